"""Generate text with a checkpoint of pretrain_gpt.py.

    python examples/serve.py --prompt 'def main('
    ls | python examples/serve.py                                      # a prompt on each line of standard input
    python examples/serve.py --http '{}'                               # POST /generate {"prompt": ...}, GET /health
    torchrun --nproc-per-node 2 examples/serve.py --parallel.tensor 2  # tensor parallel: ranks share every weight

Without ``--parallel.tensor``, each rank of torchrun is a replica: it has the whole model, and answers its share of the
prompts or listens at its own port. If a prompt cannot be answered, standard error has the reason, the other prompts are
answered, and the exit status is 1. ``--checkpoint.load`` names another checkpoint than that of ``make train``; the
model's shape and the tokenizer come from the checkpoint. After SIGTERM the endpoint answers the requests in flight, and
then the process ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.settings import GPTSettings
from runtime_di import Phase, Problem, service
from runtime_di.containers import InferenceContainer, InferenceRuntime, InferenceSettings
from runtime_di.providers.checkpoint import CheckpointLoader, LoadSettings
from runtime_di.providers.kv_cache import KVCache
from runtime_di.providers.process_groups import ProcessGroups
from runtime_di.providers.tokenizer import Tokenizer
from runtime_di.providers.vocabulary import Vocabulary
from serving.endpoint import Endpoint, HttpSettings, open_endpoint
from serving.follower_signals import defer_signals
from serving.sampling import SamplingSettings

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from gpt.decoder import Decoder


class ServeSettings(InferenceSettings):
    """Settings of this script; the tokenizer and the model come from the checkpoint unless set."""

    checkpoint: LoadSettings = LoadSettings(load=Path("runs/gpt/checkpoints"), load_settings=True)
    model: GPTSettings = GPTSettings()
    sampling: SamplingSettings = SamplingSettings()
    """How tokens are sampled; a request can override each value."""
    prompt: str | None = None
    """Prompt to answer; unless set, each line of standard input is a prompt."""
    http: HttpSettings | None = None
    """Serve HTTP requests instead of answering prompts."""

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if self.checkpoint.load is None:
            yield Problem("checkpoint.load", "not set: there is no model to serve", fix="name a checkpoint")
        if self.tokenizer is None:
            yield Problem("tokenizer", "not set: prompts and answers are text", fix="leave it to the checkpoint")
        if self.cache is None:
            yield Problem("cache", "not set: the model needs a KV cache", fix="leave it out, or set its sizes")
        if self.prompt is not None and self.http is not None:
            yield Problem("prompt", "is not answered if http is set", fix="unset one of them", involves=("http",))
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
    """Load the model; torch is imported here, after the settings are validated."""
    from gpt.decoder import load_decoder

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
    """Services of a serving process.

    Inherited from InferenceContainer: see ``containers/inference.py``.
    Added here: endpoint (RUNTIME), decoder (WARMUP).
    """

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
    """The services that `serve` uses."""

    settings: ServeSettings
    endpoint: Endpoint | None
    decoder: Decoder


def serve(runtime: ServeRuntime) -> None:
    """Answer requests over HTTP, or the prompts."""
    from serving.generator import create_generator  # imports torch
    from serving.prompts import answer_prompts

    runtime.start()
    if runtime.settings.http is None:
        answer_prompts(runtime)
    elif runtime.decoder.is_leader:
        from serving.app import create_app

        assert runtime.endpoint is not None, "every leader has an endpoint"
        runtime.log.info("serving at %s", runtime.endpoint.url)
        with create_generator(runtime) as generator:
            runtime.endpoint.serve(create_app(generator, runtime.settings.sampling), until=generator.stopped)
    else:
        with defer_signals():
            runtime.decoder.follow()


if __name__ == "__main__":
    ServeRuntime.main(serve)
