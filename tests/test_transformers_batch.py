"""`generate_batch` against ``generate``, prompt by prompt, on small random models."""

import gc

import pytest
from transformers_support import PAGED, generate, make_model, make_prompt, torch, transformers

import pagedkv
from pagedkv.integrations.transformers import PagedCache, PagedStores, TokenEvent, generate_batch

PREFIX = make_prompt(26, seed=100)
PROMPTS = [PREFIX + make_prompt(n, seed=n) for n in (3, 9, 1, 17)] + [make_prompt(5, seed=8), make_prompt(31, seed=9)]

pytestmark = pytest.mark.usefixtures("one_thread")


def stores_for(model, total_blocks=256, block_size=4, **options):
    return PagedStores(model, total_blocks, block_size=block_size, debug=True, **options)


def held(stores):
    gc.collect()
    return [group.store.total_blocks - group.store.free_block_count for group in stores.groups]


def collect(events, n):
    answers = [[] for _ in range(n)]
    for event in events:
        answers[event.request].append(event.token)
    return answers


def answers_of(model, prompts, **options):
    return collect(generate_batch(model, prompts, **{"max_new_tokens": 12, **options}), len(prompts))


@pytest.mark.parametrize("family", PAGED)
def test_tokens_are_those_of_generate(family):
    model = make_model(family)
    expected = [generate(model, [prompt])[0] for prompt in PROMPTS]
    stores = stores_for(model)
    assert answers_of(model, PROMPTS, stores=stores) == expected
    assert held(stores) == [0] * len(stores.groups)
    assert model.config._attn_implementation == "eager"
    assert generate(model, PROMPTS[:1])[0] == expected[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_tokens": 1},
        {"max_prefill_tokens": 7},
        {"max_running": 1},
        {"max_running": 2},
        {"share_prefixes": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(family, options):
    model = make_model(family)
    stores = stores_for(model)
    assert answers_of(model, PROMPTS, stores=stores, **options) == answers_of(model, PROMPTS)
    assert held(stores) == [0] * len(stores.groups)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_requests_that_are_pushed_out_come_back(family):
    """Fewer blocks than the requests need together: some give way while they decode, and none is lost."""
    model = make_model(family)
    longest = max(map(len, PROMPTS)) + 40
    stores = stores_for(model, total_blocks=-(-longest // 4) + 9)
    assert answers_of(model, PROMPTS, stores=stores, max_new_tokens=40) == answers_of(model, PROMPTS, max_new_tokens=40)
    assert held(stores) == [0] * len(stores.groups)


def test_prefixes_are_computed_and_held_once():
    model = make_model("llama")
    computed = []

    def count(module, args, kwargs, output):
        computed.append(kwargs["input_ids"].shape[1])

    model.register_forward_hook(count, with_kwargs=True)
    prompts = [[*PREFIX, 50 + i, 60 + i, 70 + i, 80 + i] for i in range(5)]  # 26 of 30 tokens are the same

    def work(**options):
        stores = stores_for(model)
        computed.clear()
        answers_of(model, prompts, stores=stores, max_new_tokens=1, **options)
        return sum(computed), stores.groups[0].store.stats().peak_held_blocks

    assert work(share_prefixes=False) == (5 * 30, 5 * 8)
    # Six blocks are shared, two rows of the seventh are copied with it; what the first one leaves behind is known.
    assert work() == (30 + 4 * 4, 6 + 1 + 4 * 2)
    assert work(max_running=1) == (30 + 4 * 4, 6 + 5 + 1)  # everybody's seventh block stays known


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_one_call_computed_is_known_to_the_next(family):
    model = make_model(family)
    stores = stores_for(model)
    expected = answers_of(model, PROMPTS)
    computed = []
    model.register_forward_hook(lambda m, a, kw, o: computed.append(kw["input_ids"].shape[1]), with_kwargs=True)

    def work(**options):
        computed.clear()
        assert answers_of(model, PROMPTS, stores=stores, **options) == expected
        return sum(computed)

    first = work(namespace=b"these weights")
    assert 0 not in held(stores)
    stores.prefixes.groups[0].check()
    second = work(namespace=b"these weights")
    n_new = 12 * len(PROMPTS)
    assert second < n_new + 4 * len(PROMPTS) < first  # less than a block of every prompt
    assert work(namespace=b"other weights") == work() == first
    stores.prefixes.clear()
    assert held(stores) == [0] * len(stores.groups)


def test_a_conversation_starts_on_its_own_answers():
    model = make_model("llama")
    stores = stores_for(model)
    prompt = PROMPTS[0]
    answer = answers_of(model, [prompt], stores=stores, namespace=b"a")[0]
    again = prompt + answer + [7, 8]
    assert stores.prefixes.match(again, namespace=b"a") == (len(prompt) + len(answer) - 1) // 4 * 4
    assert answers_of(model, [again], stores=stores, namespace=b"a")[0] == generate(model, [again])[0]


def test_what_is_known_gives_way():
    """Stores that hold one request at a time serve many, and what is known of earlier ones goes."""
    model = make_model("gemma3")
    stores = stores_for(model, total_blocks=16)
    for call in range(4):
        prompts = [make_prompt(40, seed=10 * call + i) for i in range(3)]
        assert answers_of(model, prompts, stores=stores, namespace=b"") == answers_of(model, prompts)
    assert all(cache.stats().blocks_evicted for cache in stores.prefixes.groups)


def test_a_prompt_that_is_the_beginning_of_another():
    model = make_model("llama")
    prompts = [PREFIX, PREFIX[:20], PREFIX, PREFIX[:1]]
    assert answers_of(model, prompts) == [generate(model, [prompt])[0] for prompt in prompts]


def test_events():
    model = make_model("llama")
    [answer] = answers_of(model, PROMPTS[:1])
    events = list(generate_batch(model, PROMPTS[:1], max_new_tokens=3))
    assert events == [
        TokenEvent(0, answer[0], None),
        TokenEvent(0, answer[1], None),
        TokenEvent(0, answer[2], "length"),
    ]
    place = next(i for i in range(1, 12) if answer[i] not in answer[:i])
    for stop in ({"stop_tokens": [answer[place]]}, {"eos_token_id": [answer[place], 96]}):
        events = list(generate_batch(model, PROMPTS[:1], max_new_tokens=12, **stop))
        assert [event.token for event in events] == answer[: place + 1]
        assert events[-1].finish_reason == "stop"


def test_tokens_come_while_others_still_wait():
    model = make_model("llama")
    stores = stores_for(model)
    events = generate_batch(model, PROMPTS, stores=stores, max_running=2, max_new_tokens=4)
    assert held(stores) == [0]  # nothing is computed before the first token is asked for
    assert next(events).request in (0, 1)
    assert held(stores) != [0]
    events.close()
    assert held(stores) == [0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("when", [1, 3])
def test_an_interrupt_gives_every_block_back(error, when):
    model = make_model("gemma3")
    stores = stores_for(model)
    calls = iter(range(100))

    def interrupt(*_):
        if next(calls) == when:
            raise error

    hook = model.model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        answers_of(model, PROMPTS, stores=stores)
    hook.remove()
    assert held(stores) == [0, 0]
    assert model.config._attn_implementation == "eager"
    assert answers_of(model, PROMPTS[:1], stores=stores) == [generate(model, PROMPTS[:1])[0]]


PROCESSED = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 5, "eos_token_id": 96},
    {"bad_words_ids": [[5], [6, 7]]},
    {"suppress_tokens": list(range(40))},
]


@pytest.mark.parametrize("options", PROCESSED, ids=str)
def test_logits_processors_are_those_of_generate(options):
    model = make_model("llama")
    expected = [generate(model, [prompt], **options)[0] for prompt in PROMPTS]
    assert answers_of(model, PROMPTS, **options) == expected
    assert answers_of(model, PROMPTS, generation_config=transformers.GenerationConfig(**options)) == expected


def test_a_logits_processor_of_the_callers():
    class Only(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -1e9).index_fill(1, input_ids[0, -1:] % 50 + 1, 0.0)

    [answer] = answers_of(make_model("llama"), [[4]], logits_processor=transformers.LogitsProcessorList([Only()]))
    assert answer == list(range(5, 17))


def test_sampling():
    """A request draws the same tokens alone and among others, and about as often as the probabilities say."""
    model = make_model("llama")
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    together = answers_of(model, PROMPTS, seed=3, **options)
    assert together == answers_of(model, PROMPTS, seed=3, max_running=1, **options)
    assert together != answers_of(model, PROMPTS, seed=4, **options)
    [first, second] = answers_of(model, PROMPTS[:1] * 2, seed=3, **options)
    assert first != second
    assert [second] == answers_of(model, PROMPTS[:1], seed=4, **options)

    prompt = PROMPTS[4]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(dim=-1)
    drawn = answers_of(model, [prompt] * 800, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=1, max_running=200)
    counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=97) / 800
    assert (counts - expected).abs().max() < 0.08


def test_half_precision():
    model = make_model("llama").to(torch.bfloat16)
    stores = stores_for(model)
    assert [len(answer) for answer in answers_of(model, PROMPTS, stores=stores)] == [12] * len(PROMPTS)


def test_stores_are_shared_with_others():
    """Somebody else's cache takes part of the blocks; what is left is enough, or not."""
    model = make_model("llama")
    stores = stores_for(model, total_blocks=20)
    cache = PagedCache(stores)
    keys = torch.ones(1, 2, 40, 12)
    with torch.no_grad():
        for layer in range(3):
            cache.update(keys, keys, layer)
    assert held(stores) == [10]
    prompts = [make_prompt(8), make_prompt(20)]
    assert answers_of(model, prompts, stores=stores) == answers_of(model, prompts)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        answers_of(model, [make_prompt(50)], stores=stores)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        answers_of(model, [make_prompt(30)], stores=stores, max_new_tokens=30)
    assert held(stores) == [10]


def test_progress(capsys):
    pytest.importorskip("tqdm")
    answers_of(make_model("llama"), PROMPTS[:2], progress=True)
    assert "24/24" in capsys.readouterr().err


def test_prompts_of_any_kind():
    model = make_model("llama")
    [expected] = answers_of(model, [[5, 6, 7]])
    for prompt in (torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7]).numpy(), (5, 6, 7), range(5, 8)):
        assert answers_of(model, [prompt]) == [expected]
    assert answers_of(model, []) == []


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, r"prompts\[1\]"),
        ([3, 97], ValueError, "0 to 96"),
        ([-1], ValueError, "0 to 96"),
        ("text", TypeError, "tokenize"),
        ([1.5], TypeError, "token ids"),
        (None, TypeError, "token ids"),
        ([[1, 2]], TypeError, "token ids"),
        ([5] * 1100, ValueError, "need 278 blocks of 4, the stores have 256"),
    ],
)
def test_prompts_that_are_refused(prompt, error, message):
    model = make_model("llama")
    stores = stores_for(model)
    with pytest.raises(error, match=message):
        generate_batch(model, [[5], prompt], stores=stores, max_new_tokens=12)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"guidance_scale": 2.0},
        {"stop_strings": ["x"]},
        {"prompt_lookup_num_tokens": 3},
        {"max_time": 3.0},
        {"max_new_tokens": 0},
        {"max_length": 2},
        {"max_running": 0},
        {"max_running": "3"},
        {"max_prefill_tokens": 0},
    ],
    ids=str,
)
def test_options_that_are_refused(options):
    error = TypeError if isinstance(options.get("max_running"), str) else ValueError
    with pytest.raises(error, match="generation_config|prompts|max_running|max_prefill_tokens|max_new_tokens"):
        generate_batch(make_model("llama"), [[5, 6, 7]], **options)


