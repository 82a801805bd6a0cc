"""Ops of an optimizer step: reduce, unscale and check gradients, step dense parameters, update rows, advance rates."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.amp.grad_scaler import OptState

from oneemb.graph.ops.grads import RowGrads, join_grads
from oneemb.graph.ops.late_check import Counts, NonFiniteGradientError, late_check_of, resolve_all
from oneemb.graph.ops.lookup import REPLACED, Lease
from oneemb.graph.ops.merged import MergedRows
from oneemb.graph.ops.row_grad import RowGrad
from oneemb.graph.row_optimizers import Group, RowOptimizer
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StorageError
from oneemb.storage.locking.step_lock import while_held
from oneemb.storage.merged_store import MergedStore


class StepOptimizer(Protocol):
    """Interface of the optimizers that ops take; `oneemb.Optimizer` implements it."""

    skip_nonfinite: bool
    skipped: int
    taken: int

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, Sequence[Group | None]] | None:
        """(row optimizer of a store, its current param groups); None = this optimizer does not train the store. There
        is one group for all tables, or one for each table; the group of a frozen table is None."""


class Scheduler(Protocol):
    """Interface of the learning rate schedulers that ops take; torch's schedulers implement it."""

    def step(self) -> object:
        """Set the learning rates of the next step."""


Groups = dict[int, Group]
"""{id(param group): options of the group}."""


