"""A training step as a graph: traced once, compiled, then called for each batch or run over a loader."""

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from oneemb.checkpoint import GraphState, load_checkpoint, save_checkpoint
from oneemb.eager import Optimizer
from oneemb.graph import ops
from oneemb.graph.build_error import BuildError
from oneemb.graph.dense import DenseCompiler
from oneemb.graph.inputs import Signature, Structure
from oneemb.graph.modules import REGISTER, embeddings_in, say_not_registered, unregistered_modules
from oneemb.graph.pipeline import Plan, Recipe, compile_plan
from oneemb.graph.prefetch import Prepared, prefetch
from oneemb.graph.recorder import Profile, stats_table
from oneemb.graph.text import graph_text
from oneemb.storage.step_lock import between_steps, in_step
from oneemb.storage.turns import undisturbed

__all__ = ["EvalGraph", "GraphConfig", "TrainGraph"]

PLANS_MAX = 16
"""Compiled steps that a graph keeps: those used last."""


@dataclass
class GraphConfig:
    """How a graph is compiled. A change counts from the next call on.

    Args:
        accumulation_steps: calls to one update. Each call runs forward and backward; the last of so many updates with
            the sum of their gradients. Divide the loss by it for the mean.
        compile_dense: run dense modules through torch.compile. Their numbers may then differ in the last bits. Where
            torch.compile fails, one warning says why and the module runs as it is.
        cuda_graph: on a GPU, replay dense modules, forward and backward, as CUDA graphs, in place of launching their
            kernels one by one. A module is captured at its fourth training step with inputs of one shape, by
            torch.cuda.make_graphed_callables, whose limits hold: no hooks, tensors alone as arguments, nothing that
            depends on values. Where it cannot be captured, as where `build` calls it twice, one warning says why and
            it runs as it is. Other threads must not use the GPU while it is captured; that of `run` does not.
    """

    accumulation_steps: int = 1
    compile_dense: bool = False
    cuda_graph: bool = False


T = TypeVar("T")

# Snapshots that earlier saves to a path have left, from which on each doubling of them is worth a warning.
_KEPT_MANY = 8


