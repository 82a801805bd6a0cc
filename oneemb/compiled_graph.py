"""What training and evaluation graphs share: `build` traced, compiled for each structure of inputs, run and shown."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx

from oneemb.embedding import embeddings_of
from oneemb.graph.build_error import BuildError
from oneemb.graph.dense import DenseCompiler
from oneemb.graph.inputs import Signature, Structure
from oneemb.graph.pipeline import Plan, Recipe, compile_plan
from oneemb.graph.prefetch import Prepared, prefetch
from oneemb.graph.recorder import Profile, stats_table
from oneemb.graph.text import graph_text
from oneemb.storage.step_lock import StepLock, in_step

__all__ = ["PLANS_MAX", "CompiledGraph", "GraphConfig", "OnAcquired", "step_locks"]

PLANS_MAX = 16
"""Compiled steps that a graph keeps: those used last."""

# Called when the rows that were prefetched for a step are the step's own.
OnAcquired = Callable[[], None]


@dataclass
class GraphConfig:
    """How a graph is compiled. A change counts from the next call on.

    Args:
        accumulation_steps: calls for each update. Every call runs forward and backward; the last of them updates with
            the sum of their gradients. Divide the loss by this number for the mean.
        compile_dense: run dense modules through torch.compile. Their numbers may then differ in the last bits. If
            torch.compile fails, one warning says why and the module runs as it is.
        cuda_graph: on a GPU, replay dense modules, forward and backward, as CUDA graphs instead of launching their
            kernels one by one. A module is captured at its fourth training step with inputs of one shape, by
            torch.cuda.make_graphed_callables, whose limits hold: no hooks, tensors alone as arguments, nothing that
            depends on values. If it cannot be captured, for example because `build` calls it twice, one warning says
            why and it runs as it is. Other threads must not use the GPU during a capture; the thread of `run` does not.
    """

    accumulation_steps: int = 1
    compile_dense: bool = False
    cuda_graph: bool = False


class CompiledGraph(torch.nn.Module):
    """Base of `TrainGraph` and `EvalGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GraphConfig()
        self._plans: OrderedDict[tuple[Structure, Hashable], Plan] = OrderedDict()  # that used last is the last
        self._dropped_plans = 0
        self._profile: Profile | None = None
        self._latest: Plan | None = None
        self._dense: dict[tuple[bool, bool], DenseCompiler | None] = {}
        self._signature = Signature(self.build)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """What a call computes; each graph defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define build(self, ...)")

    # ---- compiling --------------------------------------------------------------------------------------------------

    def compiled(self) -> fx.GraphModule:
        """The graph that the next call runs; `.code` and `.graph` show it.

        A graph is compiled anew when modules are exchanged, frozen, unfrozen or switched between training and eval
        mode, when rows have moved or their state has another width, and for inputs of another nesting. Other shapes
        of inputs need no compilation.
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
        """Drop the least recently used plan if `PLANS_MAX` are kept; the first time, with a warning."""
        if len(self._plans) < PLANS_MAX:
            return
        before: Structure = next(reversed(self._plans))[0]
        if self._dropped_plans == 0:
            changed = before.difference(structure) or "the state of modules, between training, eval, frozen and others"
            warnings.warn(
                f"{type(self).__name__} has been compiled {PLANS_MAX + 1} times, for inputs of as many structures, and"
                f" keeps the {PLANS_MAX} that were used last; what changed this time is {changed}. Give what changes"
                " from call to call as tensors, or inside a tuple, list or dict of a fixed length",
                stacklevel=2,
            )
        self._plans.popitem(last=False)
        self._dropped_plans += 1

    def _key(self, structure: Structure) -> tuple[Structure, Hashable]:
        """What a plan is compiled for. Calls with equal keys share a plan."""
        lookups = [
            (embedding.store, embedding.num_tables, embedding.key_type, embedding.padding_idx)
            for embedding in embeddings_of(self).values()
        ]
        return structure, (self._dense_options(), tuple(lookups), self._recipe_key())

    def _recipe(self) -> Recipe:
        raise NotImplementedError

    def _recipe_key(self) -> Hashable:
        """What the recipe depends on, the options of dense modules left out."""
        raise NotImplementedError

    def _dense_options(self) -> tuple[bool, bool]:
        return self.config.compile_dense, self.config.cuda_graph

    def _dense_compiler(self) -> DenseCompiler | None:
        options = self._dense_options()
        if options not in self._dense:
            self._dense[options] = DenseCompiler(*options) if any(options) else None
        return self._dense[options]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # torch converts modules one by one: an embedding that refuses must do so before the first is converted.
        for embedding in embeddings_of(self).values():
            embedding.check_apply(fn)
        return super()._apply(fn, recurse)

    # ---- showing ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The compiled graph as text: its ops, in two halves where part of it can run ahead of its step."""
        plan = self._latest
        if plan is None:
            return f"{self!r}\nnot compiled yet: call the graph, or compiled()"
        traced, compiled = _count_ops(plan.history[0].graph), _count_ops(plan.whole.graph)
        parts = [f"{type(self).__name__}: {traced} ops traced, {compiled} compiled"]
        if plan.prepare is None or plan.compute is None:
            parts.append(_indented("step", plan.whole.graph))
        else:
            parts += [_indented("prepare", plan.prepare.graph), _indented("compute", plan.compute.graph)]
        return "\n".join(parts)

    def explain(self) -> str:
        """Where the time went since the graph was compiled: a table with a line for each op.

        The prepare half runs on a thread of its own, beside the compute half: it costs time only where it takes longer.
        Bytes and GB/s count the rows and gradients that an op must move; of a dense module only the time is known.
        The 16 plans that were used last are in the table; where more were compiled, a line says how many are left out.
        """
        executors = [executor for plan in list(self._plans.values()) for executor in plan.executors()]
        text = stats_table([(executor.half, executor.stats()) for executor in executors])
        if self._dropped_plans:
            text += f"\nwithout what {self._dropped_plans} plans have done, which gave way to others"
        caches = ["embedding  step  hit rate  rows in cache  evicted  written down"]
        for name, embedding in embeddings_of(self).items():
            stats = embedding.stats()
            hot = stats.get("device")
            rows, evicted, written_down = (hot["rows"], hot["evicted"], hot["written_down"]) if hot else (0, 0, 0)
            caches.append(f"{name}  {stats['step']}  {stats['hit_rate']:.1%}  {rows:,}  {evicted:,}  {written_down:,}")
        return text + "\n\n" + "\n".join(caches)

    def draw(self, path: str) -> None:
        """Draw the graph as it was traced and as each pass left it, side by side.

        Args:
            path: the file to write; its suffix chooses the format: svg, png or pdf.

        Raises:
            ImportError: matplotlib is not installed; the extra `draw` brings it.
            RuntimeError: the graph has not been compiled.
        """
        from oneemb.graph.draw import draw_history

        if self._latest is None:
            raise RuntimeError("the graph is not compiled yet: call it, or compiled(), before draw()")
        draw_history(self._latest.history, path)

    def profile(self, steps: int) -> Profile:
        """Record when each op of the next steps begins and ends; `print` shows a table, `.save` writes a Chrome trace.

        Example: `profile = graph.profile(20)`, run 20 steps, `print(profile)`, `profile.save("trace.json")`.
        """
        self._profile = Profile(steps)
        return self._profile

    def _active_profile(self) -> Profile | None:
        return self._profile if self._profile is not None and not self._profile.done else None

    # ---- running ----------------------------------------------------------------------------------------------------

    def run(self, loader: Iterable[Any], prefetch_depth: int = 1) -> Generator[Any, None, None]:
        """Call the graph for each batch, while a thread loads and prepares the batches to come.

        `for loss in graph.run(loader): ...` gives what `for batch in loader: loss = graph(*batch)` gives, bit for
        bit. Ahead of its step a batch's unique ids are found, and its known rows are read into the cache and pinned.
        Preparing inserts nothing and reads no row's values, so whoever leaves the loop early or saves in it finds what
        the steps so far have made. The end of the loop, leaving it, or an error in it unpins the rows and ends the
        thread. If the loader keeps the thread for more than 30 s, a warning says so, and both happen when it gives its
        batch.

        Args:
            loader: gives batches: a tuple or list of `build`'s arguments, a dict of them by name, or, if `build`
                cannot be called so, its one argument; `(samples,)` hands over a list of samples, however many they
                are. It runs on the thread: if both it and the steps draw random numbers from torch, give it a
                generator of its own. A batch must not be changed once it is handed over.
            prefetch_depth: batches prepared ahead; 0 = none, and no thread. Rows of that many more batches should fit
                in the cache; those that do not are read when their step comes.

        Yields:
            What `build` returns, for each batch.

        Raises:
            ValueError: prefetch_depth is not an int of at least 0.
            What the loader raised, at the batch that it did not give, with its traceback; what a call raises.
        """
        if isinstance(prefetch_depth, bool) or not isinstance(prefetch_depth, int) or prefetch_depth < 0:
            raise ValueError(f"prefetch_depth must be an int of at least 0, got {prefetch_depth!r}")
        if prefetch_depth == 0:
            return self._run_without_thread(loader)
        return self._run_ahead(loader, prefetch_depth)

    def _run_without_thread(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        for batch in loader:
            args, kwargs = self._signature.spread(batch)
            yield self(*args, **kwargs)

    def _run_ahead(self, loader: Iterable[Any], depth: int) -> Generator[Any, None, None]:
        devices = [embedding.store.loops.device for embedding in embeddings_of(self).values()]
        yield from prefetch(loader, self._prepare, self._compute_prepared, depth, devices)

    def _prepare(self, batch: Any, follow: Callable[[list[tuple[int, int]]], object] | None = None) -> Prepared:
        """A batch with what can be computed ahead of its step; runs on the worker.

        Only plans that exist are used: the thread that calls the graph does the tracing.

        Args:
            follow: told the versions of the buffers that preparing is about to read.
        """
        signature = self._signature
        args, kwargs = signature.spread(batch)
        values, structure = signature.flatten(args, kwargs)
        plan = self._plans.get(self._key(structure))
        if plan is None or plan.prepare is None:
            return Prepared((values, structure))
        versions = plan.buffer_versions()
        if versions and follow is not None:
            follow(versions)  # A kernel that changes a buffer is launched before the buffer's version changes.
        prepared = plan.prepare(values, profile=self._active_profile())
        return Prepared((values, structure), plan, prepared, versions)

    def _compute_prepared(self, prepared: Prepared, on_acquired: OnAcquired) -> Any:
        values, structure = prepared.batch
        return self._whole_step(lambda: self._step(values, structure, prepared, on_acquired))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a batch, compiling `build` if this is the first.

        Args:
            args, kwargs: those of `build`. From call to call, shapes of tensors, numbers, and strings inside a tuple,
                list or dict may differ: `build` may hand them on and may not branch on them. `build` is compiled anew
                for another nesting of tuples, lists and dicts, and for other values of what it may branch on: None,
                True, False, dtypes, devices, and a string that is an argument of its own (mode="train"). The 16
                compiled graphs that were used last are kept.

        Returns:
            What `build` returns.

        Raises:
            BuildError: `build` cannot be compiled.
            NonFiniteGradientError: a gradient is NaN or infinite; no weight, state or count has changed. Ids that the
                lookups have inserted stay, with their initial values.
            What a hook, an optimizer or a scheduler raises: a note says what was updated before. A step whose
                scheduler failed has been made and is counted.
        """
        values, structure = self._signature.flatten(args, kwargs)
        return self._whole_step(lambda: self._step(values, structure, Prepared(None), None))

    def _whole_step(self, step: Callable[[], Any]) -> Any:
        for embedding in embeddings_of(self).values():
            if _has_hooks(embedding):
                raise BuildError(
                    f"embedding {embedding.name!r} has hooks, which a graph does not call: its lookups are ops. Put"
                    " them on a module that build gives the rows to, or remove them"
                )
        return in_step(step_locks(self), step)

    def _step(self, values: list[Any], structure: Structure, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        return self._run_plan(values, structure, prepared, on_acquired, None)

    def _run_plan(
        self, values: list[Any], structure: Structure, prepared: Prepared, on_acquired: OnAcquired | None,
        committing: ExitStack | None,
    ) -> Any:  # fmt: skip
        plan = self._plan(structure)
        profile = self._active_profile()
        fits = prepared.plan is not None and prepared.plan.prepared == plan.prepared
        fits = fits and prepared.versions == plan.buffer_versions()
        if fits and plan.compute is not None and prepared.values is not None:
            result = plan.compute([*values, *prepared.values], on_acquired, profile, committing)
        else:
            prepared.drop()
            result = plan.whole(values, on_acquired, profile, committing)
        if profile is not None:
            profile.step += 1
        return result


def step_locks(graph: torch.nn.Module) -> list[StepLock]:
    """The locks of the stores of all embeddings below a module."""
    return [embedding.store.step_lock for embedding in embeddings_of(graph).values()]


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks)


def _count_ops(graph: fx.Graph) -> int:
    return sum(node.op not in ("placeholder", "get_attr", "output") for node in graph.nodes)


def _indented(title: str, graph: fx.Graph) -> str:
    return f"{title}:\n" + "\n".join(f"    {line}" for line in graph_text(graph).splitlines())
