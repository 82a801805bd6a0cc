"""`oneemb.Optimizer`: steps of a torch optimizer on dense parameters and on the rows of embeddings."""

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
from oneemb.graph.building import building_now
from oneemb.graph.recorder import UNCOUNTED, StepStats
from oneemb.graph.row_optimizers import Group, RowOptimizer
from oneemb.graph.tracers import uncompiled
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.locking.signals_deferred import CommitBlock, signals_deferred
from oneemb.storage.locking.step_lock import in_step
from oneemb.training.row_step import RowStep, WeightInGroup, attach, groups_of_rows, row_weights, step_rows
from oneemb.training.step_hooks import is_observed, note_step, rows_stepped, steps_nothing


def _of_torch(name: str, doc: str) -> Any:
    """Property that reads and writes the attribute `name` of the torch optimizer; in `__init__`, before the torch
    optimizer is set, an attribute of the object itself."""

    def holder(optimizer: "Optimizer") -> tuple[object, str]:
        return (optimizer, f"_own_{name}") if optimizer._inner is None else (optimizer._inner, name)

    def put(optimizer: "Optimizer", value: object) -> None:
        setattr(*holder(optimizer), value)

    return property(lambda optimizer: getattr(*holder(optimizer)), put, doc=doc)


def _of_row_step(name: str, doc: str) -> Any:
    """Property that reads and writes the attribute `name` of the row step."""

    def put(optimizer: "Optimizer", value: object) -> None:
        setattr(optimizer.row_step, name, value)

    return property(attrgetter(f"row_step.{name}"), put, doc=doc)


