"""The contract of a backend: the kernels for the host's cores (`host_backend.py`) or for a GPU (`cuda_backend.py`).

Everything above the kernels works with a `Backend` and never asks which of the two it is. A store has one;
`oneemb.kernels.host_backend` gives that of a device or of a tensor. Letters: N ids in P bags, U unique keys, M new
keys, S slots, T tables, D weights of a row.

    keys = backend.unique_keys(table_N, id_N, tables=T, padding_id=None, check=None)
    backend.gather(RowsOfIds(weight_SX, slot_U, keys.inverse_N), out_ND)
    segments = backend.segments(keys, None, grad_ND, None)

Invariant: both implementations give the same keys in the same order and, but for functions such as `log` and `pow`,
the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oneemb.kernels.arrays import Array, Bags, RowsOfIds, Terms
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.jit import CpuLoop, CudaLoop


class Keys(Protocol):
    """The unique keys of N ids: `UniqueKeys` on the host, `DeviceKeys` on a GPU. A backend takes keys that it made."""

    @property
    def table_U(self) -> Array:
        """int32"""

    @property
    def id_U(self) -> Array:
        """int64"""

    @property
    def inverse_N(self) -> Array:
        """The unique key of each id; -1 for padding."""

    @property
    def head_U(self) -> Array:
        """The first occurrence of each key."""


class Segments(Protocol):
    """Gradients of ids, still to be summed for each unique key. A backend takes segments that it made."""

    @property
    def grad_NX(self) -> Array:
        """Gradients of ids, or of bags."""

    @property
    def order_N(self) -> Array:
        """The rows of `grad_NX`, key by key."""

    @property
    def scale_N(self) -> Array | None:
        """The factor of each."""

    @property
    def shape(self) -> tuple[int, int]:
        """(U, D): the shape of the summed gradients."""


class Backend(Protocol):
    """The kernels of one place, with the arrays they work on.

    `place` is its name in errors: "the CPU" or the device's name. Backends of one place may exchange arrays.
    Tensors have to be on `device`. `merges` says whether one loop can run over the rows of several slabs,
    `waits` whether the host waits for what it asks of a tensor.
    """

    place: str
    device: torch.device
    merges: bool
    waits: bool

    # ---- arrays
    def array(self, tensor: torch.Tensor) -> Array:
        """The tensor's memory as kernels take it: float16 and bfloat16 as bits."""

    def tensor(self, array: Array) -> torch.Tensor:
        """The array's memory as a tensor."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A C-contiguous copy of gradients or rows."""

    def put(self, array: np.ndarray) -> Array:
        """A host array in the place of the backend: itself, or a copy."""

    def arange(self, size: int) -> Array:
        """0 to size - 1, int64."""

    # ---- keys
    def tables(self, table_ids: torch.Tensor, tables: int) -> torch.Tensor:
        """Tables of ids as int32; a number outside 0..T-1 stays outside."""

    def tables_of_columns(self, ids: int, tables: int) -> Array:
        """0 to T-1 over and over: int32 [ids]. Only to be read."""

    def unique_keys(
        self, table_N: Array, id_N: Array, *, tables: int, padding_id: int | None, check: Callable[[], None] | None
    ) -> Keys:
        """The unique keys in the order of first occurrence, padding left out.

        `check` raises what is wrong with tables or offsets. The host calls it first. On a GPU the device looks for
        errors, and `counted` or a store's `acquire` calls it if there are any; arrays have room for N keys until then.
        """

    def unique_keys_of_bags(
        self, id_N: Array, offset_P1: Array, table_P: Array | None, *, tables: int, columns: Sequence[int] | None,
        padding_id: int | None, check: Callable[[], None],
    ) -> tuple[Keys, Bags]:  # fmt: skip
        """The same for ids in bags. Without `table_P` bag p is of table p % T; or, where the table of each column is
        given, of column p // B, and gives row p % B * C + p // B."""

    def distinct_keys(self, table_U: Array, id_U: Array) -> Keys:
        """Keys that are known to be distinct. Their `inverse_N` must not be read."""

    def counted(self, keys: Keys) -> Keys:
        """The same keys, their arrays cut to as many as there are. A GPU is waited for."""

    def copy_words_in(self, row_SW: Array, slot_U: Array, first: int, word_UX: np.ndarray) -> None:
        """Put int32 words, [U, X] on the host, into rows of distinct slots, from their word `first` on."""

    def uses_of(self, keys: Keys) -> np.ndarray:
        """Number of ids of each key, counted: int64 [U], on the host."""

    # ---- rows
    def initial_rows(self, initial: InitialRows) -> Any:
        """First values of rows, in the form that `init_rows` takes."""

    def init_rows(
        self, weight_SX: Array, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array, initial: Any,
        state: np.ndarray, *, state_begin: int,
    ) -> None:  # fmt: skip
        """Write initial weights and state of keys into rows slot_M."""

    def update_rows(
        self, on_host: CpuLoop, on_cuda: CudaLoop, weight_SX: Array, row_SW: Array, slot_U: Array,
        grads: Array | Segments, state_begin: int, *scalars: object, state_width: int,
    ) -> None:  # fmt: skip
        """Run an optimizer's loop for the host, or that for GPUs, over the rows of slot_U."""

    def negated(self, grads: Array | Segments) -> Array:
        """The sums of gradients, with the other sign. They are summed first, as torch does it: a zero's sign is that of
        a sum."""

    # ---- forward
    def gather(self, rows: RowsOfIds, out_ND: Array) -> None:
        """out_ND[n] = the weights of id n; zeros for padding."""

    def pool(self, rows: RowsOfIds, bags: Bags, scale_N: Array | None, out_PD: Array) -> None:
        """out_PD[p] = the sum of bag p, each id's weights times its scale, in float32, rounded once. Here and below
        bag p may be row `bags.row_P[p]` of what bags give."""

    def pool_max(self, rows: RowsOfIds, bags: Bags, out_PD: Array, argmax_PD: Array) -> None:
        """out_PD[p] = the elementwise maximum of bag p; argmax_PD, int32 [P, D] = the place in the bag of the id that
        gave each number, the first of several; -1 where there is none."""

    def mean_scales(self, offset_P1: Array, inverse_N: Array) -> Array:
        """The scales that make each bag's sum the mean: float32 [N]."""

    # ---- backward
    def scale_grads(self, rows: RowsOfIds, bag_N: Array, grad_PX: Array) -> Array:
        """The gradient of the scales: float32 [N]."""

    def spread_max_grads(self, bags: Bags, argmax_PD: Array, grad_PX: Array, out_NX: Array) -> None:
        """out_NX[n] = the gradient of id n: that of its bag where `pool_max` took the id's number, zero elsewhere."""

    def segments(self, keys: Keys, bags: Bags | None, grad_NX: Array, scale_N: Array | None) -> Segments:
        """The gradients of ids, or where `bags` are given those of their bags, by unique key."""

    def sum_costs_less(self, keys: Keys, rows: int) -> bool:
        """Whether less memory moves if a gradient of so many rows is summed as it comes, than if it is copied for the
        update to sum."""

    def sum_segments(self, segments: Segments) -> tuple[Array, Array]:
        """grad_UD float32 [U, D], summed in batch order; finite_U bool [U]."""

    def surely_finite(self, terms: Sequence[Terms], dense: Sequence[torch.Tensor]) -> bool:
        """Whether every sum of such terms must be finite and every dense gradient is. False means: look closer."""

    def norm(self, grad_UD: Array, p: float) -> float:
        """The p-norm of all values together."""
