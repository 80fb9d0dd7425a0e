"""`PagedCache` and the attention function ``pagedkv`` against transformers' own cache, on small random models."""

import copy
import gc

import pytest
from proof_starved import is_refused, testcapi
from proof_ways import WAYS
from transformers_support import (
    FAMILIES,
    OWN_ATTENTION,
    PAGED,
    generate,
    make_model,
    make_prompt,
    pad_left,
    torch,
    transformers,
)

import pagedkv
from pagedkv.integrations.transformers import PagedCache, PagedStores

ATTENTION = ["pagedkv", "sdpa", "eager"]

pytestmark = pytest.mark.usefixtures("one_thread")


def stores_for(model, total_blocks=256, block_size=4, **options):
    return PagedStores(model, total_blocks, block_size=block_size, debug=True, **options)


def held(stores):
    gc.collect()
    return [group.store.total_blocks - group.store.free_block_count for group in stores.groups]


def skip_unless_possible(family, attention):
    if attention == "sdpa" and family in ("gemma2", "gpt_oss", "mimo_v2_flash"):
        pytest.skip("needs soft capping or sinks, which sdpa has not")
    if attention == "pagedkv" and family in OWN_ATTENTION:
        pytest.skip("reads the cache itself")


@pytest.mark.parametrize("attention", ["pagedkv", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_a_family(family, attention):
    model = make_model(family)
    prompts = [make_prompt(21)]
    expected = generate(model, prompts)
    assert len(set(expected[0])) > 3  # not one token for ever
    skip_unless_possible(family, attention)
    model.set_attn_implementation(attention)
    stores = stores_for(model)
    assert generate(model, prompts, PagedCache(stores)) == expected
    assert held(stores) == [0] * len(stores.groups)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_the_older_name_of_the_argument():
    model = make_model("llama")
    prompts = [make_prompt(9)]
    expected = generate(model, prompts)
    assert generate(model, prompts, past_key_values=PagedCache(stores_for(model))) == expected


@pytest.mark.parametrize("family", PAGED)
def test_logits_of_a_family(family):
    """Closer than tokens: every position's logits, over a prefill, a second chunk and a decode step."""
    model = make_model(family)
    ids = torch.tensor([make_prompt(30, seed) for seed in (1, 2)])
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("pagedkv")
        cache = PagedCache(stores_for(model))
        parts = [model(part, cache=cache).logits for part in ids.split([17, 12, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_padded_on_the_left(family, attention):
    skip_unless_possible(family, attention)
    model = make_model(family)
    prompts = [make_prompt(n, seed=n) for n in (19, 3, 11)]
    expected = [generate(model, [prompt])[0] for prompt in prompts]
    assert generate(model, prompts) == expected
    model.set_attn_implementation(attention)
    assert generate(model, prompts, PagedCache(stores_for(model))) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_prefill_in_chunks(family, chunk):
    """Also chunks in which a row is nothing but padding."""
    model = make_model(family)
    prompts = [make_prompt(33, seed=1), make_prompt(5, seed=2)]
    expected = generate(model, prompts)
    model.set_attn_implementation("pagedkv")
    assert generate(model, prompts, PagedCache(stores_for(model)), prefill_chunk_size=chunk) == expected


def test_a_chunk_of_nothing_but_padding():
    model = make_model("llama")
    prompts = [make_prompt(9), make_prompt(7, seed=2)]
    expected = generate(model, prompts)
    ids, mask = (torch.nn.functional.pad(side, (6, 0)) for side in pad_left(prompts))
    model.set_attn_implementation("pagedkv")
    cache = PagedCache(stores_for(model))
    options = {"max_new_tokens": 12, "do_sample": False, "prefill_chunk_size": 4}
    out = model.generate(ids, attention_mask=mask, cache=cache, **options)
    assert out[:, ids.shape[1] :].tolist() == expected


def test_padding_is_not_stored():
    model = make_model("llama", "pagedkv")
    stores, ids_and_mask = stores_for(model), pad_left([make_prompt(16), make_prompt(2)])
    cache = PagedCache(stores)
    with torch.no_grad():
        model(ids_and_mask[0], attention_mask=ids_and_mask[1], cache=cache)
    assert [sequence.seq_len for sequence in cache.sequences] == [16, 2]
    assert held(stores) == [5]
    assert cache.get_seq_length() == 16


def test_windows_give_blocks_back():
    model = make_model("gemma3", "pagedkv")
    stores = stores_for(model)
    cache = PagedCache(stores)
    generate(model, [make_prompt(40)], cache)
    windowed, full = held(stores)
    assert (stores.groups[0].window, stores.groups[1].window) == (6, None)
    assert windowed <= 3
    assert full == 13


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams(family, attention):
    model = make_model(family)
    options = {"num_beams": 4, "num_return_sequences": 3}
    prompts = [make_prompt(18), make_prompt(7, seed=3)]
    expected = generate(model, prompts, **options)
    model.set_attn_implementation(attention)
    stores = stores_for(model)
    assert generate(model, prompts, PagedCache(stores), **options) == expected
    assert held(stores) == [0] * len(stores.groups)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_assisted_generation(family, attention):
    """The assistant is wrong often enough that tokens are taken back, across windows too."""
    model = make_model(family)
    prompts = [make_prompt(18)]
    expected = generate(model, prompts, max_new_tokens=40)
    assistant = make_model(family)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.set_attn_implementation(attention)
    cache = PagedCache(stores_for(model))
    assert generate(model, prompts, cache, max_new_tokens=40, assistant_model=assistant) == expected


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompt_lookup(family, attention):
    model = make_model(family)
    prompts = [make_prompt(6) * 4]
    expected = generate(model, prompts, max_new_tokens=40)
    model.set_attn_implementation(attention)
    cache = PagedCache(stores_for(model))
    assert generate(model, prompts, cache, max_new_tokens=40, prompt_lookup_num_tokens=4) == expected


def test_a_copied_cache_shares_its_blocks():
    """A prompt that is computed once and continued several times, as transformers' documentation does it."""
    model = make_model("gemma3")
    prefix = make_prompt(23)
    tails = [make_prompt(4, seed=5), make_prompt(6, seed=6)]
    expected = [generate(model, [prefix + tail])[0] for tail in tails]
    model.set_attn_implementation("pagedkv")
    stores = stores_for(model)
    cache = PagedCache(stores)
    with torch.no_grad():
        model(torch.tensor([prefix]), cache=cache)
    before = held(stores)
    copies = [copy.deepcopy(cache) for _ in tails]
    assert held(stores) == before
    assert [generate(model, [prefix + tail], mine)[0] for tail, mine in zip(tails, copies, strict=True)] == expected
    del copies
    assert held(stores) == before


def test_one_prompt_fans_out():
    model = make_model("llama", "pagedkv")
    stores = stores_for(model)
    cache = PagedCache(stores)
    prompt = make_prompt(9)
    with torch.no_grad():
        model(torch.tensor([prompt[:-1]]), cache=cache)
        cache.batch_repeat_interleave(3)
        assert held(stores) == [2]
        logits = model(torch.tensor([prompt[-1:]] * 3), cache=cache).logits
        assert held(stores) == [5]  # two full blocks together, a third one each
        expected = model(torch.tensor([prompt])).logits[:, -1:]
    torch.testing.assert_close(logits, expected.expand(3, 1, -1), rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert len(cache.sequences) == 2
    cache.reset()
    assert held(stores) == [0]


@pytest.mark.parametrize("order", [("sdpa", "pagedkv"), ("pagedkv", "sdpa")])
def test_the_attention_function_may_change_midway(order):
    model = make_model("gemma3")
    ids = torch.tensor([make_prompt(31)])
    with torch.no_grad():
        expected = model(ids).logits
        cache, parts = PagedCache(stores_for(model)), []
        for attention, part in zip(order, ids.split([20, 11], dim=1), strict=True):
            model.set_attn_implementation(attention)
            parts.append(model(part, cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_without_a_paged_cache(family):
    model = make_model(family)
    prompts = [make_prompt(19), make_prompt(8, seed=1)]
    expected = generate(model, prompts)
    model.set_attn_implementation("pagedkv")
    assert generate(model, prompts) == expected
    assert generate(model, prompts, use_cache=False) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    """Rows are exact in a float32 store, so gathered copies give the very same tokens."""
    model = make_model("llama").to(dtype)
    prompts = [make_prompt(15)]
    assert generate(model, prompts, PagedCache(stores_for(model))) == generate(model, prompts)
    ids = torch.tensor(prompts)
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("pagedkv")
        got = model(ids, cache=PagedCache(stores_for(model))).logits
    assert got.dtype == dtype
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("attention", ["pagedkv", "eager"])
@pytest.mark.parametrize(("dtype", "error"), [("float16", 0.01), ("bfloat16", 0.05), ("int8", 0.1)])
def test_stores_of_fewer_bytes(dtype, error, attention):
    """Logits of a decode step, relative to the greatest; a window and padding make the gathering harder."""
    model = make_model("gemma3")
    ids, mask = pad_left([make_prompt(30), make_prompt(21, seed=1)])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[:, -1]
        model.set_attn_implementation(attention)
        stores = stores_for(model, dtype=dtype)
        cache = PagedCache(stores)
        model(ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
        got = model(ids[:, -1:], attention_mask=mask, cache=cache).logits[:, -1]
    assert stores.groups[0].store.dtype == dtype
    assert 0 < (got - expected).abs().max() < error * expected.abs().max()


def test_a_bfloat16_model_loses_nothing_in_a_bfloat16_store():
    model = make_model("llama").to(torch.bfloat16)
    prompts = [make_prompt(15)]
    assert generate(model, prompts, PagedCache(stores_for(model, dtype="bfloat16"))) == generate(model, prompts)


# --- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_store_that_is_too_small(attention):
    model = make_model("gemma3", attention)
    stores = stores_for(model, total_blocks=6)
    cache = PagedCache(stores)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        generate(model, [make_prompt(40)], cache)
    assert held(stores) == [0, 0]
    assert cache.get_seq_length() == 0
    assert len(generate(model, [make_prompt(5)], cache, max_new_tokens=3)[0]) == 3


@pytest.mark.parametrize("attention", ATTENTION)
def test_an_exception_in_a_layer_leaves_the_cache_as_it_was(attention):
    model = make_model("gemma3", attention)
    stores = stores_for(model)
    ids = torch.tensor([make_prompt(20)])
    cache = PagedCache(stores)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        model(ids[:, :-2], cache=cache)

        def interrupt(*_):
            raise KeyboardInterrupt

        hook = model.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, -2:], cache=cache)
        hook.remove()
        assert cache.get_seq_length() == 18
        got = model(ids[:, -2:], cache=cache).logits[:, -1]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    del cache
    assert held(stores) == [0, 0]


def test_a_layer_that_cannot_attend_gives_its_blocks_back_at_once():
    model = make_model("llama", "pagedkv")
    stores = stores_for(model)
    cache = PagedCache(stores)
    rows = torch.ones(1, 2, 9, 12)
    key, value = cache.update(rows, rows, 0)
    attend = transformers.AttentionInterface()["pagedkv"]
    with pytest.raises(ValueError, match="sinks"):
        attend(model.model.layers[0].self_attn, torch.ones(1, 4, 9, 12), key, value, None, s_aux=torch.ones(3))
    assert held(stores) == [0]


def refused(model, cache, message, error=ValueError, **inputs):
    before = cache.get_seq_length(), held(cache.stores)
    with pytest.raises(error, match=message), torch.no_grad():
        model(cache=cache, **inputs)
    assert (cache.get_seq_length(), held(cache.stores)) == before


def test_what_is_refused():
    model = make_model("llama", "pagedkv")
    cache = PagedCache(stores_for(model))
    ids = torch.tensor([make_prompt(6), make_prompt(6, seed=1)])
    ones = torch.ones(2, 6, dtype=torch.long)
    right, hole = ones.clone(), ones.clone()
    right[0, 4:] = 0
    hole[1, 2] = 0
    refused(model, cache, "padding on the left only", input_ids=ids, attention_mask=right)
    refused(model, cache, "padding on the left only", input_ids=ids, attention_mask=hole)
    refused(model, cache, "padding on the left", input_ids=ids, attention_mask=torch.zeros(2, 1, 6, 6))
    with torch.no_grad():
        model(ids, cache=cache)
    refused(model, cache, "holds 2 sequences", input_ids=ids[:1])
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 0] = 0
    refused(model, cache, "row 0 began with 0", input_ids=ids[:, :1], attention_mask=mask)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(2)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(-7)


def test_masks_of_other_patterns_are_refused():
    from transformers import masking_utils as masks

    config = make_model("mistral", "pagedkv").config
    inputs = {"config": config, "inputs_embeds": torch.ones(1, 5, 48), "attention_mask": None, "cache": None}
    assert masks.create_causal_mask(**inputs) is None
    assert masks.create_sliding_window_causal_mask(**inputs) is None
    both = torch.tensor([[0, 0, 1, 1, 1]])
    for make, more in [
        (masks.create_causal_mask, {"or_mask_function": lambda b, h, q, k: k < 3}),
        (masks.create_sliding_window_causal_mask, {"and_mask_function": lambda b, h, q, k: k > 1}),
        (masks.create_causal_mask, {"block_sequence_ids": both}),
        (masks.create_causal_mask, {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}),  # packed sequences
        (masks.create_bidirectional_mask, {}),
    ]:
        with pytest.raises(ValueError, match="another pattern"):
            make(**inputs, **more)


def test_a_window_that_the_configuration_does_not_know_is_refused():
    model = make_model("mistral", "pagedkv")
    cache, rows = PagedCache(stores_for(model)), torch.ones(1, 2, 3, 16)
    key, value = cache.update(rows, rows, 0)
    attend = transformers.AttentionInterface()["pagedkv"]
    with pytest.raises(ValueError, match="sliding_window: expected 9"):
        attend(model.model.layers[0].self_attn, torch.ones(1, 4, 3, 16), key, value, None, sliding_window=8)


def test_dropout_and_weights_are_refused():
    model = make_model("llama", "pagedkv", attention_dropout=0.1)
    cache, ids = PagedCache(stores_for(model)), torch.tensor([make_prompt(6)])
    model.train()
    refused(model, cache, "dropout", input_ids=ids)
    model.eval()
    refused(model, cache, "output_attentions", input_ids=ids, output_attentions=True)


def test_a_static_cache_is_refused():
    model = make_model("llama", "pagedkv")
    with pytest.raises(ValueError, match="static cache"), torch.no_grad():
        model(torch.tensor([make_prompt(6)]), cache=transformers.StaticCache(model.config, max_cache_len=32))


def test_models_that_do_their_own_attention_are_refused():
    """The configuration says pagedkv and the model does not ask: it must not take the new keys for all keys."""
    model = make_model("llama")
    cache = PagedCache(stores_for(model))
    keys = torch.ones(1, 2, 3, 12)
    model.set_attn_implementation("pagedkv")
    key, _ = cache.update(keys, keys, 0)
    assert key.shape == (1, 2, 3, 12)
    with pytest.raises(TypeError, match="the model reads the keys itself .transpose. and not"):
        torch.matmul(keys, key.transpose(2, 3))
    with pytest.raises(TypeError, match="attention interface"):
        key.repeat_interleave(2, dim=1)


def test_an_early_exit_is_refused():
    model = make_model("llama", "pagedkv")
    cache = PagedCache(stores_for(model))
    model.config.num_hidden_layers = 2
    refused(model, cache, "leaving it early", input_ids=torch.tensor([[5]]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("Llama4TextConfig", "chunked_attention"),
        ("Qwen3NextConfig", "linear_attention"),
        ("MambaConfig", "attention"),
        ("T5Config", "decoder"),
    ],
)
def test_models_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        PagedStores(getattr(transformers, config)(), 8)


def test_a_cache_of_another_model_is_refused():
    model = make_model("qwen3", "pagedkv")
    refused(model, PagedCache(stores_for(make_model("llama", "pagedkv"))), "key_states", input_ids=torch.tensor([[5]]))
    with pytest.raises(TypeError, match="stores"):
        PagedCache(model)
    with pytest.raises(TypeError, match="model"):
        PagedStores("llama", 8)


@pytest.mark.parametrize("how", [*WAYS, "memory"])
@pytest.mark.parametrize("what", ["crop", "batch_select_indices"])
def test_all_rows_or_none(what, how):
    """Whatever is raised while a batch is cut or chosen from: it goes on as before it, or as after it."""
    if how == "memory" and testcapi is None:
        pytest.skip("needs CPython's test of its own C API, and a GIL")
    model = make_model("llama", "pagedkv")
    ids, rows = torch.tensor([make_prompt(9, seed) for seed in (0, 1, 2)]), torch.tensor([2, 0])

    def computed():
        cache = PagedCache(stores_for(model))
        with torch.no_grad():
            model(ids, cache=cache)
        return cache

    def act(cache):
        cache.crop(-2) if what == "crop" else cache.batch_select_indices(rows)

    def shape(cache):
        return cache.get_seq_length(), len(cache.sequences)

    def goes_on(cache):
        with torch.no_grad():
            return model(torch.full((len(cache.sequences), 1), 7), cache=cache).logits

    before, after = computed(), computed()
    act(after)
    right = {shape(cache): goes_on(cache) for cache in (before, after)}
    assert len(right) == 2
    seen = set()
    for at in range(1, 5000, {"bytecode": 53, "call": 5, "memory": 3}[how]):
        cache = computed()
        if how == "memory":
            stopped = is_refused([lambda cache=cache: act(cache)], at)
        else:
            stopped = WAYS[how](at).run(lambda cache=cache: act(cache))
        seen.add((stopped, shape(cache)))
        expected = right[shape(cache)]
        assert torch.equal(goes_on(cache), expected)
        if not stopped:
            break
    stores = cache.stores
    cache.reset()
    assert held(stores) == [0]
    assert seen >= {(True, (9, 3)), (False, (7, 3) if what == "crop" else (9, 2))}
