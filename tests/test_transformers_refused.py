"""Models and uses that would be computed wrongly: refused in words that say what to do, and the cache is as it was."""

import ast
import gc
from pathlib import Path

import pytest
from transformers_support import (
    COMMON,
    FAMILIES,
    GROUPED,
    HEADS,
    OWN_ATTENTION,
    generate,
    make_model,
    make_prompt,
    pad_left,
    torch,
    transformers,
)

from pagedkv.integrations.transformers import PagedCache, PagedStores, generate_batch, private

ATTENTION = ["pagedkv", "sdpa", "eager"]
IDS = torch.tensor([make_prompt(9)])

pytestmark = pytest.mark.usefixtures("one_thread")


def make(name, attention="eager", **values):
    torch.manual_seed(7)
    config = getattr(transformers, name)(**values)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def cache_for(model):
    return PagedCache(PagedStores(model, 64, block_size=4, debug=True))


def assert_untouched(cache, length=0, n_blocks=0):
    gc.collect()
    assert cache.get_seq_length() == length
    assert [group.n_blocks_in_use for group in cache.stores.groups] == [n_blocks] * len(cache.stores.groups)


def refused(model, cache, error, message, ids=IDS, **inputs):
    """Also on top of a past, which stays as it was and may be gone on with."""
    with pytest.raises(error, match=message), torch.no_grad():
        model(ids, cache=cache, **inputs)
    assert_untouched(cache)


# --- attention of another kind ------------------------------------------------------------------------


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_attention_that_reads_keys_itself_or_twice(family):
    """DiffLlama attends twice, with the same keys and other values: the second would be attended as the first."""
    message = 'attn_implementation "pagedkv": .*use attn_implementation="sdpa" or "eager"'
    model = make_model(family, "pagedkv")
    refused(model, cache_for(model), (TypeError, ValueError), message)
    with pytest.raises((TypeError, ValueError), match=message):
        list(generate_batch(make_model(family), [make_prompt(9)], max_new_tokens=3))


def test_other_values_and_a_second_time():
    model = make_model("llama", "pagedkv")
    attend = transformers.AttentionInterface()["pagedkv"]
    module = model.model.layers[0].self_attn
    rows, query = torch.randn(1, 2, 9, 12), torch.randn(1, 4, 9, 12)
    cache = cache_for(model)
    key, value = cache.update(rows, rows, 0)
    for other in (value + 1, value[:, :1], value[:, :, :8]):
        with pytest.raises(ValueError, match="other values than the cache was given is not supported, in LlamaAtt"):
            attend(module, query, key, other, None)
    assert_untouched(cache)
    out, _ = attend(module, query, key, value.clone(), None)  # a copy has the same values
    expected = torch.nn.functional.scaled_dot_product_attention(query, rows, rows, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="attention twice with the same keys is not supported, in LlamaAttention"):
        attend(module, query, key, value, None)
    cache.reset()
    assert_untouched(cache)


def test_attention_weights_of_layers_that_are_not_told():
    """GPT-2 does not hand ``output_attentions`` on: it returned an empty tuple of weights."""
    model = make("GPT2Config", vocab_size=97, n_embd=48, n_layer=2, n_head=4)
    with torch.no_grad():
        assert len(model(IDS, cache=cache_for(model), output_attentions=True).attentions) == 2
    model.set_attn_implementation("pagedkv")
    message = "attention weights .output_attentions. are not supported, in GPT2Attention"
    refused(model, cache_for(model), ValueError, message, output_attentions=True)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(IDS, output_attentions=True)
    with torch.no_grad():
        assert model(IDS, cache=cache_for(model), output_hidden_states=True).hidden_states


def test_a_mask_that_a_model_reads_itself():
    """Doge makes its own mask of the one it gets."""
    model = make("DogeConfig", **GROUPED)
    prompts = [make_prompt(9), make_prompt(5)]
    expected = generate(model, prompts)
    assert generate(model, prompts, cache_for(model)) == expected
    model.set_attn_implementation("pagedkv")
    ids, mask = pad_left(prompts)
    refused(model, cache_for(model), TypeError, "DogeModel reads the mask itself", ids, attention_mask=mask)
    refused(model, cache_for(model), ValueError, "attention_mask: .* use attn_implementation", ids)
    with pytest.raises(ValueError, match="attention_mask: expected none, got one of the model's own making; use gen"):
        list(generate_batch(model, prompts, max_new_tokens=2))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model():
    model = make_model("llama", "pagedkv")
    cache = cache_for(model)
    with torch.no_grad():
        expected = model(IDS).logits
    message = "TypeError: attn_implementation .* expected a model that is not compiled; use attn_implementation"
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match=message), torch.no_grad():
        torch.compile(model, backend="eager")(IDS, cache=cache)
    torch._dynamo.reset()
    assert_untouched(cache)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        got = torch.compile(model, backend="eager")(IDS, cache=cache).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


# --- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTION)
def test_gradients(attention):
    """Those of the past would be lost: the keys that come back are numbers."""
    model = make_model("llama", attention)
    cache = cache_for(model)
    with pytest.raises(ValueError, match="cache: gradients do not go back through it; run under torch.no_grad"):
        model(IDS, cache=cache)
    assert_untouched(cache)
    with torch.no_grad():
        model(IDS[:, :5], cache=cache)
    with pytest.raises(ValueError, match="gradients"):
        model(IDS[:, 5:], cache=cache)
    assert_untouched(cache, 5, 2)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            model(IDS[:, 5:6], cache=cache)
    model.requires_grad_(False)  # there are none
    model(IDS[:, 7:], cache=cache)
    assert cache.get_seq_length() == 9
    assert model(IDS, use_cache=False).logits.shape == (1, 9, 97)


