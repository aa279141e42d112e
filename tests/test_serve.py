"""The serving example: the tokens of the model, over prompts and HTTP, on one rank and on several."""

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

from asking import ask, until_accepted
from generator import Generator, generating
from gpt import GPT
from gpt_generate import Batch
from http_endpoint import HttpSettings, open_endpoint
from prompts import read_prompts
from runtime_di import CapabilityError, SettingsError
from runtime_di.containers import ConverterRuntime, ConverterSettings
from runtime_di.launch import LaunchSettings
from runtime_di.providers.tokenizer import ByteTokenizer
from runtime_di.testing import run_ranks
from sampling import SamplingSettings
from serve import ServeRuntime, ServeSettings, serve
from tiny_checkpoint import NUM_TOKENS, Tiny, make_tiny

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def load(tiny: Tiny, *flags: str) -> ServeSettings:
    return ServeSettings.load(["--checkpoint.load", str(tiny.checkpoints), *flags])


def texts(runtime: ServeRuntime, prompts: list[str], **sampling: Any) -> list[str]:
    with generating(runtime) as generator:
        answers = [generator.submit(prompt, SamplingSettings(**sampling)) for prompt in prompts]
        return [answer.result().text for answer in answers]


# The model


def test_settings_are_the_checkpoints_own(tiny: Tiny) -> None:
    """Shape and tokenizer come from the checkpoint, by the script's own default; flags are stronger."""
    settings = load(tiny, "--sampling.max_tokens", "3")

    assert (settings.model.num_layers, settings.model.width) == (1, 32)
    assert str(settings.explain("model.width")).startswith(f"model.width = 32 (from checkpoint {tiny.checkpoints})")
    assert settings.explain("tokenizer.path").value == str(tiny.corpus)
    assert load(tiny, "--no-checkpoint.load_settings").model.width == 128


def test_tokens_are_those_of_the_whole_model(tiny: Tiny) -> None:
    """With cached keys and values, each token is the likeliest one by the model over the whole text."""
    with ServeRuntime.open(load(tiny, "--cache.sequences", "2")) as runtime:
        tokens = runtime.tokenizer.encode("import os")
        (text,) = texts(runtime, ["import os"], max_tokens=8)
        model = runtime.decoder.model
        with torch.no_grad():
            for _ in range(8):
                tokens.append(int(model(torch.tensor([tokens]))[0, -1, :NUM_TOKENS].argmax()))

        assert text == runtime.tokenizer.decode(tokens[-8:])


def test_scores_of_a_batch_are_those_of_each_alone(tiny: Tiny) -> None:
    """Sequences of other lengths in a batch, and what the cache held before, change no score beyond rounding."""
    texts = [[5], [7, 8, 9, 10], [11, 12]]
    with ServeRuntime.open(load(tiny)) as runtime:
        decoder = runtime.decoder
        decoder.next_logits(Batch([0, 1, 2], [0, 0, 0], [[1] * 9] * 3))

        first = decoder.next_logits(Batch([2, 0, 1], [0, 0, 0], texts))
        second = decoder.next_logits(Batch([0, 1], [4, 2], [[3], [4]]))

        with torch.no_grad():
            alone = [decoder.model(torch.tensor([text]))[0, -1, :NUM_TOKENS] for text in texts]
            after = [
                decoder.model(torch.tensor([[*text, new]]))[0, -1, :NUM_TOKENS]
                for text, new in ((texts[1], 3), (texts[2], 4))
            ]
    torch.testing.assert_close(first, torch.stack(alone))
    torch.testing.assert_close(second, torch.stack(after))


def test_company_does_not_change_an_answer(tiny: Tiny) -> None:
    """Requests of any length that share the cache, more than it has places, get the answers they get alone."""
    prompts = ["a", "import os, sys", "", "def f(x):", "class A", "return x + 1"]
    with ServeRuntime.open(load(tiny, "--cache.sequences", "2")) as runtime:
        together = texts(runtime, prompts, max_tokens=5, temperature=1.0, seed=3)

        alone = [texts(runtime, [prompt], max_tokens=5, temperature=1.0, seed=3)[0] for prompt in prompts]

    assert together == alone


def test_answer_ends_where_the_cache_does(tiny: Tiny) -> None:
    """The text is as long as cache and model have room for; a prompt that fills it is refused."""
    with ServeRuntime.open(load(tiny, "--cache.length", "12")) as runtime, generating(runtime) as generator:
        prompt = "import os"
        num_tokens = len(runtime.tokenizer.encode(prompt))
        answer = generator.submit(prompt, SamplingSettings(max_tokens=99)).result()

        assert (answer.num_tokens, answer.ended) == (13 - num_tokens, False)
        with pytest.raises(ValueError, match="a sequence at most 12"):
            generator.submit(prompt * 9, SamplingSettings())


