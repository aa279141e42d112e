"""A client of the serving example's HTTP endpoint."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any


def request_json(url: str, body: Any = None) -> tuple[int, Any]:
    """Send a request and return status and JSON; retry while the server does not listen yet."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    for _ in range(600):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError(url)


def wait_until_accepted(url: str, requests: Sequence[Future[Any]]) -> None:
    """Wait until the endpoint has accepted every request: each is running, queued or answered."""

    def num_accepted() -> int:
        load = request_json(f"{url}/health")[1]
        return load["running"] + load["queued"] + sum(future.done() for future in requests)

    while num_accepted() < len(requests):
        time.sleep(0.001)
