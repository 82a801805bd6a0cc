"""Conversions between stored rows (words) and arrays of weights and state.

Invariant: a weight that does not fit in the rows' dtype is an error, never an infinity.
"""

from typing import TYPE_CHECKING

import numpy as np

from oneemb.storage.rows.row_format import RowFormat

if TYPE_CHECKING:
    import torch


def weights_of(row_format: RowFormat, row_NW: np.ndarray) -> np.ndarray:
    """The exact weights of rows: [N, D], float16 for float16 rows, otherwise float32. May share the rows' memory."""
    bits_ND = row_format.weights(row_NW)[:, : row_format.dim]
    if row_format.dtype == "float16":
        return bits_ND.view(np.float16)
    if row_format.dtype == "bfloat16":
        return (bits_ND.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits_ND


def state_of(row_format: RowFormat, row_NW: np.ndarray) -> np.ndarray:
    """The optimizer state of rows: float32 [N, Z], Z values of a row. Shares memory with `row_NW`."""
    return row_NW[:, row_format.state_begin :]


def encode_rows(row_format: RowFormat, weight_ND: np.ndarray, state_NZ: np.ndarray | None = None) -> np.ndarray:
    """Rows of the given weights, rounded to nearest even, and state: float32 [N, W].

    Args:
        weight_ND: floating-point [N, D].
        state_NZ: float32 [N, Z]; None for rows without state.

    Raises:
        ValueError: a finite weight is too large for the rows' dtype.
    """
    row_NW = np.zeros((len(weight_ND), row_format.row_width), np.float32)
    out_ND = row_format.weights(row_NW)[:, : row_format.dim]
    with np.errstate(over="ignore"):
        if row_format.dtype == "float16":
            stored_ND = weight_ND.astype(np.float16)
            out_ND[:] = stored_ND.view(np.uint16)
        elif row_format.dtype == "bfloat16":
            out_ND[:] = _bfloat16_bits(weight_ND.astype(np.float32)).view(np.int16)
            stored_ND = weights_of(row_format, row_NW)
        else:
            stored_ND = weight_ND.astype(np.float32)
            out_ND[:] = stored_ND
    lost = np.isinf(stored_ND) & np.isfinite(weight_ND)
    if lost.any():
        raise ValueError(
            f"weights must fit in {row_format.dtype}, got {weight_ND[lost][0]} among them; give dtype float32"
        )
    if state_NZ is not None:
        state_of(row_format, row_NW)[:] = state_NZ
    return row_NW


def array_of(array: "np.ndarray | torch.Tensor") -> np.ndarray:
    """NumPy array of an array or a torch tensor. A bfloat16 tensor gives float32, since NumPy has no bfloat16."""
    if isinstance(array, np.ndarray):
        return array
    tensor = array.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _bfloat16_bits(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16 | 0x40).astype(np.uint16), rounded)
