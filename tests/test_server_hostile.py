"""What nobody should send to the HTTP server: always a clean answer in OpenAI's form, and others are served on."""

import json
import socket
import time

import pytest
from server_support import TOKENIZER, all_given_back, load_long, outcomes, post, serving, text_alone, wait_until

from pagedkv.demo.server import app as application
from pagedkv.demo.server.text import StoppingText

PROMPT = "hello world"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_long(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model):
    with serving(model) as served:
        yield served


@pytest.fixture(scope="module")
def expected(model):
    return text_alone(model, PROMPT, 5)[0]


@pytest.fixture(autouse=True)
def others_are_served_on(served, expected):
    yield
    status, _, answer = post(served, {"prompt": PROMPT, "temperature": 0, "max_tokens": 5})
    assert status == 200
    assert answer["choices"][0]["text"] == expected
    all_given_back(served)


def refused(served, body, status=400, **options):
    """The error that a body is refused with."""
    got, _, answer = post(served, body, **options)
    assert got == status, answer
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 400
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"null",
        b"[]",
        b'"prompt"',
        b"17",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"} {}',
        b'{"prompt": "x", }',
        b"[" * 100_000,
        b'{"prompt": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"max_tokens": ' + b"9" * 10_000 + b', "prompt": "x"}',
        b"prompt=x&max_tokens=3",
        b"\0" * 1000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_no_json_object(served, body):
    refused(served, body)


WRONG = {
    "max_tokens": [0, -1, -(10**30), 10**30, 2.5, 3.0, "3", True, [], {}, float("nan"), float("inf")],
    "n": [0, -1, 129, 1.5, "1", True, []],
    "temperature": [-0.1, 2.1, "1", True, [], {}, float("nan"), float("inf"), 10**400],
    "top_p": [-0.1, 1.1, "1", False, [], float("nan")],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True, []],
    "stop": ["", 7, True, {}, [""], ["a", ""], [1], ["a"] * 5, "a" * 257, "\ud800", [["a"]]],
    "stream": [0, 1, "true", [], {}],
    "model": [7, True, [], {}, "\ud800"],
    "user": [7, []],
    "stream_options": [{"include_usage": True}, {}, 7],  # without stream
    "logprobs": [0, 1, 5, True],
    "echo": [True],
    "suffix": ["x"],
    "best_of": [2],
    "logit_bias": [{"50256": -100}],
    "presence_penalty": [0.5],
    "frequency_penalty": [-2],
    "prompt": [None, 7, 1.5, True, {}, [], [[]], [[], [1]], [None], ["a", 5], [5, "a"], [[5], "a"], [1.5], [True],
               [-1], [10**30], [len(TOKENIZER)], [[5], [len(TOKENIZER)]], "\ud800", ["a", "\udfff"], [[[5]]], [{}]],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_fields_of_wrong_types_and_values(served, name, value):
    error = refused(served, {"prompt": "x", name: value})
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("value", [7, [], {"a": 1}, {"include_usage": 1}, {"include_usage": True, "b": 2}])
def test_wrong_stream_options(served, value):
    error = refused(served, {"prompt": "x", "stream": True, "stream_options": value})
    assert error["param"] in ("stream_options", "include_usage")


def test_unknown_fields(served):
    assert refused(served, {"prompt": "x", "bogus": 1})["param"] == "bogus"
    assert len(refused(served, {"prompt": "x", "b" * 10_000: 1})["param"]) == 100
    refused(served, {"prompt": "x", "": 1})
    refused(served, {"prompt": "x", **{f"field{i}": i for i in range(20_000)}})
    refused(served, {})
    refused(served, {"max_tokens": 5})


def test_what_asks_for_nothing_is_not_refused(served):
    nothing = {
        "best_of": 1, "echo": False, "frequency_penalty": 0.0, "logit_bias": None, "logprobs": None, "n": None,
        "presence_penalty": 0, "seed": None, "stop": None, "stream": None, "stream_options": None, "suffix": None,
        "temperature": None, "top_p": None, "max_tokens": None, "user": "somebody", "model": None,
    }  # fmt: skip
    status, _, answer = post(served, {"prompt": PROMPT, **nothing})
    assert (status, answer["usage"]["completion_tokens"] <= 16) == (200, True)


@pytest.mark.parametrize("extreme", [{"seed": -(2**63)}, {"seed": 2**63 - 1}, {"temperature": 1e-300}, {"top_p": 0}])
def test_extremes_that_are_allowed(served, extreme):
    assert post(served, {"prompt": PROMPT, **extreme})[0] == 200


