"""The HTTP endpoint: its settings, its listening socket and its server."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from runtime_di import CapabilityError, LaunchSettings, Module, Problem, Requirement, Section

if TYPE_CHECKING:
    from concurrent.futures import Future

    from starlette.applications import Starlette


class HttpSettings(Section):
    """Address of the endpoint."""

    host: str = "127.0.0.1"
    """Address to listen at; with ``0.0.0.0`` or ``::`` any machine can connect."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the first replica, the next replicas use the following ports; 0 lets the system choose."""
    shutdown_timeout_s: PositiveInt = 20
    """Seconds from SIGTERM or SIGINT until unanswered requests are aborted; torchrun kills the process after 30."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        return [Module("", "starlette", extra="serve"), Module("", "uvicorn", extra="serve")]


class Endpoint:
    """A socket that listens before the model is loaded, so that early requests are queued instead of refused."""

    def __init__(self, listening: socket.socket, shutdown_timeout_s: int) -> None:
        self._socket, self._shutdown_timeout_s = listening, shutdown_timeout_s
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self.url = f"http://{_format_address(*self.address)}"

    def serve(self, app: Starlette, until: Future[None]) -> None:
        """Answer requests until a signal arrives or ``until`` is done, then finish the requests in flight.

        The signal is raised again for the previous handler, once every request is answered or aborted.
        """
        import uvicorn

        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=self._shutdown_timeout_s,
        )
        server = uvicorn.Server(config)
        until.add_done_callback(lambda _: setattr(server, "should_exit", True))
        server.run(sockets=[self._socket])


def open_endpoint(settings: HttpSettings, launch: LaunchSettings, tensor: int) -> Iterator[Endpoint | None]:
    """Listen on the first rank of each replica; ``None`` on the other ranks.

    Raises:
        CapabilityError: the address is not one of this machine, or the port is in use.
    """
    replica, index = divmod(launch.rank, tensor)
    if index > 0:
        yield None
        return
    port = settings.port and settings.port + replica
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        what = f"cannot listen at {_format_address(settings.host, port)}: {error}"
        problem = Problem("http.port", what, fix="choose another port, or another http.host")
        raise CapabilityError("The endpoint cannot be opened:", [problem]) from error
    with closing(listening):
        yield Endpoint(listening, settings.shutdown_timeout_s)


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
