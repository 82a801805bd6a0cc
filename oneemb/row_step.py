"""Lets torch's own optimizers train rows: hooks around every `optimizer.step()` of the process.

    before   the gradients of rows are taken out of `weight.grad`, which torch's step must not see; embeddings without
             an optimizer are attached to this one; what is not finite is refused
    after    the rows are updated, with the options that the step was made with, and the gradients are put back

An embedding's weight is in a param group like any other parameter, so it is that group's options that its rows follow.

A step that raises in between leaves the gradients of rows here; the optimizer's next step takes them up, as it does
those of dense parameters. `oneemb.Optimizer` puts them back at once.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from oneemb.graph import ops
from oneemb.graph.building import building_now
from oneemb.graph.ranks import Ranks
from oneemb.graph.recorder import StepStats
from oneemb.graph.row_optimizers import Group, RowOptimizer, row_optimizer_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.step_lock import alone, in_step
from oneemb.storage.turns import undisturbed

__all__ = ["RowStep", "TrainedRows", "attach", "embedding_of", "row_weights"]


class TrainedRows(Protocol):
    """What a step asks of an embedding."""

    name: str
    store: EmbeddingStore
    weight: torch.nn.Parameter
    ranks: Ranks | None
    row_optimizer: RowOptimizer | None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The one that trains the rows."""

    def attach(self, row_optimizer: RowOptimizer, optimizer: torch.optim.Optimizer) -> None:
        """Give every row the state of this optimizer."""

    def detach_optimizer(self) -> None:
        """Let another optimizer train the rows."""


Rows = TypeVar("Rows", bound=TrainedRows)


def embedding_of(parameter: torch.Tensor) -> TrainedRows | None:
    """The embedding whose rows a parameter stands for; None for any other."""
    reference = getattr(parameter, "embedding", None)
    return reference() if isinstance(reference, weakref.ref) else None


def row_weights(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, TrainedRows]]:
    """The embeddings whose weights an optimizer holds, with the number of the param group."""
    for g, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if (embedding := embedding_of(parameter)) is not None:
                yield g, embedding


def _has_grad(weight: torch.Tensor) -> bool:
    return isinstance(weight.grad, ops.RowGrad) and not weight.grad.spent


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def attach(optimizer: torch.optim.Optimizer, groups: Mapping[Rows, int]) -> None:
    """Let rows carry this optimizer's state. All of these embeddings are attached, or none is.

    Raises:
        ValueError, TypeError: one has another optimizer, or this class or an option of it is not supported for rows.
        StorageError: the rows hold another optimizer's state, or a path is in use.
    """
    row_optimizers: dict[Rows, RowOptimizer] = {}
    for embedding, g in groups.items():
        if embedding.ranks is None and (world := _world_size()) > 1:
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
        row_optimizers[embedding] = row_optimizer_of(optimizer, optimizer.param_groups[g])

    def attach_all() -> None:
        try:
            with undisturbed:
                for embedding, row_optimizer in row_optimizers.items():
                    embedding.attach(row_optimizer, optimizer)
        except BaseException:  # Ctrl-C, which comes when the block has ended, too.
            for embedding in row_optimizers:
                embedding.detach_optimizer()
            raise

    alone((embedding.store.step_lock for embedding in row_optimizers), attach_all)


def settle_rows(optimizers: Iterable[torch.optim.Optimizer]) -> Ranks | None:
    """Bring the gradients of rows that ranks own together to their owners; all ranks call it before a step.

    Returns:
        The ranks; None if there are none.

    Raises:
        ValueError: the rows are of several process groups.
        RankError: another rank has failed.
    """
    embeddings: dict[TrainedRows, None] = {}
    for optimizer in optimizers:
        embeddings |= {
            embedding: None
            for _, embedding in row_weights(optimizer)
            if embedding.ranks is not None and (embedding.weight.requires_grad or _has_grad(embedding.weight))
        }
    grads: list[ops.RowGrad] = []
    for embedding in embeddings:
        # Also where this rank has looked nothing up: it owns rows that others have.
        grad = embedding.weight.grad
        grads.append(grad if isinstance(grad, ops.RowGrad) else ops.RowGrad(embedding.store, ranks=embedding.ranks))
    groups = {embedding.ranks.group: embedding.ranks for embedding in embeddings if embedding.ranks is not None}
    if len(groups) > 1:
        names = ", ".join(repr(embedding.name) for embedding in embeddings)
        raise ValueError(f"a step trains embeddings of one process_group, those of {names} are {len(groups)}")
    ops.settle(grads)
    for embedding, grad in zip(embeddings, grads, strict=True):
        if grad.summed is not None:
            embedding.weight.grad = grad
    return next(iter(groups.values()), None)


