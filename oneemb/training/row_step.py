"""The rows' part of a step of torch optimizers: their gradients are taken out of weights, reduced, and applied.

An embedding's weight is in a param group like any other parameter, so it is that group's options that its rows follow.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
    """The embedding whose rows a parameter stands for; None for any other."""
    reference = getattr(parameter, "embedding", None)
    return reference() if isinstance(reference, weakref.ref) else None


class RowWeight(NamedTuple):
    """A parameter that stands for rows, in a group of an optimizer."""

    group: int
    weight: torch.nn.Parameter
    embedding: WeightOfRows


def row_weights(optimizer: torch.optim.Optimizer) -> list[RowWeight]:
    """The parameters of an optimizer that stand for rows."""
    found = []
    for g, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            reference = getattr(parameter, "embedding", None)  # as `embedding_of`
            if isinstance(reference, weakref.ref) and (embedding := reference()) is not None:
                found.append(RowWeight(g, parameter, embedding))
    return found


def groups_of_rows(
    optimizer: torch.optim.Optimizer, weights: Iterable[RowWeight] | None = None
) -> dict[WeightOfRows, tuple[int, ...]]:
    """The numbers of the param groups that each embedding is in: of each of its weights, or of one that stands for all.

    Raises:
        ValueError: some tables of an embedding are in no group, and are not frozen.
    """
    of_weights: dict[WeightOfRows, dict[int, int]] = {}
    for g, weight, embedding in row_weights(optimizer) if weights is None else weights:
        of_weights.setdefault(embedding, {})[id(weight)] = g
    groups: dict[WeightOfRows, tuple[int, ...]] = {}
    for embedding, its in of_weights.items():
        its_weights = embedding.weights
        if len(its_weights) == 1 and (only := id(its_weights[0])) in its:
            groups[embedding] = (its[only],)
            continue
        missing = [t for t, weight in enumerate(its_weights) if id(weight) not in its and weight.requires_grad]
        if missing:
            raise ValueError(
                f"the rows of embedding {embedding.name!r} are trained by one optimizer: {type(optimizer).__name__}"
                f" holds the weights of some of its tables, not those of {missing}; add these, or freeze them with"
                " requires_grad_(False)"
            )
        first = next(iter(its.values()))
        groups[embedding] = tuple(its.get(id(weight), first) for weight in its_weights)
    return groups


def _has_grad(weight: torch.Tensor) -> bool:
    return isinstance(weight.grad, ops.RowGrad) and not weight.grad.spent


def attach(optimizer: torch.optim.Optimizer, groups: Mapping[Rows, Sequence[int]]) -> None:
    """Let rows carry this optimizer's state. All of these embeddings are attached, or none is.

    Raises:
        ValueError, TypeError: one has another optimizer, or this class or an option of it is not supported for rows.
        StorageError: the rows hold another optimizer's state, or a path is in use.
    """
    row_optimizers: dict[Rows, RowOptimizer] = {}
    distributed = torch.distributed
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    for embedding, its_groups in groups.items():
        if embedding.ranks.alone and world > 1:
            raise ValueError(
                f"embedding {embedding.name!r} would be trained by each of {world} ranks"
                " alone, and its rows drift apart: make it with process_group=torch.distributed.group.WORLD; or, if"
                " each rank is to have rows of its own, with a group of this rank alone"
            )
        if embedding.optimizer is not None:
            raise ValueError(
                f"embedding {embedding.name!r} has an optimizer already; one trains it, until"
                " embedding.detach_optimizer()"
            )
        row_optimizers[embedding] = _row_optimizer(embedding, optimizer, its_groups)

    def attach_all() -> None:
        try:
            with signals_deferred:
                for embedding, row_optimizer in row_optimizers.items():
                    attach_rows(embedding, row_optimizer, optimizer)
        except BaseException:  # Ctrl-C, which comes when the block has ended, too.
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
            f"the tables of embedding {embedding.name!r} are in groups of {type(optimizer).__name__} whose options ask"
            " for state of different kinds (momentum, amsgrad and the like): its rows have one; use the same in all"
        )
    return first


def rows_to_owners(weights: Iterable[Sequence[RowWeight]]) -> AnyRanks:
    """Bring the gradients of rows that ranks own together to their owners; all ranks call it before a step.

    Args:
        weights: `row_weights` of each optimizer of the step.

    Returns:
        The ranks of all these embeddings; ValueError if they are of several process groups.
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
        # Also where this rank has looked nothing up: it owns rows that others have.
        grad = weight.grad
        grads.append(grad if isinstance(grad, ops.RowGrad) else ops.RowGrad(embedding.store, ranks=embedding.ranks))
    ranks = [embedding.ranks for embedding in embeddings if not embedding.ranks.alone]
    if (groups := len({one.group for one in ranks})) > 1:
        names = ", ".join(repr(embedding.name) for embedding in embeddings)
        raise ValueError(f"a step trains embeddings of one process_group, those of {names} are {groups}")
    ops.reduce_to_owners(grads)
    for weight, grad in zip(embeddings.values(), grads, strict=True):
        if grad.summed is not None:
            weight.grad = grad
    # Of all of them: lookups of replicated tables are no exchange, so that nothing else compares how these were made.
    return Ranks.joined(ranks)