def test_arguments_of_the_wrong_kind():
    model = make_model("llama")
    with pytest.raises(TypeError, match="'no_such'"):
        generate_batch(model, [[5]], no_such=3)
    with pytest.raises(TypeError, match="model"):
        generate_batch("llama", [[5]])
    with pytest.raises(TypeError, match="namespace"):
        generate_batch(model, [[5]], namespace="text")
    with pytest.raises(TypeError, match="stores"):
        generate_batch(model, [[5]], stores=PagedCache(stores_for(model)))
    for stop_tokens in (None, "ab", [1.5]):
        with pytest.raises(TypeError, match="stop_tokens: expected"):
            generate_batch(model, [[5]], stop_tokens=stop_tokens)
    for n_layers in (model.config.num_hidden_layers - 1, model.config.num_hidden_layers + 1):
        with pytest.raises(ValueError, match="stores: expected those of this LlamaForCausalLM"):
            generate_batch(model, [[5]], stores=stores_for(make_model("llama", num_hidden_layers=n_layers)))


def test_models_that_are_refused():
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="model"):
        generate_batch(bloom, [[5]])
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
            "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match="longrope"):
        generate_batch(make_model("phi3", rope_parameters=long), [[5]])
    with pytest.raises(TypeError, match="attention interface"):
        list(generate_batch(make_model("deepseek_v3"), [[5]]))
