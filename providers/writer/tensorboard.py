"""A writer of TensorBoard event files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat, PositiveInt

from runtime_di.errors import ClosedError, Problem
from runtime_di.settings.section import Section

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSettings(Section):
    """Event files in the run folder."""

    queue_size: PositiveInt = 1000
    """Queued events at which a call blocks until the writing thread has caught up."""
    flush_interval_s: PositiveFloat = 30.0
    """Seconds between two flushes to disk."""


class TensorBoardWriter:
    """Queues events for TensorBoard's own writing thread; calls from several threads are safe.

    It needs the package ``tensorboard`` only and does not import torch. A forked process lacks the writing thread: its
    calls raise a `ClosedError`, where TensorBoard's own would block forever.
    """

    def __init__(self, settings: TensorBoardSettings, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._process = os.getpid()
        self._open_events = EventFileWriter(str(folder), settings.queue_size, settings.flush_interval_s)

    def scalar(self, name: str, value: float, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(Summary.Value(tag=name, simple_value=float(value)), step)

    def text(self, name: str, text: str, step: int) -> None:
        """Write Markdown for TensorBoard's text tab."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(display_name=name, description="")
        self._add(Summary.Value(tag=name, metadata=metadata, tensor=make_tensor_proto(text)), step)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings as a code block under ``settings``."""
        lines = json.dumps(values, indent=2, default=str).splitlines()
        self.text("settings", "\n".join("    " + line for line in lines), step=0)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        """Write all queued events and end the thread.

        Raises:
            OSError: the thread could not write; TensorBoard's own ``close`` would not report it.
        """
        try:
            self._events.flush()
        finally:
            self._events.close()

    @property
    def _events(self) -> EventFileWriter:
        if os.getpid() != self._process:
            problem = Problem(
                "writer.tensorboard", "was opened before this process was forked", fix="open a runtime in this process"
            )
            raise ClosedError("The TensorBoard writer belongs to the parent process:", [problem])
        return self._open_events

    def _add(self, value: Summary.Value, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
