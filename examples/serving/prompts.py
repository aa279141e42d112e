"""Answers the prompts of the settings or of standard input; imports torch, so serve.py imports it after validation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch.distributed as dist

from runtime_di import Problem
from serving.follower_signals import defer_signals
from serving.generator import Answer, Generator, create_generator

if TYPE_CHECKING:
    from serve import ServeRuntime
    from serving.sampling import SamplingSettings

MAX_CHARACTERS = 40
"""Characters of a prompt that an error message quotes."""


def answer_prompts(runtime: ServeRuntime) -> None:
    """Divide the prompts among the replicas; rank 0 prints prompts and answers, in order.

    Raises:
        SystemExit: with status 1 on rank 0, if a prompt has no answer; standard error has the reason.
    """
    groups = runtime.process_groups
    prompts = [read_prompts(runtime.settings.prompt) if groups.rank == 0 else []]
    dist.broadcast_object_list(prompts, src=0)
    local = range(groups.index("dp"), len(prompts[0]), groups.size("dp"))
    answers = generate_answers(runtime, {number: prompts[0][number] for number in local})
    gathered = [answers] * groups.world_size
    dist.all_gather_object(gathered, answers)
    if groups.rank == 0:
        answers = {number: answer for part in gathered for number, answer in part.items()}
        print_answers(prompts[0], [answers[number] for number in range(len(answers))])


def print_answers(prompts: Sequence[str], answers: Sequence[str | Problem]) -> None:
    """Print each prompt with its answer, or its problem on standard error; exit with status 1 if there is a problem."""
    for prompt, answer in zip(prompts, answers, strict=True):
        if isinstance(answer, Problem):
            print(answer, file=sys.stderr, flush=True)
        else:
            print(f"{prompt}{answer}\n", flush=True)
    if any(isinstance(answer, Problem) for answer in answers):
        raise SystemExit(1)


def generate_answers(runtime: ServeRuntime, prompts: Mapping[int, str]) -> dict[int, str | Problem]:
    """Generate the text after each prompt, or the reason why there is none; empty on ranks that follow a leader."""
    if not runtime.decoder.is_leader:
        with defer_signals():
            runtime.decoder.follow()
        return {}
    with create_generator(runtime) as generator:
        futures = {number: submit(generator, prompt, runtime.settings.sampling) for number, prompt in prompts.items()}
        runtime.log.info("answering %d prompts", len(futures))
    return {
        number: text_or_problem(f"prompt {number + 1}", prompts[number], future) for number, future in futures.items()
    }


def submit(generator: Generator, prompt: str, sampling: SamplingSettings) -> Future[Answer]:
    """Queue a request; if the prompt is refused, return a future with the error."""
    try:
        return generator.submit(prompt, sampling)
    except ValueError as error:
        refused: Future[Answer] = Future()
        refused.set_exception(error)
        return refused


def text_or_problem(where: str, prompt: str, future: Future[Answer]) -> str | Problem:
    """Return the text of a finished request, or its error as a problem."""
    error = future.exception()
    if error is None:
        return future.result().text
    start = repr(prompt if len(prompt) <= MAX_CHARACTERS else f"{prompt[:MAX_CHARACTERS]}...")
    return Problem(where, f"no answer: {error}", start, fix="shorten it" if isinstance(error, ValueError) else None)


def read_prompts(prompt: str | None) -> list[str]:
    """Return ``prompt`` if it is set, or else the non-empty lines of standard input; undecodable bytes are replaced."""
    if prompt is not None:
        return [prompt]
    if sys.stdin is None:  # closed by the parent process
        return []
    text = sys.stdin.buffer.read().decode(sys.stdin.encoding, errors="replace")
    return [line for line in (line.rstrip("\r") for line in text.split("\n")) if line]