def served(flags: list[str], prompts: list[str]) -> tuple[str, str, int]:
    """On one of several ranks: what it prints for these prompts, what it tells on standard error, and its status."""
    sys.stdin = io.TextIOWrapper(io.BytesIO("\n".join(prompts).encode(errors="surrogateescape")), "utf-8")
    status = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            with ServeRuntime.open(ServeSettings.load(flags)) as runtime:
                serve(runtime)
        except SystemExit as left:
            status = int(str(left.code))
    return out.getvalue(), err.getvalue(), status


def served_twice(flags: list[str], prompts: list[str], unfit: str) -> list[tuple[str, str, int]]:
    """The same with one more prompt among the others, and without."""
    return [served(flags, [prompts[0], unfit, *prompts[1:]]), served(flags, prompts)]


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (2, 2)], ids=["replicas", "tensor-parallel"])
def test_ranks_print_what_one_prints(tiny: Tiny, ranks: int, tensor: int, tmp_path: Path) -> None:
    """Replicas share the prompts, and ranks each token of a converted checkpoint; rank 0 prints all in order.

    A prompt that cannot be answered costs the others nothing: standard error tells why, and the status is 1.
    """
    prompts = ["import os", "def f(x):", "class \udcff"]  # the byte 255, which no text has
    flags = ["--checkpoint.load", str(tiny.checkpoints), "--sampling.max_tokens", "4", "--log.level", "ERROR"]
    conversion = {"folder": tmp_path / "converted", "tensor": tensor}
    with ConverterRuntime.open(
        ConverterSettings(checkpoint={"load": tiny.checkpoints}, conversion=conversion)
    ) as converter:
        shared = converter.converter.convert()
    load_for = ["--checkpoint.load", str(shared), *flags[2:], "--parallel.tensor", str(tensor)]
    ((partly, alone),) = run_ranks(served_twice, 1, flags, prompts, "import os " * 99)

    told = run_ranks(served_twice, ranks, load_for, prompts, "import os " * 99)

    assert told == [[partly, alone], *[[("", "", 0)] * 2] * (ranks - 1)]
    assert [line for line in (*prompts[:2], "class \ufffd") if line not in alone[0]] == []
    assert alone[1:] == ("", 0)
    assert (partly[0], partly[2]) == (alone[0], 1)
    assert re.fullmatch(
        r"prompt 2 = 'import os .{30}\.\.\.': no answer: the prompt has \d+ tokens, and a sequence at most 32\n"
        r"  fix: shorten it\n",
        partly[1],
    )


