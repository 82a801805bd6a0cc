"""The rows' part of a step of torch optimizers: take the gradients of rows out of weights, reduce and apply them.

The weight of an embedding is in a param group like any other parameter. Its rows are updated with this group's options.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from oneemb.embeddings.weight_of_rows import WeightOfRows, attach_rows
from oneemb.graph import ops
from oneemb.graph.one_rank import ALONE
from oneemb.graph.ranks import AnyRanks, Ranks
from oneemb.graph.recorder import UNCOUNTED, StepStats
from oneemb.graph.row_optimizers import Group, RowOptimizer, row_optimizer_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import alone, in_step

Rows = TypeVar("Rows", bound=WeightOfRows)


def embedding_of(parameter: torch.Tensor) -> WeightOfRows | None:
    """The embedding whose rows a parameter stands for; None = the parameter stands for no rows."""
    reference = getattr(parameter, "embedding", None)
    return reference() if isinstance(reference, weakref.ref) else None


class WeightInGroup(NamedTuple):
    """A parameter that stands for rows, with the number of its param group and its embedding."""

    group: int
    weight: torch.nn.Parameter
    embedding: WeightOfRows


def row_weights(optimizer: torch.optim.Optimizer) -> list[WeightInGroup]:
    """The parameters of an optimizer that stand for rows."""
    found = []
    for g, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            reference = getattr(parameter, "embedding", None)  # as `embedding_of`
            if isinstance(reference, weakref.ref) and (embedding := reference()) is not None:
                # `WeightInGroup(...)` makes the same call, by one more function.
                found.append(tuple.__new__(WeightInGroup, (g, parameter, embedding)))
    return found


def groups_of_rows(
    optimizer: torch.optim.Optimizer, weights: Iterable[WeightInGroup] | None = None
) -> dict[WeightOfRows, tuple[int, ...]]:
    """{embedding: numbers of the param groups of its weights}, one number for each table or one for all tables.

    Raises:
        ValueError: some tables of an embedding are in no group, and are not frozen.
    """
    groups: dict[WeightOfRows, tuple[int, ...]] = {}
    of_weights: dict[WeightOfRows, dict[int, int]] = {}
    for g, weight, embedding in row_weights(optimizer) if weights is None else weights:
        only, *others = embedding.weights
        if weight is only and not others:
            groups[embedding] = (g,)
        else:
            of_weights.setdefault(embedding, {})[id(weight)] = g
    for embedding, group_of_weight in of_weights.items():
        if embedding in groups:
            continue  # The other weight is one that it had before.
        weights_of_tables = embedding.weights
        missing = [
            t
            for t, weight in enumerate(weights_of_tables)
            if id(weight) not in group_of_weight and weight.requires_grad
        ]
        if missing:
            raise ValueError(
                f"one optimizer must train all tables of embedding {embedding.name!r}: {type(optimizer).__name__} holds"
                f" the weights of some tables, but not those of {missing}; add these weights, or freeze them with"
                " requires_grad_(False)"
            )
        first = next(iter(group_of_weight.values()))
        groups[embedding] = tuple(group_of_weight.get(id(weight), first) for weight in weights_of_tables)
    return groups


def _has_grad(weight: torch.Tensor) -> bool:
    return isinstance(weight.grad, ops.RowGrad) and not weight.grad.spent


def attach(optimizer: torch.optim.Optimizer, groups: Mapping[Rows, Sequence[int]]) -> None:
    """Give the rows of embeddings the state of an optimizer: of all embeddings, or of none.

    Args:
        groups: {embedding: numbers of its param groups}, see `groups_of_rows`.

    Raises:
        ValueError, TypeError: an embedding has another optimizer, or the class or an option of the optimizer is not
            supported for rows.
        StorageError: the rows hold another optimizer's state, or a path is in use.
    """
    row_optimizers: dict[Rows, RowOptimizer] = {}
    distributed = torch.distributed
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    for embedding, numbers in groups.items():
        if embedding.ranks.alone and world > 1:
            raise ValueError(
                f"embedding {embedding.name!r} would be trained by each of {world} ranks"
                " alone, with rows that drift apart; make it with process_group=torch.distributed.group.WORLD; or, if"
                " each rank should have rows of its own, with a group of this rank alone"
            )
        if embedding.optimizer is not None:
            raise ValueError(
                f"embedding {embedding.name!r} has an optimizer already, {type(embedding.optimizer).__name__}; call"
                f" embedding.detach_optimizer() before {type(optimizer).__name__} trains it"
            )
        row_optimizers[embedding] = _row_optimizer(embedding, optimizer, numbers)

    def attach_all() -> None:
        try:
            with signals_deferred:
                for embedding, row_optimizer in row_optimizers.items():
                    attach_rows(embedding, row_optimizer, optimizer)
        except BaseException:  # also Ctrl-C, which is raised at the end of the block
            for embedding in row_optimizers:
                embedding.detach_optimizer()
            raise

    alone((embedding.store.step_lock for embedding in row_optimizers), attach_all)


def _row_optimizer(embedding: WeightOfRows, optimizer: torch.optim.Optimizer, groups: Sequence[int]) -> RowOptimizer:
    first, *others = (row_optimizer_of(optimizer, optimizer.param_groups[g]) for g in dict.fromkeys(groups))
    if any(
        (other.name, other.weight_state, other.row_state) != (first.name, first.weight_state, first.row_state)
        for other in others
    ):
        raise ValueError(
            f"the tables of embedding {embedding.name!r} are in groups of {type(optimizer).__name__} whose options need"
            " different state (momentum, amsgrad and the like), but its rows have one kind of state; use the same"
            " options in all groups"
        )
    return first


def rows_to_owners(weights: Iterable[Sequence[WeightInGroup]]) -> AnyRanks:
    """Bring the gradients of rows that ranks own together to the owners. All ranks call it before a step.

    Args:
        weights: result of `row_weights` for each optimizer of the step.

    Returns:
        The ranks of all embeddings of the step; ValueError if they have several process groups.
    """
    embeddings: dict[WeightOfRows, torch.nn.Parameter] = {}
    for of_optimizer in weights:
        for _, weight, embedding in of_optimizer:
            if not embedding.ranks.alone and (weight.requires_grad or _has_grad(weight)):
                embeddings[embedding] = weight
    if not embeddings:
        return ALONE
    grads: list[ops.RowGrad] = []
    for embedding, weight in embeddings.items():
        # Also if this rank has looked no ids up: it may own rows that other ranks have looked up.
        grad = weight.grad
        if not isinstance(grad, ops.RowGrad):
            grad = ops.RowGrad.of(embedding.store, ranks=embedding.ranks)
        grads.append(grad)
    ranks = [embedding.ranks for embedding in embeddings if not embedding.ranks.alone]
    if (groups := len({one.group for one in ranks})) > 1:
        names = ", ".join(repr(embedding.name) for embedding in embeddings)
        raise ValueError(f"a step must train embeddings of one process_group, got {groups} for {names}")
    ops.reduce_to_owners(grads)
    for weight, grad in zip(embeddings.values(), grads, strict=True):
        if grad.summed is not None:
            weight.grad = grad
    # The ranks of all embeddings: lookups of replicated tables are no exchange, so only this one compares their `made`.
    return Ranks.joined(ranks)


class RowStep:
    """The rows' part of one step of a torch optimizer.

    Args:
        optimizer: the torch optimizer.
        skip_nonfinite: whether a step whose gradients are not finite is skipped; False = it raises.
        check_in_step: whether each step waits for the check of its gradients; see `oneemb.Optimizer`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, skip_nonfinite: bool = False, check_in_step: bool = True
    ):  # fmt: skip
        self.optimizer = optimizer
        self.skip_nonfinite, self.check_in_step = skip_nonfinite, check_in_step
        self._is_late, self._label = False, f"update({type(optimizer).__name__})"
        self.skipped = self.taken = 0
        self.grads: list[tuple[WeightInGroup, ops.RowGrad]] = []
        """The gradients that were taken out of weights, with these weights."""
        self._spent: list[tuple[WeightInGroup, ops.RowGrad]] = []
        """Gradients that were taken out of weights, of rows that were updated in the backward pass."""
        self.groups_of_tables: Callable[[], Sequence[Group | None]] | None = None
        """Returns the options of each table (None = frozen) in place of those of the param group; None = not
        replaced."""
        self._taken: dict[EmbeddingStore, tuple[WeightOfRows, tuple[int, ...]]] = {}
        """{store: its embedding, and the numbers of the embedding's param groups} of the gradients that were taken."""
        self._options: ops.Groups = {}

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, Sequence[Group | None]] | None:
        """(row optimizer of a store, its current param groups: one for all tables, or one for each table); None = no
        gradient of the store was taken."""
        embedding, numbers = self._taken.get(store, (None, ()))
        if embedding is None or embedding.row_optimizer is None:
            return None
        if self.groups_of_tables is not None:
            return embedding.row_optimizer, self.groups_of_tables()
        groups: list[Group | None] = []
        for number in numbers:
            groups.append(self.optimizer.param_groups[number])
        return embedding.row_optimizer, groups

    @property
    def embeddings(self) -> dict[WeightOfRows, None]:
        """The embeddings whose gradients were taken, as keys."""
        return {taken.embedding: None for taken, _ in self.grads}

    def begin_late(self, check: ops.LateCheck) -> None:
        """Let the torch optimizer write nothing where `check` finds a gradient that is not finite, until `end_late`."""
        optimizer: Any = self.optimizer
        optimizer.found_inf, optimizer.grad_scale, self._is_late = check.found_inf(), None, True

    def end_late(self) -> None:
        """End the step that `begin_late` has begun."""
        if self._is_late:
            self._is_late = False
            del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]

    def take_grads(self, weights: Sequence[WeightInGroup] | None = None) -> None:
        """Take the gradients of rows out of the weights. Embeddings without an optimizer are attached; if that raises,
        the gradients stay in the weights. `weights`: result of `row_weights`; None = call it."""
        if weights is None:
            weights = row_weights(self.optimizer)
        found: dict[WeightOfRows, None] = {}
        grads: list[tuple[WeightInGroup, ops.RowGrad]] = []
        for taken in weights:
            grad = taken.weight.grad
            if isinstance(grad, ops.RowGrad):
                grads.append((taken, grad))
                if not grad.spent:
                    found[taken.embedding] = None
        groups = groups_of_rows(self.optimizer, weights) if found else {}
        for embedding in found:
            if embedding.optimizer is not self.optimizer:
                if embedding.optimizer is not None:
                    raise ValueError(
                        f"embedding {embedding.name!r} must be trained by one optimizer, here"
                        f" {type(self.optimizer).__name__}, and is trained by another"
                        f" {type(embedding.optimizer).__name__}; call embedding.detach_optimizer() first"
                    )
                for weight in embedding.weights:  # `attach` moves rows, since they get wider
                    if isinstance(weight.grad, ops.RowGrad):
                        weight.grad.unpin()
                attach(self.optimizer, {embedding: groups[embedding]})
            self._taken[embedding.store] = embedding, groups[embedding]
        for taken, grad in grads:
            (self._spent if grad.spent else self.grads).append((taken, grad))
        for _, weight, _ in weights:
            # Tools step with dense gradients of zeros to create an optimizer's state. Such a gradient is dropped.
            weight.grad = None

    def takes(self, taken: WeightInGroup) -> bool:
        """Whether `take` may take a gradient: the step has none yet, its optimizer is attached to the only weight of
        the embedding, and no hook is called before the step."""
        embedding, optimizer = taken.embedding, self.optimizer
        weight, *others = embedding.weights
        is_attached = embedding.optimizer is optimizer and weight is taken.weight and not others
        return is_attached and not (self.has_grads() or self.groups_of_tables or optimizer._optimizer_step_pre_hooks)

    def take(self, taken: WeightInGroup, grad: ops.RowGrad) -> None:
        """Take a gradient out of its weight, as `take_grads` takes several."""
        self.grads.append((taken, grad))
        self._taken[taken.embedding.store] = taken.embedding, (taken.group,)
        taken.weight.grad = None

    def has_grads(self) -> bool:
        """Whether gradients were taken out of weights and not put back."""
        return bool(self.grads or self._spent)

    def put_back(self) -> None:
        """Put the gradients back into the weights that have no newer gradient."""
        for taken, grad in self.grads + self._spent:
            if taken.weight.grad is None:
                taken.weight.grad = grad
        self.grads, self._spent, self._taken = [], [], {}

    def reduce(self, stats: StepStats) -> list[ops.RowGrads]:
        """Group the gradients of rows by unique key; `update` sums them. The rows are pinned until `update` or
        `put_back`; StoreFullError if they do not fit."""
        # Gradients of one param group are reduced together, a store with tables in several groups alone.
        of_group: dict[tuple[int, ...], list[ops.RowGrad]] = {}
        for taken, grad in self.grads:
            store = taken.embedding.store
            store.store_lock.check(changes=True)
            _, group_T = self._taken[store]
            if len(group_T) > 1:
                group_T = group_T[:1] if len(set(group_T)) == 1 else (*group_T, id(store))
            of_group.setdefault(group_T, []).append(grad)
        reduced: list[ops.RowGrads] = []
        for group in of_group.values():
            reduced += stats.call("reduce_grads", ops.reduce_grads, group, measure=ops.measure_reduce)
        return reduced

    def reduce_again(self, grads: list[ops.RowGrads], changes: Sequence[int]) -> None:
        """Take the gradients out again after the user's hooks. If a hook has changed them, reduce and check them anew.

        Args:
            grads: the reduced gradients; replaced in place if they were reduced anew.
            changes: result of `changes()` when the gradients were reduced.
        """
        self.take_grads()
        if self.changes() != changes:
            grads[:] = self.reduce(UNCOUNTED)
            ops.may_step(ops.check_finite([self], grads), [self])

    def changes(self) -> list[int]:
        """Numbers that change if a taken gradient is changed or replaced."""
        return [number for _, grad in self.grads for number in (id(grad), grad.changes)]

    def update(self, grads: Sequence[ops.RowGrads], go: bool, options: ops.Groups, stats: StepStats) -> None:
        """Update the rows, unpin them, and put the gradients back into the weights, where they stay until `zero_grad`,
        as torch's gradients do.

        Args:
            grads: result of `reduce`.
            go: whether to update; False = the step is skipped.
            options: options of the param groups.
        """
        for grad in grads:
            stats.call(self._label, ops.update, self, grad, go, options, measure=ops.measure_update)
        for _, row_grad in self.grads:
            row_grad.unpin()
        self.put_back()

    def step_in_backward(self, weight: torch.Tensor) -> None:
        """Update the rows. This is a hook of `weight`, called when its gradient is complete."""
        row_grad, embedding = weight.grad, embedding_of(weight)
        assert isinstance(row_grad, ops.RowGrad) and embedding is not None
        try:
            in_step([embedding.store.step_lock], self._update_now)
        except BaseException:
            self.put_back()
            row_grad.unpin()
            weight.grad = None  # otherwise the next gradient would be added to the refused one
            raise
        self.put_back()
        row_grad.spend()

    def _update_now(self) -> None:
        def update(go: bool, grads: Sequence[Sequence[ops.RowGrads]]) -> None:
            self.update(grads[0], go, ops.options_of(self.optimizer), UNCOUNTED)
            self.taken += go

        late = None if self.check_in_step else ()
        step_rows([self], update, where=" in the backward pass", late=late)


