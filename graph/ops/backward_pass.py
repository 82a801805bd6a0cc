"""Gradient that a backward pass leaves for a lookup."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from oneemb.graph.ops.grads import RowGrads, Summed
from oneemb.graph.ops.lookup import Lease
from oneemb.graph.tape import version_of


class Pass(NamedTuple):
    """Gradient that one backward pass has left for one lookup."""

    lease: Lease
    grad: torch.Tensor | Summed
    """d loss / d rows of the lookup: [N, D], or of bags [P, D]; or its sums, see `Lease.sum_now`."""
    version: int
    """Version of the gradient tensor at the end of its backward pass; 0 for `Summed`. The user may hold the tensor too,
    from a hook or as argument of `backward`."""

    def checked(self) -> torch.Tensor | Summed:
        """The gradient; RuntimeError if it was changed in place since it came."""
        grad = self.grad
        if isinstance(grad, torch.Tensor) and version_of(grad) != self.version:
            raise RuntimeError(
                "the gradient of rows was changed in place since its backward pass, as a buffer that is given to"
                " backward again and again, or a tensor that a hook keeps: give or keep a clone() of it"
            )
        return grad


def grads_of_leases(passes: Iterable[Pass]) -> list[tuple[Lease, list[torch.Tensor | Summed]]]:
    """The gradients of each lookup, in the order in which lookups were made; errors are those of `Pass.checked`."""
    grads_of: dict[Lease, list[torch.Tensor | Summed]] = {}
    for one in passes:
        grads_of.setdefault(one.lease, []).append(one.checked())
    if len(grads_of) == 1:
        return list(grads_of.items())
    return sorted(grads_of.items(), key=lambda its: its[0].order)


def reduce_passes(passes: Iterable[Pass], *, shared: bool = False) -> Sequence[RowGrads]:
    """The gradient of each row, to be summed, of each lookup; if `shared`, kept for others that ask for the same, such
    as those of other tables of the lookup."""
    return [(lease.reduce_once if shared else lease.reduce)(grads) for lease, grads in grads_of_leases(passes)]
