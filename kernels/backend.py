"""The contract of a backend: the kernels for the host's cores (`host_backend.py`) or for a GPU (`cuda_backend.py`).

Code above the kernels calls a `Backend` and need not know which of the two it is. Each store has one;
`oneemb.kernels.host_backend` returns the backend for a device or for a tensor. Letters: N ids in P bags, U unique keys,
M new keys, S slots, T tables, D weights of a row, X values of a row as it is stored.

    keys = backend.unique_keys(table_N, id_N, tables=T, padding_id=None, check=None)
    backend.gather(RowsOfIds(weight_SX, slot_U, keys.inverse_N), out_ND)
    segments = backend.segments(keys, None, grad_ND, None)

Invariant: both implementations give the same keys in the same order and, except in functions such as `log` and `pow`,
the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from oneemb.kernels.arrays import Array, Bags, RowsOfIds, Terms
from oneemb.kernels.init_rows import InitialRows
from oneemb.kernels.jit import CpuLoop, CudaLoop

BITS = {torch.float32: torch.float32, torch.float16: torch.uint16, torch.bfloat16: torch.int16}
"""{dtype of weights: dtype in which loops see their bits}."""
SUM_MAX = 2.0**127
"""A float32 sum whose exact value is below this number is finite, however its additions round."""


class Keys(Protocol):
    """The unique keys of N ids: `UniqueKeys` on the host, `DeviceKeys` on a GPU. A backend accepts only keys that it
    has made itself."""

    @property
    def table_U(self) -> Array:
        """int32: table of each key."""

    @property
    def id_U(self) -> Array:
        """int64: id of each key."""

    @property
    def inverse_N(self) -> Array:
        """For each id, the index of its key among the unique keys; -1 for padding."""

    @property
    def head_U(self) -> Array:
        """Position in the batch of the first occurrence of each key."""


class Segments(Protocol):
    """Gradients of ids with their grouping by unique key, not summed yet. A backend accepts only segments that it has
    made itself."""

    @property
    def grad_NX(self) -> Array:
        """Gradients: one row for each id, or for each bag."""

    @property
    def order_N(self) -> Array:
        """Numbers of the rows of `grad_NX` to sum, grouped by key."""

    @property
    def scale_N(self) -> Array | None:
        """Factor of each row that `order_N` names; None = 1."""

    @property
    def shape(self) -> tuple[int, int]:
        """(U, D): the shape of the summed gradients."""


@dataclass(frozen=True)
class RowLoops:
    """Loops of one optimizer. `states` = state values of each weight; `row_states` = state values of the row as a
    whole, which stand behind those of its weights."""

    on_host: CpuLoop
    on_cuda: CudaLoop
    states: int
    row_states: int = 0


class Backend(Protocol):
    """The kernels for the host or for one GPU.

    `place`: name in errors, "the CPU" or the device's name; backends of the same place may exchange arrays.
    `device`: where tensors must be. `merges`: whether one loop can run over the rows of several slabs.
    `waits`: whether the host has to wait for the device when it reads a value of a tensor.
    """

    place: str
    device: torch.device
    merges: bool
    waits: bool

    # ---- arrays
    def array(self, tensor: torch.Tensor) -> Array:
        """The tensor's memory as an array for kernels; the host's sees float16 and bfloat16 as bits."""

    def tensor(self, array: Array) -> torch.Tensor:
        """The array's memory as a tensor."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A C-contiguous copy of gradients or rows."""

    def put(self, array: np.ndarray) -> Array:
        """A host array as an array of this backend: the same array, or a copy on the device."""

    def arange(self, size: int) -> Array:
        """0 to size - 1, int64."""

    # ---- keys
    def tables(self, table_ids: torch.Tensor, tables: int) -> torch.Tensor:
        """Table numbers of ids as int32; a number outside 0 to T-1 stays outside that range."""

    def tables_of_columns(self, ids: int, tables: int) -> Array:
        """Table number of each id of a flattened batch [B, T]: 0 to T-1, again and again; int32 [ids]. The array is
        shared between calls, so it must not be written to."""

    def unique_keys(
        self, table_N: Array, id_N: Array, *, tables: int, padding_id: int | None, check: Callable[[], None] | None
    ) -> Keys:
        """The unique keys in the order of first occurrence, padding left out.

        `check` raises the error if tables or offsets are invalid. The host calls it first. On a GPU the device looks
        for errors, and `counted` or a store's `acquire` calls `check` if it has found one. Until then the number of
        keys is not known, and the arrays of the keys have N entries.
        """

    def unique_keys_of_bags(
        self, id_N: Array, offset_P1: Array, table_P: Array | None, *, tables: int, columns: Sequence[int] | None,
        padding_id: int | None, check: Callable[[], None],
    ) -> tuple[Keys, Bags]:  # fmt: skip
        """The unique keys of ids in bags, and the bags. Bag p is of table table_P[p]. If `table_P` is None, `columns`
        may list the table of each column: then bag p is of column p // B and has output row p % B * C + p // B. If both
        are None, bag p is of table p % T."""

    def distinct_keys(self, table_U: Array, id_U: Array) -> Keys:
        """`Keys` of arrays that hold each key once, as the caller knows. Its `inverse_N` must not be read."""

    def counted(self, keys: Keys) -> Keys:
        """The same keys, in arrays whose length is the number of keys. The host waits for a GPU here."""

    def checked(self, keys: Keys) -> Keys:
        """The same keys, with valid tables and offsets; `counted` where only the device knows whether they are."""

    def copy_words_in(self, row_SW: Array, slot_U: Array, first: int, word_UX: np.ndarray) -> None:
        """Write int32 words [U, X], an array of the host, into rows of distinct slots, from word `first` of a row
        on."""

    def uses_of(self, keys: Keys) -> np.ndarray:
        """How often each key occurs among the ids: int64 [U], on the host. The keys must be `counted`."""

    # ---- rows
    def initial_rows(self, initial: InitialRows) -> Any:
        """First values of rows in the form that this backend's `init_rows` takes."""

    def init_rows(
        self, weight_SX: Array, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array, initial: Any,
        state: np.ndarray, *, state_begin: int,
    ) -> None:  # fmt: skip
        """Write initial weights and state of keys into rows slot_M."""

    def update_rows(
        self, loops: RowLoops, scalars: tuple, weight_SX: Array, row_SW: Array, slot_U: Array,
        grads: Array | Segments, state_begin: int,
    ) -> None:  # fmt: skip
        """Run an optimizer's loop over the rows of slot_U, with these scalars; Python floats are rounded to float32."""

    def negated(self, grads: Array | Segments) -> Array:
        """The summed gradients with the opposite sign. The sign is changed after the sum, as in torch, so that a sum of
        zeros has the same sign as there."""

    # ---- forward
    def gather(self, rows: RowsOfIds, out_ND: Array) -> None:
        """out_ND[n] = the weights of id n; zeros for padding."""

    def pool(self, rows: RowsOfIds, bags: Bags, scale_N: Array | None, out_PD: Array) -> None:
        """out_PD[p] = sum over the ids of bag p of their weights times their scales, in float32, rounded once. If
        `bags.row_P` is given, here and below, bag p has row row_P[p] of `out_PD`, `argmax_PD` and `grad_PX`."""

    def pool_max(self, rows: RowsOfIds, bags: Bags, out_PD: Array, argmax_PD: Array) -> None:
        """out_PD[p] = elementwise maximum over the ids of bag p. argmax_PD, int32 [P, D] = position within the bag of
        the first id that has the maximum; -1 if the bag holds nothing but padding."""

    def mean_scales(self, offset_P1: Array, inverse_N: Array) -> Array:
        """Scale of each id with which a bag's sum is the bag's mean: float32 [N]."""

    # ---- backward
    def scale_grads(self, rows: RowsOfIds, bag_N: Array, grad_PX: Array) -> Array:
        """Gradient with respect to the scale of each id: float32 [N]."""

    def spread_max_grads(self, bags: Bags, argmax_PD: Array, grad_PX: Array, out_NX: Array) -> None:
        """out_NX[n, d] = the gradient of the bag of id n if `pool_max` took number d from this id, otherwise zero."""

    def segments(self, keys: Keys, bags: Bags | None, grad_NX: Array, scale_N: Array | None) -> Segments:
        """Gradients grouped by unique key. `grad_NX` holds one row for each id, or, with `bags`, for each bag."""

    def sum_segments(self, segments: Segments) -> tuple[Array, Array]:
        """grad_UD float32 [U, D], summed in batch order, and whether all values of a sum are finite: bool [U], or on a
        GPU int64 [1] for all sums together. Beyond the keys that there are, grad_UD holds any numbers."""

    def sum_grads(
        self, keys: Keys, bags: Bags | None, grad_NX: Array, scale_N: Array | None
    ) -> tuple[Array, Array]:  # fmt: skip
        """`sum_segments` of `segments` with these arguments."""

    def finite_of(self, grad_UD: Array) -> Array:
        """Whether all values of sums are finite, as `sum_segments` returns it."""

    def surely_finite(self, terms: Sequence[Terms], dense: Sequence[torch.Tensor]) -> bool:
        """True if all sums of `terms` are certain to be finite and all dense gradients are finite. False = uncertain:
        the caller has to compute the sums and look at each value."""

    def norm(self, grad_UD: Array, p: float) -> float:
        """The p-norm of all values of `grad_UD`, taken as one vector."""
