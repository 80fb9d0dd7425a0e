"""The demo's model and server loop, on a tiny model with random weights."""

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the extra: pip install pagedkv[demo]")

from demo_support import SHAPE, reference_logits, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_support import alone, assert_all_free, load, run, server, tokens

from pagedkv.demo.engine import Work
from pagedkv.demo.verify import ContiguousKv, compare

WINDOW = SHAPE["attention.sliding_window"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"))


# --- the model ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention.sliding_window_pattern": 1},
        {"attention.sliding_window_pattern": 3},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ],
)
@pytest.mark.parametrize("n", [1, 2, 40])
def test_logits_are_those_of_a_dense_float64_model(tmp_path, changes, n):
    shape = {**SHAPE, **changes}
    model = load(tmp_path, shape=shape)
    hidden = model.forward(tokens(n), np.arange(n), ContiguousKv(model).attend)
    expected = reference_logits(tensors(), tokens(n), shape)
    np.testing.assert_allclose(model.logits(hidden)[-1], expected, atol=2e-4)


def test_prefill_in_parts_gives_the_same_logits(model):
    kv, prompt = ContiguousKv(model), tokens(30)
    for first, last in [(0, 7), (7, 8), (8, 29), (29, 30)]:
        hidden = model.forward(prompt[first:last], np.arange(first, last), kv.attend)
    np.testing.assert_allclose(model.logits(hidden)[-1], reference_logits(tensors(), prompt), atol=2e-4)


def test_extreme_activations_stay_finite(tmp_path):
    weights = {name: array * 50 if "ffn_gate" in name else array for name, array in tensors().items()}
    model = load(tmp_path, weights=weights)
    with np.errstate(all="raise", under="ignore"):
        hidden = model.forward(tokens(20), np.arange(20), ContiguousKv(model).attend)
    np.testing.assert_allclose(model.logits(hidden)[-1], reference_logits(weights, tokens(20)), atol=2e-3)


def test_the_27b_model_scales_its_attention_by_width(model):
    layers = model.config.layers[:1] * 62
    config = type(model.config)(**{**vars(model.config), "layers": layers, "width": 5376, "n_q_heads": 32})
    assert config.attention_scale == pytest.approx(168**-0.5)
    assert model.config.attention_scale == 0.25


# --- serving ---


def test_a_request_gets_the_tokens_it_gets_alone(model):
    served = server(model)
    request = served.engine.submit(tokens(9), 20)
    run(served)
    assert request.finish_reason
    assert request.generated == alone(model, tokens(9), 20)
    assert compare(model, tokens(9), request.generated, Work()) is None


def test_compare_finds_the_first_difference(model):
    right = alone(model, tokens(9), 6)
    wrong = [*right[:3], (right[3] + 1) % 300, *right[4:]]
    mismatch = compare(model, tokens(9), wrong, Work())
    assert (mismatch.place, mismatch.expected, mismatch.got) == (3, right[3], wrong[3])
    assert mismatch.margin > 0


def test_a_stop_token_ends_a_request(model):
    continuation = alone(model, tokens(9), 8)
    stop = continuation[4]
    served = server(model, stop_tokens={stop})
    request = served.engine.submit(tokens(9), 8)
    run(served)
    assert request.generated == continuation[: continuation.index(stop) + 1]


def test_requests_join_and_leave_while_others_decode(model):
    served = server(model, max_prefill_tokens=8)
    first = served.engine.submit(tokens(5, seed=1), 30)
    for _ in range(4):
        served.engine.step()
    late = served.engine.submit(tokens(20, seed=2), 3)  # three steps of prefill
    got = [{request for request in served.engine.step()} for _ in range(5)]
    assert got == [{first}, {first}, {first, late}, {first, late}, {first, late}]
    assert late.finish_reason
    assert not first.finish_reason
    run(served)
    assert first.generated == alone(model, tokens(5, seed=1), 30)
    assert late.generated == alone(model, tokens(20, seed=2), 3)


def test_prompts_that_arrive_together_share_what_the_first_computes(model):
    served = server(model)
    common = tokens(23)
    prompts = [common + tokens(3 + i, seed=i) for i in range(1, 5)]
    requests = [served.engine.submit(prompt, 5) for prompt in prompts]
    served.engine.step()
    assert served.scheduler.running == (requests[0],)
    served.engine.step()
    assert served.scheduler.running == tuple(requests)
    full = next(number for number, group in enumerate(served.stores.groups) if group.window is None)
    assert len({tuple(request.sequence.caches[full].block_table[:5]) for request in requests}) == 1
    run(served)
    counts = served.scheduler.counts
    assert (counts.positions_reused, counts.most_running) == (3 * 23, 4)
    assert served.engine.prefill.tokens == sum(map(len, prompts)) - 3 * 23
    assert [r.generated for r in requests] == [alone(model, prompt, 5) for prompt in prompts]


