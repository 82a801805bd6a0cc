"""`TrainGraph`: a training step whose lookups are made ahead. It is called for each batch, or run over a loader."""

import functools
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Self

import torch

from oneemb.checkpoints.checkpoint import GraphState, load_checkpoint, save_checkpoint
from oneemb.checkpoints.graph_state import LoadedKeys
from oneemb.embeddings.embedding import embeddings_of
from oneemb.embeddings.internals import drop_grads
from oneemb.flags import check_flags
from oneemb.graph import ops
from oneemb.graph.build_error import BuildError
from oneemb.graph.building import MadeLookup, steps_itself
from oneemb.graph.modules import REGISTER, not_registered, unregistered_modules
from oneemb.graph.prefetch import Prepared
from oneemb.kernels.compile_notice import compile_notice
from oneemb.storage.fs import AnyPath, file_path
from oneemb.storage.locking.signals_deferred import CommitBlock, signals_deferred
from oneemb.storage.locking.step_lock import between_steps
from oneemb.training.compiled_graph import CompiledGraph, step_locks
from oneemb.training.eager import Optimizer, step_together
from oneemb.training.loader_loops import OnAcquired
from oneemb.training.plan_cache import Batch
from oneemb.training.row_step import embedding_of, row_weights, rows_to_owners
from oneemb.training.scaling import Scaling, scalers_of, standing_in
from oneemb.training.train_state import LearningRateScheduler, TrainState

# `save` without a limit warns when this number of snapshots of earlier checkpoints is kept, and at every doubling.
_MANY_SNAPSHOTS = 8

_UNSCALED = Scaling(())
"""`Scaling` of steps without a GradScaler."""


