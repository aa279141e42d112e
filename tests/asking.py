"""Asks an endpoint over HTTP."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
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
