"""The HTTP server in a thread of this process, on a tiny model, and clients that behave and that do not."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("gguf", reason="needs openai and the extras: pip install pagedkv[demo,serve]")
pytest.importorskip("starlette", reason="needs openai and the extras: pip install pagedkv[demo,serve]")
pytest.importorskip("uvicorn", reason="needs openai and the extras: pip install pagedkv[demo,serve]")
pytest.importorskip("prometheus_client", reason="needs openai and the extras: pip install pagedkv[demo,serve]")
pytest.importorskip("openai", reason="needs openai and the extras: pip install pagedkv[demo,serve]")

import openai
from demo_support import SHAPE, metadata
from prometheus_client.parser import text_string_to_metric_families
from serving_support import alone, load

from pagedkv.demo.engine import Engine
from pagedkv.demo.server.completion import Service
from pagedkv.demo.server.metrics import Metrics
from pagedkv.demo.server.run import Server
from pagedkv.demo.server.worker import Worker
from pagedkv.demo.tokenizer import TextStream, Tokenizer
from pagedkv.serving import ModelStores, Scheduler

MODEL = "tiny"
TOKENIZER = Tokenizer(metadata())


def load_long(directory):
    """The tiny model with a context that a request does not fill before a test is through with it."""
    return load(directory, shape={**SHAPE, "context_length": 4096})


@contextmanager
def serving(model, *, n_blocks=512, max_queue=128):
    """A server; in the end it is told to stop, and every block has to be free."""
    stores = ModelStores(model.config.layers, n_blocks, block_size=4)
    scheduler = Scheduler(stores)
    metrics = Metrics(scheduler)
    gate, stops = Gate(model), TOKENIZER.stop_tokens
    worker = Worker(Engine(gate, scheduler, stops), scheduler, stops, metrics, max_queue)
    service = Service(MODEL, model.config.context_length, 16, TOKENIZER, scheduler, worker, metrics)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(service, "test")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    served = SimpleNamespace(
        address=listener.getsockname(), stores=stores, scheduler=scheduler, worker=worker, gate=gate, server=server
    )
    try:
        yield served
    finally:
        gate.open()
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive()
    for group in stores.groups:
        group.store.check()
        assert group.store.free_block_count == group.store.total_blocks


class Gate:
    """A model whose forward passes can be held up, made slow, and made to fail."""

    def __init__(self, model):
        self._model = model
        self.config = model.config
        self._open = threading.Event()
        self._open.set()
        self.seconds = 0.0
        self.failures = 0
        self.script = None
        self.open, self.close = self._open.set, self._open.clear
        self.n_held_up = 0

    def forward(self, tokens, positions, attend):
        self.n_held_up += 1
        self._open.wait(30)
        self.n_held_up -= 1
        time.sleep(self.seconds)
        hidden = self._model.forward(tokens, positions, attend)
        if self.failures:
            self.failures -= 1
            raise ArithmeticError("a forward pass fails")
        return hidden

    def logits(self, hidden):
        logits = self._model.logits(hidden)
        if self.script is not None:
            logits[:] = 0
            logits[:, self.script.pop(0)] = 1
        return logits


def client(served, **options):
    options = {"max_retries": 0, "timeout": 30, **options}
    return openai.OpenAI(base_url="http://{}:{}/v1".format(*served.address), api_key="none", **options)


def async_client(served):
    url = "http://{}:{}/v1".format(*served.address)
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30)


def text_of(tokens):
    stream = TextStream(TOKENIZER)
    return "".join(map(stream.feed, tokens)) + stream.finish()


def text_alone(model, prompt, n):
    """What follows a prompt greedily when it is alone, up to a stop token, and why it ends."""
    generated = alone(model, TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt, n)
    end = next((i for i, token in enumerate(generated) if token in TOKENIZER.stop_tokens), None)
    return (text_of(generated), "length") if end is None else (text_of(generated[:end]), "stop")


def post(served, body, path="/v1/completions", method="POST"):
    """Status, headers and what the JSON of the answer says, for a body that no client library would send."""
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
    try:
        connection.request(method, path, raw)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())
    finally:
        connection.close()


def metrics_of(served):
    """Every sample: its name and its labels' values, in the order of their names, to its value."""
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    connection.close()
    return {(sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value for sample in samples}


def outcomes(served):
    """Requests by outcome, those that are not 0."""
    samples = metrics_of(served).items()
    return {key[1]: value for key, value in samples if key[0] == "pagedkv_requests_total" and value}


def open_stream(served, prompt, **options):
    """A socket on which a stream has begun; closing it is what a killed client does."""
    connection = socket.create_connection(served.address, timeout=30)
    body = json.dumps({"prompt": prompt, "stream": True, "temperature": 0, **options}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def all_given_back(served):
    """Nobody holds a block but the prefix cache, which gives all of them back."""
    wait_until(lambda: not served.worker._open)
    assert served.scheduler.is_idle
    for group in served.stores.groups:
        assert group.store.free_block_count + group.store.evictable_block_count == group.store.total_blocks