def test_equal_prompts_compute_one_token_again(model):
    served = server(model)
    requests = [served.engine.submit(tokens(8), 4) for _ in range(3)]
    run(served)
    assert served.scheduler.counts.positions_reused == 2 * 7
    assert len({tuple(request.generated) for request in requests}) == 1


def test_sharing_can_be_turned_off(model):
    served = server(model, share_prefixes=False)
    requests = [served.engine.submit(tokens(8), 4) for _ in range(3)]
    served.engine.step()
    assert served.scheduler.running == tuple(requests)
    run(served)
    assert served.scheduler.counts.positions_reused == 0


def test_a_full_store_makes_requests_wait_their_turn(model):
    served = server(model, n_blocks=10, share_prefixes=False)
    big, bigger, small = (served.engine.submit(tokens(n, seed=n), 4) for n in (24, 32, 4))
    served.engine.step()
    assert served.scheduler.running == (big,)  # and the small one does not overtake
    done = []
    while not served.scheduler.is_idle:
        done += [request for request in served.engine.step() if request.finish_reason]
    assert done[0] is big
    assert {bigger, small} == set(done[1:])
    assert_all_free(served)


def test_who_came_last_is_preempted_and_starts_again(model):
    served = server(model, n_blocks=8, share_prefixes=False)
    requests = [served.engine.submit(tokens(10, seed=i), 20) for i in range(2)]
    run(served)
    assert served.scheduler.counts.preemptions == 1
    assert [r.generated for r in requests] == [alone(model, tokens(10, seed=i), 20) for i in range(2)]


def test_what_could_never_fit_is_refused(model):
    served = server(model, n_blocks=5)
    with pytest.raises(ValueError, match="18 tokens and 4 new ones need 6 blocks of 4, the stores have 5"):
        served.engine.submit(tokens(18), 4)
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        served.engine.submit([], 4)
    request = served.engine.submit(tokens(18), 3)  # the last token is not computed: 20 positions
    run(served)
    assert len(request.generated) == 3


def test_windowed_layers_hold_about_a_window(model):
    served = server(model, n_blocks=40, max_prefill_tokens=8)
    served.engine.submit(tokens(100), 50)
    run(served)
    windowed, full = served.engine.peak_blocks
    assert full == 38
    assert windowed <= (WINDOW + 8) // 4 + 2


def test_close_gives_everything_back(model):
    served = server(model)
    for i in range(3):
        served.engine.submit(tokens(9, seed=i), 20)
    served.engine.step()
    served.engine.close()
    assert served.scheduler.is_idle
    assert_all_free(served)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_changes_nothing(model, error, monkeypatch):
    served = server(model)
    requests = [served.engine.submit(tokens(9, seed=i), 5) for i in range(2)]
    served.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda hidden: (_ for _ in ()).throw(error))
        before = [(r.sequence.seq_len, list(r.tokens)) for r in requests]
        with pytest.raises(error):
            served.engine.step()
        assert [(r.sequence.seq_len, r.tokens) for r in requests] == before
    run(served)
    assert [r.generated for r in requests] == [alone(model, tokens(9, seed=i), 5) for i in range(2)]


prompts = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 3), st.integers(1, 10)), min_size=1, max_size=6
)


@settings(max_examples=40, deadline=None)
@given(
    prompts,
    st.integers(1, 9),
    st.integers(0, 30),
    st.sampled_from([1, 5, 256]),
    st.booleans(),
    st.lists(st.integers(0, 6), min_size=6, max_size=6),
)
def test_everyone_gets_their_own_tokens(model, prompts, block_size, spare, chunk, share, arrivals):
    """Whatever arrives when, shares what, waits and is preempted."""
    texts = [(tokens(n_common) + tokens(n_own, seed=seed), n_new) for n_common, n_own, seed, n_new in prompts]
    largest = max(-(-(len(text) + n_new) // block_size) for text, n_new in texts)
    served = server(
        model, block_size=block_size, n_blocks=largest + spare, share_prefixes=share, max_prefill_tokens=chunk
    )
    requests = []
    for (text, n_new), arrival in zip(texts, arrivals, strict=False):
        requests.append(served.engine.submit(text, n_new))
        for _ in range(arrival):
            if not served.scheduler.is_idle:
                served.engine.step()
    run(served)
    for request, (text, _) in zip(requests, texts, strict=True):
        mismatch = compare(model, text, request.generated, Work())
        assert mismatch is None or mismatch.margin < 1e-4
