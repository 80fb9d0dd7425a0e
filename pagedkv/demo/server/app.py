"""The ASGI application: completions from a body's first byte to the answer's last, and what surrounds them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pagedkv.demo.errors import RequestRefused
from pagedkv.demo.sampling import Sampler
from pagedkv.demo.scheduler import Scheduler
from pagedkv.demo.server import protocol
from pagedkv.demo.server.errors import ApiError, bad_request, error_body
from pagedkv.demo.server.metrics import Metrics
from pagedkv.demo.server.text import StoppingText
from pagedkv.demo.server.worker import Job, Piece, Worker
from pagedkv.demo.tokenizer import Tokenizer

_MOST_BODY_BYTES = 1 << 20
_MOST_BODY_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """What the application serves from. `max_tokens` is for requests that do not say."""

    model_id: str
    context_length: int
    max_tokens: int
    tokenizer: Tokenizer
    scheduler: Scheduler
    worker: Worker
    metrics: Metrics


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


class Completion:
    """One client's request: a job for each choice, and a queue through which their text comes back."""

    def __init__(self, service: Service, call: protocol.Call, prompts: list[list[int]]) -> None:
        self.worker = service.worker
        self._call = call
        self._n_prompt = sum(map(len, prompts))
        self._pieces: asyncio.Queue[tuple[int, Piece | ApiError]] = asyncio.Queue()
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_id,
        }
        loop = asyncio.get_running_loop()

        def make_job(index: int, prompt: list[int]) -> Job:
            def emit(piece: Piece | ApiError) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

            seed = None if call.seed is None else [call.seed % 2**64, index]
            choose = Sampler(call.temperature, call.top_p, seed)
            max_tokens = call.max_tokens or service.max_tokens
            return Job(prompt, max_tokens, choose, StoppingText(service.tokenizer, call.stops), emit)

        choices = [prompt for prompt in prompts for _ in range(call.n)]
        self.jobs = [make_job(index, prompt) for index, prompt in enumerate(choices)]

    async def answer(self) -> dict[str, Any]:
        """All choices whole, and the usage. Raises the `ApiError` that ends it."""
        texts: list[list[str]] = [[] for _ in self.jobs]
        ends: list[str | None] = [None] * len(self.jobs)
        async for index, piece in self._until_all_end():
            texts[index].append(piece.text)
            ends[index] = piece.finish
        choices = [
            protocol.choice(index, "".join(parts), end)
            for index, (parts, end) in enumerate(zip(texts, ends, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, one a piece. An `ApiError` is an event too, the last one."""
        usage = {"usage": None} if self._call.include_usage else {}
        try:
            async for index, piece in self._until_all_end():
                yield protocol.event({**self._head, "choices": [protocol.choice(index, *piece)], **usage})
        except ApiError as error:
            yield protocol.event(error.body)
            return
        if self._call.include_usage:
            yield protocol.event({**self._head, "choices": [], "usage": self._usage()})
        yield protocol.event("[DONE]")

    async def _until_all_end(self) -> AsyncIterator[tuple[int, Piece]]:
        n_open = len(self.jobs)
        while n_open:
            index, piece = await self._pieces.get()
            if isinstance(piece, ApiError):
                raise piece
            n_open -= piece.finish is not None
            yield index, piece

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many choices it has: what its first found known."""
        n_known = sum(job.n_known for job in self.jobs[:: self._call.n])
        return protocol.usage(self._n_prompt, n_known, sum(job.n_generated for job in self.jobs))


class EventStream(StreamingResponse):
    """Sends a completion's events; gives up its jobs when the client has gone, also before the first event."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(completion.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.worker.cancel(self._completion.jobs)


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
            service.scheduler.check(tokens, n_new)
        except RequestRefused as error:
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
