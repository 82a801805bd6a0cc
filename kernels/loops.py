"""Where loops run: on the host's cores or on a GPU.

Everything above the kernels works with a `Loops` and never asks which of the two it is. A store has one; `loops_of`
gives the one for the ids of a lookup. Letters: N ids in P bags, U unique keys, S slots, D weights of a row.

    keys = loops.unique_keys(table_N, id_N, tables=T)
    loops.gather(weight_SX, slot_U, keys.inverse_N, out_ND)
    segments = loops.segments(keys, None, grad_ND, None)

Invariant: both implementations give the same keys in the same order and, but for functions such as `log` and `pow`,
the same bits.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.threads import Threads

if TYPE_CHECKING:
    from oneemb.kernels.bags import Bags
    from oneemb.kernels.init_rows import InitialRows

__all__ = ["Array", "Keys", "Loops", "Segments", "Terms", "loops_at", "loops_of"]

Array = Any
"""A NumPy array where loops run on the host, a tensor on the device where they run on a GPU. The two have no type in
common, and no code looks inside one without its `Loops`."""


class Keys(Protocol):
    """The unique keys of N ids: `UniqueKeys` on the host, `DeviceKeys` on a GPU. Loops take those they have given."""

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
    """Gradients of ids, still to be summed for each unique key. Loops take those they have given."""

    @property
    def grad_NX(self) -> Array:
        """Of ids, or of bags."""

    @property
    def order_N(self) -> Array:
        """The rows of `grad_NX`, key by key."""

    @property
    def scale_N(self) -> Array | None:
        """By what each is multiplied."""

    @property
    def shape(self) -> tuple[int, int]:
        """U, D: that of the gradients once they are summed."""


class Loops(Protocol):
    """The loops of one place, with the arrays they work on."""

    place: str
    """What errors call it: "the CPU" or the device's name. Two loops of one place take each other's arrays."""
    device: torch.device
    """Where tensors have to be."""
    merges: bool
    """Whether one loop can run over the rows of several slabs."""

    # ---- arrays
    def array(self, tensor: torch.Tensor) -> Array:
        """The tensor's memory as loops take it: float16 and bfloat16 as bits."""

    def tensor(self, array: Array) -> torch.Tensor:
        """The array's memory as a tensor."""

    def put(self, array: np.ndarray) -> Array:
        """A host array where loops run: itself, or a copy."""

    def to_host(self, array: Array) -> np.ndarray:
        """An array of loops on the host: itself, or a copy."""

    def zeros(self, rows: int, width: int) -> Array:
        """float32 [rows, width]"""

    def arange(self, size: int) -> Array:
        """0 to size - 1, int64."""

    def join(self, arrays: Sequence[Array]) -> Array:
        """Arrays one after another."""

    # ---- keys
    def tables(self, table_ids: torch.Tensor, tables: int) -> torch.Tensor:
        """Tables of ids as int32; one that is none of `tables` stays none."""

    def tables_of_columns(self, ids: int, tables: int) -> Array:
        """0 to T-1 over and over: int32 [ids]. Only to be read."""

    def unique_keys(
        self, table_N: Array, id_N: Array, *, tables: int, padding_id: int | None,
        check: Callable[[], None] | None,
    ) -> Keys:  # fmt: skip
        """The unique keys in the order of first occurrence, padding left out.

        On a GPU arrays have room for N keys until `counted` or a store's `acquire`, which call `check`, to raise what
        is wrong with tables or offsets, if the device has found that something is. On the host it is called first.
        """

    def unique_keys_of_bags(
        self, id_N: Array, offset_P1: Array, table_P: Array | None, *, tables: int,
        padding_id: int | None, check: Callable[[], None],
    ) -> tuple[Keys, "Bags"]:  # fmt: skip
        """The same for ids in bags; without `table_P` bag p is of table p % T."""

    def distinct_keys(self, table_U: Array, id_U: Array) -> Keys:
        """Keys that are known to be distinct; nobody may ask them for `inverse_N`."""

    def counted(self, keys: Keys) -> Keys:
        """The same keys, their arrays cut to as many as there are. A GPU is waited for."""

    # ---- rows
    def initial_rows(self, initial: "InitialRows") -> Any:
        """How rows begin, as `init_rows` takes it."""

    def init_rows(
        self, weight_SX: Array, row_SW: Array, slot_M: Array, table_M: Array, id_M: Array, initial: Any,
        state: np.ndarray, *, state_begin: int,
    ) -> None:  # fmt: skip
        """Write initial weights and state of keys into rows slot_M."""

    def update_rows(
        self, on_host: Any, on_cuda: Any, weight_SX: Array, row_SW: Array, slot_U: Array, grads: Array | Segments,
        state_begin: int, *scalars: Any, state_width: int,
    ) -> None:  # fmt: skip
        """Run an optimizer's loop for the host, or that for GPUs, over the rows of slot_U."""

    # ---- forward
    def gather(self, weight_SX: Array, slot_U: Array, inverse_N: Array, out_ND: Array) -> None:
        """out_ND[n] = the weights in slot slot_U[inverse_N[n]]; zeros where inverse_N[n] is -1."""

    def pool(
        self, weight_SX: Array, slot_U: Array, inverse_N: Array, offset_P1: Array, scale_N: Array | None, out_PD: Array
    ) -> None:
        """out_PD[p] = the sum of bag p, each id's weights times its scale, in float32, rounded once."""

    def mean_scales(self, offset_P1: Array, inverse_N: Array) -> Array:
        """The scales that make each bag's sum the mean: float32 [N]."""

    # ---- backward
    def scale_grads(self, weight_SX: Array, slot_U: Array, inverse_N: Array, bag_N: Array, grad_PX: Array) -> Array:
        """The gradient of the scales: float32 [N]."""

    def segments(self, keys: Keys, bags: "Bags | None", grad_NX: Array, scale_N: Array | None) -> Segments:
        """The gradients of ids, or of their bags, by unique key."""

    def sum_segments(self, segments: Segments) -> tuple[Array, Array]:
        """grad_UD float32 [U, D], summed in batch order; finite_U bool [U]."""

    def finite_rows(self, grad_UD: Array) -> Array:
        """bool [U]: whether a row is finite throughout."""

    def surely_finite(self, terms: Sequence["Terms"], dense: Sequence[torch.Tensor]) -> bool:
        """Whether every sum of such terms must be finite and every dense gradient is. False means: look closer."""

    def norm(self, grad_UD: Array, p: float) -> float:
        """The p-norm of all values together."""


class Terms(NamedTuple):
    """What sums are made of: so many values of an array at most, times those that scale them."""

    grad_NX: Array
    scale_N: Array | None
    number: int


_ONE_THREAD = Threads(1)


def loops_of(tensor: torch.Tensor, threads: Threads = _ONE_THREAD) -> Loops:
    """The loops that work on a tensor where it lies; those of the host run on `threads`.

    Nothing of CUDA is imported before a tensor on a GPU, or an embedding there, needs it.
    """
    if tensor.is_cuda or "oneemb.kernels.cuda_loops" in sys.modules:
        from oneemb.kernels import cuda_loops

        if (found := cuda_loops.loops_of(tensor)) is not None:
            return found
    return HostLoops(threads)


def loops_at(device: torch.device, threads: Threads) -> Loops:
    """The loops of a device; those of the host run on `threads`.

    Raises:
        RuntimeError, ImportError: CUDA cannot be used; the message says what to install.
    """
    if device.type == "cpu":
        return HostLoops(threads)
    from oneemb.kernels import cuda_loops

    return cuda_loops.loops_at(device)
