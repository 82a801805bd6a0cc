"""Joins a torch optimizer with embeddings: the update of rows and the step of dense parameters are one."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Never

import torch

from oneemb.embeddings.embedding import TableEmbedding
from oneemb.embeddings.weight_of_rows import WeightOfRows
from oneemb.graph import ops
from oneemb.graph.recorder import UNCOUNTED, StepStats
from oneemb.graph.row_optimizers import Group, RowOptimizer
from oneemb.graph.tracers import uncompiled
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import in_step
from oneemb.training.row_step import RowStep, attach, groups_of_rows, row_weights, step_rows
from oneemb.training.step_hooks import rows_stepped, steps_nothing


def _of_torch(name: str, doc: str) -> Any:
    """Property that is the torch optimizer's attribute of this name; in `__init__`, before there is one, the object's
    own."""

    def holder(optimizer: "Optimizer") -> tuple[object, str]:
        return (optimizer, f"_own_{name}") if optimizer._inner is None else (optimizer._inner, name)

    def put(optimizer: "Optimizer", value: object) -> None:
        setattr(*holder(optimizer), value)

    return property(lambda optimizer: getattr(*holder(optimizer)), put, doc=doc)


def _of_row_step(name: str, doc: str) -> Any:
    """Property that is the row step's attribute of this name."""

    def put(optimizer: "Optimizer", value: object) -> None:
        setattr(optimizer.row_step, name, value)

    return property(attrgetter(f"row_step.{name}"), put, doc=doc)


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer that steps the rows of embeddings too, for eager training. `TrainGraph` makes its own.

    The rows that were looked up since the last step are updated as the optimizer's class would update them, with the
    hyperparameters that the group with `embedding.weight` has at this step; other rows are not touched. Where the
    update rule counts steps, it uses the embedding's count.

    Args:
        optimizer: a torch optimizer of one of the supported classes; its groups hold `embedding.weight` of each
            embedding, and dense parameters or none.
        embeddings: the embeddings it trains. An embedding has one optimizer only.
        skip_nonfinite: skip a step in which a gradient is NaN or infinite, dense parameters included, and count it in
            `skipped`, instead of raising `NonFiniteGradientError`.
        fused: update the rows of an embedding in the backward pass, as soon as their gradient has come: no step is
            needed for them, and no gradient is kept. One backward pass is one step; clipping, a GradScaler and
            accumulation need gradients that are kept, and are refused. Ranks bring gradients to their owners in the
            backward pass, which every one of them then makes.

    Raises:
        ValueError: an embedding is in no group, is given twice or has an optimizer already; or the class, or an option
            of it, is not supported for rows: the message names it.
        StorageError: the rows hold another optimizer's state, or the embedding's path is in use.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "words", 8, torch.float32, torch.int64, [oneemb.make_table()],
        ...     oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        >>> optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding])
        >>> embedding(torch.tensor([3, 5, 3])).sum().backward()
        >>> optimizer.step()
        >>> embedding.stats()["step"]
        1
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        embeddings: Sequence[TableEmbedding] | None = None,
        *,
        skip_nonfinite: bool = False,
        fused: bool = False,
    ):
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizer must be a torch optimizer made on embedding.parameters(), got {type(optimizer).__name__}"
                f" {optimizer!r}"
            )
        embeddings = list(embeddings) if isinstance(embeddings, Iterable) else embeddings
        if embeddings is not None and not (
            isinstance(embeddings, list) and all(isinstance(one, TableEmbedding) for one in embeddings)
        ):
            raise TypeError(f"embeddings must be a list of embeddings that the optimizer trains, got {embeddings!r}")
        self._inner: torch.optim.Optimizer | None = None
        # Nobody sees the groups and state of this call's parameter: see below.
        super().__init__([torch.empty(0, dtype=torch.float32, device="cpu")], {})
        self._inner = optimizer
        self.steps_rows_itself = True
        groups: dict[WeightOfRows, tuple[int, ...]] = {}
        held = groups_of_rows(optimizer)
        for embedding in held if embeddings is None else embeddings:
            if embedding in groups:
                raise ValueError(f"embedding {embedding.name!r} is given twice; its rows would be stepped twice")
            if embedding not in held:
                raise ValueError(
                    f"no group of {type(optimizer).__name__} holds the weight of embedding {embedding.name!r}; make the"
                    " optimizer on embedding.parameters()"
                )
            groups[embedding] = held[embedding]
        self.embeddings = tuple(groups)
        self._groups_of = {embedding.store: its for embedding, its in groups.items()}
        self.row_step = RowStep(optimizer, skip_nonfinite)
        """Step of this optimizer on rows."""
        if fused and any(len(embedding.weights) > 1 for embedding in self.embeddings):
            raise ValueError(
                "fused=True updates the rows of an embedding as soon as their gradient has come, and those of tables"
                " that have weights of their own come one by one; leave it out for them"
            )
        if fused and len(self.embeddings) > 1 and not all(embedding.ranks.alone for embedding in self.embeddings):
            raise ValueError(
                "fused=True updates the rows of an embedding as soon as their gradient has come, and ranks bring those"
                " of an optimizer to their owners together; make an optimizer for each embedding with a process_group"
            )
        attach(optimizer, groups)
        if fused:
            # A hook that held the step, which holds the weight, would keep rows and their path for ever: torch's hooks
            # are nothing that Python's collector looks into.
            step = weakref.WeakMethod(self.row_step.step_in_backward)
            for embedding in self.embeddings:
                (weight,) = embedding.weights
                weight.register_post_accumulate_grad_hook(functools.partial(_step_in_backward, step))
                weight.is_stepped_in_backward = True  # type: ignore[attr-defined]

    # Schedulers, loggers and trainers see the attributes of the torch optimizer.

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        assert self._inner is not None
        return self._inner

    param_groups: list[Group] = _of_torch("param_groups", "The torch optimizer's groups.")
    defaults: dict[str, Any] = _of_torch("defaults", "The torch optimizer's options for groups that say nothing else.")
    state: Any = _of_torch("state", "The torch optimizer's state of dense parameters; that of rows is in the rows.")
    skip_nonfinite: bool = _of_row_step(
        "skip_nonfinite", "Whether steps whose gradients are not finite are left out, rather than refused."
    )
    skipped: int = _of_row_step("skipped", "Steps that were left out because a gradient was not finite.")
    taken: int = _of_row_step("taken", "Steps made by this object.")

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, Sequence[Group | None]] | None:
        """The row optimizer of a store and its param groups now, of each table, or of all; None if it is not trained
        here."""
        if store not in self._groups_of:
            return None
        embedding = next(embedding for embedding in self.embeddings if embedding.store is store)
        if embedding.row_optimizer is None:  # It was detached, and is attached anew by the next step.
            return None
        return embedding.row_optimizer, [self.optimizer.param_groups[g] for g in self._groups_of[store]]

    @uncompiled  # torch.compile stays out of it, as out of a lookup
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the dense parameters and the rows that have a gradient. Gradients stay until `zero_grad`.

        Args:
            closure: computes the loss and its gradients before the step.

        Returns:
            What the closure gave.

        Raises:
            NonFiniteGradientError: a gradient is NaN or infinite; no weight, state or count has changed. Ids that the
                lookups have inserted stay, with their initial values.
            What the torch optimizer or a hook of it raises: no row has changed; dense parameters may have.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        embeddings = dict.fromkeys(self.embeddings)
        for _, _, embedding in row_weights(self.optimizer):
            embeddings[embedding] = None
        in_step([embedding.store.step_lock for embedding in embeddings], functools.partial(step_together, [self]))
        return loss

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of rows and dense parameters."""
        with signals_deferred:
            self.row_step.put_back()  # gradients of a step that was stopped
            for _, weight, _ in row_weights(self.optimizer):
                if isinstance(weight.grad, ops.RowGrad):
                    weight.grad.unpin()
                    weight.grad = None
        if set_to_none:
            ops.zero_grad(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the torch optimizer. Embeddings whose weights it holds are attached at the next step."""
        if self._inner is None:
            super().add_param_group(param_group)
        else:
            self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state; the state of rows is in the snapshots of embeddings."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            "an oneemb.Optimizer cannot be copied or pickled: it trains the rows of its embeddings; save its"
            " state_dict()"
        )