class _Graph(torch.nn.Module):
    """What training and evaluation share: `build` traced, compiled for each structure of inputs, and shown."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GraphConfig()
        self._plans: OrderedDict[Any, Plan] = OrderedDict()  # that used last is the last
        self._dropped = 0  # plans that gave way to others
        self._profile: Profile | None = None
        self._latest: Plan | None = None
        self._dense: dict[tuple[bool, bool], DenseCompiler | None] = {}
        self._signature = Signature(self.build)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """What to compute. Users write it."""
        raise NotImplementedError(f"{type(self).__name__} must define build(self, ...)")

    # ---- compiling --------------------------------------------------------------------------------------------------

    def compiled(self) -> fx.GraphModule:
        """The graph that a call runs now; `.code` and `.graph` show it.

        Compiled anew where modules have changed between training and eval mode, or between frozen and trained, or are
        others, where rows have moved or their state has another width, and for inputs of another nesting; not for other
        shapes.
        """
        return self._plan(None).module

    def _plan(self, structure: Structure | None) -> Plan:
        structure = structure or self._signature.default_structure()
        key = self._key(structure)
        plan = self._plans.get(key)
        if plan is None:
            plan = compile_plan(self, self._recipe(), structure)
            self._make_room(structure)
            self._plans[key] = plan
        self._plans.move_to_end(key)
        self._latest = plan
        return plan

    def _make_room(self, structure: Structure) -> None:
        """Drop the plan that was used longest ago, if there are as many as are kept."""
        if len(self._plans) < PLANS_MAX:
            return
        before: Structure = next(reversed(self._plans))[0]
        if self._dropped == 0:
            changed = before.difference(structure) or "the state of modules, between training, eval, frozen and others"
            warnings.warn(
                f"{type(self).__name__} has been compiled {PLANS_MAX + 1} times, for inputs of as many structures, and"
                f" keeps the {PLANS_MAX} that were used last; what changed this time is {changed}. Give what changes"
                " from call to call as tensors, or inside a tuple, list or dict of a fixed length",
                stacklevel=2,
            )
        self._plans.popitem(last=False)
        self._dropped += 1

    def _key(self, structure: Structure) -> Any:
        modes = [
            (one.training, one.weight.requires_grad, one.store, one.store.format, one.store.loops.place)
            for one in embeddings_in(self).values()
        ]
        dense = self.config.compile_dense, self.config.cuda_graph
        return structure, self.training, tuple(modes), dense, self._recipe_key()

    def _recipe(self) -> Recipe:
        raise NotImplementedError

    def _recipe_key(self) -> Any:
        return None

    def _dense_compiler(self) -> DenseCompiler | None:
        how = self.config.compile_dense, self.config.cuda_graph
        if how not in self._dense:
            self._dense[how] = DenseCompiler(*how) if any(how) else None
        return self._dense[how]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # torch converts parts one by one; an embedding that refuses must do so before the first.
        for embedding in embeddings_in(self).values():
            embedding.check_apply(fn)
        return super()._apply(fn, recurse)

    # ---- showing ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The compiled graph as text: its ops, in two halves where part of it can run ahead of its step."""
        plan = self._latest
        if plan is None:
            return f"{self!r}\nnot compiled yet: call the graph, or compiled()"
        parts = [f"{type(self).__name__}: {_ops(plan.history[0].graph)} ops traced, {_ops(plan.whole.graph)} compiled"]
        if plan.prepare is None or plan.compute is None:
            parts.append(_indented("step", plan.whole.graph))
        else:
            parts += [_indented("prepare", plan.prepare.graph), _indented("compute", plan.compute.graph)]
        return "\n".join(parts)

    def explain(self) -> str:
        """Where the time went since the graph was compiled: a table with a line for each op.

        Times of the prepare half are those of its thread: they are hidden as far as the compute half is longer.
        Bytes and GB/s are of rows and gradients that an op must move; of a dense module only the time is known.
        Plans that have been dropped, where inputs come in ever new structures, are not in it; a line says how many.
        """
        plans = list(self._plans.values())
        stats = [(one.half, one.stats()) for plan in plans for one in plan.executors()]
        caches = ["embedding  step  hit rate  rows in cache  evicted  written down"]
        for name, embedding in embeddings_in(self).items():
            now = embedding.stats()
            hot = now.get("device", {})
            caches.append(
                f"{name}  {now['step']}  {now['hit_rate']:.1%}  {hot.get('rows', 0):,}  {hot.get('evicted', 0):,}"
                f"  {hot.get('written_down', 0):,}"
            )
        dropped = f"\nwithout what {self._dropped} plans have done, which gave way to others" if self._dropped else ""
        return stats_table(stats) + dropped + "\n\n" + "\n".join(caches)

    def draw(self, path: str) -> None:
        """Draw the graph as traced and after each pass, one picture beside the other.

        Args:
            path: the file to write; its ending says the format: svg, png or pdf.

        Raises:
            ImportError: matplotlib is not installed; the extra `draw` brings it.
            RuntimeError: the graph has not been compiled.
        """
        from oneemb.graph.draw import draw_history

        if self._latest is None:
            raise RuntimeError("the graph is not compiled yet: call it, or compiled(), before draw()")
        draw_history(self._latest.history, path)

    def profile(self, steps: int) -> Profile:
        """Note when each op of the next steps begins and ends; `print` shows a table, `.save` writes a Chrome trace.

        Example: `profile = graph.profile(20)`, run 20 steps, `print(profile)`, `profile.save("trace.json")`.
        """
        self._profile = Profile(steps)
        return self._profile

    def _profile_now(self) -> Profile | None:
        return self._profile if self._profile is not None and not self._profile.done else None

    # ---- running ----------------------------------------------------------------------------------------------------

    def run(self, loader: Iterable[Any], prefetch_depth: int = 1) -> Generator[Any, None, None]:
        """Call the graph for each batch, the coming batches being loaded and prepared on a thread meanwhile.

        `for loss in graph.run(loader): ...` gives what `for batch in loader: loss = graph(*batch)` gives, bit for
        bit. Ahead of its step a batch has its unique ids found and its known rows read into the cache and pinned; it
        inserts nothing and reads no row's values, so leaving the loop early or saving in it finds what the steps so
        far have made. Leaving it, an error in it, or its end gives back what was pinned and ends the thread; where the
        loader keeps that thread for more than 30 s, a warning says so, and both happen once it gives its batch.

        Args:
            loader: gives batches: a tuple or list of `build`'s arguments, a dict of them by name, or, where `build`
                cannot be called so, its one argument; `(samples,)` hands over a list of samples, however many they
                are. It runs on the thread: what it draws from torch's global generator while steps draw from it
                too, give it a generator of its own for. A batch must not be changed once it is handed over.
            prefetch_depth: batches prepared ahead; 0 = none, and no thread. Rows of that many more batches should fit
                in the cache; where they do not, they are read when their step comes.

        Yields:
            What `build` returns, for each batch.

        Raises:
            What the loader raised, at the batch that it did not give, with its traceback; what a call raises.
        """
        if isinstance(prefetch_depth, bool) or not isinstance(prefetch_depth, int) or prefetch_depth < 0:
            raise ValueError(f"prefetch_depth must be an int of at least 0, got {prefetch_depth!r}")
        if prefetch_depth == 0:
            return self._run_plainly(loader)
        return self._run_ahead(loader, prefetch_depth)

    def _run_plainly(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        for batch in loader:
            args, kwargs = self._signature.spread(batch)
            yield self(*args, **kwargs)

    def _run_ahead(self, loader: Iterable[Any], depth: int) -> Generator[Any, None, None]:
        devices = [one.store.loops.device for one in embeddings_in(self).values()]
        yield from prefetch(loader, self._prepare, self._compute_prepared, depth, devices)

    def _prepare(self, batch: Any, follow: Any = None) -> Prepared:
        """On the worker. Only plans that are there are used: tracing is for the thread that calls the graph."""
        signature = self._signature
        args, kwargs = signature.spread(batch)
        values, structure = signature.flatten(args, kwargs)
        plan = self._plans.get(self._key(structure))
        if plan is None or plan.prepare is None:
            return Prepared((values, structure))
        versions = plan.buffer_versions()
        if versions and follow is not None:
            follow(versions)  # What changed a buffer is launched before its version changes.
        prepared = plan.prepare(values, profile=self._profile_now())
        return Prepared((values, structure), plan, prepared, versions)

    def _compute_prepared(self, prepared: Prepared, acquired: Any) -> Any:
        values, structure = prepared.batch
        return self._whole_step(lambda: self._step(values, structure, prepared, acquired))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a batch, compiling `build` if this is the first.

        Args:
            args, kwargs: those of `build`. Tensors may change shape from call to call, numbers may differ, and so may
                strings inside a tuple, list or dict: `build` may hand them on and may not branch on them. Nested
                tuples, lists and dicts of another structure are compiled anew, and so are other values of what
                `build` may branch on: None, True, False, dtypes, devices, and a string that is an argument of its own
                (mode="train"). The 16 that were used last are kept.

        Returns:
            What `build` returns.

        Raises:
            BuildError: `build` cannot be compiled.
            NonFiniteGradientError: a gradient is NaN or infinite; no weight, state or count has changed. Ids that the
                lookups have inserted stay, with their initial values.
            What a hook, an optimizer or a scheduler raises: a note says what was updated before. A step whose
                scheduler failed is made and counted.
        """
        values, structure = self._signature.flatten(args, kwargs)
        return self._whole_step(lambda: self._step(values, structure, Prepared(None), None))

    def _whole_step(self, call: Callable[[], Any]) -> Any:
        embeddings = embeddings_in(self).values()
        for one in embeddings:
            if one._forward_hooks or one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks:
                raise BuildError(
                    f"embedding {one.name!r} has hooks, which a graph does not call: its lookups are ops. Put them on a"
                    " module that build gives the rows to, or remove them"
                )
        return in_step((one.store.step_lock for one in embeddings), call)

    def _between_steps(self, what: str, call: Callable[[], T]) -> T:
        """What `call` gives, while no thread is in the middle of a step with an embedding of the graph."""
        return between_steps((one.store.step_lock for one in embeddings_in(self).values()), what, call)

    def _step(self, values: list[Any], structure: Structure, prepared: Prepared, acquired: Any) -> Any:
        return self._run_plan(values, structure, prepared, acquired, None)

    def _run_plan(
        self, values: list[Any], structure: Structure, prepared: Prepared, acquired: Any, committing: ExitStack | None
    ) -> Any:
        plan = self._plan(structure)
        profile = self._profile_now()
        fits = prepared.plan is not None and prepared.plan.prepared == plan.prepared
        fits = fits and prepared.versions == plan.buffer_versions()
        if fits and plan.compute is not None and prepared.values is not None:
            result = plan.compute([*values, *prepared.values], acquired, profile, committing)
        else:
            prepared.drop()
            result = plan.whole(values, acquired, profile, committing)
        if profile is not None:
            profile.step += 1
        return result


class TrainGraph(_Graph):
    """Subclass it, assign modules, add optimizers, write `build` with `loss.backward()` in it, and call the object.

    `build` is traced with torch.fx at the first call. Submodules that hold no embedding may contain any Python. The
    update of embedding rows is part of the graph: a table's gradient is never made. Parameters and rows are updated
    once a call, after all of `build`. In eval mode (`graph.eval()`) a call runs forward only and inserts no ids.

    What `build` does in torch it does at every call; other Python (random, NumPy, the clock) runs once, while it is
    traced. Tensors and arrays from outside of the graph are read as they are at each call; modules and parameters must
    be assigned to it. One graph is traced at a time; a second thread waits.

    `build` may use torch.autocast, torch.no_grad, torch.profiler.record_function,
    torch.nn.utils.clip_grad_norm_ (over dense parameters and the rows of embeddings together), clip_grad_value_,
    several losses, and GradScaler.scale; the graph itself steps optimizers and schedulers, unscales, skips a step that
    overflowed, and drops gradients.

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
        self.optimizers: list[Optimizer] = []
        """What `add_optimizer` was given, joined with the embeddings each trains; `.optimizer` is the torch object."""
        self._lr_schedulers: list[Any] = []
        self._max_norms: list[float | None] = []
        self._scaler: Any = None
        self._held = ops.Held()
        self._merged: dict[Any, Any] = {}
        self._calls = 0  # since the last update
        self.steps = 0
        """Updates made or skipped so far."""

    def add_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        *,
        skip_nonfinite: bool = False,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Let an optimizer train those of the graph's parameters and embeddings that its groups hold.

        Args:
            optimizer: a torch optimizer. Groups that hold an embedding's weight train its rows.
            lr_scheduler: a torch.optim.lr_scheduler of this optimizer; it is stepped after each update.
            skip_nonfinite: leave out steps in which a gradient is NaN or infinite, in place of raising.
            clip_grad_norm: before each update, scale the gradients of this optimizer's parameters and rows so that
                their norm, taken as one vector, is at most this.

        Raises:
            ValueError: its groups hold nothing of this graph, or an embedding that is no part of it; the optimizer's
                class or an option of it is not supported for rows; clip_grad_norm is not above 0; or the scheduler is
                another optimizer's, or one that needs a metric.
            StorageError: rows hold another optimizer's state, or a path is in use.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in self.parameters()):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter of this graph; assign the modules before add_optimizer"
            )
        self._refuse_foreign_embeddings(optimizer)
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric; step it yourself after each evaluation")
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler must be made on the optimizer it is added with")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be above 0, or None, got {clip_grad_norm}")
        embeddings = [one for one in embeddings_in(self).values() if id(one.weight) in held]

        def add() -> None:
            with undisturbed:
                self.optimizers.append(Optimizer(optimizer, embeddings, skip_nonfinite=skip_nonfinite))
                self._lr_schedulers.append(lr_scheduler)
                self._max_norms.append(clip_grad_norm)
                self._plans.clear()

        self._between_steps("add_optimizer", add)

    def _refuse_foreign_embeddings(self, optimizer: torch.optim.Optimizer) -> None:
        own = {id(parameter) for parameter in self.parameters()}
        kept = {id(e.weight): e for _, one in unregistered_modules(self) for e in embeddings_in(one).values()}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if (name := getattr(parameter, "embedding_name", None)) is None or id(parameter) in own:
                continue
            said = (
                f"embedding {name!r} is no part of {type(self).__name__}, which would not update its rows; {REGISTER}"
            )
            if id(parameter) in kept:
                said = say_not_registered(self, kept[id(parameter)])
            raise ValueError(f"{type(optimizer).__name__} holds the weight of an embedding: {said}")

    def set_grad_scaler(self, scaler: Any) -> None:
        """Scale every loss with a torch.amp.GradScaler before its backward pass.

        Gradients are unscaled before they are clipped. A step in which one overflows is left out as a whole, dense
        parameters, rows and learning rate, and the scale shrinks. Where `build` calls `scaler.scale(loss).backward()`
        itself, this is not needed.
        """
        self._scaler = scaler
        self._plans.clear()

    def _step(self, values: list[Any], structure: Structure, prepared: Prepared, acquired: Any) -> Any:
        if not self.training:
            with torch.no_grad():
                return super()._step(values, structure, prepared, acquired)
        taken = self._taken()
        trained = [embedding for optimizer in self.optimizers for embedding in optimizer.embeddings]
        pending = [len(embedding.pending) for embedding in trained]
        with ExitStack() as committing:  # A step is made as a whole, and counted, or an interrupt comes before it.
            try:
                result = self._run_plan(values, structure, prepared, acquired, committing)
            except BaseException:
                with undisturbed:
                    self._drop_gradients()
                    self.steps += self._taken() > taken  # a scheduler failed, after the update
                raise
            self._calls = (self._calls + 1) % self._accumulation()
            self.steps += self._calls == 0
        for embedding, count in zip(trained, pending, strict=True):
            if len(embedding.pending) > count:
                ops.release(embedding.pending[count:])
                del embedding.pending[count:]
                raise RuntimeError(
                    f"a module that build calls looks embedding {embedding.name!r} up by a closure, a global or the"
                    f" like: the graph does not see it, so this step has not updated those rows; {REGISTER}"
                )
        return result

    def _taken(self) -> int:
        return sum(one.taken for one in self.optimizers)

    def _drop_gradients(self) -> None:
        """After an error: what this step, and the micro-batches before it, have left."""
        ops.drop(self._held)
        for one in self.optimizers:
            one.optimizer.zero_grad(set_to_none=True)
        self._calls = 0

    def save(self, path: str, *, keep: int | None = None) -> None:
        """Write a checkpoint: everything that the next step depends on, in one file, as a whole or not at all.

        The file holds dense parameters and buffers, the states of optimizers, schedulers and the GradScaler, the
        count of steps and the random generators (of torch, random and numpy). Rows are saved as a snapshot in each
        embedding's `persistent_path`, which the file names. While it is being saved, `path.<hex>.saving` and
        `.tmp` lie beside it; what a process that was killed has left of a save goes with the next one.

        Args:
            path: the file; its folder must exist.
            keep: how many of the snapshots that saves to this path have made to keep, this one among them; older
                ones are deleted when the file is in place, and copies of it that name them cannot be loaded any more.
                None = all of them, until `delete_snapshot`: each takes the disk space of its own rows.

        Raises:
            RuntimeError: micro-batches are accumulated that no update has used yet; or a step of this very thread is
                under way, and a hook, a scheduler or a handler of a signal asks. Between two calls of the graph it can.
            ValueError: there is something at `path` that is no checkpoint; `keep` is below 1.
            StorageError, OSError: the disk fails; what was at `path` is still there, or the new checkpoint is and the
                folder's name of it could not be made durable.
        """
        kept = self._between_steps("save", lambda: save_checkpoint(self, os.fsdecode(path), keep))
        if kept >= _KEPT_MANY and kept & (kept - 1) == 0:
            warnings.warn(
                f"{kept} snapshots of earlier checkpoints at {os.fsdecode(path)} are kept, for copies of the file may"
                " name them; save(path, keep=n) keeps the last n, embedding.delete_snapshot(name) deletes one",
                stacklevel=2,
            )

    def load(self, path: str) -> None:
        """Go on from a checkpoint, bit for bit.

        Raises:
            ValueError: it is no checkpoint, or one of another graph; the message says what differs. Nothing changed.
            StorageError: a snapshot that it names is not there, is another run's, or its rows hold another optimizer's
                state; nothing changed. Or its files are damaged.
            KeyboardInterrupt, and what else stops a load half way: every call of the graph's embeddings raises
                `BrokenStoreError` until another load.
        """
        self._between_steps("load", lambda: load_checkpoint(self, os.fsdecode(path)))

    def state(self) -> GraphState:
        """The graph's whole state for torch.distributed.checkpoint: `dcp.save({"graph": graph.state()}, ...)`."""
        return GraphState(self)

    def _accumulation(self) -> int:
        steps = self.config.accumulation_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"config.accumulation_steps must be an int of at least 1, got {steps!r}")
        return steps

    def _updates_now(self) -> bool:
        return self._calls + 1 >= self._accumulation()

    def _recipe_key(self) -> Any:
        return self._accumulation() > 1, self._updates_now()

    def _recipe(self) -> Recipe:
        return Recipe(
            list(zip(self.optimizers, self._lr_schedulers, strict=True)),
            self._max_norms,
            self._scaler,
            trains=self.training,
            held=self._held if self._accumulation() > 1 else None,
            dense=self._dense_compiler(),
            updates=self._updates_now(),
            merged=self._merged,
        )


