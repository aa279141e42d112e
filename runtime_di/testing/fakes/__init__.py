"""Fakes of the services that tests replace most often; creating one does not import torch."""

from runtime_di.testing.fakes.checkpointer import FakeCheckpointer
from runtime_di.testing.fakes.process_groups import fake_process_groups
from runtime_di.testing.fakes.timers import FakeClock, FakeTimers
from runtime_di.testing.fakes.tokenizer import FakeTokenizer, fake_vocabulary
from runtime_di.testing.fakes.writer import FakeWriter

__all__ = [
    "FakeCheckpointer",
    "FakeClock",
    "FakeTimers",
    "FakeTokenizer",
    "FakeWriter",
    "fake_process_groups",
    "fake_vocabulary",
]