def _step_in_backward(step: Callable[[], Callable[[torch.Tensor], None] | None], weight: torch.Tensor) -> None:
    call = step()
    if call is not None:
        call(weight)
    else:
        warnings.warn(
            "the oneemb.Optimizer that updated rows in the backward pass (fused=True) is gone, so that it updates them"
            " no more: keep a reference to it as long as you train",
            stacklevel=2,
        )


def step_together(
    optimizers: Sequence[Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    *,
    commit: Callable[[], object] | None = None,
    stats: StepStats = UNCOUNTED,
) -> bool:
    """Make one step of several optimizers, dense parameters and rows: all of it or, if a gradient is not finite, none.

    Args:
        scaler: the GradScaler that has scaled and unscaled the gradients: a step that overflows is then left out.
        commit: called before the first change; None = nothing is.
        stats: counts and times each op.

    Returns:
        Whether the step was made.

    Raises:
        NonFiniteGradientError: a gradient is NaN or infinite; nothing has changed.
        What a torch optimizer or a hook of it raises: no row has changed; dense parameters may have.
    """
    for optimizer in optimizers:
        for embedding in optimizer.embeddings:
            embedding.store.store_lock.check(changes=True)
    rows = [optimizer.row_step for optimizer in optimizers]

    def make(go: bool, grads: Sequence[list[ops.RowGrads]]) -> None:
        try:
            options: list[ops.Groups] = []
            for row_step, its_grads in zip(rows, grads, strict=True):
                if go and steps_nothing(row_step.optimizer):
                    options.append({})  # as they are now: no hook can change them
                    continue
                try:
                    rows_stepped.add(row_step.optimizer)
                    after_hooks = _after_hooks(row_step, its_grads, go)
                    label = f"step({type(row_step.optimizer).__name__})"
                    options.append(stats.call(label, ops.step, row_step, go, after_hooks))
                finally:
                    rows_stepped.discard(row_step.optimizer)
            for row_step, its_grads, its_options in zip(rows, grads, options, strict=True):
                row_step.update(its_grads, go, its_options, stats)
                row_step.taken += go
        except BaseException as error:
            if not isinstance(error, Exception):  # It was not held back: some rows may be updated, others not.
                for optimizer in optimizers:
                    for embedding in optimizer.embeddings:
                        embedding.store.store_lock.note(error)
            raise

    return step_rows(rows, make, scaler=scaler, commit=commit, stats=stats)


def _after_hooks(row_step: RowStep, grads: list[ops.RowGrads], go: bool) -> Callable[[], None] | None:
    """Give weights their gradients back for hooks of the torch optimizer, if it has any. Returns what takes them
    anew."""
    optimizer = row_step.optimizer
    if not go or not optimizer._optimizer_step_pre_hooks:
        return None
    changes = row_step.changes()
    row_step.put_back()
    return lambda: row_step.reduce_again(grads, changes)
