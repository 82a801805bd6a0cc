"""The step of the optimizer: dense parameters, rows, rates."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.ops.op import UPDATE, op
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.step_lock import while_held
from oneemb.storage.turns import whole

__all__ = ["Groups", "StepOptimizer", "add_note", "advance", "step", "update"]


if TYPE_CHECKING:
    from oneemb.graph.row_optimizers import RowOptimizer


class StepOptimizer(Protocol):
    """What ops ask of an optimizer: `oneemb.Optimizer` is one."""

    optimizer: torch.optim.Optimizer
    skip_nonfinite: bool
    skipped: int
    taken: int

    def rows_of(self, store: EmbeddingStore) -> tuple["RowOptimizer", dict[str, Any]] | None:
        """The row optimizer of a store and its parameter group now; None where the store is not its own."""


Groups = dict[int, dict[str, Any]]
"""The options of param groups, by the identity of the group."""


@op(UPDATE, takes=("optimizer", "go"), commits=True)
def step(optimizer: StepOptimizer, go: bool) -> Groups:
    """Step the dense parameters. It comes before rows are updated, since it runs what may fail: hooks of the user's.

    Returns:
        The options that this step was made with, after hooks before it and before those after it, for `update`.

    Raises:
        What the optimizer or a hook of it raises; no row has been updated.
    """
    groups: Groups = {}
    if not go:
        return groups

    def keep(*_: Any) -> None:
        for group in optimizer.optimizer.param_groups:
            groups[id(group)] = {
                name: option.clone() if isinstance(option, torch.Tensor) else option
                for name, option in group.items()
                if name != "params"
            }

    handle = optimizer.optimizer.register_step_pre_hook(keep)  # after those that there are
    try:
        optimizer.optimizer.step()
    except BaseException as error:
        add_note(
            error,
            f"{type(optimizer.optimizer).__name__}.step() did not end: no row was updated, dense parameters are as far"
            " as it got",
        )
        raise
    finally:
        handle.remove()
    return groups


def _measure_update(args: Any, result: Any) -> tuple[int, int]:
    grads, go = args[1], args[2]
    if grads is None or not go:
        return 0, 0
    layout, rows = grads.store.format, len(grads.slot_U)
    read = 4 * layout.dim * rows if grads.segments is None else grads.segments.grad_NX.nbytes
    return rows, read + 2 * layout.row_bytes * rows


@op(UPDATE, takes=("optimizer", "grads", "go"), commits=True, measure=_measure_update)
def update(optimizer: StepOptimizer, grads: RowGrads | None, go: bool, groups: Groups | None = None) -> None:
    """Apply the optimizer to the rows, in place.

    Args:
        groups: the options to apply it with, from `step`; None = as they are now.
    """
    # Of merged stores the first answers for all: one group of one optimizer trains them.
    rows = optimizer.rows_of(grads.stores[0]) if grads is not None else None
    if grads is None or rows is None or not go:
        return
    store, (row_optimizer, group) = grads.store, rows
    group = (groups or {}).get(id(group), group)
    for one in grads.stores:
        one.turns.check(changes=True)

    def write() -> None:
        for some, step in _by_step(grads):
            row_optimizer.update(
                store.weight_SX, store.row_SW, some.slot_U, some.segments or some.grad_UD,
                state_begin=store.format.state_begin, group=group, step=step + 1, loops=store.loops,
            )  # fmt: skip

    with whole(one.turns for one in grads.stores):
        while_held(sorted((one.writing for one in grads.stores), key=id), write)
        for one in grads.stores:
            one.step += 1
        store.mark_dirty(grads.table_U, grads.slot_U)


def _by_step(grads: RowGrads) -> list[tuple[RowGrads, int]]:
    """The gradients and the steps that their store has made; of merged stores that are not equally far, apart."""
    steps = sorted({one.step for one in grads.stores})
    if len(steps) == 1:
        return [(grads, steps[0])]
    step_M = np.array([member.step for member in grads.store.members])
    step_U = step_M[grads.store.members_of(grads.table_U)]
    parts = []
    for step in steps:
        u = np.flatnonzero(step_U == step)
        keys = grads.table_U[u], grads.id_U[u], grads.slot_U[u]
        parts.append((RowGrads(grads.store, grads.generation, *keys, grads.grad_UD[u], grads.finite_U[u]), step))
    return parts


@op(UPDATE)
def advance(optimizers: Sequence[StepOptimizer], lr_schedulers: Sequence[Any], go: bool) -> None:
    """Count the step, drop the gradients of dense parameters, and step the learning rates.

    Raises:
        What a scheduler raises, once the others have been stepped; the step is made and counted.
    """
    for optimizer in optimizers:
        optimizer.taken += go
        optimizer.optimizer.zero_grad(set_to_none=True)
    failed: Exception | None = None
    for scheduler in lr_schedulers if go else ():
        try:
            if scheduler is not None:
                scheduler.step()
        except Exception as error:
            add_note(
                error,
                f"{type(scheduler).__name__}.step() failed after the update: rows and dense parameters are updated and"
                " the step is counted; its learning rate may not have moved",
            )
            failed = failed or error
    if failed is not None:
        raise failed


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note`, once."""
    if not any(note in one for one in getattr(error, "__notes__", ())):
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
