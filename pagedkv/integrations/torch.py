"""Torch tensors as the library's rows, and its arrays as tensors, without a copy where the layout allows."""

from __future__ import annotations

import warnings
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch

# What a store's dtype is as a tensor. NumPy has no bfloat16: there its rows are their bits.
_TENSOR_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@overload
def as_rows(tensor: torch.Tensor, dtype: Literal["float32"] = "float32") -> npt.NDArray[np.float32]: ...
@overload
def as_rows(tensor: torch.Tensor, dtype: Literal["float16"]) -> npt.NDArray[np.float16]: ...
@overload
def as_rows(tensor: torch.Tensor, dtype: Literal["bfloat16"]) -> npt.NDArray[np.uint16]: ...
@overload
def as_rows(tensor: torch.Tensor, dtype: str) -> npt.NDArray[Any]: ...
def as_rows(tensor: torch.Tensor, dtype: str = "float32") -> npt.NDArray[Any]:
    """A tensor's values as an array that `PagedKvCache.push`, `Step.write` and `paged_attention` take.

    The memory is shared where the tensor has that dtype already, whatever its strides; otherwise the
    values are converted. Gradients are left behind.

    Parameters
    ----------
    tensor : torch.Tensor
        On the CPU; float32, float16, bfloat16 or float64.
    dtype : "float32", "float16" or "bfloat16", optional
        bfloat16 comes as its bits, uint16: what a bfloat16 store takes bit for bit.

    Returns
    -------
    array of the tensor's shape
        float32, float16, or uint16 for bfloat16.

    Raises
    ------
    TypeError
        No tensor, or one of integers.
    ValueError
        A tensor on another device, or a dtype that is none of the three.

    Notes
    -----
    Threads: may be called from any thread; where the memory is shared, nobody may write into the tensor meanwhile.

    Examples
    --------
    >>> import torch
    >>> from pagedkv.integrations.torch import as_rows
    >>> tensor = torch.ones(2, 3)
    >>> as_rows(tensor)[0, 0] = 5                          # the same memory
    >>> tensor[0, 0].item()
    5.0
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"tensor: expected floating point values, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor: expected a tensor on the CPU, got one on {tensor.device}")
    if dtype not in _TENSOR_DTYPES:
        raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {dtype!r}")
    values = tensor.detach().to(_TENSOR_DTYPES[dtype])
    return (values.view(torch.uint16) if dtype == "bfloat16" else values).numpy()


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An array as a tensor: results of attention, rows of a cache, views of blocks.

    The memory is shared unless ``dtype`` asks for a conversion. A read-only array, such as
    `PagedKvStore.k_block` gives, is shared too: torch knows no read-only tensors, so do not write into it.

    Parameters
    ----------
    array : float32, float16 or uint16 array
        Of any shape; uint16 stands for the bits of bfloat16.
    dtype : torch.dtype, optional
        That of the tensor; the array's without it.

    Returns
    -------
    torch.Tensor of the array's shape

    Raises
    ------
    TypeError
        No array, or one of another dtype.

    Notes
    -----
    Threads: may be called from any thread. The tensor of a block shows what is written into the block later.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.integrations.torch import as_tensor
    >>> array = np.ones((2, 3), np.float32)
    >>> as_tensor(array)[0, 0] = 5                         # the same memory
    >>> float(array[0, 0])
    5.0
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array: expected a NumPy array, got {type(array).__name__}")
    if array.dtype not in (np.float32, np.float16, np.uint16):
        raise TypeError(f"array: expected float32, float16 or uint16, got {array.dtype}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        tensor = torch.from_numpy(array)
    if array.dtype == np.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor if dtype is None else tensor.to(dtype)