class EvalGraph(_Graph):
    """A graph that only evaluates: subclass it, assign modules, write `build`, and call the object.

    A call runs its modules in eval mode, whatever mode they are in, makes no gradient and inserts no id: an unknown
    one reads as its initial value. So a `TrainGraph` and an `EvalGraph` may share modules. Where two threads call
    graphs that share an embedding, one waits for the step of the other. Modes of modules are the same for all threads,
    though: an `EvalGraph` may not run beside eager training of its modules, or beside a graph with which it shares no
    embedding but other modules; give it copies of those.

    Example:
        >>> import tempfile, torch, oneemb
        >>> class Score(oneemb.EvalGraph):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = oneemb.MultiTableEmbedding(
        ...             "words", 4, torch.float32, torch.int64, [oneemb.make_table()],
        ...             oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        ...     def build(self, ids):
        ...         return self.embedding(ids).sum(-1)
        >>> graph = Score()
        >>> graph(torch.tensor([7, 8])).shape, graph.embedding.stats()["rows"]
        (torch.Size([2]), 0)
    """

    def _recipe(self) -> Recipe:
        return Recipe(trains=False, dense=self._dense_compiler())

    def _key(self, structure: Structure) -> Any:
        return structure, self.config.compile_dense, self.config.cuda_graph

    def _step(self, values: list[Any], structure: Structure, prepared: Prepared, acquired: Any) -> Any:
        trained = [module for module in self.modules() if module.training]
        try:
            for module in trained:
                module.training = False
            with torch.no_grad():
                return super()._step(values, structure, prepared, acquired)
        finally:
            with undisturbed:
                for module in trained:
                    module.training = True


def _ops(graph: fx.Graph) -> int:
    return sum(node.op not in ("placeholder", "get_attr", "output") for node in graph.nodes)


def _indented(title: str, graph: fx.Graph) -> str:
    return f"{title}:\n" + "\n".join(f"    {line}" for line in graph_text(graph).splitlines())
