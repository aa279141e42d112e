"""Generate with a checkpoint that pretrain_gpt.py made.

    python examples/serve.py --prompt 'def main('
    ls | python examples/serve.py                                      # a prompt on each line of standard input
    python examples/serve.py --http '{}'                               # POST /generate {"prompt": ...}, GET /health
    torchrun --nproc-per-node 2 examples/serve.py --parallel.tensor 2  # ranks share every weight

Without ``--parallel.tensor``, each rank of torchrun has the whole model and answers its share of the prompts, or
listens at a port of its own. A prompt that cannot be answered is told on standard error; the others are answered, and
the exit status is 1. ``--checkpoint.load`` names another checkpoint than that of ``make train``; the shape of
the model and the tokenizer are the checkpoint's own. SIGTERM ends the endpoint once what is in flight is answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from deferred_signals import signals_deferred
from gpt_settings import GPTSettings
from http_endpoint import Endpoint, HttpSettings, open_endpoint
from runtime_di import Phase, Problem, service
from runtime_di.containers import InferenceContainer, InferenceRuntime, InferenceSettings
from runtime_di.providers.checkpoint_loader import CheckpointLoader, LoadSettings
from runtime_di.providers.kv_cache import KVCache
from runtime_di.providers.process_groups import ProcessGroups
from runtime_di.providers.tokenizer import Tokenizer
from runtime_di.providers.vocabulary import Vocabulary
from sampling import SamplingSettings

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from gpt_generate import Decoder


class ServeSettings(InferenceSettings):
    """Settings of this script; tokenizer and model are the checkpoint's own unless set."""

    checkpoint: LoadSettings = LoadSettings(load=Path("runs/gpt/checkpoints"), load_settings=True)
    model: GPTSettings = GPTSettings()
    sampling: SamplingSettings = SamplingSettings()
    """How tokens are drawn; a request may say otherwise."""
    prompt: str | None = None
    """What to go on from; the lines of standard input unless set."""
    http: HttpSettings | None = None
    """Answer requests instead of prompts."""

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if self.checkpoint.load is None:
            yield Problem("checkpoint.load", "not set: there is no model to serve", fix="name a checkpoint")
        if self.tokenizer is None:
            yield Problem("tokenizer", "not set: prompts and answers are text", fix="leave it to the checkpoint")
        if self.cache is None:
            yield Problem("cache", "not set: the sequences have no place", fix="leave it out, or set its sizes")
        if self.prompt is not None and self.http is not None:
            yield Problem("prompt", "is not answered while http is set", fix="unset one of them", involves=("http",))
        if self.model.num_heads % self.parallel.tensor:
            fix = f"use a divisor of model.num_heads, {self.model.num_heads}"
            yield Problem("parallel.tensor", "cannot share the attention heads", fix=fix, involves=("model.num_heads",))
        if self.parallel.pipeline * self.parallel.context > 1:
            yield Problem("parallel", "this model has neither pipeline nor context parallelism", fix="leave both at 1")


def open_decoder(
    model: GPTSettings,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    *,
    device: torch.device,
    process_groups: ProcessGroups,
    mesh: DeviceMesh,
    cache: KVCache,
    checkpointer: CheckpointLoader,
) -> Decoder:
    """Load the model; torch is imported here, once the settings are known to be right."""
    from gpt_generate import load_decoder

    return load_decoder(
        model,
        vocabulary,
        tokenizer.size,
        device=device,
        groups=process_groups,
        mesh=mesh,
        cache=cache,
        checkpointer=checkpointer,
    )


class ServeContainer(InferenceContainer):
    """The services of an inference worker, the model and the endpoint."""

    settings = InferenceContainer.settings
    endpoint = service(
        Phase.RUNTIME,
        open_endpoint,
        settings.provided.http,
        settings.provided.launch,
        settings.provided.parallel.tensor,
    )
    decoder = service(
        Phase.WARMUP,
        open_decoder,
        settings.provided.model,
        InferenceContainer.vocabulary,
        InferenceContainer.tokenizer,
        device=InferenceContainer.device,
        process_groups=InferenceContainer.process_groups,
        mesh=InferenceContainer.mesh,
        cache=InferenceContainer.cache,
        checkpointer=InferenceContainer.checkpointer,
    )


class ServeRuntime(InferenceRuntime, container=ServeContainer):
    """What `serve` is given."""

    settings: ServeSettings
    endpoint: Endpoint | None
    decoder: Decoder


def serve(runtime: ServeRuntime) -> None:
    """Answer requests over HTTP, or the prompts that were given."""
    from generator import generating  # torch is imported here
    from prompts import answer_prompts

    runtime.start()
    if runtime.settings.http is None:
        answer_prompts(runtime)
    elif runtime.decoder.leads:
        from http_app import app_of

        assert runtime.endpoint is not None, "every leader listens"
        runtime.log.info("serving at %s", runtime.endpoint.url)
        with generating(runtime) as generator:
            runtime.endpoint.serve(app_of(generator, runtime.settings.sampling), until=generator.stopped)
    else:
        with signals_deferred():
            runtime.decoder.follow()


if __name__ == "__main__":
    ServeRuntime.main(serve)
