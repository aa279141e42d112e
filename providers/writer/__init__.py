"""The metric writer of a run, on the one rank that writes."""

from runtime_di.providers.writer.fan_out import FanOutWriter
from runtime_di.providers.writer.jsonl import JsonLinesSettings, JsonLinesWriter
from runtime_di.providers.writer.null import NullWriter
from runtime_di.providers.writer.protocol import Writer
from runtime_di.providers.writer.service import open_writer
from runtime_di.providers.writer.settings import WriterSettings
from runtime_di.providers.writer.tensorboard import TensorBoardSettings, TensorBoardWriter

__all__ = [
    "FanOutWriter",
    "JsonLinesSettings",
    "JsonLinesWriter",
    "NullWriter",
    "TensorBoardSettings",
    "TensorBoardWriter",
    "Writer",
    "WriterSettings",
    "open_writer",
]
