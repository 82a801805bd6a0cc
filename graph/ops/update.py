"""The step of the optimizer: dense parameters, rows, rates."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.ops.lookup import REPLACED
from oneemb.graph.row_optimizers import Group, RowOptimizer
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError
from oneemb.storage.locking.step_lock import while_held
from oneemb.storage.locking.turns import changing, whole


class StepOptimizer(Protocol):
    """Interface of an optimizer, as ops use it; `oneemb.Optimizer` has it."""

    skip_nonfinite: bool
    skipped: int
    taken: int

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, Sequence[Group | None]] | None:
        """The row optimizer of a store and its param groups now, of each table, None for one that is frozen; or one of
        all. None where the store is not its own."""


class Scheduler(Protocol):
    """Interface of a learning rate scheduler, as ops use it; torch's schedulers have it."""

    def step(self) -> object:
        """Set the rates of the next step."""


Groups = dict[int, Group]
"""The options of param groups, by the identity of the group."""


def options_of(optimizer: torch.optim.Optimizer) -> Groups:
    """The options of each param group as they are now."""
    options: Groups = {}
    for group in optimizer.param_groups:
        its = options[id(group)] = dict(group)
        its.pop("params", None)
        for name, option in its.items():
            if isinstance(option, torch.Tensor):
                its[name] = option.clone()
    return options


def step(optimizer: StepOptimizer, go: bool, after_hooks: Callable[[], None] | None = None) -> Groups:
    """Step the dense parameters. It comes before rows are updated, since it runs what may fail: hooks of the user's.

    Args:
        after_hooks: called after the user's hooks that come before the step.

    Returns:
        The options that this step was made with, after hooks before it and before those after it, for `update`.

    Raises:
        What the optimizer or a hook of it raises; no row has been updated.
    """
    groups: Groups = {}
    if not go:
        return groups

    def keep(*_: object) -> None:
        if after_hooks is not None:
            after_hooks()
        groups.update(options_of(optimizer.optimizer))

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


_ZERO_GRAD = torch.optim.Optimizer.zero_grad


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Set the gradients of an optimizer to None: at once, where `Optimizer.zero_grad` is torch's, which begins with a
    record for the profiler."""
    changed = type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer)
    if changed or torch.autograd._profiler_enabled():
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def measure_update(args: tuple[object, RowGrads | None, bool, object], result: None) -> tuple[int, int]:
    _, grads, go, *_ = args
    if grads is None or not go:
        return 0, 0
    layout, rows = grads.store.format, len(grads.slot_U)
    read = 4 * layout.dim * rows if grads.segments is None else grads.segments.grad_NX.nbytes
    return rows, read + 2 * layout.row_bytes * rows


def update(optimizer: StepOptimizer, grads: RowGrads | None, go: bool, groups: Groups | None = None) -> None:
    """Apply the optimizer to the rows, in place.

    Args:
        groups: the options to apply it with, from `step`; None = as they are now.

    Raises:
        StorageError: the rows are not in their slots any more; nothing has changed.
    """
    # Of merged stores the first answers for all: one group of one optimizer trains them.
    rows = optimizer.rows_of(grads.stores[0]) if grads is not None else None
    if grads is None or rows is None or not go:
        return
    store, (row_optimizer, its_groups) = grads.store, rows
    options = [groups.get(id(group), group) if group and groups else group for group in its_groups]
    for member in grads.stores:
        member.turns.check(changes=True)
    if grads.generation != store.generation:  # A hook, or another thread beside torch's own step, has loaded others.
        raise StorageError(REPLACED)

    parts = [(its, step, group) for grads_G, group in _by_group(grads, options) for its, step in _by_step(grads_G)]

    def write() -> None:
        with changing:
            row_SW, layout, loops = store.row_SW, store.format, store.loops
            weight_SX = layout.weights(row_SW)
            for part, step, group in parts:
                row_optimizer.update(
                    weight_SX, row_SW, part.slot_U, part.segments or part.grad_UD,
                    state_begin=layout.state_begin, group=group, step=step + 1, loops=loops,
                )  # fmt: skip
            for member in grads.stores:
                member.step += 1
            store.mark_dirty(grads.table_U, grads.slot_U)

    turns, writing = [], []
    for member in grads.stores:
        turns.append(member.turns)
        writing.append(member.writing)
    with whole(turns):
        while_held(sorted(writing, key=id), write)


def _by_group(grads: RowGrads, options: Sequence[Group | None]) -> list[tuple[RowGrads, Group]]:
    """The gradients and the options of their tables: those of tables that have others, apart."""
    if len(options) == 1:
        return [] if options[0] is None else [(grads, options[0])]
    alike: list[tuple[Group | None, list[int]]] = []
    for t, group in enumerate(options):
        its = next((tables for other, tables in alike if other is group or _same_options(other, group)), None)
        if its is None:
            alike.append((group, [t]))
        else:
            its.append(t)
    if len(alike) == 1:
        return [(grads, group) for group, _ in alike if group is not None]
    return [(grads.of_tables(tables), group) for group, tables in alike if group is not None]


def _same_options(one: Group | None, other: Group | None) -> bool:
    if one is None or other is None or one.keys() != other.keys():
        return False
    return all(name == "params" or _same(one[name], other[name]) for name in one)


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return one == other


def _by_step(grads: RowGrads) -> list[tuple[RowGrads, int]]:
    """The gradients and the steps that their store has made; of merged stores that are not equally far, apart."""
    if len(grads.stores) == 1:
        return [(grads, grads.stores[0].step)]
    steps = sorted({member.step for member in grads.stores})
    if len(steps) == 1:
        return [(grads, steps[0])]
    step_M = np.array([member.step for member in grads.store.members])
    step_U = step_M.take(grads.store.members_of(grads.table_U))
    return [(grads.rows(np.flatnonzero(step_U == step)), step) for step in steps]


def advance(optimizers: Sequence[StepOptimizer], lr_schedulers: Sequence[Scheduler | None], go: bool) -> None:
    """Drop the gradients, and step the learning rates.

    Raises:
        What a scheduler raises, once the others have been stepped; the step is made and counted.
    """
    for optimizer in optimizers:
        zero_grad(optimizer.optimizer)
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
    if not any(note in present for present in getattr(error, "__notes__", ())):
        error.add_note(note)