class RowStep:
    """The rows' part of one step of a torch optimizer: `begin`, the step itself, `end`.

    Args:
        optimizer: the torch optimizer.
        skip_nonfinite: whether a step whose gradients are not finite is left out, rather than refused.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, skip_nonfinite: bool = False):
        self.optimizer = optimizer
        self.skip_nonfinite = skip_nonfinite
        self.skipped = self.taken = 0
        self.grads: list[tuple[TrainedRows, ops.RowGrad]] = []
        """The gradients that have been taken out of weights."""
        self._spent: list[tuple[TrainedRows, ops.RowGrad]] = []
        """Those too, of rows that were updated in the backward pass."""
        self._groups: dict[EmbeddingStore, int] = {}
        self._options: ops.Groups = {}

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, Group] | None:
        """The row optimizer of a store and its parameter group now; None if it is not trained here."""
        for embedding, _ in self.grads:
            if embedding.store is store and embedding.row_optimizer is not None:
                return embedding.row_optimizer, self.optimizer.param_groups[self._groups[store]]
        return None

    def take_grads(self) -> None:
        """Take the gradients of rows out of the weights, attaching embeddings that have no optimizer.

        Raises:
            ValueError, TypeError, StorageError: an embedding cannot be attached; its gradient stays where it is.
        """
        weights = list(row_weights(self.optimizer))
        found = [(g, embedding) for g, embedding in weights if _has_grad(embedding.weight)]
        for g, embedding in found:
            if embedding.optimizer is not self.optimizer:
                if embedding.optimizer is not None:
                    raise ValueError(
                        f"embedding {embedding.name!r} is trained by another {type(embedding.optimizer).__name__}; its"
                        " weight may be in the groups of one optimizer, until embedding.detach_optimizer()"
                    )
                embedding.weight.grad.unpin()  # type: ignore[union-attr]  # rows move: they come to have state
                attach(self.optimizer, {embedding: g})
        for g, embedding in found:
            self._groups[embedding.store] = g
        for _, embedding in weights:
            grad = embedding.weight.grad
            if isinstance(grad, ops.RowGrad):
                (self._spent if grad.spent else self.grads).append((embedding, grad))
                embedding.weight.grad = None

    def put_back(self) -> None:
        """Give the weights their gradients back, those that have no newer one."""
        for embedding, grad in self.grads + self._spent:
            if embedding.weight.grad is None:
                embedding.weight.grad = grad
        self.grads, self._spent = [], []

    def reduce(self, stats: StepStats) -> list[ops.RowGrads]:
        """The gradients of rows, to be summed, with rows pinned until `update` or `put_back`.

        Args:
            stats: counts and times each op.

        Raises:
            StoreFullError: the rows of the step do not fit.
        """
        of_group: dict[int, list[ops.RowGrad]] = {}  # one group's options are those of all rows that are updated as one
        for embedding, grad in self.grads:
            embedding.store.turns.check(changes=True)
            of_group.setdefault(self._groups[embedding.store], []).append(grad)
        reduced = [stats.call("reduce_grads", ops.reduce_grads, group) for group in of_group.values()]
        return [grads for each in reduced for grads in each]

    def update(self, grads: list[ops.RowGrads], go: bool, options: ops.Groups, stats: StepStats) -> None:
        """Update the rows, let them be evicted, and give the weights their gradients back: as torch's, they stay until
        `zero_grad`."""
        for grad in grads:
            stats.call(f"update({type(self.optimizer).__name__})", ops.update, self, grad, go, options)
        for _, row_grad in self.grads:
            row_grad.unpin()
        self.put_back()

    def step_in_backward(self, weight: torch.Tensor) -> None:
        """A hook of a weight, called when its gradient has come: update the rows."""
        row_grad = weight.grad
        assert isinstance(row_grad, ops.RowGrad)
        try:
            self.take_grads()
            locks = [embedding.store.step_lock for embedding, _ in self.grads]
            in_step(locks, self._update_now)
        finally:
            self.put_back()
        row_grad.spend()

    def _update_now(self) -> None:
        grads = self.reduce(StepStats())
        go = ops.may_step(ops.check_finite([self], grads), [self])
        with undisturbed:
            self.update(grads, go, ops.options_of(self.optimizer), StepStats())
            self.taken += go


# ---- torch's own `optimizer.step()` ---------------------------------------------------------------------------------


class _Hooked(RowStep):
    """A step between the two hooks."""

    def begin(self) -> None:
        ranks = settle_rows([self.optimizer])
        try:
            found = self._ready() if ranks is None else ranks.agree("step", self._ready)
            ops.may_step(found, [self])
        except BaseException:
            self.put_back()
            raise
        if not self.grads:
            self.put_back()
            return
        # The options after hooks of the user's that come before the step, and before those that come after it.
        self._handle = self.optimizer.register_step_pre_hook(self._keep_options)

    def _ready(self) -> str | None:
        self.take_grads()
        if not self.grads:
            return None
        self._reduced = self.reduce(StepStats())
        return ops.check_finite([self], self._reduced)

    def _keep_options(self, *_: object) -> None:
        self._options = ops.options_of(self.optimizer)

    def abandon(self) -> None:
        """The step has raised: the gradients stay for another one."""
        self._handle.remove()
        self.put_back()

    def end(self) -> None:
        self._handle.remove()
        locks = [embedding.store.step_lock for embedding, _ in self.grads]
        with undisturbed:
            in_step(locks, self._update_rows)

    def _update_rows(self) -> None:
        try:
            if any(grads.generation != grads.store.generation for grads in self._reduced):
                self._reduced = self.reduce(StepStats())  # A hook, or another thread, has moved or replaced the rows.
            self.update(self._reduced, True, self._options, StepStats())
        except Exception as error:
            name = type(self.optimizer).__name__
            ops.add_note(error, f"{name}.step() has stepped the dense parameters, not all rows")
            raise


_begun: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _Hooked]" = weakref.WeakKeyDictionary()


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (building := building_now()) is not None:
        building.check_step(optimizer)
    if getattr(optimizer, "steps_rows_itself", False):
        return None
    if (left := _begun.pop(optimizer, None)) is not None:  # a step that raised
        left.abandon()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _begin(optimizer)
        return None

    def closure_and_rows() -> Any:
        loss = closure()
        _begin(optimizer)
        return loss

    # Gradients come in the closure, which the step calls first.
    return ((args[0], closure_and_rows, *args[2:]), kwargs) if len(args) > 1 else (
        args, {**kwargs, "closure": closure_and_rows}
    )  # fmt: skip


def _begin(optimizer: torch.optim.Optimizer) -> None:
    step = _Hooked(optimizer)
    step.begin()
    if step.grads:
        _begun[optimizer] = step


def _after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    step = _begun.pop(optimizer, None)
    if step is not None:
        step.end()


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