def options_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Copy of the current options of each param group."""
    options: Groups = {}
    for group in optimizer.param_groups:
        copied = options[id(group)] = dict(group)
        copied.pop("params", None)
        for name, option in copied.items():
            if isinstance(option, torch.Tensor):
                copied[name] = option.clone()
    return options


def measure_reduce(args: object, grads: Sequence[RowGrads]) -> tuple[int, int]:
    # This op makes no sums: an update makes them row by row, or clipping makes them.
    rows = 0
    for grad in grads:
        rows += len(grad.slot_U)
    return rows, 0


def reduce_grads(row_grads: Sequence[RowGrad]) -> list[RowGrads]:
    """Gradients of each embedding by unique key, still to be summed, with the slots of the rows. The rows are resident,
    and pinned until `unpin`. Embeddings whose lookups were merged have one result together.

    Sums are float32: over the backward passes of an id in the order of the passes, over the ids of a lookup in batch
    order, then over lookups in the order in which they were made.

    Args:
        row_grads: gradients of embeddings, or of some tables of an embedding, which are reduced as one gradient.
            Embeddings whose lookups were merged must be trained by one param group.

    Raises:
        StoreFullError: rows that were unpinned do not fit any more; nothing has changed.
        StorageError: rows were replaced since the lookup (load_snapshot, clear).
    """
    merged: dict[MergedStore, list[RowGrad]] = {}
    unmerged: list[RowGrad] = []
    for row_grad in _of_stores(row_grads):
        store = row_grad.merged_in()
        (unmerged if store is None else merged.setdefault(store, [])).append(row_grad)
    reduced: list[RowGrads] = []
    for group in merged.values():
        lookups = _merged_lookups(group)
        if lookups is None:
            unmerged += group
        elif (joined := join_grads([rows.reduce(grads) for rows, grads in lookups])) is not None:
            reduced.append(joined)
    for row_grad in unmerged:
        if (grads := row_grad.acquire()) is not None:
            reduced.append(grads)
    return reduced


def _of_stores(row_grads: Sequence[RowGrad]) -> Sequence[RowGrad]:
    """One gradient for each store. Several gradients of a store belong to different tables, and are joined."""
    if len(row_grads) == 1:
        return row_grads
    of_store: dict[EmbeddingStore, list[RowGrad]] = {}
    for row_grad in row_grads:
        of_store.setdefault(row_grad.store, []).append(row_grad)
    return [grads[0] if len(grads) == 1 else _as_one(store, grads) for store, grads in of_store.items()]


def _as_one(store: EmbeddingStore, row_grads: Sequence[RowGrad]) -> RowGrad:
    first, all_tables = row_grads[0], frozenset[int]().union(*(grad.tables or () for grad in row_grads))
    tables = None if len(all_tables) == store.num_tables else all_tables
    left = [[id(one.grad) for one in grad.passes] for grad in row_grads]
    if all(passes == left[0] for passes in left) and all(grad.summed is None for grad in row_grads):
        return RowGrad.of(store, first.passes, tables=tables)
    # A gradient was changed since its backward pass, and holds sums in place of passes.
    parts = [grads for grad in row_grads if (grads := grad.reduce()) is not None]
    holders = dict.fromkeys(
        lease for grad in row_grads for lease in (*(one.lease for one in grad.passes), *grad.holders)
    )
    return RowGrad.of(store, (), join_grads(parts), tuple(holders), tables=tables)


def _merged_lookups(
    group: Sequence[RowGrad],
) -> list[tuple[MergedRows, dict[int, tuple[Lease, list[torch.Tensor]]]]] | None:
    """[(merged rows, {p: (lease, gradients) of lookup p})], in an order in which each embedding's lookups were made;
    None if the orders of the embeddings contradict each other."""
    lookups: dict[MergedRows, dict[int, tuple[Lease, list[torch.Tensor]]]] = {}
    for row_grad in group:
        for one in row_grad.passes:
            assert one.lease.shared is not None
            rows, p = one.lease.shared
            assert isinstance(rows, MergedRows)
            lookups.setdefault(rows, {}).setdefault(p, (one.lease, []))[1].append(cast(torch.Tensor, one.checked()))
    in_order = sorted(lookups.items(), key=lambda lookup: min(lease.order for lease, _ in lookup[1].values()))
    latest: dict[EmbeddingStore, int] = {}
    for _, grads in in_order:
        for lease, _ in grads.values():
            if lease.order < latest.get(lease.store, -1):
                return None
            latest[lease.store] = lease.order
    return in_order


def unscale(scaler: torch.amp.GradScaler, optimizers: Sequence[StepOptimizer]) -> None:
    """Divide the gradients of dense parameters and of rows by the scale, in place, unless `build` has unscaled them."""
    if not scaler.is_enabled():
        return
    for optimizer in optimizers:
        states = [scaler._per_optimizer_states.get(id(one)) for one in (optimizer, optimizer.optimizer)]
        if not any(state is not None and state["stage"] is OptState.UNSCALED for state in states):
            scaler.unscale_(optimizer.optimizer)


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: StepOptimizer) -> None:
    """Tell `scaler` that the gradients that it has unscaled for `optimizer` are dropped."""
    for one in (optimizer, optimizer.optimizer):
        scaler._per_optimizer_states.pop(id(one), None)


def update_scale(scaler: torch.amp.GradScaler, go: bool) -> None:
    """Let the scaler grow its scale, or shrink it if `go` is False: gradients have overflowed."""
    if not scaler.is_enabled():
        return
    states = scaler._per_optimizer_states
    for state in states.values():
        # One answer for the whole step: perhaps only one optimizer's gradients overflowed, or it has no gradients.
        state["found_inf_per_device"] = {
            torch.device("cpu"): torch.full((), 0.0 if go else 1.0, dtype=torch.float32, device="cpu")
        }
    scaler.update()


def check_finite(
    optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads | None], *, late: Counts | None = None
) -> str | None:
    """Text about a gradient of the step, dense or of rows, that is not finite; None = all are finite. If all are
    finite, watchers of the stores are notified that the rows are about to change.

    Args:
        late: let the GPU check the gradients where the host need not know the result: see late_check.py. Then a result
            of None says nothing, and the updates of `grads` write nothing if a gradient is not finite. If the step was
            left out, these counts are set back too: (object, attribute). None = wait for the check.

    Raises:
        NonFiniteGradientError: an earlier step, checked late, was not made.
        ValueError: an optimizer's options have changed in a way that its rows cannot follow; no weight, state or
            count has changed.
        StorageError: there is no room for the averages of rows (`oneemb.AveragedEmbedding`); nothing has changed.
    """
    present = list(filter(None, grads))
    row_optimizers: list[RowOptimizer] = []
    for optimizer in optimizers:
        for grad in present:
            rows = optimizer.rows_of(grad.stores[0])
            if rows is not None:
                row_optimizer, groups = rows
                row_optimizers.append(row_optimizer)
                for group in groups:
                    if group is not None:
                        row_optimizer.check(group)
    waits = False
    for grad in present:
        waits = waits or grad.store.backend.waits
    if waits:
        if late is None:
            resolve_all(present)
        elif late_check_of(optimizers, row_optimizers, present, late) is not None:
            return None
    found = None if _surely_finite(optimizers, present) else _find_nonfinite(optimizers, present)
    if found is None:
        for grad in present:
            grad.before_change()
    return found


def may_step(
    found: str | None, optimizers: Sequence[StepOptimizer], scaler: torch.amp.GradScaler | None = None
) -> bool:
    """Whether the step may be taken, given the result of `check_finite`.

    Args:
        scaler: the GradScaler that scaled the losses. With a scaler, a step whose gradients overflow is skipped.

    Raises:
        NonFiniteGradientError: a gradient is not finite, and an optimizer of the step does not skip such steps.
    """
    if found is None:
        return True
    if scaler is None and not all(optimizer.skip_nonfinite for optimizer in optimizers):
        raise NonFiniteGradientError(
            f"{found}; nothing was updated. Lower the learning rate or clip the gradients, or pass"
            " skip_nonfinite=True to skip such steps"
        )
    for optimizer in optimizers:
        optimizer.skipped += 1
    return False


def _surely_finite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads]) -> bool:
    """Whether all gradients are so small that every sum must be finite. The host waits for a GPU once."""
    by_place: dict[str, list[RowGrads]] = {}
    for grad in grads:
        by_place.setdefault(grad.store.backend.place, []).append(grad)
    dense: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                if (grad_of := parameter.grad) is not None:
                    dense.append(grad_of)
    for there in by_place.values():
        for row_grads in there:
            row_grads.sum_to_check()
        if not there[0].store.backend.surely_finite([grad.terms for grad in there], dense):
            return False
        dense = []  # The first device has checked the dense gradients.
    return bool(by_place)


def _find_nonfinite(optimizers: Sequence[StepOptimizer], grads: Sequence[RowGrads]) -> str | None:
    """Text about the first gradient that is not finite; None = all are finite."""
    for row_grads in grads:
        row_grads.counted()
        finite_U = row_grads.finite_rows()
        if not finite_U.all():
            u = int(np.argmin(finite_U))
            count = int(np.count_nonzero(~finite_U))
            key = row_grads.store.describe_key(int(row_grads.table_U[u]), int(row_grads.id_U[u]))
            return f"the gradients of {count} of {len(finite_U)} rows are not finite, the first of them that of {key}"
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                # A sum is finite only if its terms are, and costs one pass; a finite overflow is ruled out after it.
                grad = parameter.grad
                if grad is not None and not torch.isfinite(grad.sum()) and not torch.isfinite(grad).all():
                    return f"the gradient of parameter {p} {list(parameter.shape)} of group {g} is not finite"
    return None


def step(optimizer: StepOptimizer, go: bool, after_hooks: Callable[[], None] | None = None) -> Groups:
    """Step the dense parameters of an optimizer. Rows are updated afterwards, since the user's hooks may fail here.

    Args:
        go: result of `may_step`; if False, nothing is stepped.
        after_hooks: called when the user's step pre-hooks have run.

    Returns:
        Options of the param groups when the step ran, for `update`: pre-hooks have run, post-hooks have not.

    Raises:
        The error of the optimizer or of a hook; no row has been updated.
    """
    groups: Groups = {}
    if not go:
        return groups

    def keep(*_: object) -> None:
        if after_hooks is not None:
            after_hooks()
        groups.update(options_of(optimizer.optimizer))

    handle = optimizer.optimizer.register_step_pre_hook(keep)  # after the hooks of users
    try:
        optimizer.optimizer.step()
    except BaseException as error:
        add_note(
            error,
            f"{type(optimizer.optimizer).__name__}.step() did not end: no row was updated, but some dense parameters"
            " may have been",
        )
        raise
    finally:
        handle.remove()
    return groups


def check_options(optimizer: StepOptimizer, grads: Sequence[RowGrads], groups: Groups) -> None:
    """Raise ValueError if hooks, which ran after `check_finite`, have changed an option in a way that rows cannot
    follow. Called for all gradients of a step before rows change. `groups`: result of `step`."""
    for grad in grads if groups else ():
        rows = optimizer.rows_of(grad.stores[0])
        if rows is not None:
            row_optimizer, options = rows
            for group in filter(None, options):
                row_optimizer.check(groups.get(id(group), group))


def measure_update(args: tuple[object, RowGrads | None, bool, object], result: None) -> tuple[int, int]:
    _, grads, go, *_ = args
    if grads is None or not go:
        return 0, 0
    layout, rows = grads.store.format, len(grads.slot_U)
    read = 4 * layout.dim * rows if grads.segments is None else grads.segments.grad_NX.nbytes
    return rows, read + 2 * layout.row_bytes * rows


def update(optimizer: StepOptimizer, grads: RowGrads | None, go: bool, groups: Groups | None = None) -> None:
    """Apply the optimizer to the rows, in place, in a `signals_deferred` block of the caller's.

    Args:
        grads: one of the results of `reduce_grads`.
        go: result of `may_step`; if False, nothing is updated.
        groups: options of the param groups, from `step`, for which `check_options` was called; None = the current ones.

    Raises:
        StorageError: the rows were replaced since the lookup; nothing has changed.
    """
    # One param group trains all merged stores, so the first store answers for all.
    rows = optimizer.rows_of(grads.stores[0]) if grads is not None else None
    if grads is None or rows is None or not go:
        return
    store, members, (row_optimizer, options) = grads.store, grads.stores, rows
    if groups:
        options = [groups.get(id(group), group) if group else group for group in options]
    writing = []
    for member in members:
        member.store_lock.check(changes=True)
        writing.append(member.writing)
    if grads.generation != store.generation:  # A hook or another thread has loaded other rows.
        raise StorageError(REPLACED)

    parts = []
    for grads_G, group_G in _by_group(grads, options):
        for part, step in _by_step(grads_G):
            parts.append((part, step, group_G))

    def write() -> None:
        try:
            row_SW, layout = store.row_SW, store.format
            backend: Any = store.backend
            marks = True
            if backend.waits:
                # The loops of updates set dirty bits themselves.
                marks = row_optimizer.has_own_update
                backend = backend.guarded(grads.go_1, None if marks else cast(Any, store).hot.dirty_S)
            weight_SX = layout.weights(row_SW)
            for part, step, group in parts:
                row_optimizer.run(
                    weight_SX, row_SW, part.slot_U, part.to_update,
                    state_begin=layout.state_begin, group=group, step=step + 1, backend=backend,
                )  # fmt: skip
            for member in members:
                member.step += 1
            if marks:
                store.mark_dirty(grads.table_U, grads.slot_U)
            else:
                for member in members:
                    member.changes += 1
        except BaseException as error:  # Perhaps only some rows have changed.
            for member in members:
                member.store_lock.cut_short(error)
            raise

    while_held(writing if len(writing) == 1 else sorted(writing, key=id), write)


def _by_group(grads: RowGrads, options: Sequence[Group | None]) -> list[tuple[RowGrads, Group]]:
    """[(gradients, options)], one pair for all tables with equal options. Frozen tables are left out."""
    if len(options) == 1:
        return [] if options[0] is None else [(grads, options[0])]
    alike: list[tuple[Group | None, list[int]]] = []
    for t, group in enumerate(options):
        same = next((tables for other, tables in alike if other is group or _same_options(other, group)), None)
        if same is None:
            alike.append((group, [t]))
        else:
            same.append(t)
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
    """[(gradients, number of steps that their stores have made)], one pair for all stores with the same number."""
    if len(grads.stores) == 1:
        return [(grads, grads.stores[0].step)]
    steps = sorted({member.step for member in grads.stores})
    if len(steps) == 1:
        return [(grads, steps[0])]
    step_M = np.array([member.step for member in grads.store.members])
    step_U = step_M.take(grads.store.members_of(grads.table_U))
    return [(grads.rows(np.flatnonzero(step_U == step)), step) for step in steps]


def advance(optimizers: Sequence[StepOptimizer], lr_schedulers: Sequence[Scheduler | None], go: bool) -> None:
    """Drop the gradients and, if `go`, step the learning rate schedulers.

    Raises:
        The first error of a scheduler, after the other schedulers were stepped; the optimizer step is counted.
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
                " the step is counted; the learning rate may not have changed",
            )
            failed = failed or error
    if failed is not None:
        raise failed


_ZERO_GRAD = torch.optim.Optimizer.zero_grad


def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Unpin and drop the gradients of rows, and drop dense gradients, or set them to zeros. To drop dense ones, torch's
    own `zero_grad` is called only while a profiler runs, since its record for the profiler takes time; a `zero_grad`
    that replaces torch's is always called."""
    changed = type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer)
    by_torch = changed or not set_to_none or torch.autograd._profiler_enabled()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if isinstance(grad, RowGrad):
                grad.unpin()
            elif by_torch:
                continue
            parameter.grad = None
    if by_torch:
        optimizer.zero_grad(set_to_none=set_to_none)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error that does not have it yet."""
    if not any(note in present for present in getattr(error, "__notes__", ())):
        error.add_note(note)
