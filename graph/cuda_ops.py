"""What the ops do where the hot tier is on a GPU: the same values from loops of CUDA.

Nothing of CUDA is imported until an embedding has moved to a GPU, or ids on one are given.

A step asks the device three things and waits for the answer: how many unique keys there are, how many of them miss,
and whether all gradients are finite.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from oneemb.kernels.launch import Gpu
    from oneemb.kernels.reduce_grads_cuda import Segments
    from oneemb.kernels.unique_keys_cuda import DeviceKeys
    from oneemb.storage.row_layout import RowLayout

__all__ = [
    "device_of", "gather", "gpu_of", "largest_magnitude", "rows_norm", "segments_of", "sum_segments", "unique_keys",
]  # fmt: skip

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_OF_BITS = {torch.float32: torch.float32, torch.uint16: torch.float16, torch.int16: torch.bfloat16}


def gpu_of(ids: torch.Tensor) -> "Gpu | None":
    """Where ids are looked up; None for the CPU."""
    if not ids.is_cuda and "oneemb.kernels.launch" not in sys.modules:
        return None
    from oneemb.kernels import launch

    return launch.gpu_of(ids)


def device_of(unique: Any) -> torch.device | None:
    """The device that keys are on; None for arrays of the host."""
    return unique.id_U.device if isinstance(unique.id_U, torch.Tensor) else None


def unique_keys(table_N: torch.Tensor, id_N: torch.Tensor, padding_id: int | None, gpu: "Gpu") -> "DeviceKeys":
    """As kernels.unique_keys."""
    from oneemb.kernels.unique_keys_cuda import unique_keys_cuda

    keys = unique_keys_cuda(table_N, id_N, padding_id=padding_id, gpu=gpu)
    return keys.cut(int(keys.size_1))


def gather(
    weight_SX: torch.Tensor, slot_U: torch.Tensor, unique: "DeviceKeys", layout: "RowLayout", gpu: "Gpu"
) -> torch.Tensor:
    """The weights of each id: [N, D] of the layout's dtype."""
    from oneemb.kernels.gather_cuda import gather_cuda

    out_ND = gpu.empty(len(unique.inverse_N), layout.dim, dtype=_DTYPES[layout.dtype])
    gather_cuda(weight_SX, slot_U, unique.inverse_N, out_ND.view(weight_SX.dtype), gpu=gpu)
    return out_ND


def segments_of(grad_NX: torch.Tensor, unique: "DeviceKeys", gpu: "Gpu") -> "Segments":
    """The gradients of each key, to be summed."""
    from oneemb.kernels import reduce_grads_cuda
    from oneemb.kernels.unique_keys_cuda import occurrences

    order_N, begin_U1 = occurrences(unique.inverse_N, len(unique.id_U), gpu=gpu)
    return reduce_grads_cuda.segments_of(grad_NX, order_N, begin_U1, gpu=gpu)


def sum_segments(segments: "Segments", gpu: "Gpu") -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels.reduce_grads.sum_segments."""
    from oneemb.kernels.reduce_grads_cuda import reduce_grads_cuda

    return reduce_grads_cuda(segments, gpu=gpu)


def largest_magnitude(values: torch.Tensor) -> float:
    """As kernels.reduce_grads.largest_magnitude."""
    return float(values.view(_OF_BITS[values.dtype]).abs().amax()) if values.numel() else 0.0


def rows_norm(grad_UD: torch.Tensor, p: float) -> float:
    """As kernels.row_norms.rows_norm, up to the order of its sum."""
    return float(torch.linalg.vector_norm(grad_UD, p, dtype=torch.float64))
