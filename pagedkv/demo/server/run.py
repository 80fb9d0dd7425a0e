"""The server as a process: socket, model, signals."""

from __future__ import annotations

import argparse
import os
import signal
import socket

import uvicorn

from pagedkv.demo.engine import Engine
from pagedkv.demo.errors import DemoError
from pagedkv.demo.loading import ModelFile, make_stores, say
from pagedkv.demo.server.app import make_app
from pagedkv.demo.server.completion import Service
from pagedkv.demo.server.metrics import Metrics
from pagedkv.demo.server.worker import Worker
from pagedkv.demo.tier import tier_of
from pagedkv.serving import Scheduler

_DEFAULT_BLOCKS = 1024
_GRACE_SECONDS = 5  # for clients that do not take their last bytes


def run(options: argparse.Namespace) -> int:
    """Serves until SIGTERM, which is exit code 0, or Ctrl-C, which is KeyboardInterrupt as everywhere."""
    with _bind(options.host, options.serve) as listener:
        file = ModelFile(options.model)
        stores = make_stores(file.config, options.blocks or _DEFAULT_BLOCKS, options)
        with tier_of(options, file, stores) as tiered:
            scheduler = Scheduler(stores, share_prefixes=not options.no_share, tiered=tiered)
            metrics = Metrics(scheduler, tiered)
            engine = Engine(file.load(), scheduler, file.tokenizer.stop_tokens, tiered)
            worker = Worker(engine, scheduler, file.tokenizer.stop_tokens, metrics, options.max_queue)
            service = Service(
                model_id=file.id,
                context_length=file.config.context_length,
                max_tokens=options.max_tokens,
                tokenizer=file.tokenizer,
                scheduler=scheduler,
                worker=worker,
                metrics=metrics,
            )
            del file  # the quantised bytes
            _serve(service, listener)
    say("ended; all blocks were given back")
    return 0


def _serve(service: Service, listener: socket.socket) -> None:
    # The server repeats a signal when it has ended. SIGTERM has then been heard; a background process may have
    # been started without Ctrl-C, which ends the server all the same.
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: None),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        Server(service, f"{service.model_id} on {_url(listener)}").run(sockets=[listener])
    finally:
        service.worker.stop()
        service.worker.join()
        for number, handler in before.items():
            signal.signal(number, handler)


class Server(uvicorn.Server):
    """A server that ends what it is computing as soon as it is told to end, rather than when that is done."""

    def __init__(self, service: Service, title: str) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http="h11",
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._service = service
        self._title = title

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"serving {self._title}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.worker.stop()
        await super().shutdown(sockets)


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the address, not listening yet: what is wrong with it is said before the model is read."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # an old connection must not keep the port; elsewhere this would take it from others
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such address"
        raise DemoError(f"cannot serve on {host} port {port}: {reason.lower()}") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
