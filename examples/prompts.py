"""Answers the prompts that serve.py was given; imports torch, so it is imported when they are answered."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch.distributed as dist

from deferred_signals import signals_deferred
from generator import Answer, Generator, generating
from runtime_di import Problem

if TYPE_CHECKING:
    from sampling import SamplingSettings
    from serve import ServeRuntime

SHOWN = 40
"""Characters of a prompt that are shown where it has no answer."""


def answer_prompts(runtime: ServeRuntime) -> None:
    """Print prompts and answers, in order, on rank 0; replicas share the work.

    Raises:
        SystemExit: with 1 on rank 0, if a prompt has no answer; standard error tells why, and the others have theirs.
    """
    groups = runtime.process_groups
    prompts = [read_prompts(runtime.settings.prompt) if groups.rank == 0 else []]
    dist.broadcast_object_list(prompts, src=0)
    mine = range(groups.index("dp"), len(prompts[0]), groups.size("dp"))
    told = answers(runtime, {number: prompts[0][number] for number in mine})
    gathered = [told] * groups.world_size
    dist.all_gather_object(gathered, told)
    if groups.rank == 0:
        told = {number: answer for part in gathered for number, answer in part.items()}
        tell(prompts[0], [told[number] for number in range(len(told))])


def tell(prompts: Sequence[str], told: Sequence[str | Problem]) -> None:
    """Print each prompt with its answer, and on standard error why there is none; in that case, leave with 1."""
    for prompt, answer in zip(prompts, told, strict=True):
        if isinstance(answer, Problem):
            print(answer, file=sys.stderr, flush=True)
        else:
            print(f"{prompt}{answer}\n", flush=True)
    if any(isinstance(answer, Problem) for answer in told):
        raise SystemExit(1)


def answers(runtime: ServeRuntime, prompts: Mapping[int, str]) -> dict[int, str | Problem]:
    """The text that goes on each prompt, or why there is none; nothing on ranks that do not lead."""
    if not runtime.decoder.leads:
        with signals_deferred():
            runtime.decoder.follow()
        return {}
    with generating(runtime) as generator:
        asked = {number: ask(generator, prompt, runtime.settings.sampling) for number, prompt in prompts.items()}
        runtime.log.info("answering %d prompts", len(asked))
    return {number: outcome(f"prompt {number + 1}", prompts[number], future) for number, future in asked.items()}


def ask(generator: Generator, prompt: str, sampling: SamplingSettings) -> Future[Answer]:
    """Ask for an answer; the error of a prompt that is refused is in the future too."""
    try:
        return generator.submit(prompt, sampling)
    except ValueError as error:
        refused: Future[Answer] = Future()
        refused.set_exception(error)
        return refused


def outcome(where: str, prompt: str, future: Future[Answer]) -> str | Problem:
    """The text of an answer that is done, or why there is none."""
    error = future.exception()
    if error is None:
        return future.result().text
    start = repr(prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}...")
    return Problem(where, f"no answer: {error}", start, fix="shorten it" if isinstance(error, ValueError) else None)


def read_prompts(prompt: str | None) -> list[str]:
    """The prompt that was given, or the lines of standard input that are not empty; what is no text is replaced."""
    if prompt is not None:
        return [prompt]
    if sys.stdin is None:  # closed by whoever started this process
        return []
    text = sys.stdin.buffer.read().decode(sys.stdin.encoding, errors="replace")
    return [line for line in (line.rstrip("\r") for line in text.split("\n")) if line]
