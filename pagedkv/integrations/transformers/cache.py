"""`PagedCache`: what a model is given as ``cache``, or ``past_key_values``.

A forward pass is a `pagedkv.Step`: it opens when the first layer comes and commits when the last one has been written.
With the attention function ``pagedkv`` it attends as well; with any other the layers are handed gathered copies.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from pagedkv import LayerGroup, ModelSequence, PagedKvCache, Step
from pagedkv.formats import FORMATS
from pagedkv.integrations.torch import as_rows, as_tensor
from pagedkv.integrations.transformers.attention import NAME, PagedKeys, count_padding, refuse_gradients
from pagedkv.integrations.transformers.private import attention_of, running_model
from pagedkv.integrations.transformers.stores import PagedStores


class _Batch:
    """The sequences of a cache, and the forward pass that is under way.

    Row ``b`` of the batch has ``length`` positions for the model. The first ``skipped[b]`` of them are padding
    and were never stored, so position ``p`` for the model is position ``p - skipped[b]`` of the sequence.
    """

    def __init__(self, stores: PagedStores) -> None:
        self.stores = stores
        self.length = 0
        self.sequences: list[ModelSequence] = []
        self.skipped: list[int] = []
        self.keeps_past = False
        self._step: Step | None = None  # the running pass
        self._written: set[int] = set()  # layers, in it
        self._kept_rows: torch.Tensor | None = None  # of it, [batch * positions] bool; None: all
        self._model: weakref.ref[PreTrainedModel] | None = None  # whose layers were looked at

    @property
    def size(self) -> int:
        return len(self.sequences)

    def window_of(self, layer: int) -> int | None:
        return self.stores.group_of(layer).window

    def first_visible(self, layer: int) -> int:
        """The first of the model's positions that the next queries of a layer can see."""
        return self.stores.group_of(layer).shape.first_needed(self.length)

    # --- a forward pass through the block tables ---

    def attend(
        self,
        keys: PagedKeys,
        query: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        try:
            return self._attend(keys, query, value, mask, options)
        except BaseException:
            self._forget()
            raise

    def _attend(
        self,
        keys: PagedKeys,
        query: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer = keys.layer
        if self._step is None or layer in self._written:
            self._begin(keys.plain, mask)
        step = self._step
        assert step is not None
        self._write(step, layer, keys.plain, value)
        attended = as_tensor(step.attend(layer, self._pack(query, "float32"), **options), query.dtype)
        self._end_if_complete(step, query.shape[2])
        batch, n_q_heads, n_new, _ = query.shape
        if self._kept_rows is not None:
            rows = attended.new_zeros((batch * n_new, *attended.shape[1:]))
            rows[self._kept_rows] = attended
            attended = rows
        return attended.view(batch, n_new, n_q_heads, -1)

    def _begin(self, rows: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Opens a pass. What is left of one that ended in an exception is taken back first."""
        self._check_model(self._forget())
        batch, _, n_new, _ = rows.shape
        sequences = self._sequences_for(batch)
        total = self.length + n_new
        padding = count_padding(mask, batch, total)
        query_lens = []
        for row, sequence in enumerate(sequences):
            skipped = self.length - sequence.seq_len
            if padding[row] != skipped and (sequence.seq_len or padding[row] < skipped):
                raise ValueError(
                    f"attention_mask: row {row} began with {skipped} positions of padding, now with {padding[row]}"
                )
            query_lens.append(total - padding[row] - sequence.seq_len)
        kept = None
        if sum(query_lens) < batch * n_new:
            kept = (torch.arange(n_new) >= n_new - torch.tensor(query_lens)[:, None]).reshape(-1)
        self._open(sequences, query_lens, kept)

    def _open(self, sequences: list[ModelSequence], query_lens: list[int], kept: torch.Tensor | None) -> None:
        self._step = Step(self.stores, sequences, query_lens).__enter__()
        self._written = set()
        self.sequences, self._kept_rows = sequences, kept

    def _write(self, step: Step, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        dtype = self.stores.group_of(layer).row_dtype
        step.write(layer, self._pack(keys, dtype), self._pack(values, dtype))
        self._written.add(layer)

    def _end_if_complete(self, step: Step, n_new: int) -> None:
        if len(self._written) < self.stores.n_layers:
            return
        self._step = None
        step.commit()
        self.length += n_new
        self.skipped = [self.length - sequence.seq_len for sequence in self.sequences]
        if not self.keeps_past:
            self.drop_unneeded()

    def _pack(self, rows: torch.Tensor, dtype: str) -> npt.NDArray[Any]:
        """``[batch, heads, positions, dim]`` as ``[n_rows, heads, dim]``, without what is padding."""
        packed = rows.transpose(1, 2).flatten(0, 1)
        return as_rows(packed if self._kept_rows is None else packed[self._kept_rows], dtype)

    # --- a forward pass over gathered copies ---

    def gather(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and V that a layer's queries see, ``[batch, heads, positions, dim]``."""
        try:
            return self._gather(layer, keys, values)
        except BaseException:
            self._forget()
            raise

    def _gather(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._step is None or layer in self._written:
            self._check_model(self._forget())
            batch, _, n_new, _ = keys.shape
            if not self.length:
                self.skipped = [0] * batch
            self._open(self._sequences_for(batch), [n_new] * batch, None)
        step = self._step
        assert step is not None
        group, index = self.stores.group_of(layer), self.stores.place_of(layer)[1]
        first = self.first_visible(layer)
        all_keys, all_values = keys, values
        if self.length:
            past = [
                _gather_rows(group, sequence.caches[self.stores.place_of(layer)[0]], index, first - skipped)
                for sequence, skipped in zip(self.sequences, self.skipped, strict=True)
            ]
            all_keys = torch.cat([_stack([k for k, _ in past], self.length - first, keys), keys], dim=2)
            all_values = torch.cat([_stack([v for _, v in past], self.length - first, values), values], dim=2)
        self._write(step, layer, keys, values)
        self._end_if_complete(step, keys.shape[2])
        return all_keys, all_values

    # --- what is done to the whole ---

    def _sequences_for(self, batch: int) -> list[ModelSequence]:
        """The sequences that a pass extends: new ones while nothing is there."""
        if not self.length:
            return [ModelSequence(self.stores) for _ in range(batch)]
        if batch != self.size:
            raise ValueError(f"cache: holds {self.size} sequences, got a batch of {batch}")
        return self.sequences

    def _forget(self) -> bool:
        """Takes back what a pass has begun that never ended, and says whether there was one."""
        step, self._step = self._step, None
        if step is not None and step.state == "open":
            step.rollback()
        return step is not None

    def _check_model(self, again: bool) -> None:
        """A pass that never ended failed in a layer, or is that of a model with fewer layers than there are here."""
        model = running_model()
        if model is not None and (again or self._model is None or self._model() is not model):
            self.stores.check_model(model)
            self._model = weakref.ref(model)

    def select(self, rows: list[int]) -> None:
        """The sequences become clones of these. Every block that somebody still holds stays; none is taken."""
        self._forget()
        sequences = [self.sequences[row].clone() for row in rows]
        self._become(sequences, [self.skipped[row] for row in rows], self.length)

    def _become(self, sequences: list[ModelSequence], skipped: list[int], length: int) -> None:
        """In one call of C, so that an interrupt comes before or after."""
        vars(self).update(sequences=sequences, skipped=skipped, length=length)

    def crop(self, n_tokens: int) -> None:
        self._forget()
        length = self.length - n_tokens
        cuts = [max(0, length - skipped) for skipped in self.skipped]
        for row, (sequence, cut) in enumerate(zip(self.sequences, cuts, strict=True)):
            if n_tokens and not sequence.can_truncate_to(cut):
                raise ValueError(
                    f"crop: positions that a sliding window sees from {cut} on were given back in row {row}; "
                    "call activate_past_recording() before the passes that may be taken back"
                )
        # All rows or none: it is clones that are cut, which takes no block.
        cropped = [sequence.clone() for sequence in self.sequences]
        for sequence, cut in zip(cropped, cuts, strict=True):
            sequence.truncate(cut)
        skipped = [length - cut for cut in cuts]
        self._become(cropped, skipped, length)
        self.drop_unneeded()

    def drop_unneeded(self) -> None:
        for sequence in self.sequences:
            sequence.drop_unneeded()

    def clear(self) -> None:
        self._forget()
        sequences = self.sequences
        self._become([], [], 0)
        for sequence in sequences:
            sequence.release()

    def clone(self) -> _Batch:
        self._forget()
        other = _Batch(self.stores)
        other.sequences = [sequence.clone() for sequence in self.sequences]
        other.skipped, other.length, other.keeps_past = list(self.skipped), self.length, self.keeps_past
        return other


def _gather_rows(
    group: LayerGroup, cache: PagedKvCache, layer: int, first: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """K and V of one layer from a position of the sequence on, ``[positions, width]``."""
    store, first = group.store, max(0, first)
    start = first // store.block_size
    ids = cache.block_table[start : -(-cache.seq_len // store.block_size)].tolist()
    rows = slice(first - start * store.block_size, cache.seq_len - start * store.block_size)
    if not ids or rows.start >= rows.stop:
        return np.empty((0, store.k_width), np.float32), np.empty((0, store.v_width), np.float32)
    if FORMATS[store.dtype].scale is not None:
        # A sequence of its own reads its blocks, also while a step has the other one.
        reading = PagedKvCache()
        store.retain(ids)
        reading.adopt_blocks(ids, len(ids) * store.block_size, store.block_size, store=store)
        try:
            flat = reading.to_contiguous(store, layer=layer, start=rows.start, stop=rows.stop)
        finally:
            reading.release(store)
        return flat.k, flat.v
    k = np.concatenate([store.k_block(block, layer) for block in ids])[rows]
    v = np.concatenate([store.v_block(block, layer) for block in ids])[rows]
    return k, v


def _stack(rows: list[npt.NDArray[Any]], n_positions: int, like: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, n_positions, dim]`` of what was gathered, at the end; zeros where padding was not stored."""
    batch, heads, _, dim = like.shape
    stacked = like.new_zeros((batch, n_positions, heads, dim))
    for row, gathered in enumerate(rows):
        if len(gathered):
            stacked[row, n_positions - len(gathered) :] = as_tensor(gathered).view(-1, heads, dim)
    return stacked.transpose(1, 2)


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`, for those who ask a layer. What changes the past is asked of the cache."""

    is_compileable = False
    is_croppable = True
    is_initialized = True
    supports_early_init = False

    def __init__(self, batch: _Batch, layer: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._batch = batch
        self._layer = layer
        self.is_sliding = batch.window_of(layer) is not None

    @property
    def batch_size(self) -> int:
        return self._batch.size or -1

    @property
    def record_past(self) -> bool:
        return self._batch.keeps_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._batch.keeps_past = value

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._batch.stores.check_rows(self._layer, key_states.shape, value_states.shape)
        refuse_gradients(key_states, value_states)
        if attention_of(self._batch.stores.config) == NAME:
            return PagedKeys.of(key_states, value_states, self._batch, self._layer), value_states
        return self._batch.gather(self._layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = self._batch.first_visible(self._layer)
        return self._batch.length - offset + query_length, offset

    def get_seq_length(self) -> int:
        return self._batch.length

    def get_max_length(self) -> int:
        return self._batch.window_of(self._layer) or -1

    def activate_past_recording(self) -> None:
        self._batch.keeps_past = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the stores are there."""

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("layers share their block tables: ask the PagedCache itself")

    offload = prefetch = reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class PagedCache(Cache):
    """The past of a batch, in the blocks of a `PagedStores`: for ``cache`` of ``generate`` and ``forward``.

    (The argument was called ``past_key_values`` before.)

    With ``model.set_attn_implementation("pagedkv")`` attention reads through the block tables, and nothing is
    gathered or copied but the new rows. With any other attention function it works too: each layer is handed a
    copy of its past, as every other cache of transformers makes one.

    Any number of caches share the blocks of one `PagedStores`. Beams, `copy.deepcopy`, and
    ``batch_repeat_interleave`` share blocks and cost none; a block is copied when one of its holders writes
    into it. Blocks go back when the cache is reset or dropped.

    Parameters
    ----------
    stores : PagedStores
        Those of the model that it is used with.

    Attributes
    ----------
    stores : PagedStores
        As given.

    Raises
    ------
    TypeError
        ``stores`` is something else.

    Notes
    -----
    A forward pass that fails in one of its layers leaves the cache as it was. `PagedStoreExhausted` is
    raised by the first layer that attends, before anything is written.

    Rows may be padded on the left if ``attention_mask`` says so; with the attention function ``pagedkv``
    padding is neither stored nor computed. Other masks are refused by it.

    Threads: belongs to one thread at a time; other caches of the same stores may be used meanwhile.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from pagedkv.integrations.transformers import PagedCache, PagedStores
    >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2, attn_implementation="pagedkv",
    ...                      eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> stores = PagedStores(model, total_blocks=64)
    >>> cache = PagedCache(stores)
    >>> tokens = model.generate(torch.tensor([[1, 2, 3]]), cache=cache, max_new_tokens=5, do_sample=False)
    >>> cache.get_seq_length()                             # the last token was not computed
    7
    """

    def __init__(self, stores: PagedStores) -> None:
        if not isinstance(stores, PagedStores):
            raise TypeError(f"stores: expected a PagedStores, got {type(stores).__name__}")
        self._take(_Batch(stores))

    def _take(self, batch: _Batch) -> None:
        self._batch = batch
        super().__init__(layers=[PagedLayer(batch, layer) for layer in range(batch.stores.n_layers)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new rows of a layer; what the attention function gets for keys and values.

        Parameters
        ----------
        key_states, value_states : torch.Tensor ``[batch, n_kv_heads, positions, head_dim]``
            New rows.
        layer_idx : int
            0 to ``stores.n_layers - 1``.
        *args, **kwargs
            Not looked at.

        Returns
        -------
        keys, values : torch.Tensor
            With ``pagedkv`` handles that it alone reads; else the past and the new rows, copied.

        Raises
        ------
        ValueError
            Rows of another shape, or another layer: the cache of another model; rows with gradients.
        """
        self.stores.check_rows(layer_idx, key_states.shape, value_states.shape)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def stores(self) -> PagedStores:
        return self._batch.stores

    @property
    def sequences(self) -> tuple[ModelSequence, ...]:
        """The rows of the batch; padding is not part of them."""
        return tuple(self._batch.sequences)

    def reset(self) -> None:
        """Gives every block back; the cache is empty."""
        self._batch.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was. Costs no blocks.

        Parameters
        ----------
        beam_idx : torch.Tensor of integers ``[n]``
            Rows of the batch.

        Raises
        ------
        IndexError
            A row that is not there.
        """
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The batch becomes these rows, in this order.

        Parameters
        ----------
        indices : torch.Tensor of integers ``[n]``, or of bool ``[batch]``
            Rows of the batch; one may occur several times. The others give their blocks back.

        Raises
        ------
        IndexError
            A row that is not there.
        """
        if self._batch.size:
            self._batch.select(torch.arange(self._batch.size)[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, one after the other. Costs no blocks.

        Parameters
        ----------
        repeats : int
            1 or more.

        Raises
        ------
        TypeError
            No integer.
        """
        self._batch.select([row for row in range(self._batch.size) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last ``-tokens_to_remove`` positions back, and gives back what the windows have left behind.

        Parameters
        ----------
        tokens_to_remove : int
            0, or below 0: how many positions of every row.

        Raises
        ------
        ValueError
            A positive number, more than there are, or positions whose windows were given back.
        """
        if not -self._batch.length <= tokens_to_remove <= 0:
            raise ValueError(f"tokens_to_remove: expected {-self._batch.length} to 0, got {tokens_to_remove}")
        self._batch.crop(-tokens_to_remove)

    def clone(self) -> PagedCache:
        """A second cache with the same past, which shares every block and costs none."""
        other = type(self).__new__(type(self))
        other._take(self._batch.clone())
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.clone()

    __copy__ = clone

    def __repr__(self) -> str:
        return f"PagedCache(batch={self._batch.size}, length={self._batch.length}, {self.stores})"
