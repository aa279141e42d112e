"""Code of a user, checked by mypy and pyright."""

from __future__ import annotations

from typing import assert_type

from runtime_di import Phase, Section, service
from runtime_di.containers import TrainingContainer, TrainingRuntime, TrainingSettings
from runtime_di.providers.tokenizer.protocol import Tokenizer
from runtime_di.providers.vocabulary import Vocabulary


class RetrieverSettings(Section):
    depth: int = 3


class Retriever:
    def __init__(self, depth: int, tokenizer: Tokenizer) -> None:
        self.depth = depth
        self.tokenizer = tokenizer


def open_retriever(settings: RetrieverSettings, tokenizer: Tokenizer) -> Retriever:
    return Retriever(settings.depth, tokenizer)


class RetrievalSettings(TrainingSettings):
    retriever: RetrieverSettings = RetrieverSettings()


class RetrievalContainer(TrainingContainer):
    retriever = service(
        Phase.RUNTIME,
        open_retriever,
        TrainingContainer.settings.provided.retriever,
        tokenizer=TrainingContainer.tokenizer,
    )


class RetrievalRuntime(TrainingRuntime, container=RetrievalContainer):
    settings: RetrievalSettings
    retriever: Retriever


def train(runtime: TrainingRuntime) -> None:
    assert_type(runtime.tokenizer, Tokenizer)
    assert_type(runtime.settings, TrainingSettings)
    assert_type(runtime.vocabulary, Vocabulary)
    assert_type(runtime.settings.parallel.tensor, int)


def retrieve(runtime: RetrievalRuntime) -> None:
    assert_type(runtime.retriever, Retriever)
    assert_type(runtime.settings, RetrievalSettings)
    assert_type(runtime.tokenizer, Tokenizer)


def main() -> None:
    settings = RetrievalSettings.load([])
    assert_type(settings, RetrievalSettings)
    with RetrievalRuntime.open(settings, overrides={"tokenizer": object()}) as runtime:
        assert_type(runtime, RetrievalRuntime)
        assert_type(runtime.start(), RetrievalRuntime)
    RetrievalRuntime.main(retrieve)