def test_more_choices_than_may_wait(served):
    error = refused(served, {"prompt": ["x"] * 2, "n": 65})
    assert error["param"] == "n"
    refused(served, {"prompt": ["x"] * 129})


def test_a_text_that_is_much_too_long(served):
    assert refused(served, {"prompt": "hello " * 4000})["code"] == "context_length_exceeded"


def test_huge_bodies(served):
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        connection = socket.create_connection(served.address, timeout=30)
        length = "Transfer-Encoding: chunked" if headers else f"Content-Length: {1 << 34}"
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        part = b"x" * 65536
        part = b"10000\r\n" + part + b"\r\n" if headers else part
        answer = b""
        try:
            for _ in range(40):
                connection.sendall(part)
            answer = connection.recv(4096)
        except ConnectionError:  # it did not wait for the rest
            pass
        assert answer[:12] in (b"HTTP/1.1 413", b"")
        connection.close()
    wait_until(lambda: len(served.server.server_state.connections) == 0)
    error = refused(served, b" " * (1 << 20) + b"{}", status=413)
    assert "1048576 bytes" in error["message"]


def test_a_body_that_never_comes(served, monkeypatch):
    monkeypatch.setattr(application, "_MOST_BODY_SECONDS", 0.2)
    connection = socket.create_connection(served.address, timeout=30)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    connection.close()


def test_a_client_that_goes_before_its_body_is_whole(served, caplog):
    for _ in range(5):
        connection = socket.create_connection(served.address, timeout=30)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.01)
        connection.close()
    wait_until(lambda: len(served.server.server_state.connections) == 0)
    assert not caplog.records


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: %s\r\n" % (i, b"x" * 100) for i in range(2000)) + b"\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nlong: " + b"x" * 1_000_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"\r\n\r\n\r\n hello\r\n\r\n",
    ],
    ids=["headers", "path", "header", "length", "lengths", "chunks", "tls", "noise"],
)
def test_what_is_no_http(served, head):
    """Its answer is 400, if it waits for one; the connection is closed either way."""
    connection = socket.create_connection(served.address, timeout=30)
    answer = b""
    try:
        connection.sendall(head)
        while part := connection.recv(4096):
            answer += part
    except ConnectionError:
        pass
    connection.close()
    assert answer[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/v1/models/%ff%00", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
    ],
)
def test_paths_and_methods_that_are_not_there(served, method, path, status):
    refused(served, None, status=status, path=path, method=method)


def test_refusals_are_counted(served):
    before = outcomes(served).get("refused", 0)
    refused(served, b"{")
    assert outcomes(served)["refused"] == before + 1


def test_random_objects(served):
    """Whatever JSON has, in any field: 200 or a clean 400."""
    import random

    rng = random.Random(3)

    def value(depth=0):
        simple = [None, True, 0, 1, -1, 2**70, 0.5, -1e300, "", "a", "hello", "\ud800", "\0", "字" * 30]
        kind = rng.randrange(8 if depth < 3 else 6)
        if kind < 6:
            return rng.choice(simple)
        if kind == 6:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(["a", "include_usage", ""]): value(depth + 1) for _ in range(rng.randrange(3))}

    names = [*WRONG, "bogus"]
    statuses = set()
    for _ in range(300):
        body = {name: value() for name in rng.sample(names, rng.randrange(1, 4))}
        body.pop("stream", None)
        status, _, answer = post(served, {"prompt": "he", "max_tokens": 1, **body})
        statuses.add(status)
        assert status == 200 or answer["error"]["message"], body
    assert statuses == {200, 400} or statuses == {200, 400, 404}


# --- the text of a stop string, piece by piece ---


@pytest.mark.parametrize("text", ["hello world", "aabaabaaab", "漢字 or 漢", "ababab", ""])
@pytest.mark.parametrize("stops", [[], ["aab"], ["or"], ["b", "ab"], ["字 o", "world"], ["漢字 or 漢!"]])
def test_a_stopping_text_is_the_text_up_to_the_first_stop(text, stops):
    found = [text.index(stop) for stop in stops if stop in text]
    stopping, got = StoppingText(TOKENIZER, stops), ""
    for token in TOKENIZER.encode(text)[1:]:
        if not stopping.stopped:
            got += stopping.feed(token)
            assert text.startswith(got)
    assert (stopping.stopped, got + stopping.finish()) == (bool(found), text[: min(found)] if found else text)


def test_nothing_is_held_back_without_need():
    stopping = StoppingText(TOKENIZER, ["lox"])
    assert [stopping.feed(token) for token in TOKENIZER.encode("helloa")[1:]] == ["hel", "loa"]
    assert json.dumps(stopping.finish()) == '""'
