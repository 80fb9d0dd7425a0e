"""The HTTP server with OpenAI's own client: answers, streams, many at once, and clients that are killed."""

import asyncio
import http.client
import json
import math
import sys

import pytest
from server_support import (
    MODEL,
    TOKENIZER,
    all_given_back,
    async_client,
    client,
    load_long,
    metrics_of,
    open_stream,
    openai,
    outcomes,
    post,
    serving,
    text_alone,
    wait_until,
)

PROMPT = "hello world"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_long(tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(model):
    with serving(model) as served:
        yield served


def complete(served, prompt=PROMPT, **options):
    return client(served).completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, **options})


def joined(chunks):
    """A stream's choices: text and the reason of the end, by index."""
    texts, ends = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return {index: (text, ends[index]) for index, text in texts.items()}


# --- answers ---


def test_an_answer(served, model):
    answer = complete(served, max_tokens=20)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == text_alone(model, PROMPT, 20)
    assert (answer.object, answer.model, choice.index) == ("text_completion", MODEL, 0)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 20, 23)
    all_given_back(served)


def test_a_stream_says_the_same(served, model):
    chunks = list(complete(served, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == {0: text_alone(model, PROMPT, 20)}
    assert len(chunks) > 5
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 20


def test_token_ids_and_several_prompts(served, model):
    tokens = TOKENIZER.encode(PROMPT)
    prompts = [PROMPT, tokens, ["he", PROMPT], [tokens, [5, 6, 7]]]
    for prompt in prompts:
        several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        expected = {index: text_alone(model, one, 8) for index, one in enumerate(several)}
        answer = complete(served, prompt, max_tokens=8)
        assert {choice.index: (choice.text, choice.finish_reason) for choice in answer.choices} == expected
        assert joined(complete(served, prompt, max_tokens=8, stream=True)) == expected
        assert answer.usage.completion_tokens == 8 * len(several)


def test_a_prefix_that_is_known_is_counted(served):
    """In whole blocks of four, and by the rows of a last one."""
    tokens = list(range(5, 36))
    first, second = (complete(served, tokens, max_tokens=1).usage for _ in range(2))
    third = complete(served, [*tokens[:18], 99], max_tokens=1).usage
    cached = [usage.prompt_tokens_details.cached_tokens for usage in (first, second, third)]
    assert cached == [0, 28, 18]
    samples = metrics_of(served)
    assert samples["pagedkv_prefix_hit_tokens_total",] == 46
    assert samples["pagedkv_prefix_missed_tokens_total",] == 31 + 3 + 1


def test_several_choices_share_their_prompt(served, model):
    prompt = list(range(5, 36))
    answer = complete(served, prompt, n=3, max_tokens=8, temperature=1, seed=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (31, 24)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert served.scheduler.counts.positions_reused == 2 * 28
    same = complete(served, prompt, n=3, max_tokens=8, temperature=1, seed=4)
    assert [choice.text for choice in same.choices] == [choice.text for choice in answer.choices]
    assert same.usage.prompt_tokens_details.cached_tokens == 30
    greedy = complete(served, prompt, n=2, max_tokens=8)
    assert {choice.text for choice in greedy.choices} == {text_alone(model, prompt, 8)[0]}


def test_without_a_seed_answers_differ(served):
    texts = {complete(served, max_tokens=20, temperature=1).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_a_stop_string_ends_the_text_before_it(served, model):
    whole, _ = text_alone(model, PROMPT, 30)
    stop = whole[9:12]
    for stops in (stop, ["never seen", stop]):
        expected = whole[: whole.index(stop)], "stop"
        [choice] = complete(served, max_tokens=30, stop=stops).choices
        assert (choice.text, choice.finish_reason) == expected
        assert joined(complete(served, max_tokens=30, stop=stops, stream=True)) == {0: expected}
    all_given_back(served)


def test_a_stop_token_ends_the_text(served):
    served.gate.script = [*TOKENIZER.encode("hello")[1:], 1]
    answer = complete(served)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "stop")
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("text", ["漢字 \N{GRINNING FACE} e\u0301 ", "a\N{ZERO WIDTH JOINER}b"])
def test_characters_are_whole_in_every_chunk(served, text):
    """Each byte of them is a token."""
    served.gate.script = TOKENIZER.encode(text)[1:]
    chunks = list(complete(served, max_tokens=len(served.gate.script), stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk.choices[0].text for chunk in chunks)


def test_half_a_character_at_the_end_is_replaced(served):
    served.gate.script = TOKENIZER.encode("a漢")[1:-1]
    assert complete(served, max_tokens=3).choices[0].text == "a\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_may_be_spread_over_tokens_and_bytes(served):
    for text, stop, expected in [
        ("he漢字or", "字", "he漢"),
        ("aaab", "aab", "a"),
        ("hello ab", "abc", "hello ab"),
        ("hello", "hello", ""),
        ("hello world", "lo w", "hel"),
    ]:
        served.gate.script = [*TOKENIZER.encode(text)[1:], 1]
        chunks = list(complete(served, max_tokens=99, stop=stop, stream=True))
        assert joined(chunks)[0] == (expected, "stop")


def test_models_and_health(served):
    assert [model.id for model in client(served).models.list()] == [MODEL]
    assert client(served).models.retrieve(MODEL).id == MODEL
    for call in (lambda: client(served).models.retrieve("other"), lambda: complete_other(served)):
        with pytest.raises(openai.NotFoundError, match="'other'"):
            call()
    assert post(served, None, "/health", "GET")[::2] == (200, {"status": "ok"})


def complete_other(served):
    client(served).completions.create(model="other", prompt="x")


# --- many at once ---


def test_32_connections_get_what_each_gets_alone(served, model):
    """All in one batch: half of them stream, and they share beginnings or do not."""
    prompts = [f"{PROMPT * (i % 3)} {chr(97 + i % 26)}{i}" for i in range(32)]

    async def ask(number):
        stream = number % 2 == 0
        async with async_client(served) as own:
            answer = await own.completions.create(
                model=MODEL, prompt=prompts[number], max_tokens=24, temperature=0, stream=stream
            )
            if stream:
                return joined([chunk async for chunk in answer])[0]
            return answer.choices[0].text, answer.choices[0].finish_reason

    async def ask_all():
        served.gate.close()
        asked = [asyncio.ensure_future(ask(number)) for number in range(32)]
        await asyncio.to_thread(wait_until, lambda: len(served.worker._open) == 32)
        assert len(served.server.server_state.connections) == 32
        served.gate.open()
        return await asyncio.gather(*asked)

    answers = asyncio.run(ask_all())
    assert answers == [text_alone(model, prompt, 24) for prompt in prompts]
    assert served.scheduler.counts.most_running == 32
    assert sum(outcomes(served).values()) == 32
    all_given_back(served)


def test_a_burst_that_does_not_fit_waits_and_is_preempted(model):
    prompts = [[5 + i] * (4 + i % 7) for i in range(24)]

    async def ask_all(served):
        async with async_client(served) as shared:
            calls = [
                shared.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0)
                for prompt in prompts
            ]
            return await asyncio.gather(*calls)

    with serving(model, n_blocks=40) as served:
        answers = asyncio.run(ask_all(served))
        samples = metrics_of(served)
        all_given_back(served)
    got = [(answer.choices[0].text, answer.choices[0].finish_reason) for answer in answers]
    assert got == [text_alone(model, prompt, 40) for prompt in prompts]
    assert samples["pagedkv_preemptions_total",] > 0
    assert samples["pagedkv_blocks_evicted_total", "full"] > 0


# --- clients that go away ---


@pytest.mark.parametrize("stream", [True, False])
def test_a_killed_client_gives_its_blocks_back(served, stream):
    served.gate.seconds = 0.005
    killed = [open_stream(served, f"{PROMPT} {i}", max_tokens=1500, stream=stream) for i in range(4)]
    wait_until(lambda: len(served.scheduler.running) == 4)
    if stream:
        for connection in killed:
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(4096)
    for connection in killed:
        connection.close()
    all_given_back(served)
    assert outcomes(served) == {"cancelled": 4}
    assert metrics_of(served)["pagedkv_generated_tokens_total",] < 4 * 1500


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_killed_in_the_queue_is_never_computed(served, stream):
    served.gate.close()
    first = open_stream(served, PROMPT, max_tokens=4)
    wait_until(lambda: served.gate.n_held_up)
    second = open_stream(served, PROMPT, max_tokens=4, stream=stream)
    wait_until(lambda: len(served.worker._open) == 2)
    second.close()
    wait_until(lambda: served.worker._inbox.qsize() == 2)  # to start, and to give up
    served.gate.open()
    all_given_back(served)
    first.close()
    assert outcomes(served) == {"length": 1, "cancelled": 1}


def test_a_client_that_stops_reading_holds_up_nobody(served, model):
    served.gate.seconds = 0.001
    lazy = open_stream(served, PROMPT, max_tokens=1500)
    assert complete(served, max_tokens=20).choices[0].text == text_alone(model, PROMPT, 20)[0]
    lazy.close()
    all_given_back(served)


# --- when it is too much, or fails ---


def test_a_full_queue_is_429_and_says_when_to_try_again(model):
    with serving(model, max_queue=2) as served:
        served.gate.close()
        running = open_stream(served, PROMPT, max_tokens=4)
        wait_until(lambda: served.gate.n_held_up)
        waiting = [open_stream(served, PROMPT, max_tokens=4) for _ in range(2)]
        wait_until(lambda: len(served.worker._open) == 3)
        for stream in (True, False):
            with pytest.raises(openai.RateLimitError) as refused:
                complete(served, stream=stream)
            assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
            assert refused.value.code == "queue_full"
        assert outcomes(served) == {"overloaded": 2}
        served.gate.open()
        patient = client(served, max_retries=4)
        assert patient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4).usage.completion_tokens <= 4
        all_given_back(served)
        for connection in [running, *waiting]:
            connection.close()


def test_a_client_that_tries_again_is_served(model):
    with serving(model, max_queue=1) as served:
        served.gate.close()
        running = open_stream(served, PROMPT, max_tokens=4)
        wait_until(lambda: served.gate.n_held_up)
        waiting = open_stream(served, PROMPT, max_tokens=4)
        wait_until(lambda: len(served.worker._open) == 2)
        refused = served.worker._metrics.requests["overloaded"]

        async def ask():
            async with async_client(served).with_options(max_retries=3) as patient:
                asked = asyncio.ensure_future(patient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4))
                await asyncio.to_thread(wait_until, lambda: refused._value.get() == 1)
                served.gate.open()
                return await asked

        assert asyncio.run(ask()).usage.prompt_tokens == 3
        running.close()
        waiting.close()


def test_what_can_never_fit_is_400(served):
    capacity = 512 * 4
    for n_prompt, n_new, words in [(3000, 10, "need 753 blocks"), (100, 3999, "more than the context of 4096")]:
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                complete(served, [7] * n_prompt, max_tokens=n_new, stream=stream)
            assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    assert complete(served, [7] * (capacity - 1), max_tokens=2).usage.prompt_tokens == capacity - 1
    assert outcomes(served) == {"refused": 4, "length": 1}


def test_a_step_that_fails_ends_its_requests_and_the_server_goes_on(served, model, caplog):
    served.gate.failures = 1
    with pytest.raises(openai.InternalServerError, match="the engine failed") as failed:
        complete(served)
    assert failed.value.status_code == 500
    assert "a forward pass fails" in caplog.text
    all_given_back(served)
    served.gate.failures = 1
    with pytest.raises(openai.APIError, match="the engine failed"):
        list(complete(served, stream=True))
    all_given_back(served)
    assert complete(served, max_tokens=9).choices[0].text == text_alone(model, PROMPT, 9)[0]
    assert outcomes(served) == {"failed": 2, "length": 1}
    assert post(served, None, "/health", "GET")[0] == 200


def test_who_waits_is_not_ended_by_a_failure(model):
    """The second does not fit beside the first."""
    with serving(model, n_blocks=60) as served:
        served.gate.seconds = 0.01
        first = open_stream(served, [5] * 40, max_tokens=150)
        wait_until(lambda: len(served.scheduler.running))
        second = open_stream(served, [6] * 210, max_tokens=4)
        wait_until(lambda: len(served.scheduler.waiting))
        served.gate.failures = 1
        all_given_back(served)
        first.close()
        second.close()
        assert outcomes(served) == {"failed": 1, "length": 1}


def test_a_request_that_cannot_be_queued_ends_alone(served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(served.scheduler, "submit", lambda *arguments, **options: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            complete(served)
    assert complete(served).usage.prompt_tokens == 3
    assert outcomes(served) == {"failed": 1, "length": 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_has_ended_is_503(served, monkeypatch):
    """Nobody waits for what will never come."""
    monkeypatch.setattr(served.scheduler, "step", sys.exit)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as refused:
            complete(served)
        assert refused.value.status_code == 503
    assert post(served, None, "/health", "GET")[0] == 503


def test_stopping_ends_what_is_served_with_503(model):
    with serving(model) as served:
        served.gate.seconds = 0.01
        streams = [complete(served, f"{PROMPT} {i}", max_tokens=1500, stream=True) for i in range(2)]
        for stream in streams:
            next(stream)
        served.worker.stop()
        for stream in streams:
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
        served.worker.join()
        for group in served.stores.groups:
            assert group.store.free_block_count == group.store.total_blocks
        with pytest.raises(openai.InternalServerError) as refused:
            complete(served)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["Retry-After"]) > 0
        assert post(served, None, "/health", "GET")[0] == 503
        assert outcomes(served) == {"shutdown": 2, "overloaded": 1}


def test_the_server_ends_although_requests_run(model):
    """An answer that has not begun is 503; a client that does not read holds it up for a few seconds only."""
    with serving(model) as served:
        served.gate.seconds = 0.01
        waiting = open_stream(served, PROMPT, max_tokens=1500, stream=False)
        wait_until(lambda: len(served.scheduler.running) == 1)
        served.server.should_exit = True
        answer = b""
        while part := waiting.recv(4096):
            answer += part
        waiting.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: " in answer.lower()


# --- what Prometheus reads ---


def test_metrics(served):
    served.gate.seconds = 0.002
    complete(served, list(range(5, 36)), max_tokens=10)
    samples = metrics_of(served)
    for name, value in {
        "pagedkv_prompt_tokens_total": 31,
        "pagedkv_generated_tokens_total": 10,
        "pagedkv_time_to_first_token_seconds_count": 1,
        "pagedkv_time_per_token_seconds_count": 9,
        "pagedkv_requests_running": 0,
        "pagedkv_requests_waiting": 0,
        "pagedkv_preemptions_total": 0,
    }.items():
        assert samples[name,] == value, name
    assert samples["pagedkv_time_per_token_seconds_sum",] >= 9 * 0.002
    assert samples["pagedkv_time_to_first_token_seconds_bucket", "+Inf"] == 1
    for store in ("full", "window_12"):
        blocks = {state: samples["pagedkv_blocks", state, store] for state in ("free", "evictable", "held")}
        assert blocks == {"free": 502, "evictable": 10, "held": 0}


def test_metrics_while_it_computes(served):
    served.gate.close()
    first = open_stream(served, list(range(5, 36)), max_tokens=10)
    wait_until(lambda: served.gate.n_held_up)
    samples = metrics_of(served)
    assert samples["pagedkv_requests_running",] == 1
    assert samples["pagedkv_blocks", "held", "full"] == math.ceil(31 / 4)
    first.close()


def test_metrics_in_the_format_that_is_asked_for(served):
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.read().endswith(b"# EOF\n")
    connection.close()


def test_events_are_what_the_protocol_says(served):
    """Not only what the client library makes of them."""
    connection = open_stream(served, PROMPT, max_tokens=2)
    received = b""
    while b"[DONE]\n\n" not in received:
        part = connection.recv(4096)
        assert part, f"closed after {received!r}"
        received += part
    connection.close()
    head, body = received.decode().split("\r\n\r\n", 1)
    assert head.startswith("HTTP/1.1 200")
    assert "content-type: text/event-stream; charset=utf-8" in head
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert [json.loads(event)["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert "usage" not in json.loads(events[0])