def _unrecorded(step: Callable[..., Any]) -> Any:
    """Decorator of `Optimizer.step`, which torch would wrap to call hooks and to record each call for a profiler. The
    wrapper is left out where nobody sees it."""
    recorded = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def call(optimizer: "Optimizer", *args: Any, **kwargs: Any) -> Any:
        # Torch has wrapped the step of a subclass that has its own, and that wrapper calls the hooks.
        is_in_wrapper = getattr(type(optimizer).step, "__code__", None) is recorded.__code__
        # A closure may register a hook, which the wrapper calls after this step.
        if not is_in_wrapper and (args or kwargs or is_observed(optimizer)):
            return recorded(optimizer, *args, **kwargs)
        if (building := building_now()) is not None:
            building.check_step(optimizer)
        # A call without `*args` and `**kwargs` takes less time.
        return step(optimizer, *args, **kwargs) if args or kwargs else step(optimizer)

    call.hooked = True  # type: ignore[attr-defined]  # torch wraps no function that has this attribute
    return uncompiled(call)


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer that steps the rows of embeddings too, for eager training. A `TrainGraph` makes its own.

    Rows that were looked up since the last step are updated as the optimizer's class would update them, with the
    current options of the param group that holds `embedding.weight`; other rows do not change. If the update rule
    counts steps, the embedding's count is used.

    Args:
        optimizer: a torch optimizer of a supported class. Its groups hold `embedding.weight` of each embedding, and
            perhaps dense parameters.
        embeddings: embeddings to train; None = all embeddings whose weights are in the groups. An embedding can have
            only one optimizer.
        skip_nonfinite: if a gradient, also of a dense parameter, is NaN or infinite, skip the step and count it in
            `skipped`, instead of raising `NonFiniteGradientError`.
        check_in_step: on a GPU, wait in each step until it is known whether gradients are finite, so that the step
            itself raises `NonFiniteGradientError`. With False a step does not wait if no dense parameter has a gradient
            or torch's optimizer was made with fused=True. The GPU then leaves out a step whose gradients are not
            finite, and all later steps, until the host reads the result; the error comes in a later step, or in the
            next call that saves, exports or replaces all rows. Other optimizers of the model do not take part: train
            rows and dense parameters with one optimizer. On a CPU every step is checked at once.
        fused: update the rows of an embedding in the backward pass, as soon as their gradient is computed. Rows then
            need no step, and their gradient is not kept. Each backward pass is a step; clipping, a GradScaler and
            accumulation are refused, since they need kept gradients. With ranks, gradients go to their owners in the
            backward pass, so every rank must run it.

    Raises:
        ValueError: an embedding is in no group, is given twice or has an optimizer already; or the class, or an option
            of it, is not supported for rows (the message names it).
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
        check_in_step: bool = True,
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
        # The groups and state of this call's parameter stay hidden: the properties below read the torch optimizer's.
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
        self._groups_of = {embedding.store: numbers for embedding, numbers in groups.items()}
        self.row_step = RowStep(optimizer, skip_nonfinite, check_in_step)
        """This optimizer's step on rows."""
        if fused and any(len(embedding.weights) > 1 for embedding in self.embeddings):
            raise ValueError(
                "fused=True needs embeddings with one weight, and updates their rows as soon as the weight has its"
                " gradient; leave it out for embeddings whose tables have several weights"
            )
        if fused and len(self.embeddings) > 1 and not all(embedding.ranks.alone for embedding in self.embeddings):
            raise ValueError(
                "fused=True with a process_group needs one optimizer for each embedding: fused=True updates each"
                " embedding by itself, but ranks exchange the gradients of all embeddings of an optimizer together;"
                f" make {len(self.embeddings)} optimizers"
            )
        attach(optimizer, groups)
        if fused:
            # The hook has a weak reference: the step holds the weight, and Python's garbage collector cannot find a
            # cycle through torch's hooks, so rows and their path would be kept for ever.
            step = weakref.WeakMethod(self.row_step.step_in_backward)
            for embedding in self.embeddings:
                (weight,) = embedding.weights
                weight.register_post_accumulate_grad_hook(functools.partial(_step_in_backward, step))
                weight.is_stepped_in_backward = True  # type: ignore[attr-defined]

    # Schedulers, loggers and trainers read the attributes of the torch optimizer.

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
    check_in_step: bool = _of_row_step(
        "check_in_step", "Whether a step on a GPU waits for the check of its gradients, to raise what it has found."
    )
    skipped: int = _of_row_step("skipped", "Steps that were left out because a gradient was not finite.")
    taken: int = _of_row_step("taken", "Steps made by this object.")

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, Sequence[Group | None]] | None:
        """(row optimizer of a store, its current param groups: one for all tables, or one for each table); None = this
        optimizer does not train the store."""
        if store not in self._groups_of:
            return None
        embedding = next(embedding for embedding in self.embeddings if embedding.store is store)
        if embedding.row_optimizer is None:  # The embedding was detached; the next step attaches it again.
            return None
        return embedding.row_optimizer, [self.optimizer.param_groups[g] for g in self._groups_of[store]]

    @_unrecorded
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the dense parameters and the rows that have a gradient. Gradients stay until `zero_grad`.

        Args:
            closure: computes the loss and its gradients before the step.

        Returns:
            The result of the closure.

        Raises:
            NonFiniteGradientError: a gradient is NaN or infinite; no weight, state or count has changed. Ids that the
                lookups have inserted stay, with their initial values.
            Any error of the torch optimizer or its hooks: no row has changed; dense parameters may have changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weights = row_weights(self.row_step.optimizer)
        if not step_one_lookup(self, weights):
            embeddings = dict.fromkeys(self.embeddings)
            for _, _, embedding in weights:
                embeddings[embedding] = None
            late = None if self.row_step.check_in_step else ()
            in_step(
                [embedding.store.step_lock for embedding in embeddings],
                functools.partial(step_together, [self], late=late, weights=[weights]),
            )
        note_step(self, weights)
        return loss

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of rows and dense parameters."""
        if self.row_step.has_grads():  # gradients of a step that was stopped
            with signals_deferred:
                self.row_step.put_back()
        ops.zero_grad(self.row_step.optimizer, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the torch optimizer. Embeddings whose weights are in the group are attached at the next
        step."""
        if self._inner is None:
            super().add_param_group(param_group)
        else:
            self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state; the state of rows is in the snapshots of embeddings."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""
        self.optimizer.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            "an oneemb.Optimizer cannot be copied or pickled, since it trains the rows of its embeddings; save its"
            " state_dict()"
        )


def _step_in_backward(step: Callable[[], Callable[[torch.Tensor], None] | None], weight: torch.Tensor) -> None:
    call = step()
    if call is not None:
        call(weight)
    else:
        warnings.warn(
            "the oneemb.Optimizer that updated rows in the backward pass (fused=True) no longer exists, so rows are not"
            " updated; keep a reference to it while you train",
            stacklevel=2,
        )