def step_rows(
    steps: Sequence[RowStep],
    make: Callable[[bool, Sequence[list[ops.RowGrads]]], None],
    *,
    scaler: torch.amp.GradScaler | None = None,
    commit: Callable[[], object] | None = None,
    stats: StepStats = UNCOUNTED,
    where: str = "",
    late: ops.Counts | None = None,
    weights: Sequence[Sequence[WeightInGroup]] | None = None,
) -> bool:
    """Step the rows of several optimizers as one transaction: prepare the gradients, agree with the ranks, make the
    step, and in any case put the gradients back into the weights.

    Args:
        make: makes the step. Its arguments are whether gradients are finite, and the gradients of each optimizer.
        scaler, commit, stats: as for `step_together`.
        where: end of the step's name in exchanges.
        late, weights: as for `step_together`.

    Returns:
        Whether the gradients are finite, so that the step was made.

    Raises:
        NonFiniteGradientError, RankError: nothing has changed.
        Any error of `make`.
    """
    grads: list[list[ops.RowGrads]] = []
    weights = [row_weights(step.optimizer) for step in steps] if weights is None else weights
    late_counts: ops.Counts | None = None

    def prepare() -> str | None:
        for step, weights_of_step in zip(steps, weights, strict=True):
            step.take_grads(weights_of_step)
        every: list[ops.RowGrads] = []
        for step in steps:
            grads.append(step.reduce(stats))
            every += grads[-1]
        return stats.call("check_finite", ops.check_finite, steps, every, late=late_counts)

    try:
        ranks = stats.call("reduce_to_owners", rows_to_owners, weights)
        # Hooks before a step may change gradients.
        late_counts = late if ranks.alone else None
        for step in steps:
            optimizer = step.optimizer
            if optimizer._optimizer_step_pre_hooks:
                late_counts = None
        if ranks.alone:
            go = ops.may_step(prepare(), steps, scaler)
            if commit is not None:
                commit()
        with signals_deferred:  # An interrupt comes before the step or after the whole step.
            if not ranks.alone:
                what = f"step by {', '.join(type(step.optimizer).__name__ for step in steps)}{where}"
                # After `agree` the other ranks make the step, so an interrupted rank must make it too.
                with signals_deferred.forks_allowed():
                    found = ranks.agree(what, prepare)
                go = ops.may_step(found, steps, scaler)
                if commit is not None:
                    commit()
            make(go, grads)
    finally:
        for step in steps:
            step.end_late()
            step.put_back()
    return go
