"""The ASGI application: what is asked for, checked and handed over, and what surrounds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagedkv.demo.server import protocol
from pagedkv.demo.server.completion import Completion, EventStream, Service
from pagedkv.demo.server.errors import ApiError, bad_request, error_body

_MOST_BODY_BYTES = 1 << 20
_MOST_BODY_SECONDS = 30.0

T = TypeVar("T")


def make_app(service: Service) -> Starlette:
    """The application; its lifespan is that of the worker's thread."""
    started = int(time.time())
    model = {"id": service.model_id, "object": "model", "created": started, "owned_by": "pagedkv"}

    async def completions(request: Request) -> Response:
        try:
            body = await _read(request)
        except ClientDisconnect:
            return Response(status_code=400)
        call = protocol.parse(body, len(service.tokenizer))
        if call.model not in (None, service.model_id):
            raise _no_such_model(str(call.model))
        completion = Completion(service, call, await asyncio.to_thread(_encode, service, call))
        service.worker.submit(completion.jobs)
        if call.stream:
            return EventStream(completion)
        try:
            answer = await _unless_gone(request, completion.answer())
        finally:
            service.worker.cancel(completion.jobs)
        return Response() if answer is None else JSONResponse(answer)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["model"] != service.model_id:
            raise _no_such_model(request.path_params["model"])
        return JSONResponse(model)

    async def health(_: Request) -> Response:
        is_serving = service.worker.is_serving
        return JSONResponse({"status": "ok" if is_serving else "stopping"}, 200 if is_serving else 503)

    async def metrics(request: Request) -> Response:
        text, content_type = service.metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if error.status in (429, 503):
            service.metrics.requests["overloaded"].inc()
        elif error.status < 500:
            service.metrics.requests["refused"].inc()
        return JSONResponse(error.body, error.status, headers=error.headers)

    async def other(_: Request, error: Exception) -> Response:
        status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
        message = error.detail if isinstance(error, HTTPException) else "the server failed"
        return JSONResponse(error_body(status, message), status, headers=headers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.stop()
        await asyncio.to_thread(service.worker.join)

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", one_model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers = {ApiError: refuse, HTTPException: other, Exception: other}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


def _encode(service: Service, call: protocol.Call) -> list[list[int]]:
    """The prompts' tokens, in a thread: a long text takes seconds. Refuses what could never be served."""
    prompts = []
    for prompt in call.prompts:
        tokens = service.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        n_new = call.max_tokens or service.max_tokens
        if len(tokens) + n_new > service.context_length:
            message = f"{len(tokens)} tokens and {n_new} new ones are more than the context of {service.context_length}"
            raise bad_request("prompt", message, "context_length_exceeded")
        try:
            service.scheduler.check_fits(len(tokens), n_new)
        except ValueError as error:
            raise bad_request("prompt", str(error), "context_length_exceeded") from None
        prompts.append(tokens)
    most = service.worker.most_waiting
    if len(prompts) * call.n > most:
        raise bad_request("n", f"{len(prompts)} prompts with {call.n} choices each are more than {most}")
    return prompts


async def _read(request: Request) -> bytes:
    """The body, if it is not too long and comes in time."""

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BODY_BYTES:
                raise ApiError(413, f"the body: expected {_MOST_BODY_BYTES} bytes at most")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), _MOST_BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body: expected it within {_MOST_BODY_SECONDS:.0f} seconds") from None


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client goes away before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


def _no_such_model(name: str) -> ApiError:
    return ApiError(404, f"model: there is no {name[:100]!r} here", param="model", code="model_not_found")