def step_together(
    optimizers: Sequence[Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    *,
    commit: Callable[[], object] | None = None,
    stats: StepStats = UNCOUNTED,
    late: ops.Counts | None = None,
    weights: Sequence[Sequence[WeightInGroup]] | None = None,
) -> bool:
    """Make one step of several optimizers on dense parameters and rows. If a gradient is not finite, nothing changes.

    Args:
        scaler: GradScaler that has scaled and unscaled the gradients. With a scaler, a step whose gradients overflow is
            skipped.
        commit: called before the first change; None = no call.
        stats: counts and times each op.
        late: let a GPU check the gradients without a wait of the host, if it can. The result is then True, and a later
            call raises if a gradient was not finite, after it has set back the counts of the step, and these: (object,
            attribute). None = wait.
        weights: result of `row_weights` for each optimizer; None = call it.

    Returns:
        Whether the step was made.

    Raises:
        NonFiniteGradientError: a gradient is NaN or infinite; nothing has changed.
        Any error of a torch optimizer or its hooks: no row has changed; dense parameters may have changed.
    """
    for optimizer in optimizers:
        for embedding in optimizer.embeddings:
            embedding.store.store_lock.check(changes=True)
    rows, make = [optimizer.row_step for optimizer in optimizers], functools.partial(_make, optimizers, stats)
    return step_rows(rows, make, scaler=scaler, commit=commit, stats=stats, late=late, weights=weights)


def _make(optimizers: Sequence[Optimizer], stats: StepStats, go: bool, grads: Sequence[list[ops.RowGrads]]) -> None:
    """Step the dense parameters and the rows of optimizers, whose gradients are checked. Arguments as of
    `step_together`, and as `step_rows` calls it."""
    try:
        options: list[ops.Groups] = []
        for o, optimizer in enumerate(optimizers):
            row_step, torchs = optimizer.row_step, optimizer.optimizer
            if go and steps_nothing(torchs):
                options.append({})  # {} = the current options, since no hook can change them
                continue
            try:
                rows_stepped.add(torchs)
                after_hooks = _after_hooks(row_step, grads[o], go)
                options.append(stats.call(f"step({type(torchs).__name__})", ops.step, row_step, go, after_hooks))
            finally:
                rows_stepped.discard(torchs)
        for o, optimizer in enumerate(optimizers):
            if options[o]:
                ops.check_options(optimizer.row_step, grads[o], options[o])
        for o, optimizer in enumerate(optimizers):
            optimizer.row_step.update(grads[o], go, options[o], stats)
            optimizer.row_step.taken += go
    except BaseException as error:
        if not isinstance(error, Exception):  # An interrupt that was not deferred: perhaps only some rows changed.
            for optimizer in optimizers:
                for embedding in optimizer.embeddings:
                    embedding.store.store_lock.note(error)
        raise


def step_one_lookup(optimizer: Optimizer, weights: Sequence[WeightInGroup]) -> bool:
    """Make the step of an optimizer that trains one embedding, whose gradient is that of one lookup, as `step_together`
    makes any step, in fewer calls. Returns False, with nothing done, if the step is of another kind, or would wait for
    a GPU (`check_in_step`)."""
    if len(weights) != 1 or optimizer.embeddings != (weights[0].embedding,):
        return False
    (taken,) = weights
    embedding, row_step, grad = taken.embedding, optimizer.row_step, taken.weight.grad
    store = embedding.store
    waits = row_step.check_in_step and store.backend.waits
    if not isinstance(grad, ops.RowGrad) or waits or not embedding.ranks.alone:
        return False
    with CommitBlock() as block:  # An interrupt comes before the step or after the whole step.
        return in_step([store.step_lock], lambda: _step_now(optimizer, taken, grad), block)


def _step_now(optimizer: Optimizer, taken: WeightInGroup, grad: ops.RowGrad) -> bool:
    """`step_one_lookup` under the step lock."""
    row_step = optimizer.row_step
    taken.embedding.store.store_lock.check(changes=True)
    # Another thread may have stepped before the lock was taken.
    if taken.weight.grad is not grad or (one := grad.only_pass()) is None or not row_step.takes(taken):
        return False
    try:
        row_step.take(taken, grad)
        grads = [one.lease.reduce([one.checked()])]
        late = None if row_step.check_in_step else ()
        go = ops.may_step(ops.check_finite([row_step], grads, late=late), [row_step])
        _make([optimizer], UNCOUNTED, go, [grads])
    finally:
        row_step.end_late()
        row_step.put_back()
    return True


def _after_hooks(row_step: RowStep, grads: list[ops.RowGrads], go: bool) -> Callable[[], None] | None:
    """Put the gradients of rows back into the weights if the torch optimizer has pre-step hooks, which may read them.
    Returns a function that takes them out again after the hooks; None = there are no hooks."""
    optimizer = row_step.optimizer
    if not go or not optimizer._optimizer_step_pre_hooks:
        return None
    changes = row_step.changes()
    row_step.put_back()
    return lambda: row_step.reduce_again(grads, changes)