# --- other layers than the stores have ----------------------------------------------------------------


def shorten(model, n=2):
    model.model.layers = model.model.layers[:n]
    return model


@pytest.mark.parametrize("attention", ATTENTION)
def test_fewer_layers_than_the_configuration_says(attention):
    """Each pass would wait for layers that never come, and be forgotten by the next."""
    kinds = ["sliding_attention", "full_attention"] * 2
    values = {**HEADS, "num_hidden_layers": 4, "sliding_window": 6, "layer_types": kinds}
    whole = make("Gemma3TextConfig", attention, **values)
    cache = cache_for(whole)
    message = "model: expected the 4 layers of its configuration, got a Gemma3.* without layer 2"
    short = shorten(make("Gemma3TextConfig", attention, **values))
    with pytest.raises(ValueError, match=message):
        PagedStores(short, 8)
    with pytest.raises(ValueError, match=message):
        list(generate_batch(short, [make_prompt(9)], max_new_tokens=2))
    refused(short, cache, ValueError, message)
    with torch.no_grad():
        whole(IDS, cache=cache)
        refused_later = shorten(whole)
        refused_later(IDS[:, :1], cache=cache)  # it was looked at before
        with pytest.raises(ValueError, match=message):
            refused_later(IDS[:, :1], cache=cache)
    assert cache.get_seq_length() == 9
    short.config.num_hidden_layers = 2
    short.config.layer_types = short.config.layer_types[:2]
    expected = generate(short, [make_prompt(9)])
    assert generate(short, [make_prompt(9)], cache_for(short)) == expected


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("n_stores", "n_model"), [(4, 2), (2, 4)])
def test_the_cache_of_a_model_of_another_depth(attention, n_stores, n_model):
    owner, model = (make("LlamaConfig", attention, **{**GROUPED, "num_hidden_layers": n}) for n in (n_stores, n_model))
    cache = cache_for(owner)
    refused(model, cache, ValueError, "expected those of this LlamaModel, got .* another model's cache?")
    with pytest.raises(ValueError, match="another model's cache?"):
        list(generate_batch(model, [make_prompt(9)], stores=cache.stores, max_new_tokens=2))
    assert generate(owner, [make_prompt(9)], cache) == generate(owner, [make_prompt(9)])


@pytest.mark.parametrize("layer", [-1, 3, 100])
def test_a_layer_that_is_not_there(layer):
    cache = cache_for(make_model("llama"))
    with pytest.raises(ValueError, match="layer_idx: expected 0 to 2, got .*: another model's cache?"):
        cache.update(torch.ones(1, 2, 3, 12), torch.ones(1, 2, 3, 12), layer)


# --- families -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"multi_query": True}, {"multi_query": False}, {"alibi": True},
                                     {"new_decoder_architecture": True, "num_kv_heads": 2}], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_falcon(attention, options):
    """It does not use the attention interface, and so works with copies."""
    model = make("FalconConfig", attention, **COMMON, **options)
    prompts = [make_prompt(15), make_prompt(6, seed=1)]
    assert generate(model, prompts, cache_for(model)) == generate(model, prompts)
    with pytest.raises(ValueError, match="expected one that uses the attention interface, got FalconForCausalLM"):
        generate_batch(model, prompts)


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97}


@pytest.mark.parametrize(("name", "values", "message"), [
    ("RwkvConfig", SMALL, "'recurrent', which a store cannot hold"),
    ("xLSTMConfig", {**SMALL, "num_blocks": 2, "num_heads": 4}, "'recurrent', which a store cannot hold"),
    ("BertConfig", {**SMALL, "num_attention_heads": 4, "intermediate_size": 64}, "got bert, an encoder"),
    ("BltConfig", {}, "expected num_hidden_layers, got none in that of blt"),
])  # fmt: skip
def test_families_that_no_store_holds(name, values, message):
    config = getattr(transformers, name)(**values)
    with pytest.raises(ValueError, match=message):
        PagedStores(config, 8)
    if name != "BltConfig":  # of 100 million parameters
        model = transformers.AutoModel.from_config(config)
        with pytest.raises(ValueError, match=message):
            PagedStores(model, 8)
        with pytest.raises(ValueError, match="^model: expected one that "):
            generate_batch(model, [[1]])


def test_attention_of_an_encoder():
    config = transformers.BertConfig(**SMALL, num_attention_heads=4, intermediate_size=64)
    model = transformers.BertModel(config).eval()
    model.set_attn_implementation("pagedkv")
    with pytest.raises(ValueError, match='attn_implementation "pagedkv": expected a causal'), torch.no_grad():
        model(IDS)


# --- what transformers does not promise ---------------------------------------------------------------


def test_this_version_was_tried():
    assert transformers.__version__ in private.VERSIONS


def private_names(source):
    """Names with an underscore that a module takes from elsewhere: attributes of anything but self, and imports."""
    tree = list(ast.walk(ast.parse(source)))
    own = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {alias.name for node in tree if isinstance(node, ast.ImportFrom) for alias in node.names}
    for node in tree:
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if is_own else used).add(node.attr)
    return {name for name in used - own if name.startswith("_") and not name.endswith("__")}


def test_what_it_does_not_promise_is_used_in_one_file():
    assert private_names("import a\nfrom b import _c\na._d(self._e, a.f)") == {"_c", "_d"}
    for path in Path(private.__file__).parent.glob("*.py"):
        found = private_names(path.read_text()) - {"_DType"}  # the library's own
        assert path.name == "private.py" or not found, path.name


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_know_their_numbers(family):
    assert private.layers_of(make_model(family)) >= set(range(3))
    assert private.running_model() is None
