"""Answers many requests with one model: each joins the running batch as soon as the cache has a place for it."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from gpt_generate import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpt_generate import Decoder
    from runtime_di.providers.tokenizer import Tokenizer
    from sampling import SamplingSettings
    from serve import ServeRuntime


_COLDEST = 1e-30
"""What a temperature between it and 0 counts as; below it, the reciprocal that GPUs multiply by would be infinite."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated.

    Attributes:
        ended: whether the model ended the document, rather than ``max_tokens`` or a full cache.
    """

    text: str
    num_tokens: int
    ended: bool


@dataclass(eq=False, slots=True)
class _Request:
    prompt: list[int]
    sampling: SamplingSettings
    future: Future[Answer] = field(default_factory=Future)
    place: int = -1
    drawn: list[int] = field(default_factory=list)
    random: torch.Generator = field(default_factory=torch.Generator)

    @property
    def pending(self) -> list[int]:
        """Tokens that the cache does not hold yet."""
        return self.drawn[-1:] or self.prompt

    @property
    def start(self) -> int:
        """Tokens that the cache holds."""
        return len(self.prompt) + len(self.drawn) - 1 if self.drawn else 0

    def draw(self, logits: torch.Tensor) -> int:
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        below = logits - logits.max()  # the likeliest token stays at 0, whatever it is divided by
        weights = torch.softmax(below / max(self.sampling.temperature, _COLDEST), dim=-1)
        return int(torch.multinomial(weights, 1, generator=self.random))


class Generator:
    """A thread that runs the decoder while the ``with`` block lasts; left by an exception, it answers no more waiting.

    A signal that raises an exception while the block is being left counts as one.

    Attributes:
        stopped: done when the thread is, with the error that ended it, if any.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, idle_s: float) -> None:
        """Tell the decoder's followers at least every ``idle_s`` seconds that this rank is alive."""
        self.stopped: Future[None] = Future()
        self._decoder, self._tokenizer, self._idle_s = decoder, tokenizer, idle_s
        self._arrived: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._places = list(range(decoder.sequences))
        self._running: list[_Request] = []
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="generator")

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are worked on, and those that wait for a place."""
        return len(self._running), self._arrived.qsize()

    def submit(self, prompt: str, sampling: SamplingSettings) -> Future[Answer]:
        """Ask for an answer.

        Raises:
            ValueError: the prompt leaves no room for an answer.
            RuntimeError: the generator is closed, or has failed.
        """
        tokens = self._tokenizer.encode(prompt) or [self._tokenizer.eod]
        if len(tokens) >= self._decoder.length:
            raise ValueError(f"the prompt has {len(tokens)} tokens, and a sequence at most {self._decoder.length}")
        request = _Request(tokens, sampling)
        request.random.manual_seed(sampling.seed)
        with self._lock:
            if self._closing or self.stopped.done():
                raise RuntimeError("the generator answers no more")
            self._arrived.put(request)
        return request.future

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._closing = True
        try:
            if error is None:
                self._arrived.put(None)
                wait([self.stopped])  # a thread whose join() a signal interrupts counts as ended, and still runs
        finally:
            if not self.stopped.done():
                self._drop_waiting()
                self._arrived.put(None)
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
                self._decoder.dismiss()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for an answer, and to the block
            with self._lock:
                self.stopped.set_exception(error)
            for request in self._running:
                request.future.set_exception(error)
            self._drop_waiting()
        else:
            self.stopped.set_result(None)

    def _step(self) -> bool:
        """Take in what waits, then go on with every sequence by a token; ``False`` once all is done and closed."""
        new = list(self._admitted())
        self._running += new
        if new:
            self._advance(new)
        if self._running:
            self._advance(list(self._running))
        elif not new:
            self._decoder.keep_alive()
        return not (self._closing and self._arrived.empty() and not self._running)

    def _admitted(self) -> Iterable[_Request]:
        """Requests that get a place now; while none is worked on, wait for one to come."""
        wait = not self._running
        while self._places:
            try:
                request = self._arrived.get(block=wait, timeout=self._idle_s)
            except queue.Empty:
                return
            wait = False
            if request is not None and request.future.set_running_or_notify_cancel():
                request.place = self._places.pop()
                yield request

    def _advance(self, requests: list[_Request]) -> None:
        places, starts, tokens = zip(*((each.place, each.start, each.pending) for each in requests), strict=True)
        for request, scores in zip(requests, self._decoder.next_logits(Batch(places, starts, tokens)), strict=True):
            try:
                request.drawn.append(request.draw(scores))
                answer = self._answer(request) if self._is_complete(request) else None
            except Exception as error:  # noqa: BLE001 - told to who waits for this answer; the others go on
                self._release(request)
                request.future.set_exception(error)
            else:
                if answer is not None:
                    self._release(request)
                    request.future.set_result(answer)

    def _release(self, request: _Request) -> None:
        self._running.remove(request)
        self._places.append(request.place)

    def _is_complete(self, request: _Request) -> bool:
        full = len(request.prompt) + len(request.drawn) > self._decoder.length
        return full or len(request.drawn) == request.sampling.max_tokens or request.drawn[-1] == self._tokenizer.eod

    def _answer(self, request: _Request) -> Answer:
        ended = request.drawn[-1] == self._tokenizer.eod
        drawn = request.drawn[:-1] if ended else request.drawn
        return Answer(self._tokenizer.decode(drawn), len(drawn), ended)

    def _drop_waiting(self) -> None:
        while True:
            try:
                request = self._arrived.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                request.future.cancel()


def generating(runtime: ServeRuntime) -> Generator:
    """A generator for this rank's replica."""
    return Generator(runtime.decoder, runtime.tokenizer, runtime.settings.distributed.timeout_s / 4)
