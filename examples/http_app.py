"""The application behind the endpoint; imports starlette, so it is imported when HTTP is asked for."""

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

from sampling import SamplingSettings

if TYPE_CHECKING:
    from starlette.requests import Request

    from generator import Generator


def app_of(generator: Generator, defaults: SamplingSettings) -> Starlette:
    """Answer with ``generator``; what a request does not say of the sampling, ``defaults`` say."""
    body = create_model("Body", __base__=SamplingSettings, prompt=(str, ...))

    async def generate(request: Request) -> JSONResponse:
        try:
            return await answer(request)
        except asyncio.CancelledError:  # by the server alone, which has waited long enough
            return JSONResponse({"error": "the endpoint stops"}, 503)

    async def answer(request: Request) -> JSONResponse:
        try:
            asked = body.model_validate({**dict(defaults), **_object(await request.body())})
            sampling = SamplingSettings(**asked.model_dump(exclude={"prompt"}))
            future = await run_in_threadpool(generator.submit, asked.model_dump()["prompt"], sampling)
        except ValidationError as error:
            told = error.errors(include_url=False, include_context=False, include_input=False)
            return JSONResponse({"error": told}, 422)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 422)
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, 503)
        (answered,) = await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
        if isinstance(answered, BaseException):
            return JSONResponse({"error": f"no answer: {answered!r}"}, 503)
        return JSONResponse(asdict(answered))

    async def health(_: Request) -> JSONResponse:
        running, waiting = generator.load
        stopped = generator.stopped.done()
        told = {"status": "stopped" if stopped else "ok", "running": running, "waiting": waiting}
        return JSONResponse(told, 503 if stopped else 200)

    return Starlette(
        routes=[Route("/generate", generate, methods=["POST"]), Route("/health", health)],
        exception_handlers={HTTPException: _refused, ClientDisconnect: _left, Exception: _failed},
    )


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "it handles no other"
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": f"no answer: {error!r}"}, 500)  # the server logs it with its traceback


async def _left(_: Request, __: Exception) -> JSONResponse:
    return JSONResponse({"error": "the request is incomplete"}, 400)


def _object(body: bytes) -> dict[str, object]:
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # halves of a character pass JSON, and no tokenizer
    except UnicodeError as error:
        raise ValueError(f"the body holds text that is no Unicode: {error}") from error
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"the body is a JSON object with a prompt, not {type(value).__name__}")
    return value
