"""Random walks: a `PagedCache` through all that is done to caches, and `generate_batch` under random schedules."""

import copy
import gc
import random

import pytest
from transformers_support import generate, make_model, make_prompt, torch

from pagedkv.integrations.transformers import PagedCache, PagedStores, generate_batch

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_all_free(stores):
    gc.collect()
    assert [group.store.free_block_count for group in stores.groups] == [stores.total_blocks] * len(stores.groups)


class Walk:
    """A cache beside the tokens that it should hold; every pass is compared with one that has no cache at all."""

    def __init__(self, family, seed):
        self.random = random.Random(seed)
        self.model, self.plain = make_model(family), make_model(family)
        self.stores = PagedStores(self.model, 400, block_size=self.random.choice([1, 3, 4, 16]), debug=True)
        self.cache = PagedCache(self.stores)
        self.cache.activate_past_recording()
        n_rows = self.random.randrange(1, 4)
        self.padding = [self.random.choice([0, 0, 3, 9]) for _ in range(n_rows)]
        self.padding[self.random.randrange(n_rows)] = 0
        self.ids = torch.zeros(n_rows, 0, dtype=torch.long)
        self.others = []

    def forward(self):
        start = self.ids.shape[1]
        new = torch.randint(3, 97, (len(self.ids), self.random.choice([1, 1, 2, 5, 13])))
        ids = torch.cat([self.ids, new], dim=1)
        mask = (torch.arange(ids.shape[1]) >= torch.tensor(self.padding)[:, None]).long()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        expected = self.plain(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, start:]
        # Copies hold padding as well, and a cache holds it or does not.
        attention = "pagedkv" if any(self.padding) else self.random.choice(["pagedkv", "eager"])
        self.model.set_attn_implementation(attention)
        got = self.model(new, attention_mask=mask, position_ids=positions[:, start:], cache=self.cache).logits
        seen = mask[:, start:].bool()
        torch.testing.assert_close(got[seen], expected[seen], rtol=1e-3, atol=2e-3)
        self.ids = ids

    def crop(self):
        n = self.random.randrange(min(6, self.ids.shape[1]) + 1)
        try:
            self.cache.crop(-n)
        except ValueError:  # a window has moved on; the next pass finds all as it was
            return
        self.ids = self.ids[:, : self.ids.shape[1] - n]

    def reorder(self):
        rows = [self.random.randrange(len(self.ids)) for _ in range(self.random.randrange(1, 4))]
        if self.ids.shape[1]:
            self.cache.reorder_cache(torch.tensor(rows))
            self.ids, self.padding = self.ids[rows], [self.padding[row] for row in rows]

    def repeat(self):
        if self.ids.shape[1] and len(self.ids) < 4:
            self.cache.batch_repeat_interleave(2)
            self.ids = self.ids.repeat_interleave(2, dim=0)
            self.padding = [n for n in self.padding for _ in range(2)]

    def copy(self):
        self.others.append(self.cache)
        self.cache = copy.deepcopy(self.cache)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("seed", range(6))
def test_a_walk_of_a_cache(family, seed):
    walk = Walk(family, seed)
    with torch.no_grad():
        for _ in range(14):
            walk.random.choice([walk.forward] * 4 + [walk.crop, walk.reorder, walk.repeat, walk.copy])()
            assert walk.cache.get_seq_length() == walk.ids.shape[1]
    caches = [*walk.others, walk.cache]
    for number, group in enumerate(walk.stores.groups):
        group.store.check([sequence.caches[number] for cache in caches for sequence in cache.sequences])
    stores = walk.stores
    del walk, caches
    assert_all_free(stores)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", range(6))
def test_a_random_schedule(family, seed):
    """Prompts that begin alike at random places, blocks that are just enough, steps and batches of all sizes."""
    draw, model = random.Random(seed), make_model(family)
    base, n_new, block_size = make_prompt(60), draw.randrange(1, 25), draw.choice([1, 3, 4, 8])
    prompts = [base[: draw.randrange(1, 60)] + make_prompt(draw.randrange(9), seed=i % 3) for i in range(6)]
    needed = max(-(-(len(prompt) + n_new - 1) // block_size) for prompt in prompts)
    stores = PagedStores(model, needed + draw.choice([0, 0, 1, 5, 30]), block_size=block_size, debug=True)
    answers = [[] for _ in prompts]
    options = {"max_prefill_tokens": draw.choice([1, 8, 17, 300]), "max_running": draw.choice([1, 2, 3, 32])}
    for event in generate_batch(model, prompts, stores=stores, max_new_tokens=n_new, **options):
        answers[event.request].append(event.token)
    assert answers == [generate(model, [prompt], max_new_tokens=n_new)[0] for prompt in prompts]
    assert_all_free(stores)
