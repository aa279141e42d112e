"""Continuous batching: each request joins the running batch as soon as a cache slot is free."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from gpt.decoder import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpt.decoder import Decoder
    from runtime_di.providers.tokenizer import Tokenizer
    from serve import ServeRuntime
    from serving.sampling import SamplingSettings


_MIN_TEMPERATURE = 1e-30
"""Replaces lower temperatures above 0, whose reciprocal, by which GPUs multiply, is infinite."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The generated text.

    Attributes:
        ended: whether the model ended the document; otherwise ``max_tokens`` or the end of the cache was reached.
    """

    text: str
    num_tokens: int
    ended: bool


@dataclass(eq=False, slots=True)
class _Request:
    prompt: list[int]
    sampling: SamplingSettings
    future: Future[Answer] = field(default_factory=Future)
    slot: int = -1
    generated: list[int] = field(default_factory=list)
    random: torch.Generator = field(default_factory=torch.Generator)

    @property
    def pending(self) -> list[int]:
        """Tokens that are not in the cache yet."""
        return self.generated[-1:] or self.prompt

    @property
    def start(self) -> int:
        """Number of tokens in the cache."""
        return len(self.prompt) + len(self.generated) - 1 if self.generated else 0

    def sample_token(self, logits: torch.Tensor) -> int:
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        shifted = logits - logits.max()  # the largest logit is 0 at any temperature, and none overflows
        weights = torch.softmax(shifted / max(self.sampling.temperature, _MIN_TEMPERATURE), dim=-1)
        return int(torch.multinomial(weights, 1, generator=self.random))


class Generator:
    """A thread that runs the decoder while the ``with`` block lasts.

    A normal exit of the block answers every request first. An exit by an exception, such as one that a signal raises
    during a normal exit, finishes the running requests and cancels the queued ones.

    Attributes:
        stopped: done when the thread has ended; has the exception that ended it, if any.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, idle_s: float) -> None:
        """Create the generator; without requests, it calls the decoder's `keep_alive` every ``idle_s`` seconds."""
        self.stopped: Future[None] = Future()
        self._decoder, self._tokenizer, self._idle_s = decoder, tokenizer, idle_s
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._free_slots = list(range(decoder.num_slots))
        self._running: list[_Request] = []
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="generator")

    @property
    def load(self) -> tuple[int, int]:
        """Number of running requests, and of queued ones."""
        return len(self._running), self._queue.qsize()

    def submit(self, prompt: str, sampling: SamplingSettings) -> Future[Answer]:
        """Queue a request.

        Raises:
            ValueError: the prompt leaves no room for an answer.
            RuntimeError: the generator is closing, or has stopped.
        """
        tokens = self._tokenizer.encode(prompt) or [self._tokenizer.eod]
        if len(tokens) >= self._decoder.max_length:
            raise ValueError(f"the prompt has {len(tokens)} tokens, and a sequence at most {self._decoder.max_length}")
        request = _Request(tokens, sampling)
        request.random.manual_seed(sampling.seed)
        with self._lock:
            if self._closing or self.stopped.done():
                raise RuntimeError("the generator accepts no more requests")
            self._queue.put(request)
        return request.future

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._closing = True
        try:
            if error is None:
                self._queue.put(None)
                wait([self.stopped])  # not join(): if a signal interrupts it, the thread counts as ended but still runs
        finally:
            if not self.stopped.done():
                self._cancel_queued()
                self._queue.put(None)
            wait([self.stopped])
            self._thread.join()
        if error is None:
            self.stopped.result()

    def _run(self) -> None:
        try:
            try:
                while self._step():
                    pass
            finally:
                self._decoder.stop_followers()
        except Exception as error:  # noqa: BLE001 - re-raised by every pending request and by the block
            with self._lock:
                self.stopped.set_exception(error)
            for request in self._running:
                request.future.set_exception(error)
            self._cancel_queued()
        else:
            self.stopped.set_result(None)

    def _step(self) -> bool:
        """Admit queued requests, then advance every running one by a token; ``False`` once closed and all answered."""
        new = list(self._admit())
        self._running += new
        if new:
            self._advance(new)
        if self._running:
            self._advance(list(self._running))
        elif not new:
            self._decoder.keep_alive()
        return not (self._closing and self._queue.empty() and not self._running)

    def _admit(self) -> Iterable[_Request]:
        """Assign free slots to queued requests; if no request is running, wait up to ``idle_s`` for one."""
        block = not self._running
        while self._free_slots:
            try:
                request = self._queue.get(block=block, timeout=self._idle_s)
            except queue.Empty:
                return
            block = False
            if request is not None and request.future.set_running_or_notify_cancel():
                request.slot = self._free_slots.pop()
                yield request

    def _advance(self, requests: list[_Request]) -> None:
        slots, starts, tokens = zip(*((each.slot, each.start, each.pending) for each in requests), strict=True)
        for request, logits in zip(requests, self._decoder.next_logits(Batch(slots, starts, tokens)), strict=True):
            try:
                request.generated.append(request.sample_token(logits))
                answer = self._answer(request) if self._is_complete(request) else None
            except Exception as error:  # noqa: BLE001 - re-raised by this request's future; the other requests continue
                self._release(request)
                request.future.set_exception(error)
            else:
                if answer is not None:
                    self._release(request)
                    request.future.set_result(answer)

    def _release(self, request: _Request) -> None:
        self._running.remove(request)
        self._free_slots.append(request.slot)

    def _is_complete(self, request: _Request) -> bool:
        full = len(request.prompt) + len(request.generated) > self._decoder.max_length
        return (
            full
            or len(request.generated) == request.sampling.max_tokens
            or request.generated[-1] == self._tokenizer.eod
        )

    def _answer(self, request: _Request) -> Answer:
        ended = request.generated[-1] == self._tokenizer.eod
        tokens = request.generated[:-1] if ended else request.generated
        return Answer(self._tokenizer.decode(tokens), len(tokens), ended)

    def _cancel_queued(self) -> None:
        while True:
            try:
                request = self._queue.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                request.future.cancel()


def create_generator(runtime: ServeRuntime) -> Generator:
    """Create the generator of this rank's replica."""
    return Generator(runtime.decoder, runtime.tokenizer, runtime.settings.distributed.timeout_s / 4)
