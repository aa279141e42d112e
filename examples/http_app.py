"""The application behind the endpoint; imports starlette, so it is imported when HTTP is asked for."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import ValidationError, create_model
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
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
            asked = body.model_validate({**dict(defaults), **_object(await request.json())})
            sampling = SamplingSettings(**asked.model_dump(exclude={"prompt"}))
            future = await run_in_threadpool(generator.submit, asked.model_dump()["prompt"], sampling)
        except ValidationError as error:
            return JSONResponse({"error": error.errors(include_url=False, include_context=False)}, 422)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 422)
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, 503)
        answer = await asyncio.wrap_future(future)
        return JSONResponse(asdict(answer))

    async def health(_: Request) -> JSONResponse:
        running, waiting = generator.load
        stopped = generator.stopped.done()
        told = {"status": "stopped" if stopped else "ok", "running": running, "waiting": waiting}
        return JSONResponse(told, 503 if stopped else 200)

    return Starlette(routes=[Route("/generate", generate, methods=["POST"]), Route("/health", health)])


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"the body is a JSON object with a prompt, not {type(value).__name__}")
    return value
