"""One client's request, from its tokens to the last byte of its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedkv.demo.sampling import Sampler
from pagedkv.demo.server import protocol
from pagedkv.demo.server.errors import ApiError
from pagedkv.demo.server.metrics import Metrics
from pagedkv.demo.server.text import StoppingText
from pagedkv.demo.server.worker import Job, Piece, Worker
from pagedkv.demo.tokenizer import Tokenizer
from pagedkv.serving import Scheduler


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