def stopped_midway(flags: list[str]) -> tuple[object, int]:
    """On one of several ranks: its exit status and the last of its batches, when SIGTERM comes in the 50th."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"def f(\n" * 5000), "utf-8")
    score, batches = GPT.score, itertools.count(1)

    def score_and_stop(*args: Any) -> torch.Tensor:
        if next(batches) == 50:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        return score(*args)

    with mock.patch.object(GPT, "score", score_and_stop), pytest.raises(SystemExit) as left:
        ServeRuntime.main(serve, flags)
    return left.value.code, next(batches) - 1


def test_ranks_that_share_a_model_stop_together(tiny: Tiny) -> None:
    """When all ranks get SIGTERM, the one that follows stays until the leader has finished what runs."""
    flags = ["--checkpoint.load", str(tiny.checkpoints), "--parallel.tensor", "2", "--vocabulary.padded_size", "384"]

    leader, follower = run_ranks(stopped_midway, 2, [*flags, "--log.level", "ERROR"])

    assert leader == follower
    assert leader[0] == 128 + signal.SIGTERM
    assert leader[1] > 50


@pytest.mark.parametrize(
    ("given", "prompts"),
    [(b"a\x0cb\r\n\nc\xe2\x80\xa8d", ["a\x0cb", "c\u2028d"]), (b"", []), (None, [])],
    ids=["lines", "nothing", "closed"],
)
def test_prompts_are_lines(given: bytes | None, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Newlines alone part prompts, with or without a carriage return; without standard input there are none."""
    stdin = None if given is None else io.TextIOWrapper(io.BytesIO(given), "utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)

    assert read_prompts(None) == prompts


# The queue


class SlowDecoder:
    """Stands for a model: the next token is one more than the last."""

    def __init__(self, fails_after: int = 10**9) -> None:
        self.sequences, self.length = 2, 64
        self.batches: list[Batch] = []
        self.go, self.fails_after, self.dismissed = threading.Event(), fails_after, False

    def next_logits(self, batch: Batch) -> torch.Tensor:
        assert self.go.wait(30)
        self.batches.append(batch)
        if len(self.batches) > self.fails_after:
            raise ArithmeticError("the model broke")
        return torch.nn.functional.one_hot(torch.tensor([tokens[-1] + 1 for tokens in batch.tokens]), 258).float()

    def keep_alive(self) -> None:
        pass

    def dismiss(self) -> None:
        self.dismissed = True


def generator_of(decoder: Any, tokenizer: Any = None) -> Generator:
    return Generator(decoder, tokenizer or ByteTokenizer(), idle_s=0.01)


def test_requests_join_the_running_batch() -> None:
    """A request that comes while others run is worked on with them as soon as there is a place."""
    decoder = SlowDecoder()

    with generator_of(decoder) as generator:
        asked = [generator.submit(text, SamplingSettings(max_tokens=3)) for text in ("a", "A", "0")]
        decoder.go.set()
        answers = [future.result(30).text for future in asked]

    assert answers == ["bcd", "BCD", "123"]
    assert max(len(batch.places) for batch in decoder.batches) == 2
    assert decoder.dismissed


def test_leaving_finishes_what_waits() -> None:
    """The end of the block comes when every request is answered; afterwards none is taken."""
    decoder = SlowDecoder()
    with generator_of(decoder) as generator:
        asked = [generator.submit(text, SamplingSettings(max_tokens=2)) for text in "aaaaa"]
        decoder.go.set()

    assert [future.result(0).text for future in asked] == ["bc"] * 5
    with pytest.raises(RuntimeError, match="answers no more"):
        generator.submit("a", SamplingSettings())


def test_leaving_by_an_error_finishes_what_runs() -> None:
    """Requests that have a place are answered, and those that wait are cancelled."""
    decoder = SlowDecoder()

    with pytest.raises(KeyError), generator_of(decoder) as generator:
        asked = [generator.submit("a", SamplingSettings(max_tokens=2)) for _ in range(4)]
        while generator.load[0] < 2:
            time.sleep(0.001)
        threading.Timer(0.05, decoder.go.set).start()
        raise KeyError

    assert sorted(future.cancelled() for future in asked) == [False, False, True, True]


def test_broken_model_is_told_to_everybody() -> None:
    """What the model raises reaches every request and the block; followers are let go."""
    decoder = SlowDecoder(fails_after=2)

    with pytest.raises(ArithmeticError), generator_of(decoder) as generator:
        asked = [generator.submit("a", SamplingSettings(max_tokens=9)) for _ in range(3)]
        decoder.go.set()
        errors = [error_of(future) for future in asked]

    assert sorted(errors) == ["ArithmeticError", "ArithmeticError", "CancelledError"]
    assert decoder.dismissed


def test_coldest_draw_is_the_likeliest_token() -> None:
    """A temperature near zero, which no float32 logits can be divided by, draws the likeliest token."""
    decoder = SlowDecoder()
    decoder.go.set()

    with generator_of(decoder) as generator:
        cold = (generator.submit("a", SamplingSettings(max_tokens=3, temperature=t)) for t in (1e-42, 5e-324))
        answers = [future.result(30).text for future in cold]

    assert answers == ["bcd"] * 2


class PartlyBrokenDecoder(SlowDecoder):
    """Has no probabilities for what follows the letter x."""

    def next_logits(self, batch: Batch) -> torch.Tensor:
        logits = super().next_logits(batch)
        logits[[tokens[-1] == ord("x") for tokens in batch.tokens]] = torch.nan
        return logits


def test_a_draw_that_fails_fails_alone() -> None:
    """What cannot be drawn for one request is told to it; its place is free again, and the others are answered."""
    decoder = PartlyBrokenDecoder()

    with generator_of(decoder) as generator:
        asked = [generator.submit(text, SamplingSettings(max_tokens=3, temperature=0.01)) for text in "axxxA"]
        decoder.go.set()
        told = [future.exception(30) for future in asked]

    assert [type(error) for error in told] == [type(None), *[RuntimeError] * 3, type(None)]
    assert [asked[0].result().text, asked[4].result().text] == ["bcd", "BCD"]


def error_of(future: Future[Any]) -> str:
    try:
        return type(future.exception(30)).__name__
    except CancelledError:
        return "CancelledError"


# HTTP


@contextmanager
def server(tiny: Tiny, *flags: str, ranks: int = 1) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The example as a user starts it, and its address."""
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
    """Status and JSON that the application answers with, without a socket; half a body ends with the connection."""
    from http_app import app_of

    received = iter([{"type": "http.request", "body": body, "more_body": not whole}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    asyncio.run(app_of(generator, SamplingSettings())(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


class StrictTokenizer(ByteTokenizer):
    """Refuses halves of a character as the tokenizers library does."""

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
def test_bad_input_is_told_in_json(body: bytes) -> None:
    """What a client gets wrong is its error, told in JSON, whatever it sent."""
    decoder = SlowDecoder()
    decoder.go.set()

    with generator_of(decoder, StrictTokenizer()) as generator:
        status, told = post(generator, body)

    assert (status, [*told]) == (422, ["error"])


def test_failure_is_told_in_json() -> None:
    """A request that the model fails on is answered with 503 and the reason."""
    decoder = SlowDecoder(fails_after=0)
    decoder.go.set()

    with pytest.raises(ArithmeticError), generator_of(decoder) as generator:
        failed = post(generator, b'{"prompt": "a"}')
        late = post(generator, b'{"prompt": "a"}')

    assert failed == (503, {"error": "no answer: ArithmeticError('the model broke')"})
    assert late == (503, {"error": "the generator answers no more"})


def test_every_error_is_json() -> None:
    """Another path, another method, and a request whose client leaves in the middle of it get a JSON error too."""
    with generator_of(SlowDecoder()) as generator:
        told = [
            post(generator, b"{}", path="/nowhere"),
            post(generator, b"", method="GET"),
            post(generator, b"{", whole=False),
        ]

    assert told == [
        (404, {"error": "Not Found"}),
        (405, {"error": "Method Not Allowed"}),
        (400, {"error": "the request is incomplete"}),
    ]


def test_half_a_request_cannot_hold_the_endpoint() -> None:
    """A client that sends no more of its request is let go after a time once the endpoint is to stop."""
    from http_app import app_of

    stop: Future[None] = Future()
    opened = open_endpoint(HttpSettings(port=0, shutdown_timeout_s=1), LaunchSettings(), 1)
    endpoint = next(opened)
    assert endpoint is not None
    with generator_of(SlowDecoder()) as generator, socket.create_connection(endpoint.address, timeout=30) as client:
        app = app_of(generator, SamplingSettings())
        serving = threading.Thread(target=endpoint.serve, args=(app, stop), daemon=True)
        serving.start()
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 100")
        client.sendall(b"{")

        stop.set_result(None)
        serving.join(30)

        assert not serving.is_alive()
        assert client.recv(1000).startswith(b"HTTP/1.1 503")


@pytest.mark.timeout(240)
def test_tensor_parallel_endpoint_ends_cleanly(tiny: Tiny) -> None:
    """Under torchrun every rank gets SIGTERM, and the one that follows stays until the leader has answered."""
    flags = ["--parallel.tensor", "2", "--vocabulary.padded_size", "384"]
    with server(tiny, *flags, ranks=2) as (process, url), ThreadPoolExecutor(2) as pool:
        ask(f"{url}/health")
        asked = [pool.submit(ask, f"{url}/generate", {"prompt": "x", "max_tokens": 20}) for _ in range(2)]
        until_accepted(url, asked)
        process.send_signal(signal.SIGTERM)
        statuses = [future.result()[0] for future in asked]
        _, stderr = process.communicate(timeout=90)

    assert statuses == [200] * 2
    assert "Traceback" not in "".join(line for line in stderr.splitlines() if line.startswith("[rank"))
    assert "forcefully exiting" not in stderr


def test_port_in_use_is_told() -> None:
    """A port that is taken gives an error with the setting, before any model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        opened = open_endpoint(HttpSettings(port=taken.getsockname()[1]), LaunchSettings(), 1)

        with pytest.raises(CapabilityError, match=r"http\.port: cannot listen at 127\.0\.0\.1:"):
            next(opened)


def test_endpoint_listens_at_ipv6_addresses() -> None:
    """A host of IPv6 is written as one, with its address in brackets."""
    for endpoint in open_endpoint(HttpSettings(host="::1", port=0), LaunchSettings(), 1):
        assert endpoint is not None
        with socket.create_connection(endpoint.address, timeout=30):
            assert endpoint.url == f"http://[::1]:{endpoint.address[1]}"


def test_only_leaders_listen() -> None:
    """The first rank of each replica listens, each at a port of its own; other ranks open no socket."""

    def endpoint(rank: int) -> Any:
        return next(open_endpoint(HttpSettings(port=0), LaunchSettings(rank=rank, world_size=4), 2))

    assert [endpoint(rank) is None for rank in range(4)] == [False, True, False, True]


def test_http_package_is_asked_only_when_wanted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without uvicorn the script still answers prompts; with --http it tells what to install."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else real(name))

    ServeRuntime.open(load(tiny)).close()
    with pytest.raises(CapabilityError, match=r"pip install 'runtime-di\[serve\]'"):
        ServeRuntime.open(load(tiny, "--http", "{}"))


def test_mistakes_are_told_together() -> None:
    """Settings that cannot work are told at once, without a checkpoint being read."""
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
