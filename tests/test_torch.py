"""Tensors, DLPack and buffers as rows, and the library's arrays as tensors: the same memory where the layout allows."""

import array
import warnings

import numpy as np
import pytest
from helpers import rows

import pagedkv


class OnlyDlpack:
    """An array of a library that NumPy knows nothing of but the protocol."""

    def __init__(self, values):
        self._values = values

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


class OnlyArray:
    def __init__(self, values):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return self._values


ENTRANCES = [OnlyDlpack, OnlyArray, memoryview, lambda values: array.array("f", values.ravel().tolist())]


@pytest.mark.parametrize("enter", ENTRANCES, ids=["dlpack", "__array__", "memoryview", "array.array"])
def test_rows_come_by_any_protocol(store, cache, enter):
    k, v = rows(2, 3), rows(2, 2)
    cache.push(store, enter(k), enter(v))
    [block] = cache.block_table
    assert store.k_row(block, 0).tolist() == k.ravel().tolist()
    assert store.v_row(block, 0).tolist() == v.ravel().tolist()


def test_blocks_go_out_by_dlpack(store, cache, row):
    cache.push(store, *row)
    [block] = cache.block_table
    view = store.k_block(block)
    other = np.from_dlpack(view)
    assert other.tolist()[0] == row[0].tolist()
    assert np.shares_memory(view, other)
    assert not other.flags.writeable


class TestTensors:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")
        self.seam = pytest.importorskip("pagedkv.integrations.torch")

    def tensor(self, *shape):
        return self.torch.from_numpy(rows(*shape))

    def test_tensors_are_rows(self, store, cache):
        k, v = self.tensor(3, 2, 3), self.tensor(3, 2, 2)
        cache.append_contiguous(store, k, v, 3)
        assert store.k_block(0)[:3].tolist() == k.flatten(1).tolist()
        cache.append_contiguous(store, self.tensor(2, 3, 3).transpose(0, 1), v, 3)  # strided: copied on the way
        with pagedkv.Step(store, [cache]) as step:
            step.write(0, k[:1], v[:1])
            step.attend(0, self.tensor(1, 4, 3))

    def test_results_go_into_tensors(self, store, cache, row):
        cache.push(store, *row)
        q, out = self.tensor(1, 2, 3), self.torch.zeros(1, 2, 2)
        pagedkv.paged_attention(q, store, cache, out=out.numpy())
        assert out.flatten().tolist() == row[1].tolist()

    @pytest.mark.parametrize("kind", ["requires_grad", "bfloat16", "float64", "meta", "negated"])
    def test_tensors_that_are_refused(self, store, cache, kind):
        k, v = self.tensor(2, 3), self.tensor(2, 2)
        bad = {
            "requires_grad": lambda: k.clone().requires_grad_(),
            "bfloat16": k.bfloat16,
            "float64": k.double,
            "meta": lambda: k.to("meta"),
            "negated": lambda: self.torch.complex(k, k).conj().imag,
        }[kind]()
        with pytest.raises(TypeError, match="k_step: expected float32"):
            cache.push(store, bad, v)
        assert (cache.seq_len, store.free_block_count) == (0, 16)

    # --- the seam ---

    def test_a_float32_tensor_is_shared(self):
        tensor = self.tensor(3, 4)
        for view in (tensor, tensor.T, tensor[::2, 1:]):
            got = self.seam.as_rows(view)
            assert got.tolist() == view.tolist()
            got[0, 0] = -1
            assert view[0, 0] == -1

    def test_gradients_are_left_behind(self):
        tensor = self.tensor(2, 2).requires_grad_()
        assert np.shares_memory(self.seam.as_rows(tensor), tensor.detach().numpy())

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
    def test_other_floats_are_converted(self, name):
        values = np.array([1.5, -2.0, 0.375], np.float32)  # exact in each
        tensor = self.torch.tensor(values).to(getattr(self.torch, name))
        got = self.seam.as_rows(tensor)
        assert got.dtype == np.float32
        assert got.tolist() == values.tolist()

    def test_bfloat16_is_its_bits(self):
        """The upper half of a float32's, for values that need no more."""
        values = np.array([[1.0, -2.5, 3e38, 0.0]], np.float32)
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        tensor = self.torch.tensor(values).to(self.torch.bfloat16)
        bits = self.seam.as_rows(tensor, "bfloat16")
        assert bits.tolist() == (values.view(np.uint32) >> 16).tolist()
        bits[0, 0] = 0
        assert tensor[0, 0] == 0  # shared
        back = self.seam.as_tensor(bits)
        assert back.dtype == self.torch.bfloat16
        assert back.data_ptr() == tensor.data_ptr()

    def test_bfloat16_enters_a_store_bit_for_bit(self):
        store, cache = pagedkv.PagedKvStore(4, 4, 2, 3, dtype="bfloat16"), pagedkv.PagedKvCache()
        k, v = (self.torch.randn(5, 2, 3).to(self.torch.bfloat16) for _ in range(2))
        as_rows = self.seam.as_rows
        cache.append_contiguous(store, as_rows(k, "bfloat16"), as_rows(v, "bfloat16"), 5)
        got = self.torch.cat([self.seam.as_tensor(store.k_block(block)) for block in cache.block_table.tolist()])
        assert self.torch.equal(got[:5], k.flatten(1))

    def test_float16_rows(self):
        tensor = self.tensor(2, 2).to(self.torch.float16)
        assert np.shares_memory(self.seam.as_rows(tensor, "float16"), tensor.numpy())
        assert self.seam.as_rows(tensor.float(), "float16").tolist() == tensor.tolist()

    def test_blocks_are_tensors(self, store, cache, row):
        cache.push(store, *row)
        view = store.k_block(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = self.seam.as_tensor(view)
        assert tensor.data_ptr() == view.ctypes.data
        assert self.seam.as_tensor(view, self.torch.float64).dtype == self.torch.float64

    def test_what_the_seam_refuses(self):
        for bad, error in (
            (np.ones(2, np.float32), TypeError),
            (None, TypeError),
            (self.torch.ones(2, dtype=self.torch.int32), TypeError),
            (self.torch.ones(2, device="meta"), ValueError),
        ):
            with pytest.raises(error, match="tensor"):
                self.seam.as_rows(bad)
        with pytest.raises(ValueError, match="dtype"):
            self.seam.as_rows(self.torch.ones(2), "int8")
        for array_ in (None, [1.0], np.ones(2)):
            with pytest.raises(TypeError, match="array"):
                self.seam.as_tensor(array_)