class TrainGraph(CompiledGraph):
    """A training step: subclass it, assign modules, add optimizers, define `build`, which calls `loss.backward()`, and
    call the object with each batch.

    `build` is ordinary Python and runs at every call, so it may do what an eager step may do: branch on values, keep
    state, print, call any library, use autocast, clipping, hooks and several losses. The graph makes the lookups of
    earlier calls ahead of `build`, for several embeddings together. If `build` then looks up other ids, that lookup is
    made as in eager mode, which costs time and changes no number. Parameters and rows are updated once in each call,
    after `build`, and gradients are dropped; the gradient of a whole table is never computed. In eval mode
    (`graph.eval()`) a call runs only forward, `loss.backward()` does nothing, and no ids are inserted.

    `build` raises BuildError, which names the line if there is one, for:

    - a step of an optimizer or scheduler of the graph, also by `GradScaler.step`, and `GradScaler.update` of the scaler
      of its losses: the graph makes these steps after `build`, with the rows. `build` may step optimizers that are not
      the graph's;
    - a lookup with gradient of an embedding that is not in the graph, which would not train, move or save it: assign
      the embedding to the graph, or freeze it;
    - a gradient for an embedding that no optimizer trains: it would be lost;
    - losses scaled by two GradScalers: one scaler unscales all gradients;
    - `torch.autograd.backward` if `set_grad_scaler` has set a scaler, which could not scale these losses;
    - a second backward pass in a step with `config.cuda_graph`, whose replay overwrites the gradients of the first.

    Saving, loading and adding an optimizer within `build` raise RuntimeError, as in the middle of any step.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "items", 8, torch.float32, torch.int64, [oneemb.make_table(), oneemb.make_table()],
        ...     oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        >>> class Graph(oneemb.TrainGraph):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = embedding
        ...         self.mlp = oneemb.nn.FusedMLP(16, [8], 1, skip_final_activation=True)
        ...         self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.01))
        ...     def build(self, ids, label):
        ...         logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        ...         loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        ...         loss.backward()
        ...         return loss
        >>> graph = Graph()
        >>> loss = graph(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.0, 1.0]))
        >>> embedding.stats()["rows"]
        4
        >>> batches = [(torch.tensor([[1, 2], [5, 6]]), torch.tensor([0.0, 1.0]))] * 3
        >>> for loss in graph.run(batches):
        ...     pass
        >>> embedding.stats()["step"]
        4

    Reference: OneFlow's nn.Graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._train_state = TrainState()
        self._no_scalers: set[type] = set()
        """Classes of values in the closure and globals of `build` that are no GradScalers."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that `add_optimizer` has added; attribute `optimizer` of each is the torch optimizer."""
        return self._train_state.optimizers

    @property
    def steps(self) -> int:
        """Number of updates made or skipped so far."""
        return self._train_state.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._train_state.steps = steps

    @property
    def waiting_batches(self) -> int:
        """Number of micro-batches whose gradients wait for an update. Meanwhile no checkpoint can be saved."""
        return self._train_state.micro_batches

    def add_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LearningRateScheduler | None = None,
        *,
        skip_nonfinite: bool = False,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Let an optimizer train the parameters and embeddings in its param groups.

        Args:
            optimizer: a torch optimizer. A group that holds the weight of an embedding trains its rows.
            lr_scheduler: a torch.optim.lr_scheduler of this optimizer, which is stepped after each update.
            skip_nonfinite: skip steps in which a gradient is NaN or infinite, instead of raising. With several
                optimizers, steps are skipped only if this is set for all.
            clip_grad_norm: largest norm of the gradients of this optimizer's parameters and rows, as one vector; larger
                gradients are scaled down before each update. None = no clipping.

        Raises:
            TypeError: an argument is of another type.
            ValueError: the optimizer was added before; its groups hold no parameter of this graph, or the weight of an
                embedding that is not in the graph; its class, or an option of it, is not supported for rows;
                clip_grad_norm is not above 0; or the scheduler belongs to another optimizer, or needs a metric.
            StorageError: rows hold another optimizer's state, or a path is in use.
        """
        _check_types(optimizer, lr_scheduler, clip_grad_norm)
        check_flags(skip_nonfinite=skip_nonfinite)
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in trained for parameter in self.parameters()):
            raise ValueError(
                f"{type(optimizer).__name__} must hold parameters of this graph, and holds none; assign the modules to"
                " the graph before add_optimizer"
            )
        if any(optimizer in (joined, joined.optimizer) for joined in self._train_state.optimizers):
            raise ValueError(f"this {type(optimizer).__name__} was added before; it would step twice at each update")
        _refuse_foreign_embeddings(self, optimizer)
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric; step it yourself after each evaluation")
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler must be made on the optimizer that it is added with")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be above 0, or None, got {clip_grad_norm}")
        embeddings = [
            one for one in embeddings_of(self).values() if any(id(weight) in trained for weight in one.weights)
        ]

        def add() -> None:
            with signals_deferred:
                joined = Optimizer(optimizer, embeddings, skip_nonfinite=skip_nonfinite)
                self._train_state.add(joined, lr_scheduler, clip_grad_norm)
                self._plans.clear()

        between_steps(step_locks(self), "add_optimizer", add)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        try:
            return super()._apply(fn, recurse)
        finally:
            self._train_state.move_dense_states()

    def set_grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale every loss with a torch.amp.GradScaler before its backward pass; None = stop scaling.

        The graph unscales gradients after `build`, before the clipping that `add_optimizer` has set. A `build` that
        clips or reads gradients calls `scaler.unscale_(optimizer)` first, as in eager mode. If a gradient overflows,
        the whole step is skipped (dense parameters, rows and learning rate) and the scale shrinks.

        If `build` itself calls `self.scaler.scale(loss).backward()`, this call is not needed: the graph unscales with
        and updates a scaler that is an attribute of the graph, a global of the module that defines `build`, or in a
        closure of `build`. It does not know any other scaler.
        """
        _check_scaler(scaler)
        self._train_state.scaler = scaler

    def _step(self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        expected: list[MadeLookup] = []
        if not self.training:
            with torch.no_grad():
                result = self._run_build(batch, prepared, on_acquired, expected, backward=_no_backward)
            prepared.trained()
            return result
        state = self._train_state
        updates_before, updates_now = state.updates_made(), state.micro_batches + 1 >= self._accumulation()
        kept: list[MadeLookup] = []
        known = scalers_of(self.build, vars(self).values(), self._no_scalers)
        given = state.scaler, state.scaled_by
        with CommitBlock() as committing:  # An interrupt waits if it comes between the update and the step count.
            try:
                on_second_pass = self._on_second_pass() if self.config.cuda_graph else None
                if known or state.scaler is not None or on_second_pass is not None:
                    scaling = Scaling(known, state.scaler, state.scaled_by, on_second_pass, self.parameters())
                else:
                    scaling = _UNSCALED
                surrounding = {"backward": scaling.backward, "steppers": state.steppers}
                build = functools.partial(self._run_build, batch, prepared, on_acquired, expected, **surrounding)
                methods = scaling.methods()
                for scheduler in state.lr_schedulers:
                    if scheduler is not None:
                        methods.append((scheduler, "step", _refuse_step))
                if methods:
                    with standing_in(methods):
                        result = build()
                else:
                    result = build()
                self._check_trained(batch, scaling)
                state.scaled_by = scaling.scaler or state.scaled_by
                if updates_now:
                    self._update(committing)
                else:
                    kept = [lookup for lookup in expected if lookup.has_grad]
            except BaseException:
                with signals_deferred:
                    state.drop_gradients({scaler for scaler in (*known, *given) if scaler is not None})
                    if state.updates_made() > updates_before:  # a scheduler failed, after the update
                        state.steps += 1
                        prepared.trained()
                raise
            finally:
                with signals_deferred:
                    for lookup in expected:
                        if lookup not in kept:
                            lookup.drop()
            state.micro_batches = 0 if updates_now else state.micro_batches + 1
            state.steps += updates_now
            prepared.trained(updates_now)
        if compile_notice.unreported:
            compile_notice.report()
        return result

    def _why_not_captured(self) -> str:
        return "gradients are accumulated over several calls" if self._accumulation() > 1 else ""

    def _on_second_pass(self) -> Callable[[], None] | None:
        """Function to call before a second backward pass of a step, in which a replay would overwrite gradients; None =
        no module is replayed."""
        dense = self._dense_compiler()
        return None if dense is None else dense.refuse_second_pass

    def _check_trained(self, batch: Batch, scaling: Scaling) -> None:
        """Raise BuildError if an embedding has a gradient that no optimizer uses, or losses were not scaled. Warn if
        the first step has no gradients."""
        state = self._train_state
        scaling.check()
        untrained = []
        for one in batch.embeddings.values():
            if one.optimizer is None and any(weight.grad is not None for weight in one.weights):
                if not any(
                    one.store is trained.store for optimizer in state.optimizers for trained in optimizer.embeddings
                ):
                    untrained.append(one)
        for embedding in untrained:
            drop_grads(embedding)
        if untrained:
            raise BuildError(
                f"build gives embedding {untrained[0].name!r} a gradient, but no optimizer of the graph trains it; pass"
                " its parameters to an optimizer, or freeze it with requires_grad_(False)"
            )
        if state.optimizers and state.steps == state.micro_batches == 0 and not self._has_gradients():
            warnings.warn(
                f"{type(self).__name__}: build has computed no gradient in the first step, so the step trains nothing;"
                " call loss.backward() in build",
                stacklevel=4,
            )

    def _has_gradients(self) -> bool:
        groups = [group for optimizer in self._train_state.optimizers for group in optimizer.param_groups]
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def _update(self, committing: CommitBlock) -> None:
        """Unscale and clip the gradients, step all optimizers and schedulers, and drop the gradients."""
        state, call = self._train_state, self._stats.call
        scaler = state.scaled_by if state.optimizers else None
        if scaler is not None or state.max_norms.count(None) < len(state.max_norms):
            # All ranks compute norms and find overflows together, also a rank without lookups.
            call("reduce_to_owners", rows_to_owners, [row_weights(one.optimizer) for one in state.optimizers])
        if scaler is not None:
            call("unscale", ops.unscale, scaler, state.optimizers)
        for optimizer, max_norm in zip(state.optimizers, state.max_norms, strict=True):
            if max_norm is not None:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                call("clip_grad_norm_", torch.nn.utils.clip_grad_norm_, parameters, max_norm)
        # A scheduler that was stepped cannot be taken back.
        waits = scaler is not None or any(state.lr_schedulers) or self.config.check_in_step
        late = None if waits else [(state, "steps")]
        go = step_together(state.optimizers, scaler, commit=committing.begin, stats=self._stats, late=late)
        if scaler is not None:
            call("update_scale", ops.update_scale, scaler, go)
        state.scaled_by = None
        call("advance", ops.advance, state.optimizers, state.lr_schedulers, go)

    def save(self, path: AnyPath, *, delta: bool = False, keep: int | None = None, keep_deltas: bool = True) -> None:
        """Save a checkpoint: everything on which the next step depends, completely or not at all.

        The file at `path` holds dense parameters and buffers, the states of optimizers, schedulers and GradScalers (of
        `set_grad_scaler`, and of attributes of the graph), the step count, the states of the random generators of
        torch, random and numpy, and `loader_state`. Rows are saved as a snapshot in the `persistent_path` of each
        embedding, which the file names. During a save, the files `path.<hex>.saving` and `path.<hex>.tmp` exist beside
        it; if the process is killed, the next save removes them and unfinished snapshots.

        With ranks (`process_group`), every rank makes the call; if one rank fails, all raise. The first rank writes the
        file. It holds the dense parameters and optimizers of the first rank, since these are the same on all ranks with
        DistributedDataParallel (a warning says if they differ), and for each rank its random generators, its loader
        state, and buffers and extra states of modules that differ. Names in the file leave out the `.module` of
        DistributedDataParallel.

        Args:
            path: the file, whose folder must exist; all ranks give the same path, but only the first uses it. Or the
                URL of an object, such as `s3://bucket/job/checkpoint.pt`: each rank uploads what the store lacks of its
                rows, and the folders keep only the newest snapshot of these saves.
            delta: if True, save only the rows that have changed since the last save to this path, as a delta of its
                snapshot. The snapshot is whole instead if this is the first save, or the first after a load of another
                checkpoint or by another number of ranks; after 128 deltas (16 in an object store); or if the deltas
                have more than half as many rows as the embedding.
            keep: number of saves to this path whose snapshots are kept, including this one. Older snapshots are deleted
                when the file is in place, except ancestors of kept snapshots and of deltas of your own; a copy of the
                file that names a deleted snapshot cannot be loaded any more. None = keep all snapshots until
                `delete_snapshot`; each takes disk space for rows that only this snapshot holds.
            keep_deltas: whether to keep older snapshots that have deltas. If False, such a snapshot and all its deltas
                are deleted once every delta is older than the kept snapshots.

        Raises:
            RuntimeError: micro-batches wait for an update; or a hook, a scheduler or a signal handler calls this method
                in the middle of a step of the same thread (call it between two calls of the graph); or a dense
                parameter is sharded over ranks.
            TypeError: `path` is no path.
            ValueError: the file at `path` is no checkpoint; `keep` is below 1; or embeddings of the graph have
                different process groups.
            RankError: another rank has failed; no checkpoint was saved.
            StorageError, OSError: the disk or the store fails. Either the old file is still at `path`, or the new file
                is there and its name in the folder could not be made durable.
        """
        path = file_path(path, "the file to write")
        kept = save_checkpoint(self, self._train_state, path, keep, keep_deltas, delta)
        if keep is None and kept >= _MANY_SNAPSHOTS and kept & (kept - 1) == 0:
            warnings.warn(
                f"{kept} snapshots of earlier checkpoints at {path} are kept, since copies of the file may name"
                " them; save(path, keep=n) keeps the last n, embedding.delete_snapshot(name) deletes one",
                stacklevel=2,
            )

    def load(self, path: AnyPath, *, strict: bool = True, delete_newer: bool = False) -> LoadedKeys:
        """Load a checkpoint, to continue with the same bits. `embedding.last_snapshot` then names the snapshot of each
        embedding.

        With ranks, every rank makes the call, and the first rank reads the file. Any number of ranks may have saved the
        checkpoint. If their number is the same, each rank continues with the bits that it had. Otherwise rows are the
        same, and all ranks get the other state of the first rank, except random generators: a rank that existed before
        keeps its own, and a further rank gets generators seeded by the first rank's state and its own number.
        Generators that were equal on several ranks are equal on all.

        Args:
            path: the file of a checkpoint, or its URL: each rank then brings the rows that its folder lacks.
            strict: whether graph and checkpoint must have the same names of parameters, buffers, embeddings, optimizers
                and other parts. If False, parts that both have are loaded, and must fit; names that only one of them
                has are ignored, and the graph's parts keep their values. Optimizer state is matched by the names of
                parameters. Older checkpoints lack these names; their state is ignored if param groups differ.
            delete_newer: if True, delete all snapshots and deltas of each embedding that were saved after the one that
                the checkpoint names, or all if it names none, after the load: the steps that saved them are made again.
                Checkpoints at other paths that name one of them cannot be loaded any more.

        Returns:
            `missing_keys`, which only the graph has, and `unexpected_keys`, which only the checkpoint has, as
            `torch.nn.Module.load_state_dict` returns: names of tensors, embeddings and modules' `_extra_state`,
            `optimizers.0`, `lr_schedulers.0`, `grad_scaler`.

        Raises:
            TypeError: `path` is no path, or `strict` no bool.
            ValueError: the file is no checkpoint, or belongs to another graph (the message says what differs); nothing
                has changed.
            RankError: another rank has failed; the message says whether anything has changed.
            StorageError: a snapshot that the file names is missing or belongs to another run, or its rows hold another
                optimizer's state (nothing has changed); or files of a snapshot are damaged; or, with `delete_newer`,
                the disk fails in a deletion: the checkpoint is loaded, and a second call deletes the rest.
            KeyboardInterrupt, or any error that stops a load half way: every call of the graph's embeddings then raises
                `BrokenStoreError` until another load.
        """
        path = file_path(path, "a file that save has written")
        return load_checkpoint(self, self._train_state, path, strict, delete_newer)

    def state(self, *, strict: bool = True) -> GraphState:
        """The whole state of the graph for torch.distributed.checkpoint: `dcp.save({"graph": graph.state()}, ...)`.

        With ranks, every rank makes each call, as torch.distributed.checkpoint requires. Contents of the state, and
        loads with another number of ranks, are as for `save` and `load`.

        Args:
            strict: argument of `load`, used by `load_state_dict` of the result, since `dcp.load` cannot pass it.

        Raises:
            TypeError: `strict` is no bool.
            ValueError: embeddings of the graph have different process groups.
        """
        return GraphState(self, self._train_state, strict)

    def _accumulation(self) -> int:
        steps = self.config.accumulation_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"config.accumulation_steps must be an int of at least 1, got {steps!r}")
        return steps

    def _steps_made(self) -> int:
        return self._train_state.steps

    def _inserts(self) -> bool:
        return self.training

    def _trainers(self) -> Sequence[Optimizer]:
        return self._train_state.optimizers


