"""The backend of the host's cores, `oneemb.kernels.backend.Backend` for NumPy arrays; and the choice of a backend.

CUDA modules are not imported before a tensor or an embedding on a GPU needs them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import oneemb.kernels as package
from oneemb.kernels.arrays import Bags, RowsOfIds, Terms, rows_of_columns
from oneemb.kernels.backend import BITS, SUM_MAX, Backend, RowLoops
from oneemb.kernels.gather import copy_into, copy_words_in, gather
from oneemb.kernels.init_rows import InitialRows, init_rows
from oneemb.kernels.pool import mean_scales, pool, pool_max, scale_grads, spread_max_grads
from oneemb.kernels.reduce_grads import Segments, largest_magnitude, rows_norm, sum_segments
from oneemb.kernels.row_update import run_row_update
from oneemb.kernels.threads import Threads
from oneemb.kernels.unique_by_table import KeysByTable, unique_keys_by_table
from oneemb.kernels.unique_keys import UniqueKeys, columns_are_faster, unique_keys, unique_keys_of_columns

OPENMP_MIN = 1 << 15
"""Size of a tensor, in values, from which on torch copies and compares it on several threads."""

_NO_INVERSE = np.empty(0, np.int32)


class HostBackend:
    """`oneemb.kernels.backend.Backend` on the host's cores, with these threads. It accepts only keys, gradients and
    segments that it has made itself."""

    place = "the CPU"
    device = torch.device("cpu")
    merges = True
    waits = False

    def __init__(self, threads: Threads):
        self.threads = threads

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        bits = BITS.get(tensor.dtype, tensor.dtype)
        return tensor.numpy() if bits is tensor.dtype else tensor.view(bits).numpy()

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() < OPENMP_MIN or not tensor.is_contiguous() or tensor.dtype not in BITS:
            return tensor.clone(memory_format=torch.contiguous_format)
        copy = torch.empty_like(tensor)
        copy_into(self.array(copy), self.array(tensor), threads=self.threads)
        return copy

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def arange(self, size: int) -> np.ndarray:
        return np.arange(size)

    # ---- keys -------------------------------------------------------------------------------------------------------

    def tables(self, table_ids: torch.Tensor, tables: int) -> torch.Tensor:
        return table_ids.detach().to(torch.int32)

    def tables_of_columns(self, ids: int, tables: int) -> np.ndarray:
        return _tables_of_columns(ids, tables)

    def unique_keys(
        self, table_N: np.ndarray, id_N: np.ndarray, *, tables: int, padding_id: int | None,
        check: Callable[[], None] | None,
    ) -> UniqueKeys:  # fmt: skip
        if check is not None:
            check()
        if self.threads.count > 1 and columns_are_faster(len(id_N), tables):
            if table_N is _tables_of_columns(len(id_N), tables):
                return unique_keys_of_columns(tables, id_N, padding_id=padding_id, threads=self.threads)
        return unique_keys(table_N, id_N, padding_id=padding_id, threads=self.threads)

    def unique_keys_of_bags(
        self, id_N: np.ndarray, offset_P1: np.ndarray, table_P: np.ndarray | None, *, tables: int,
        columns: Sequence[int] | None, padding_id: int | None, check: Callable[[], None],
    ) -> tuple[UniqueKeys | KeysByTable, Bags]:  # fmt: skip
        check()
        row_P = None if columns is None else rows_of_columns(len(offset_P1) - 1, len(columns))
        bags = Bags(offset_P1, row_P=row_P)
        if table_P is None:
            keys = unique_keys_by_table(
                id_N, offset_P1, tables, columns=columns, padding_id=padding_id, threads=self.threads
            )
            return keys, bags
        return unique_keys(table_P[bags.bag_N], id_N, padding_id=padding_id, threads=self.threads), bags

    def distinct_keys(self, table_U: np.ndarray, id_U: np.ndarray) -> UniqueKeys:
        return UniqueKeys(table_U, id_U, _NO_INVERSE, None)

    def counted(self, keys: Any) -> UniqueKeys | KeysByTable:
        return keys

    def checked(self, keys: Any) -> UniqueKeys | KeysByTable:
        return keys

    def copy_words_in(self, row_SW: np.ndarray, slot_U: np.ndarray, first: int, word_UX: np.ndarray) -> None:
        copy_words_in(row_SW, slot_U, first, word_UX, threads=self.threads)

    def uses_of(self, keys: Any) -> np.ndarray:
        if isinstance(keys, KeysByTable):
            return np.diff(keys.begin_U1.astype(np.int64))
        if keys.head_U is None:
            return np.ones(len(keys.id_U), np.int64)
        return np.bincount(keys.inverse_N[keys.inverse_N >= 0], minlength=len(keys.id_U))

    # ---- rows -------------------------------------------------------------------------------------------------------

    def initial_rows(self, initial: InitialRows) -> InitialRows:
        return initial

    def init_rows(
        self, weight_SX: np.ndarray, row_SW: np.ndarray, slot_M: np.ndarray, table_M: np.ndarray, id_M: np.ndarray,
        initial: InitialRows, state: np.ndarray, *, state_begin: int,
    ) -> None:  # fmt: skip
        init_rows(
            weight_SX, row_SW, slot_M, table_M, id_M, initial, state, state_begin=state_begin, threads=self.threads
        )

    def update_rows(
        self, loops: RowLoops, scalars: tuple, weight_SX: np.ndarray, row_SW: np.ndarray, slot_U: np.ndarray,
        grads: Any, state_begin: int,
    ) -> None:  # fmt: skip
        run_row_update(
            loops.on_host, weight_SX, row_SW, slot_U, grads, state_begin, scalars,
            state_width=loops.states * grads.shape[1] + loops.row_states, threads=self.threads,
        )  # fmt: skip

    def negated(self, grads: Any) -> Any:
        return -(self.sum_segments(grads)[0] if isinstance(grads, Segments) else grads)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def gather(self, rows: RowsOfIds, out_ND: np.ndarray) -> None:
        gather(*rows, out_ND, threads=self.threads)

    def pool(self, rows: RowsOfIds, bags: Bags, scale_N: np.ndarray | None, out_PD: np.ndarray) -> None:
        pool(*rows, bags, scale_N, out_PD, threads=self.threads)

    def pool_max(self, rows: RowsOfIds, bags: Bags, out_PD: np.ndarray, argmax_PD: np.ndarray) -> None:
        pool_max(*rows, bags, out_PD, argmax_PD, threads=self.threads)

    def mean_scales(self, offset_P1: np.ndarray, inverse_N: np.ndarray) -> np.ndarray:
        return mean_scales(offset_P1, inverse_N, threads=self.threads)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def scale_grads(self, rows: RowsOfIds, bag_N: np.ndarray, grad_PX: np.ndarray) -> np.ndarray:
        return scale_grads(*rows, bag_N, grad_PX, threads=self.threads)

    def spread_max_grads(self, bags: Bags, argmax_PD: np.ndarray, grad_PX: np.ndarray, out_NX: np.ndarray) -> None:
        spread_max_grads(bags, argmax_PD, grad_PX, out_NX, threads=self.threads)

    def segments(self, keys: Any, bags: Bags | None, grad_NX: np.ndarray, scale_N: np.ndarray | None) -> Segments:
        if isinstance(keys, KeysByTable):
            return Segments(grad_NX, *keys.occurrences(bags is not None, scale_N, threads=self.threads))
        return Segments(grad_NX, *keys.occurrences(None if bags is None else bags.bag_N, scale_N))

    def sum_segments(self, segments: Any) -> tuple[np.ndarray, np.ndarray]:
        return sum_segments(segments, threads=self.threads)

    def sum_grads(
        self, keys: Any, bags: Bags | None, grad_NX: np.ndarray, scale_N: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.sum_segments(self.segments(keys, bags, grad_NX, scale_N))

    def finite_of(self, grad_UD: np.ndarray) -> np.ndarray:
        return self.array(torch.isfinite(self.tensor(grad_UD)).all(1))

    def surely_finite(self, terms: Sequence[Terms], dense: Sequence[torch.Tensor]) -> bool:
        for grad_NX, scale_N, number, finite_X in terms:
            if finite_X is not None:
                if not finite_X.all():
                    return False
                continue
            largest = largest_magnitude(grad_NX, threads=self.threads)
            if scale_N is not None:
                scale = largest_magnitude(scale_N, threads=self.threads)
                largest *= 1.0 if scale < 1.0 else scale  # not max(), which would lose a NaN
            if not largest * max(1, number) < SUM_MAX:
                return False
        # A finite sum means that all terms are finite, and a sum reads the gradient only once.
        for grad in dense:
            if not bool(torch.isfinite(grad.sum())):
                return False
        return True

    def norm(self, grad_UD: np.ndarray, p: float) -> float:
        return rows_norm(grad_UD, p, threads=self.threads)


@functools.lru_cache(maxsize=8)
def _tables_of_columns(ids: int, tables: int) -> np.ndarray:
    return np.tile(np.arange(tables, dtype=np.int32), ids // tables)


_ONE_THREAD = Threads(1)


def backend_of(tensor: torch.Tensor, threads: Threads = _ONE_THREAD) -> Backend:
    """The backend for the place of a tensor. The host's backend runs on `threads`."""
    cuda_backend: Any = vars(package).get("cuda_backend")  # None = not imported
    if cuda_backend is None:
        if not tensor.is_cuda:
            return HostBackend(threads)
        from oneemb.kernels import cuda_backend
    found: Backend | None = cuda_backend.backend_of(tensor)
    return HostBackend(threads) if found is None else found


def backend_at(device: torch.device, threads: Threads) -> Backend:
    """The backend for a device. The host's backend runs on `threads`. If CUDA cannot be used: RuntimeError or
    ImportError, whose message says what to install."""
    if device.type == "cpu":
        return HostBackend(threads)
    from oneemb.kernels import cuda_backend

    return cuda_backend.backend_at(device)
