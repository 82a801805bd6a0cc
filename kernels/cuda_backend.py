"""The backend of a GPU: `oneemb.kernels.backend.Backend` for tensors on the device.

What the host waits for:

    lookup, all rows on the device   nothing, where there is room for as many new rows as there are ids
    lookup, a cache                  how many keys miss, with their number; nothing if all rows were prefetched
    rows from below                  their keys, and a page-locked buffer in use
    tables given, or bags            whether tables and offsets are valid; in training in one go with the misses
    eval, all rows on the device     nothing
    eval, a cache                    as in training
    check_finite                     nothing, where the device may leave the step out (graph/ops/late_check.py); else
                                     how large the gradients of rows and of dense parameters are, in one go
    several lookups of an embedding  the number of keys of each, and of all together
    clipping                         a norm
    policies                         the keys of each lookup, since the host decides which get a row

A check that waits comes after the whole backward pass was launched, and costs what launching that step costs.

What keeps a step out of a CUDA graph: places that the host reads (the list above); the time of use, the number of the
step and rates, which are arguments of launches; events and `record_stream` of `StreamOrder`, between streams; slabs
that move when they grow; page-locked memory in which loops tell the host numbers, another in each step (later.py).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from oneemb.kernels import launch
from oneemb.kernels.admit_cuda import DeviceAdmission, TierArrays
from oneemb.kernels.arrays import Bags, RowsOfIds, Terms, rows_of_columns
from oneemb.kernels.backend import BITS, SUM_MAX, RowLoops
from oneemb.kernels.gather_cuda import gather_cuda
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.init_rows_cuda import DeviceInitialRows, ListedSlots, init_rows_cuda
from oneemb.kernels.launch import Gpu
from oneemb.kernels.pool_cuda import (
    bags_of_cuda,
    mean_scales_cuda,
    pool_cuda,
    pool_max_cuda,
    scale_grads_cuda,
    spread_max_grads_cuda,
)
from oneemb.kernels.reduce_grads_cuda import (
    Segments,
    reduce_grads_cuda as sum_segments_cuda,
    segments_of,
    sum_grads_cuda,
)
from oneemb.kernels.row_update_cuda import run_row_update_cuda
from oneemb.kernels.unique_keys_cuda import DeviceKeys, unique_keys_cuda

_OF_BITS = {bits: dtype for dtype, bits in BITS.items()}
_HALVES = {dtype for dtype, bits in BITS.items() if bits is not dtype}


class CudaBackend:
    """The backend of a GPU; see `oneemb.kernels.backend.Backend`. It takes keys, gradients, segments that it made."""

    merges = False
    waits = True
    go_1: torch.Tensor | None = None
    """Where it is 0, `update_rows` writes nothing; `sum_segments` sets it to 0 if a sum is not finite."""
    dirty_S: torch.Tensor | None = None
    """Dirty bits of the rows, bool [S], which `update_rows` sets; None = it sets none."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.device = gpu.device
        self.place = str(gpu.device) if gpu.device.type == "cuda" else "the simulated GPU"

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def array(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(BITS[tensor.dtype]) if tensor.dtype in _HALVES else tensor

    def tensor(self, array: torch.Tensor) -> torch.Tensor:
        return array

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def put(self, array: np.ndarray) -> torch.Tensor:
        return self.gpu.put(array)

    def arange(self, size: int) -> torch.Tensor:
        return torch.arange(size, device=self.device)

    # ---- keys -------------------------------------------------------------------------------------------------------

    def tables(self, table_ids: torch.Tensor, tables: int) -> torch.Tensor:
        # Values are not checked yet: an invalid table must not become a valid one by losing its upper bits.
        if table_ids.dtype == torch.int64:
            table_ids = table_ids.clamp(-1, tables)
        return table_ids.detach().to(torch.int32)

    def tables_of_columns(self, ids: int, tables: int) -> torch.Tensor:
        return _tables_of_columns(ids, tables, self.gpu, self.gpu.stream_now())

    def unique_keys(
        self, table_N: torch.Tensor, id_N: torch.Tensor, *, tables: int, padding_id: int | None,
        check: Callable[[], None] | None,
    ) -> DeviceKeys:  # fmt: skip
        return unique_keys_cuda(table_N, id_N, tables=tables, padding_id=padding_id, check=check, gpu=self.gpu)

    def unique_keys_of_bags(
        self, id_N: torch.Tensor, offset_P1: torch.Tensor, table_P: torch.Tensor | None, *, tables: int,
        columns: Sequence[int] | None, padding_id: int | None, check: Callable[[], None],
    ) -> tuple[DeviceKeys, Bags]:  # fmt: skip
        size_2, row_P = self.gpu.filled(2), None
        if columns is not None:
            row_P, table_P = _bags_of_columns(len(offset_P1) - 1, tuple(columns), self.gpu, self.gpu.stream_now())
        bag_N, table_N = bags_of_cuda(offset_P1, table_P, row_P, tables, len(id_N), size_2, gpu=self.gpu)
        keys = unique_keys_cuda(
            table_N, id_N, tables=tables, padding_id=padding_id, size_2=size_2, check=check, gpu=self.gpu
        )  # fmt: skip
        return keys, Bags(offset_P1, bag_N, row_P)

    def distinct_keys(self, table_U: torch.Tensor, id_U: torch.Tensor) -> DeviceKeys:
        size_2 = self.gpu.filled(2)
        size_2[:1].fill_(len(id_U))
        none, no_ids = self.gpu.none(torch.int64), self.gpu.none(torch.int32)
        return DeviceKeys(table_U, id_U, none, size_2, no_ids, exact=True)

    def every_id(self, table_N: torch.Tensor, id_N: torch.Tensor) -> DeviceKeys:
        """Ids as keys, which may repeat, for a gather from a tier that holds all rows: id n is key n."""
        none, no_ids = self.gpu.none(torch.int64), self.gpu.none(torch.int32)
        size_2 = _size_of(len(id_N), self.gpu, self.gpu.stream_now())
        return DeviceKeys(table_N, id_N.to(torch.int64), none, size_2, no_ids, exact=True)

    def counted(self, keys: Any) -> DeviceKeys:
        if keys.exact:
            return keys
        size, wrong = self.gpu.read(keys.size_2)
        if wrong:
            assert keys.check is not None
            keys.check()
            raise AssertionError("the device found tables or offsets to be wrong, and the host does not")
        return keys.cut(size)

    def checked(self, keys: Any) -> DeviceKeys:
        return keys if keys.check is None else self.counted(keys)

    def copy_words_in(self, row_SW: torch.Tensor, slot_U: torch.Tensor, first: int, word_UX: np.ndarray) -> None:
        row_SW[slot_U, first : first + word_UX.shape[1]] = self.put(word_UX.view(np.float32))

    def uses_of(self, keys: Any) -> np.ndarray:
        if len(keys.inverse_N) == 0:  # They did not come from a batch.
            return np.ones(len(keys.id_U), np.int64)
        inverse_N = keys.inverse_N.cpu().numpy()
        return np.bincount(inverse_N[inverse_N >= 0], minlength=len(keys.id_U))

    # ---- rows -------------------------------------------------------------------------------------------------------

    def initial_rows(self, initial: InitialRows) -> DeviceInitialRows:
        return DeviceInitialRows(initial, gpu=self.gpu)

    def init_rows(
        self, weight_SX: torch.Tensor, row_SW: torch.Tensor, slot_M: torch.Tensor | ListedSlots,
        table_M: torch.Tensor, id_M: torch.Tensor, initial: DeviceInitialRows, state: np.ndarray, *, state_begin: int,
    ) -> None:  # fmt: skip
        state_on_gpu = _state_of(state.tobytes(), self.gpu, self.gpu.stream_now())
        init_rows_cuda(
            weight_SX, row_SW, slot_M, table_M, id_M, initial, state_on_gpu, state_begin=state_begin, gpu=self.gpu
        )

    def admission(
        self, arrays: TierArrays, weight_SX: torch.Tensor, initial: DeviceInitialRows, state: np.ndarray, *,
        state_begin: int,
    ) -> DeviceAdmission:  # fmt: skip
        """A `DeviceAdmission` for calls on the current stream; values of new rows as for `init_rows`."""
        state_on_gpu = _state_of(state.tobytes(), self.gpu, self.gpu.stream_now())
        return DeviceAdmission(arrays, weight_SX, initial, state_on_gpu, state_begin=state_begin, gpu=self.gpu)

    def update_rows(
        self, loops: RowLoops, scalars: tuple, weight_SX: torch.Tensor, row_SW: torch.Tensor, slot_U: torch.Tensor,
        grads: Any, state_begin: int,
    ) -> None:  # fmt: skip
        run_row_update_cuda(
            loops.on_cuda, scalars, weight_SX, row_SW, slot_U, grads, state_begin, self.go_1, self.dirty_S, gpu=self.gpu
        )

    def guarded(self, go_1: torch.Tensor | None, dirty_S: torch.Tensor | None = None) -> "CudaBackend":
        """This backend with another `go_1` and `dirty_S`."""
        other = CudaBackend.__new__(CudaBackend)
        other.gpu, other.device, other.place = self.gpu, self.device, self.place
        other.go_1, other.dirty_S = go_1, dirty_S
        return other

    def negated(self, grads: Any) -> Any:
        return -(self.sum_segments(grads)[0] if isinstance(grads, Segments) else grads)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def gather(self, rows: RowsOfIds, out_ND: torch.Tensor) -> None:
        gather_cuda(rows.weight_SX, rows.slot_U, rows.inverse_N, out_ND, gpu=self.gpu)

    def pool(self, rows: RowsOfIds, bags: Bags, scale_N: torch.Tensor | None, out_PD: torch.Tensor) -> None:
        pool_cuda(*rows, bags, scale_N, out_PD, gpu=self.gpu)

    def pool_max(self, rows: RowsOfIds, bags: Bags, out_PD: torch.Tensor, argmax_PD: torch.Tensor) -> None:
        pool_max_cuda(*rows, bags, out_PD, argmax_PD, gpu=self.gpu)

    def mean_scales(self, offset_P1: torch.Tensor, inverse_N: torch.Tensor) -> torch.Tensor:
        return mean_scales_cuda(offset_P1, inverse_N, gpu=self.gpu)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def scale_grads(self, rows: RowsOfIds, bag_N: torch.Tensor, grad_PX: torch.Tensor) -> torch.Tensor:
        return scale_grads_cuda(*rows, bag_N, grad_PX, gpu=self.gpu)

    def spread_max_grads(
        self, bags: Bags, argmax_PD: torch.Tensor, grad_PX: torch.Tensor, out_NX: torch.Tensor
    ) -> None:
        spread_max_grads_cuda(bags, argmax_PD, grad_PX, out_NX, gpu=self.gpu)

    def segments(self, keys: Any, bags: Bags | None, grad_NX: torch.Tensor, scale_N: torch.Tensor | None) -> Segments:
        bag_N = None if bags is None else bags.bag_N
        return segments_of(grad_NX, keys.inverse_N, keys.id_U.shape[0], bag_N, scale_N, gpu=self.gpu)

    def sum_segments(self, segments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_segments_cuda(segments, self.go_1, gpu=self.gpu)

    def sum_grads(
        self, keys: Any, bags: Bags | None, grad_NX: torch.Tensor, scale_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bag_N = None if bags is None else bags.bag_N
        return sum_grads_cuda(grad_NX, keys.inverse_N, keys.id_U.numel(), bag_N, scale_N, self.go_1, gpu=self.gpu)

    def finite_of(self, grad_UD: torch.Tensor) -> torch.Tensor:
        return torch.isfinite(grad_UD).all().reshape(1).to(torch.int64)

    def surely_finite(self, terms: Sequence[Terms], dense: Sequence[torch.Tensor]) -> bool:
        found, bounds = [], []
        for grad_NX, scale_N, number, finite_X in terms:
            if finite_X is not None:
                found.append((finite_X == 0).any())
                bounds.append(0.5)
                continue
            largest = _largest(grad_NX.view(_OF_BITS[grad_NX.dtype])).double()
            if scale_N is not None and len(scale_N):
                largest = largest * _largest(scale_N).double().clamp(min=1)
            found.append(largest)
            bounds.append(SUM_MAX / max(1, number))
        values = [grad._values() if grad.is_sparse else grad for grad in dense]
        if values := [grad for grad in values if grad.numel()]:
            found.append(torch.nn.utils.get_total_norm(values, torch.inf))
            bounds.append(torch.inf)
        largest_K = torch.stack([largest.to(self.device, torch.float64, non_blocking=True) for largest in found])
        numbers = self.gpu.read(largest_K)
        return all(number < bound for number, bound in zip(numbers, bounds, strict=True))  # which NaN is not

    def norm(self, grad_UD: torch.Tensor, p: float) -> float:
        """Not bit for bit the host's: torch sums in another order."""
        return float(torch.linalg.vector_norm(grad_UD, p, dtype=torch.float64))


def _largest(array: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(array, torch.inf) if array.numel() else array.new_zeros(())


@functools.lru_cache(maxsize=8)
def _tables_of_columns(ids: int, tables: int, gpu: Gpu, stream: int) -> torch.Tensor:
    # One for each stream: another stream would not wait until it is written, nor keep its memory until it is read.
    return gpu.kept(torch.arange(tables, dtype=torch.int32, device=gpu.device).repeat(ids // tables))


@functools.lru_cache(maxsize=8)
def _bags_of_columns(bags: int, columns: tuple[int, ...], gpu: Gpu, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of what bags give and the table, int32 [P], of each of P bags that lie column by column."""
    # One for each stream, as above.
    table_P = np.repeat(np.array(columns, np.int32), bags // len(columns))
    return gpu.put(rows_of_columns(bags, len(columns))), gpu.put(table_P)


@functools.lru_cache(maxsize=64)
def _size_of(ids: int, gpu: Gpu, stream: int) -> torch.Tensor:
    """`DeviceKeys.size_2` of this many keys."""
    return gpu.kept(gpu.put(np.array([ids, 0])))


@functools.lru_cache(maxsize=64)
def _state_of(values: bytes, gpu: Gpu, stream: int) -> torch.Tensor:
    """First values of the state of a row, float32, on the device."""
    return gpu.kept(gpu.put(np.frombuffer(values, np.float32).copy()))


def backend_at(device: torch.device) -> CudaBackend:
    """The backend of a GPU. RuntimeError or ImportError if CUDA cannot be used; the message says what to install."""
    return _backend_of_gpu(launch.gpu_at(device))


def backend_of(tensor: torch.Tensor) -> CudaBackend | None:
    """The backend of the GPU that a tensor is on; None where it is on the CPU."""
    gpu = launch.gpu_of(tensor)
    return None if gpu is None else _backend_of_gpu(gpu)


@functools.lru_cache(maxsize=64)
def _backend_of_gpu(gpu: Gpu) -> CudaBackend:
    return CudaBackend(gpu)