def _refuse_step(scheduler: LearningRateScheduler) -> None:
    raise BuildError(steps_itself(scheduler))


def _no_backward(*args: object, **kwargs: object) -> None:
    """Do nothing: it replaces `Tensor.backward` in eval mode."""


def _check_scaler(scaler: object) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        got = f"{type(scaler).__name__} {scaler!r:.100}"
        raise TypeError(f"scaler must be a torch.amp.GradScaler, or None to stop scaling, got {got}")


def _refuse_foreign_embeddings(graph: TrainGraph, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer holds the weight of an embedding that is not in the graph."""
    registered = {id(parameter) for parameter in graph.parameters()}
    unregistered = {
        id(weight): embedding
        for _, module in unregistered_modules(graph)
        for embedding in embeddings_of(module).values()
        for weight in embedding.weights
    }
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        embedding = embedding_of(parameter)
        if embedding is None or id(parameter) in registered:
            continue
        if id(parameter) in unregistered:
            reason = not_registered(graph, unregistered[id(parameter)])
        else:
            reason = (
                f"embedding {embedding.name!r} is no part of {type(graph).__name__}, which would not update its"
                f" rows; {REGISTER}"
            )
        raise ValueError(f"{type(optimizer).__name__} holds the weight of an embedding: {reason}")


def _check_types(optimizer: object, lr_scheduler: object, clip_grad_norm: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch.optim.Optimizer over parameters of the graph, got {got}")
    steps = [getattr(lr_scheduler, name, None) for name in ("step", "state_dict", "load_state_dict")]
    if lr_scheduler is not None and (isinstance(lr_scheduler, type) or not all(map(callable, steps))):
        got = f"{type(lr_scheduler).__name__} {lr_scheduler!r:.100}"
        raise TypeError(
            f"lr_scheduler must be a torch.optim.lr_scheduler made on the optimizer, or None, got {got}; give an"
            " object, such as torch.optim.lr_scheduler.StepLR(optimizer, 1000)"
        )
    if clip_grad_norm is not None and (isinstance(clip_grad_norm, bool) or not isinstance(clip_grad_norm, Real)):
        got = f"{type(clip_grad_norm).__name__} {clip_grad_norm!r}"
        raise TypeError(f"clip_grad_norm must be a number above 0, or None, got {got}")
