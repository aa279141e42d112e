"""Asks an endpoint over HTTP."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any


def ask(url: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of an answer; the server may still be loading its model."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    for _ in range(600):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError(url)


def until_accepted(url: str, asked: Sequence[Future[Any]]) -> None:
    """Wait until the endpoint has every request that was asked: it works on it, lets it wait, or has answered it."""

    def num_known() -> int:
        load = ask(f"{url}/health")[1]
        return load["running"] + load["waiting"] + sum(future.done() for future in asked)

    while num_known() < len(asked):
        time.sleep(0.001)
