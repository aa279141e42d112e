"""The HTTP application: ``POST /generate`` and ``GET /health``; imports starlette, an optional dependency."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import ValidationError, create_model
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.routing import Route

from serving.sampling import SamplingSettings

if TYPE_CHECKING:
    from starlette.requests import Request

    from serving.generator import Generator


def create_app(generator: Generator, defaults: SamplingSettings) -> Starlette:
    """Create the application; ``defaults`` apply to the sampling settings that a request leaves out."""
    body = create_model("Body", __base__=SamplingSettings, prompt=(str, ...))

    async def generate(request: Request) -> JSONResponse:
        try:
            return await answer(request)
        except asyncio.CancelledError:  # only the server cancels, after shutdown_timeout_s
            return JSONResponse({"error": "the endpoint is shutting down"}, 503)

    async def answer(request: Request) -> JSONResponse:
        try:
            values = body.model_validate({**dict(defaults), **_parse_object(await request.body())}).model_dump()
            prompt = values.pop("prompt")
            future = await run_in_threadpool(generator.submit, prompt, SamplingSettings(**values))
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            return JSONResponse({"error": details}, 422)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 422)
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, 503)
        (result,) = await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
        if isinstance(result, BaseException):
            return JSONResponse({"error": f"no answer: {result!r}"}, 503)
        return JSONResponse(asdict(result))

    async def health(_: Request) -> JSONResponse:
        running, queued = generator.load
        stopped = generator.stopped.done()
        state = {"status": "stopped" if stopped else "ok", "running": running, "queued": queued}
        return JSONResponse(state, 503 if stopped else 200)

    return Starlette(
        routes=[Route("/generate", generate, methods=["POST"]), Route("/health", health)],
        exception_handlers={
            HTTPException: _http_error,
            ClientDisconnect: _client_disconnected,
            Exception: _internal_error,
        },
    )


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "it is registered for HTTPException alone"
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _internal_error(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": f"no answer: {error!r}"}, 500)  # the server logs it with its traceback


async def _client_disconnected(_: Request, __: Exception) -> JSONResponse:
    return JSONResponse({"error": "the request is incomplete"}, 400)


def _parse_object(body: bytes) -> dict[str, object]:
    """Parse a JSON object, and refuse text that a tokenizer cannot encode."""
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # JSON allows lone surrogates, tokenizers do not
    except UnicodeError as error:
        raise ValueError(f"the body has text that is not valid Unicode: {error}") from error
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"the body must be a JSON object with a prompt, and is {type(value).__name__}")
    return value
