"""What the ops do where the hot tier is on a GPU: the same values from loops of CUDA.

Nothing of CUDA is imported until an embedding has moved to a GPU, or ids on one are given.

A step waits for the device twice: its admission reads how many unique keys there are, how many of them miss and
whether tables and offsets are as they must be, in one go, and not at all where a batch prepared ahead has found every
row; and `check_finite` reads how large gradients are, those of rows and of dense parameters in one go. That second
wait could be put off only as far as the dense optimizer's step: torch's optimizers take no answer that is on the
device, and rows updated before it would have to be taken back, with the step's count and the marks of dirty rows. It
comes when the whole backward pass has been handed to the device, and costs what launching that step costs. Several
lookups of one embedding in a step wait once more, for the number of their keys together; so does clipping, for a norm.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from oneemb.kernels.launch import Gpu
    from oneemb.kernels.reduce_grads_cuda import Segments
    from oneemb.kernels.unique_keys_cuda import DeviceKeys
    from oneemb.storage.row_layout import RowLayout

__all__ = [
    "bags_of", "device_of", "gpu_of", "magnitudes", "mean_scales", "merged_keys", "read_rows", "rows_norm",
    "scale_grads", "segments_of", "stream_of", "sum_segments", "tables_of", "unique_keys",
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


def stream_of(ids: torch.Tensor) -> int:
    """A number for the stream that ids are looked up on; 0 on the CPU."""
    return torch.cuda.current_stream(ids.device).cuda_stream if ids.is_cuda else 0


def tables_of(table_ids: torch.Tensor, num_tables: int) -> torch.Tensor:
    """The same as int32; on a GPU, where nobody has looked yet, one that is no table of these stays none."""
    if table_ids.dtype == torch.int64 and gpu_of(table_ids) is not None:
        table_ids = table_ids.clamp(-1, num_tables)
    return table_ids.detach().to(torch.int32)


def unique_keys(
    table_N: torch.Tensor,
    id_N: torch.Tensor,
    num_tables: int,
    padding_id: int | None,
    gpu: "Gpu",
    check: Callable[[], object] | None = None,
    size_2: torch.Tensor | None = None,
) -> "DeviceKeys":
    """As kernels.unique_keys, with room for N keys: an admission cuts it off.

    Args:
        check: raises what is wrong with tables and offsets; called where the device has found that something is.
    """
    from oneemb.kernels.unique_keys_cuda import unique_keys_cuda

    keys = unique_keys_cuda(table_N, id_N, tables=num_tables, padding_id=padding_id, size_2=size_2, gpu=gpu)
    return keys._replace(check=check)


def bags_of(
    offset_P1: torch.Tensor, table_P: torch.Tensor | None, num_tables: int, ids: int, gpu: "Gpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bag_N, table_N and the size_2 to find unique keys with."""
    from oneemb.kernels.pool_cuda import bags_of_cuda

    size_2 = gpu.full(2, value=0, dtype=torch.int64)
    return *bags_of_cuda(offset_P1, table_P, num_tables, ids, size_2, gpu=gpu), size_2


def merged_keys(table_N: torch.Tensor, id_N: torch.Tensor, gpu: "Gpu") -> "DeviceKeys":
    """The unique keys of several lookups, cut to as many as there are."""
    from oneemb.kernels.unique_keys_cuda import unique_keys_cuda

    keys = unique_keys_cuda(table_N, id_N, gpu=gpu)
    return keys.cut(gpu.read(keys.size_2)[0])


def mean_scales(offset_P1: torch.Tensor, inverse_N: torch.Tensor, gpu: "Gpu") -> torch.Tensor:
    """As kernels.pool.mean_scales."""
    from oneemb.kernels.pool_cuda import mean_scales_cuda

    return mean_scales_cuda(offset_P1, inverse_N, gpu=gpu)


def read_rows(
    weight_SX: torch.Tensor,
    slot_U: torch.Tensor,
    keys: Any,
    scale_N: torch.Tensor | None,
    layout: "RowLayout",
    gpu: "Gpu",
) -> torch.Tensor:
    """The weights of each id of `ops.Keys`, or of each bag: [*shape of the keys, D] of the layout's dtype."""
    from oneemb.kernels.gather_cuda import gather_cuda
    from oneemb.kernels.pool_cuda import pool_cuda

    out = gpu.empty(*keys.shape, layout.dim, dtype=_DTYPES[layout.dtype])
    out_ND = out.view(weight_SX.dtype).view(-1, layout.dim)
    inverse_N = keys.unique.inverse_N
    if keys.bags is None:
        gather_cuda(weight_SX, slot_U, inverse_N, out_ND, gpu=gpu)
    else:
        pool_cuda(weight_SX, slot_U, inverse_N, keys.bags.offset_P1, scale_N, out_ND, gpu=gpu)
    return out


def scale_grads(
    weight_SX: torch.Tensor, slot_U: torch.Tensor, keys: Any, grad_PX: torch.Tensor, gpu: "Gpu"
) -> torch.Tensor:
    """As kernels.pool.scale_grads."""
    from oneemb.kernels.pool_cuda import scale_grads_cuda

    return scale_grads_cuda(weight_SX, slot_U, keys.unique.inverse_N, keys.bags.bag_N, grad_PX, gpu=gpu)


def segments_of(
    grad_NX: torch.Tensor,
    unique: "DeviceKeys",
    gpu: "Gpu",
    bag_N: torch.Tensor | None = None,
    scale_N: torch.Tensor | None = None,
) -> "Segments":
    """The gradients of each key, to be summed."""
    from oneemb.kernels import reduce_grads_cuda
    from oneemb.kernels.unique_keys_cuda import occurrences

    order_N, begin_U1 = occurrences(unique.inverse_N, len(unique.id_U), gpu=gpu)
    return reduce_grads_cuda.segments_of(grad_NX, order_N, begin_U1, bag_N, scale_N, gpu=gpu)


def sum_segments(segments: "Segments", gpu: "Gpu") -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels.reduce_grads.sum_segments."""
    from oneemb.kernels.reduce_grads_cuda import reduce_grads_cuda

    return reduce_grads_cuda(segments, gpu=gpu)


def magnitudes(
    arrays: Sequence[tuple[torch.Tensor, torch.Tensor | None]], dense: Sequence[torch.Tensor], gpu: "Gpu"
) -> list[float]:
    """The largest absolute value of each array, times that of what scales it if that is above 1, and at last of all
    dense gradients together: not finite where one of their values is not. One wait for all.

    Args:
        arrays: (bits of float32, float16 or bfloat16, what scales it or None); either may be empty.
    """
    found = []
    for array, scale_N in arrays:
        largest = _largest(array.view(_OF_BITS[array.dtype])).double()
        if scale_N is not None and len(scale_N):
            largest = largest * _largest(scale_N).double().clamp(min=1)
        found.append(largest)
    values = [grad._values() if grad.is_sparse else grad for grad in dense]
    if values := [grad for grad in values if grad.numel()]:
        found.append(torch.nn.utils.get_total_norm(values, torch.inf))
    numbers = gpu.read(torch.stack([one.to(gpu.device, torch.float64, non_blocking=True) for one in found]))
    return numbers if values else [*numbers, 0.0]


def _largest(array: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(array, torch.inf) if array.numel() else array.new_zeros(())


def rows_norm(grad_UD: torch.Tensor, p: float) -> float:
    """As kernels.row_norms.rows_norm, up to the order of its sum."""
    return float(torch.linalg.vector_norm(grad_UD, p, dtype=torch.float64))
