"""A JSON endpoint: ``POST /generate`` answers a prompt, ``GET /health`` tells whether it would."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runtime_di import LaunchSettings, Module, Problem, Requirement, Section, ServiceError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from starlette.applications import Starlette


class HttpSettings(Section):
    """Where requests come in."""

    host: str = "127.0.0.1"
    """Address to listen at; ``0.0.0.0`` lets other machines in, whoever they are."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the first replica, the next ones take the ports after it; 0 lets the system choose."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        return [Module("", "starlette", extra="serve"), Module("", "uvicorn", extra="serve")]


class Endpoint:
    """A socket that listens since the start, so that requests wait rather than fail while the model is loaded."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        host, port = listening.getsockname()[:2]
        self.url = f"http://{host}:{port}"

    def serve(self, app: Starlette, until: Future[None]) -> None:
        """Answer requests until a signal comes or ``until`` is done, then finish those that are in flight.

        A signal goes on to the handler that was there before, once all is answered.
        """
        import uvicorn

        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, log_level="warning"))
        until.add_done_callback(lambda _: setattr(server, "should_exit", True))
        server.run(sockets=[self._socket])


def open_endpoint(settings: HttpSettings, launch: LaunchSettings, tensor: int) -> Iterator[Endpoint | None]:
    """Listen on the first rank of each replica, and nowhere else."""
    replica, index = divmod(launch.rank, tensor)
    if index > 0:
        yield None
        return
    port = settings.port and settings.port + replica
    try:
        listening = socket.create_server((settings.host, port), backlog=128)
    except (OSError, OverflowError) as error:
        problem = Problem("http.port", f"cannot listen at {settings.host}:{port}: {error}", fix="choose another port")
        raise ServiceError("The endpoint cannot be opened:", [problem]) from error
    with closing(listening):
        yield Endpoint(listening)
