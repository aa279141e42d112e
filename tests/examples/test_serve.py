"""The serving example: decoding, the request queue, prompts and HTTP, on one rank and on several."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gpt.decoder import Batch
from gpt.model import GPT
from runtime_di import CapabilityError, SettingsError
from runtime_di.containers import ConverterRuntime, ConverterSettings
from runtime_di.providers.tokenizer.byte import ByteTokenizer
from runtime_di.settings.launch import LaunchSettings
from runtime_di.testing import run_ranks
from serve import ServeRuntime, ServeSettings, serve
from serving.endpoint import HttpSettings, open_endpoint
from serving.generator import Generator, create_generator
from serving.prompts import read_prompts
from serving.sampling import SamplingSettings
from tests.support.checkpoints.tiny import NUM_TOKENS, TinyCheckpoint, train_tiny_checkpoint
from tests.support.http_client import request_json, wait_until_accepted
from tests.support.paths import EXAMPLES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def load(tiny: TinyCheckpoint, *flags: str) -> ServeSettings:
    return ServeSettings.load(["--checkpoint.load", str(tiny.checkpoints), *flags])


def generate(runtime: ServeRuntime, prompts: list[str], **sampling: Any) -> list[str]:
    with create_generator(runtime) as generator:
        futures = [generator.submit(prompt, SamplingSettings(**sampling)) for prompt in prompts]
        return [future.result().text for future in futures]


# The model


def test_settings_come_from_the_checkpoint(tiny: TinyCheckpoint) -> None:
    """By default shape and tokenizer come from the checkpoint; flags are stronger."""
    settings = load(tiny, "--sampling.max_tokens", "3")

    assert (settings.model.num_layers, settings.model.width) == (1, 32)
    assert str(settings.explain("model.width")).startswith(f"model.width = 32 (from checkpoint {tiny.checkpoints})")
    assert settings.explain("tokenizer.path").value == str(tiny.corpus)
    assert load(tiny, "--no-checkpoint.load_settings").model.width == 128


def test_cached_decoding_gives_the_tokens_of_a_full_forward_pass(tiny: TinyCheckpoint) -> None:
    """With cached keys and values, each token is the likeliest one of a forward pass over the whole text."""
    with ServeRuntime.open(load(tiny, "--cache.sequences", "2")) as runtime:
        tokens = runtime.tokenizer.encode("import os")
        (text,) = generate(runtime, ["import os"], max_tokens=8)
        model = runtime.decoder.model
        with torch.no_grad():
            for _ in range(8):
                tokens.append(int(model(torch.tensor([tokens]))[0, -1, :NUM_TOKENS].argmax()))

        assert text == runtime.tokenizer.decode(tokens[-8:])


def test_logits_of_a_batch_are_those_of_each_sequence_alone(tiny: TinyCheckpoint) -> None:
    """Other sequences in the batch, and earlier contents of the cache, change logits by rounding at most."""
    sequences = [[5], [7, 8, 9, 10], [11, 12]]
    with ServeRuntime.open(load(tiny)) as runtime:
        decoder = runtime.decoder
        decoder.next_logits(Batch([0, 1, 2], [0, 0, 0], [[1] * 9] * 3))

        first = decoder.next_logits(Batch([2, 0, 1], [0, 0, 0], sequences))
        second = decoder.next_logits(Batch([0, 1], [4, 2], [[3], [4]]))

        with torch.no_grad():
            alone = [decoder.model(torch.tensor([tokens]))[0, -1, :NUM_TOKENS] for tokens in sequences]
            after = [
                decoder.model(torch.tensor([[*tokens, new]]))[0, -1, :NUM_TOKENS]
                for tokens, new in ((sequences[1], 3), (sequences[2], 4))
            ]
    torch.testing.assert_close(first, torch.stack(alone))
    torch.testing.assert_close(second, torch.stack(after))


def test_other_requests_do_not_change_an_answer(tiny: TinyCheckpoint) -> None:
    """Requests of any length, more than the cache has slots, get the same answers as each one alone."""
    prompts = ["a", "import os, sys", "", "def f(x):", "class A", "return x + 1"]
    with ServeRuntime.open(load(tiny, "--cache.sequences", "2")) as runtime:
        together = generate(runtime, prompts, max_tokens=5, temperature=1.0, seed=3)

        alone = [generate(runtime, [prompt], max_tokens=5, temperature=1.0, seed=3)[0] for prompt in prompts]

    assert together == alone


def test_answer_ends_when_the_cache_is_full(tiny: TinyCheckpoint) -> None:
    """An answer is as long as cache and context allow; a prompt that fills the cache is refused."""
    with ServeRuntime.open(load(tiny, "--cache.length", "12")) as runtime, create_generator(runtime) as generator:
        prompt = "import os"
        num_tokens = len(runtime.tokenizer.encode(prompt))
        answer = generator.submit(prompt, SamplingSettings(max_tokens=99)).result()

        assert (answer.num_tokens, answer.ended) == (13 - num_tokens, False)
        with pytest.raises(ValueError, match="a sequence at most 12"):
            generator.submit(prompt * 9, SamplingSettings())


def serve_prompts(flags: list[str], prompts: list[str]) -> tuple[str, str, int]:
    """On one rank: its standard output for these prompts, its standard error, and its exit status."""
    sys.stdin = io.TextIOWrapper(io.BytesIO("\n".join(prompts).encode(errors="surrogateescape")), "utf-8")
    status = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            with ServeRuntime.open(ServeSettings.load(flags)) as runtime:
                serve(runtime)
        except SystemExit as error:
            status = int(str(error.code))
    return out.getvalue(), err.getvalue(), status


def serve_with_and_without(flags: list[str], prompts: list[str], too_long: str) -> list[tuple[str, str, int]]:
    """`serve_prompts`, first with a prompt that is too long among the others, then without it."""
    return [serve_prompts(flags, [prompts[0], too_long, *prompts[1:]]), serve_prompts(flags, prompts)]


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (2, 2)], ids=["replicas", "tensor-parallel"])
def test_several_ranks_print_what_one_prints(tiny: TinyCheckpoint, ranks: int, tensor: int, tmp_path: Path) -> None:
    """Replicas divide the prompts, tensor-parallel ranks share a converted checkpoint; rank 0 prints all in order.

    If a prompt cannot be answered, the others are: standard error has the reason, and the exit status is 1.
    """
    prompts = ["import os", "def f(x):", "class \udcff"]  # the byte 255, which is not valid UTF-8
    flags = ["--checkpoint.load", str(tiny.checkpoints), "--sampling.max_tokens", "4", "--log.level", "ERROR"]
    conversion = {"folder": tmp_path / "converted", "tensor": tensor}
    with ConverterRuntime.open(
        ConverterSettings(checkpoint={"load": tiny.checkpoints}, conversion=conversion)
    ) as converter:
        converted = converter.converter.convert()
    load_for = ["--checkpoint.load", str(converted), *flags[2:], "--parallel.tensor", str(tensor)]
    ((partly, complete),) = run_ranks(serve_with_and_without, 1, flags, prompts, "import os " * 99)

    outputs = run_ranks(serve_with_and_without, ranks, load_for, prompts, "import os " * 99)

    assert outputs == [[partly, complete], *[[("", "", 0)] * 2] * (ranks - 1)]
    assert [line for line in (*prompts[:2], "class \ufffd") if line not in complete[0]] == []
    assert complete[1:] == ("", 0)
    assert (partly[0], partly[2]) == (complete[0], 1)
    assert re.fullmatch(
        r"prompt 2 = 'import os .{30}\.\.\.': no answer: the prompt has \d+ tokens, and a sequence at most 32\n"
        r"  fix: shorten it\n",
        partly[1],
    )


def stop_at_batch_50(flags: list[str]) -> tuple[object, int]:
    """On one rank: raise SIGTERM in the 50th batch; return the exit status and the number of batches."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"def f(\n" * 5000), "utf-8")
    score, batches = GPT.score, itertools.count(1)

    def score_and_stop(*args: Any) -> torch.Tensor:
        if next(batches) == 50:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        return score(*args)

    with mock.patch.object(GPT, "score", score_and_stop), pytest.raises(SystemExit) as caught:
        ServeRuntime.main(serve, flags)
    return caught.value.code, next(batches) - 1


@pytest.mark.processes
def test_ranks_that_share_a_model_stop_together(tiny: TinyCheckpoint) -> None:
    """When all ranks get SIGTERM, the follower stays until the leader has finished its running requests."""
    flags = ["--checkpoint.load", str(tiny.checkpoints), "--parallel.tensor", "2", "--vocabulary.padded_size", "384"]

    leader, follower = run_ranks(stop_at_batch_50, 2, [*flags, "--log.level", "ERROR"])

    assert leader == follower
    assert leader[0] == 128 + signal.SIGTERM
    assert leader[1] > 50


@pytest.mark.parametrize(
    ("content", "prompts"),
    [(b"a\x0cb\r\n\nc\xe2\x80\xa8d", ["a\x0cb", "c\u2028d"]), (b"", []), (None, [])],
    ids=["lines", "nothing", "closed"],
)
def test_prompts_are_lines(content: bytes | None, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only newlines separate prompts, with or without a carriage return; a closed standard input has no prompts."""
    stdin = None if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)

    assert read_prompts(None) == prompts


# The queue


class SlowDecoder:
    """A decoder that blocks until ``go`` is set; each next token is the last one plus one."""

    def __init__(self, fails_after: int = 10**9) -> None:
        self.num_slots, self.max_length = 2, 64
        self.batches: list[Batch] = []
        self.go, self.fails_after, self.followers_stopped = threading.Event(), fails_after, False

    def next_logits(self, batch: Batch) -> torch.Tensor:
        assert self.go.wait(30)
        self.batches.append(batch)
        if len(self.batches) > self.fails_after:
            raise ArithmeticError("the model broke")
        return torch.nn.functional.one_hot(torch.tensor([tokens[-1] + 1 for tokens in batch.tokens]), 258).float()

    def keep_alive(self) -> None:
        pass

    def stop_followers(self) -> None:
        self.followers_stopped = True


def generator_of(decoder: Any, tokenizer: Any = None) -> Generator:
    return Generator(decoder, tokenizer or ByteTokenizer(), idle_s=0.01)


def test_requests_join_the_running_batch() -> None:
    """A request that arrives while others run joins their batch as soon as a cache slot is free."""
    decoder = SlowDecoder()

    with generator_of(decoder) as generator:
        futures = [generator.submit(text, SamplingSettings(max_tokens=3)) for text in ("a", "A", "0")]
        decoder.go.set()
        answers = [future.result(30).text for future in futures]

    assert answers == ["bcd", "BCD", "123"]
    assert max(len(batch.slots) for batch in decoder.batches) == 2
    assert decoder.followers_stopped


def test_normal_exit_answers_every_request() -> None:
    """The block ends when every request is answered; afterwards the generator accepts none."""
    decoder = SlowDecoder()
    with generator_of(decoder) as generator:
        futures = [generator.submit(text, SamplingSettings(max_tokens=2)) for text in "aaaaa"]
        decoder.go.set()

    assert [future.result(0).text for future in futures] == ["bc"] * 5
    with pytest.raises(RuntimeError, match="accepts no more requests"):
        generator.submit("a", SamplingSettings())


def test_exit_by_an_exception_cancels_the_queued_requests() -> None:
    """Requests with a cache slot are answered, and the queued ones are cancelled."""
    decoder = SlowDecoder()

    with pytest.raises(KeyError), generator_of(decoder) as generator:
        futures = [generator.submit("a", SamplingSettings(max_tokens=2)) for _ in range(4)]
        while generator.load[0] < 2:
            time.sleep(0.001)
        threading.Timer(0.05, decoder.go.set).start()
        raise KeyError

    assert sorted(future.cancelled() for future in futures) == [False, False, True, True]


def test_error_of_the_model_reaches_every_request() -> None:
    """An error of the model reaches every request and the block, and the followers are stopped."""
    decoder = SlowDecoder(fails_after=2)

    with pytest.raises(ArithmeticError), generator_of(decoder) as generator:
        futures = [generator.submit("a", SamplingSettings(max_tokens=9)) for _ in range(3)]
        decoder.go.set()
        errors = [error_of(future) for future in futures]

    assert sorted(errors) == ["ArithmeticError", "ArithmeticError", "CancelledError"]
    assert decoder.followers_stopped


def test_lowest_temperatures_sample_the_likeliest_token() -> None:
    """A temperature near zero, by which float32 logits cannot be divided, samples the likeliest token."""
    decoder = SlowDecoder()
    decoder.go.set()

    with generator_of(decoder) as generator:
        futures = (generator.submit("a", SamplingSettings(max_tokens=3, temperature=t)) for t in (1e-42, 5e-324))
        answers = [future.result(30).text for future in futures]

    assert answers == ["bcd"] * 2


class PartlyBrokenDecoder(SlowDecoder):
    """Returns NaN logits after the letter x."""

    def next_logits(self, batch: Batch) -> torch.Tensor:
        logits = super().next_logits(batch)
        logits[[tokens[-1] == ord("x") for tokens in batch.tokens]] = torch.nan
        return logits


def test_failed_sampling_fails_one_request_alone() -> None:
    """If a token cannot be sampled, that request fails and frees its cache slot; the others are answered."""
    decoder = PartlyBrokenDecoder()

    with generator_of(decoder) as generator:
        futures = [generator.submit(text, SamplingSettings(max_tokens=3, temperature=0.01)) for text in "axxxA"]
        decoder.go.set()
        errors = [future.exception(30) for future in futures]

    assert [type(error) for error in errors] == [type(None), *[RuntimeError] * 3, type(None)]
    assert [futures[0].result().text, futures[4].result().text] == ["bcd", "BCD"]


def error_of(future: Future[Any]) -> str:
    try:
        return type(future.exception(30)).__name__
    except CancelledError:
        return "CancelledError"


# HTTP


@contextmanager
def server(tiny: TinyCheckpoint, *flags: str, ranks: int = 1) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the example as a user does; return the process and its address."""
    port = free_port()
    script = [str(EXAMPLES / "serve.py"), "--checkpoint.load", str(tiny.checkpoints), "--http.port", str(port), *flags]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    process = subprocess.Popen(
        [sys.executable, *(torchrun if ranks > 1 else []), *script],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def post(
    generator: Generator, body: bytes, path: str = "/generate", method: str = "POST", whole: bool = True
) -> tuple[int, Any]:
    """Send a request to the application without a socket; return status and JSON.

    With ``whole=False`` the client disconnects in the middle of the body.
    """
    from serving.app import create_app

    received = iter([{"type": "http.request", "body": body, "more_body": not whole}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    asyncio.run(create_app(generator, SamplingSettings())(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


class StrictTokenizer(ByteTokenizer):
    """Refuses lone surrogates as the tokenizers library does."""

    def encode(self, text: str) -> list[int]:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise TypeError("TextInputSequence must be str")
        return super().encode(text)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "a", "\ud800": 1}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "max_tokens": NaN}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
    ],
    ids=["surrogate", "surrogate key", "NaN", "infinity", "NaN tokens", "no UTF-8", "too deep"],
)
def test_bad_input_gets_a_json_error(body: bytes) -> None:
    """Any invalid input gets status 422 and a JSON error."""
    decoder = SlowDecoder()
    decoder.go.set()

    with generator_of(decoder, StrictTokenizer()) as generator:
        status, answer = post(generator, body)

    assert (status, [*answer]) == (422, ["error"])


def test_failure_of_the_model_gets_a_json_error() -> None:
    """If the model fails, the request gets status 503 and the reason."""
    decoder = SlowDecoder(fails_after=0)
    decoder.go.set()

    with pytest.raises(ArithmeticError), generator_of(decoder) as generator:
        failed = post(generator, b'{"prompt": "a"}')
        late = post(generator, b'{"prompt": "a"}')

    assert failed == (503, {"error": "no answer: ArithmeticError('the model broke')"})
    assert late == (503, {"error": "the generator accepts no more requests"})


def test_every_error_is_json() -> None:
    """An unknown path, a wrong method, and a client that disconnects in mid-request get a JSON error too."""
    with generator_of(SlowDecoder()) as generator:
        answers = [
            post(generator, b"{}", path="/nowhere"),
            post(generator, b"", method="GET"),
            post(generator, b"{", whole=False),
        ]

    assert answers == [
        (404, {"error": "Not Found"}),
        (405, {"error": "Method Not Allowed"}),
        (400, {"error": "the request is incomplete"}),
    ]


def test_incomplete_request_cannot_block_the_shutdown() -> None:
    """A request that its client does not complete is aborted ``shutdown_timeout_s`` after the stop signal."""
    from serving.app import create_app

    stop: Future[None] = Future()
    opened = open_endpoint(HttpSettings(port=0, shutdown_timeout_s=1), LaunchSettings(), 1)
    endpoint = next(opened)
    assert endpoint is not None
    with generator_of(SlowDecoder()) as generator, socket.create_connection(endpoint.address, timeout=30) as client:
        app = create_app(generator, SamplingSettings())
        serving = threading.Thread(target=endpoint.serve, args=(app, stop), daemon=True)
        serving.start()
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 100")
        client.sendall(b"{")

        stop.set_result(None)
        serving.join(30)

        assert not serving.is_alive()
        assert client.recv(1000).startswith(b"HTTP/1.1 503")


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_tensor_parallel_endpoint_ends_cleanly(tiny: TinyCheckpoint) -> None:
    """Under torchrun every rank gets SIGTERM, and the follower stays until the leader has answered."""
    flags = ["--parallel.tensor", "2", "--vocabulary.padded_size", "384"]
    with server(tiny, *flags, ranks=2) as (process, url), ThreadPoolExecutor(2) as pool:
        request_json(f"{url}/health")
        futures = [pool.submit(request_json, f"{url}/generate", {"prompt": "x", "max_tokens": 20}) for _ in range(2)]
        wait_until_accepted(url, futures)
        process.send_signal(signal.SIGTERM)
        statuses = [future.result()[0] for future in futures]
        _, stderr = process.communicate(timeout=90)

    assert statuses == [200] * 2
    assert "Traceback" not in "".join(line for line in stderr.splitlines() if line.startswith("[rank"))
    assert "forcefully exiting" not in stderr


def test_port_in_use_is_an_error() -> None:
    """A port in use is an error that names the setting, before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        opened = open_endpoint(HttpSettings(port=taken.getsockname()[1]), LaunchSettings(), 1)

        with pytest.raises(CapabilityError, match=r"http\.port: cannot listen at 127\.0\.0\.1:"):
            next(opened)


def test_endpoint_listens_at_ipv6_addresses() -> None:
    """The endpoint listens at an IPv6 host and writes its address in brackets."""
    for endpoint in open_endpoint(HttpSettings(host="::1", port=0), LaunchSettings(), 1):
        assert endpoint is not None
        with socket.create_connection(endpoint.address, timeout=30):
            assert endpoint.url == f"http://[::1]:{endpoint.address[1]}"


def test_only_leaders_listen() -> None:
    """The first rank of each replica listens at its own port; other ranks open no socket."""

    def endpoint(rank: int) -> Any:
        return next(open_endpoint(HttpSettings(port=0), LaunchSettings(rank=rank, world_size=4), 2))

    assert [endpoint(rank) is None for rank in range(4)] == [False, True, False, True]


def test_http_package_is_required_only_with_http(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without uvicorn the script still answers prompts; with --http the error names what to install."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else real(name))

    ServeRuntime.open(load(tiny)).close()
    with pytest.raises(CapabilityError, match=r"pip install 'runtime-di\[serve\]'"):
        ServeRuntime.open(load(tiny, "--http", "{}"))


def test_all_wrong_settings_are_reported_together() -> None:
    """One error lists every wrong setting, before a checkpoint is read."""
    with pytest.raises(SettingsError) as caught:
        ServeSettings(
            checkpoint={"load": None, "load_settings": False},
            tokenizer=None,
            cache=None,
            prompt="import",
            http={},
            parallel={"tensor": 3},
            launch={"world_size": 3, "local_world_size": 3},
        )

    wrong = ["checkpoint.load", "tokenizer", "cache", "prompt", "parallel.tensor"]
    assert [problem.where for problem in caught.value.problems] == wrong