class RowStep:
    """The rows' part of one step of a torch optimizer.

    Args:
        optimizer: the torch optimizer.
        skip_nonfinite: whether a step whose gradients are not finite is left out, rather than refused.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, skip_nonfinite: bool = False):
        self.optimizer = optimizer
        self.skip_nonfinite = skip_nonfinite
        self.skipped = self.taken = 0
        self.grads: list[tuple[RowWeight, ops.RowGrad]] = []
        """The gradients that have been taken out of weights."""
        self._spent: list[tuple[RowWeight, ops.RowGrad]] = []
        """Gradients taken out of weights whose rows were updated in the backward pass."""
        self.groups_of_tables: Callable[[], Sequence[Group | None]] | None = None
        """Gives the options of each table, None for one that is frozen, where they are not those of the param group."""
        self._groups: dict[EmbeddingStore, tuple[int, ...]] = {}
        self._options: ops.Groups = {}

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, Sequence[Group | None]] | None:
        """The row optimizer of a store and its param groups now, of each table, or of all; None if it is not trained
        here."""
        for (_, _, embedding), _ in self.grads:
            if embedding.store is store and embedding.row_optimizer is not None:
                if self.groups_of_tables is not None:
                    return embedding.row_optimizer, self.groups_of_tables()
                param_groups = self.optimizer.param_groups
                return embedding.row_optimizer, list(map(param_groups.__getitem__, self._groups[store]))
        return None

    @property
    def embeddings(self) -> dict[WeightOfRows, None]:
        """Embeddings whose gradients have been taken."""
        return {taken.embedding: None for taken, _ in self.grads}

    def take_grads(self, weights: Sequence[RowWeight] | None = None) -> None:
        """Take the gradients of rows out of the weights, attaching embeddings that have no optimizer: the gradient of
        one that cannot be attached stays where it is. `weights` are the result of `row_weights`; None = call it."""
        if weights is None:
            weights = row_weights(self.optimizer)
        found: dict[WeightOfRows, None] = {}
        for _, weight, embedding in weights:
            if _has_grad(weight):
                found[embedding] = None
        groups = groups_of_rows(self.optimizer, weights) if found else {}
        for embedding in found:
            if embedding.optimizer is not self.optimizer:
                if embedding.optimizer is not None:
                    raise ValueError(
                        f"embedding {embedding.name!r} is trained by another {type(embedding.optimizer).__name__}; its"
                        " weight may be in the groups of one optimizer, until embedding.detach_optimizer()"
                    )
                for weight in embedding.weights:  # rows move: they come to have state
                    if isinstance(weight.grad, ops.RowGrad):
                        weight.grad.unpin()
                attach(self.optimizer, {embedding: groups[embedding]})
            self._groups[embedding.store] = groups[embedding]
        for taken in weights:
            grad = taken.weight.grad
            if isinstance(grad, ops.RowGrad):
                (self._spent if grad.spent else self.grads).append((taken, grad))
            # Tools step with gradients of zeros to make an optimizer's state; rows have their own, so it is dropped.
            taken.weight.grad = None

    def put_back(self) -> None:
        """Give the weights without a newer gradient theirs back."""
        for taken, grad in self.grads + self._spent:
            if taken.weight.grad is None:
                taken.weight.grad = grad
        self.grads, self._spent = [], []

    def reduce(self, stats: StepStats) -> list[ops.RowGrads]:
        """The gradients of rows, to be summed, with rows pinned until `update` or `put_back`; StoreFullError if they do
        not fit."""
        # Rows that are updated as one have the same options, table by table if need be.
        of_group: dict[tuple[int, ...], list[ops.RowGrad]] = {}
        for taken, grad in self.grads:
            store = taken.embedding.store
            store.store_lock.check(changes=True)
            its = self._groups[store]
            of_group.setdefault(its[:1] if len(set(its)) == 1 else (*its, id(store)), []).append(grad)
        reduced: list[ops.RowGrads] = []
        for group in of_group.values():
            reduced += stats.call("reduce_grads", ops.reduce_grads, group, measure=ops.measure_reduce)
        return reduced

    def reduce_again(self, grads: list[ops.RowGrads], changes: Sequence[int]) -> None:
        """Take the gradients, which hooks of the user's have seen since they were reduced: `grads`, reduced anew and
        checked if something was done to them. `changes` is the result of `changes()` when they were reduced."""
        self.take_grads()
        if self.changes() != changes:
            grads[:] = self.reduce(UNCOUNTED)
            ops.may_step(ops.check_finite([self], grads), [self])

    def changes(self) -> list[int]:
        """Numbers that change whenever a gradient that has been taken is changed or replaced."""
        return [number for _, grad in self.grads for number in (id(grad), grad.changes)]

    def update(self, grads: Sequence[ops.RowGrads], go: bool, options: ops.Groups, stats: StepStats) -> None:
        """Update the rows, let them be evicted, and give the weights their gradients back: as torch's, they stay until
        `zero_grad`."""
        label = f"update({type(self.optimizer).__name__})"
        for grad in grads:
            stats.call(label, ops.update, self, grad, go, options, measure=ops.measure_update)
        for _, row_grad in self.grads:
            row_grad.unpin()
        self.put_back()

    def step_in_backward(self, weight: torch.Tensor) -> None:
        """A hook of a weight, called when its gradient has come: update the rows."""
        row_grad, embedding = weight.grad, embedding_of(weight)
        assert isinstance(row_grad, ops.RowGrad) and embedding is not None
        try:
            in_step([embedding.store.step_lock], self._update_now)
        except BaseException:
            self.put_back()
            row_grad.unpin()
            weight.grad = None  # No gradient is kept: the next one would be added to the refused one.
            raise
        self.put_back()
        row_grad.spend()

    def _update_now(self) -> None:
        def update(go: bool, grads: Sequence[Sequence[ops.RowGrads]]) -> None:
            self.update(grads[0], go, ops.options_of(self.optimizer), UNCOUNTED)
            self.taken += go

        step_rows([self], update, where=" in the backward pass")


def step_rows(
    steps: Sequence[RowStep],
    make: Callable[[bool, Sequence[list[ops.RowGrads]]], None],
    *,
    scaler: torch.amp.GradScaler | None = None,
    commit: Callable[[], object] | None = None,
    stats: StepStats = UNCOUNTED,
    where: str = "",
) -> bool:
    """One transaction of the rows of several optimizers: prepare their gradients, agree with the ranks, make the step;
    give the weights their gradients back, whether it is made or not.

    Args:
        make: makes the step, from whether gradients are finite, and the gradients of each optimizer.
        scaler, commit, stats: as of `step_together`.
        where: ends the name of the step in exchanges.

    Returns:
        Whether the gradients are finite.

    Raises:
        NonFiniteGradientError, RankError: nothing has changed.
        What `make` raises.
    """
    grads: list[list[ops.RowGrads]] = []
    weights = [row_weights(step.optimizer) for step in steps]

    def prepare() -> str | None:
        for step, its in zip(steps, weights, strict=True):
            step.take_grads(its)
        every: list[ops.RowGrads] = []
        for step in steps:
            grads.append(step.reduce(stats))
            every += grads[-1]
        return stats.call("check_finite", ops.check_finite, steps, every)

    try:
        ranks = stats.call("reduce_to_owners", rows_to_owners, weights)
        if ranks.alone:
            go = ops.may_step(prepare(), steps, scaler)
            if commit is not None:
                commit()
        with signals_deferred:  # An interrupt comes before the step or after all of it.
            if not ranks.alone:
                what = f"step by {', '.join(type(step.optimizer).__name__ for step in steps)}{where}"
                # Once they have agreed the other ranks make the step: one that is interrupted must make it too.
                with signals_deferred.forks_allowed():
                    found = ranks.agree(what, prepare)
                go = ops.may_step(found, steps, scaler)
                if commit is not None:
                    commit()
            make(go, grads)
    finally:
        for step in steps:
            step.put_back()
    return go
