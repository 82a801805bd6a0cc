"""`CompiledGraph`, the base of graphs, which makes the lookups of `build` ahead of its call; and `EvalGraph`."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch

from oneemb.embeddings.embedding import embeddings_of
from oneemb.graph.building import Building, Expected, MadeLookup
from oneemb.graph.dense import DenseCompiler, dense_modules
from oneemb.graph.inputs import Signature
from oneemb.graph.model_trace import ModelTrace
from oneemb.graph.ops.reading import measure_gather
from oneemb.graph.ops.update import StepOptimizer
from oneemb.graph.plan import LookupPlan, compile_plan
from oneemb.graph.prefetch import Prepared
from oneemb.graph.rank_messages import moment
from oneemb.graph.recorder import Profile, StepStats
from oneemb.storage.fs import AnyPath
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import StepLock
from oneemb.training.loader_loops import LoaderLoops, OnAcquired
from oneemb.training.plan_cache import Batch, PlanCache


@dataclass
class GraphConfig:
    """Options of a graph. A change takes effect at the next call.

    Args:
        accumulation_steps: number of calls for each update. Every call runs forward and backward; the last call
            updates with the sum of the gradients. Divide the loss by this number for the mean.
        compile_dense: run dense modules through torch.compile. Results may then differ in the last bits. If
            torch.compile fails, one warning gives the reason and the module runs uncompiled.
        cuda_graph: on a GPU, replay forward and backward passes of dense modules as CUDA graphs, instead of launching
            kernels one by one. A module is captured once it has had three training steps with inputs of the same
            shapes, by torch.cuda.make_graphed_callables, whose limits hold: no hooks, only tensors as arguments, no
            control flow that depends on values. If a module cannot be captured, for example because `build` calls it
            twice, one warning gives the reason and the module runs without a graph. During a capture no other thread of
            yours may use the GPU. The thread that `run` starts waits by itself.
        check_in_step: on a GPU, wait in each step for the check of its gradients, so that an error is raised in that
            step and not in a later one; see `oneemb.Optimizer`. Steps with a GradScaler, or with a scheduler that the
            graph steps, always wait. With False, the position of the loader counts the batches of steps that were left
            out.
    """

    accumulation_steps: int = 1
    compile_dense: bool = False
    cuda_graph: bool = False
    check_in_step: bool = True


def _goes_on(forward: object) -> bool:
    """Whether a method `forward` calls `super().forward`, so that it surrounds the graph's step."""
    code = getattr(inspect.unwrap(cast(Any, forward)), "__code__", None)
    return code is not None and {"super", "forward"} <= set(code.co_names)


class CompiledGraph(LoaderLoops):
    """Base of `TrainGraph` and `EvalGraph`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__[: cls.__mro__.index(CompiledGraph)]:
            if "forward" in vars(base) and not _goes_on(vars(base)["forward"]):
                where = "" if base is cls else f" in its base {base.__name__}"
                remedy = "give it another name" if base is cls else "list this base after the graph"
                raise TypeError(
                    f"{cls.__name__} defines forward{where}, which would replace the graph's step, so that a call would"
                    f" update nothing; name it build, which the step calls, or {remedy}; a forward around the step"
                    " calls super().forward"
                )

    def __init__(self) -> None:
        super().__init__()
        self.config = GraphConfig()
        self._plans = PlanCache(type(self).__name__)
        self._stats = StepStats()
        self._dense: dict[tuple[bool, bool], DenseCompiler | None] = {}
        self._signature = Signature(self.build)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Result of a call of the graph. Each graph defines this method."""
        raise NotImplementedError(f"{type(self).__name__} must define build(self, ...)")

    # ---- compiling --------------------------------------------------------------------------------------------------

    def _surrounds_step(self) -> bool:
        hooks = self._forward_pre_hooks, self._forward_hooks, self._backward_pre_hooks, self._backward_hooks
        return type(self).forward is not CompiledGraph.forward or any(hooks)

    def _trainers(self) -> Sequence[StepOptimizer]:
        """The optimizers that train the graph's embeddings."""
        return ()

    def _dense_compiler(self) -> DenseCompiler | None:
        options = self.config.compile_dense, self.config.cuda_graph
        if options not in self._dense:
            self._dense[options] = DenseCompiler(*options) if any(options) else None
        return self._dense[options]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # torch converts modules one by one, so an embedding must refuse before the first module is converted.
        for embedding in embeddings_of(self).values():
            embedding.check_apply(fn)
        return super()._apply(fn, recurse)

    # ---- serving ----------------------------------------------------------------------------------------------------

    def export(
        self,
        path: AnyPath,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        format: Literal["export", "aot_inductor", "torchscript"] = "export",
        dtype: Literal["float32", "float16", "int8", "int4"] = "float32",
        lookup: Literal["aten", "op"] = "aten",
        absent: Literal["initial", "zeros"] = "initial",
        snapshot: str | None = None,
        dynamic_shapes: Any = None,
    ) -> None:
        """Write an inference program, which computes the result of `build` in eval mode and contains the rows. See
        docs/export.md.

        The graph and its embeddings do not change. The program of a `TrainGraph` takes all arguments of `build`, labels
        too, and computes the whole result, without `loss.backward()`. To export only scores, give the same modules to
        an `EvalGraph`.

        Args:
            path: the file, replaced when the new file is complete; its folder must exist. Torch expects a name that
                ends in .pt2, or in .pt for TorchScript.
            args, kwargs: arguments of `build`: an example batch, on the CPU. The first dimension of every tensor, here
                at least 2, is free in the program: any number of examples, also 0. Other values are constants.
            format: "export" = a program for torch.export.load; "aot_inductor" = a compiled package for
                torch._inductor.aoti_load_package or C++; "torchscript" = traced, for torch.jit.load.
            dtype: dtype of the rows in the program; "float32" = the trained weights, bit for bit.
            lookup: "aten" = ops that every torch has; "op" = one op of oneemb, which is faster, and needs
                `import oneemb.serving.frozen_op` in Python.
            absent: value of an id without a row: "initial" = its initial weights in training, or "zeros".
            snapshot: name of the snapshot whose rows are exported; None = the current rows.
            dynamic_shapes: argument of torch.export.export, if other dimensions than the first ones are free.

        Raises:
            BuildError: `build` branches on values, fixes the number of examples, or does something that torch.export
                cannot export.
            TypeError: `path` is no path, `kwargs` no dict, or `snapshot` no name.
            ValueError: an argument is not as above, a tensor or module is not on the CPU, or the graph has a module
                that no program can hold: a collection of `oneemb.torchrec`, an `InferenceEmbedding`.
            FileNotFoundError: the folder of `path` does not exist.
            IsADirectoryError: `path` is a folder.
            StorageError: there is no such snapshot, rows do not fit in the dtype, or files cannot be read or written.
            After any error, the file at `path` is unchanged.

        Example:
            >>> import tempfile, torch, oneemb
            >>> folder = tempfile.mkdtemp()
            >>> class Score(oneemb.EvalGraph):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.embedding = oneemb.MultiTableEmbedding(
            ...             "items", 4, torch.float32, torch.int64, [oneemb.make_table()],
            ...             oneemb.make_device_mem_store_options(folder + "/items"),
            ...         )
            ...     def build(self, ids):
            ...         return self.embedding(ids).sum(-1)
            >>> score = Score()
            >>> score.export(folder + "/score.pt2", torch.zeros(2, 1, dtype=torch.int64))
            >>> program = torch.export.load(folder + "/score.pt2").module()
            >>> program(torch.tensor([[7], [-1], [9]])).shape
            torch.Size([3, 1])
        """
        from oneemb.serving.export import export_graph

        export_graph(
            self, self.build, path, args, kwargs, format=format, dtype=dtype, lookup=lookup, absent=absent,
            snapshot=snapshot, dynamic_shapes=dynamic_shapes,
        )  # fmt: skip

    # ---- running ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a batch.

        Args:
            args, kwargs: arguments of `build`.

        Returns:
            The result of `build`.

        Raises:
            BuildError: `build` does something that a graph refuses; the message names the call and its line.
            NonFiniteGradientError: a gradient is NaN or infinite; no weight, state or count has changed. Ids that the
                lookups have inserted stay, with their initial values.
            Any error of `build`, a hook, an optimizer or a scheduler: a note says what was updated before. A step whose
                scheduler failed has been made and is counted.
        """
        since, made = moment(), self._steps_made()
        try:  # as in `_failing_together`
            prepared = Prepared(None, position=self._called_by)
            if self._called_by is not None:  # An assignment to an attribute of a module takes long.
                self._called_by = None
            batch = self._batch(args, kwargs)
            return self._in_step(batch, functools.partial(self._step, batch, prepared, None))
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail_together(error, since, made, one_step=True)
            raise

    def _step(self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        result = self._run_build(batch, prepared, on_acquired, [])
        prepared.trained()
        return result

    def _run_build(
        self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None, expected: list[MadeLookup],
        **surrounding: Any,
    ) -> Any:  # fmt: skip
        """Result of `build` for a batch.

        Args:
            prepared: the batch's prepared values, if the batch was prepared ahead.
            on_acquired: called once the rows of the lookups are acquired; None outside of `run` with prefetch.
            expected: list to which the lookups that `build` is expected to make are added.
            surrounding: further arguments of `Building`.
        """
        self._stats.profile = profile = self._active_profile()
        known = self._plans.of(batch, self._inserts())
        names = {embedding.store: name for name, embedding in batch.embeddings.items()}
        tape, plan = known.tape(batch), known.plan
        if plan is None:
            prepared.drop()
        elif plan.only_embedding and on_acquired is None and prepared.values is None:
            # A call, not `run`: nothing was prepared ahead.
            surrounding |= {"at_once": plan.only_embedding, "count": functools.partial(self._count_lookup, expected)}
        else:
            self._expect(expected, plan, batch, prepared, profile)
        all_made = on_acquired or (lambda: None)
        planned = cast("list[Expected]", expected)  # No lookup was made yet.
        trace = None if tape is None else ModelTrace(batch.values, batch.structure.names())
        building = Building(names, planned, all_made, tape, announced=prepared.announced, trace=trace, **surrounding)
        dense = self._dense_compiler()
        call = functools.partial(self._stats.call, "build", building.call, self.build, *batch.args, **batch.kwargs)
        if dense is None and trace is None:
            result = call()
        else:
            with contextlib.ExitStack() as surroundings:
                if trace is not None:
                    surroundings.enter_context(trace.watching(self, () if dense else dense_modules(self)))
                if dense is not None:
                    surroundings.enter_context(dense.in_place_of(self, self._why_not_captured()))
                result = call()
        if tape is not None and trace is not None:
            found = tape, self, batch.embeddings, self._trainers(), self._plans.merged
            with signals_deferred:  # In the C code of torch.fx a KeyboardInterrupt would become a SystemError.
                known.keep(compile_plan(*found, inserts=self._inserts()), trace.boxes(result))
        elif plan is not None:
            known.look_back(building, plan)
        if known.plan is not None:
            self._plans.latest = known.plan
        if profile is not None:
            profile.step += 1
        return result

    def _expect(
        self, expected: list[MadeLookup], plan: LookupPlan, batch: Batch, prepared: Prepared, profile: Profile | None
    ) -> None:
        """Add the lookups that `build` is expected to make to `expected`."""
        try:
            fits = prepared.plan is plan and prepared.values is not None and prepared.versions == plan.versions()
            if not fits and (prepared.values is not None or prepared.announced.lookups):
                prepared.drop()
            expected += plan.expect(batch.values, prepared.values if fits else None, profile)
        except Exception:  # `build` will make the lookups as in eager mode, and raise the error at its line.
            prepared.drop()
        prepared.values = None  # The expected lookups hold the rows, or the rows were dropped.

    def _count_lookup(self, expected: list[MadeLookup], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Result of the lookup `make`, which is counted and timed. The lookup is added to `expected`, so that its rows
        are unpinned after the step, even if a kept result or error of `build` keeps the lease alive."""
        rows = self._stats.call("lookup", make, measure=measure_gather)
        lease = getattr(rows.grad_fn, "lease", None)
        if lease is not None:
            expected.append(MadeLookup(lease))
        return rows

    def _why_not_captured(self) -> str:
        """Reason why dense modules must not be captured as CUDA graphs; "" = they may be captured."""
        return ""


def step_locks(graph: torch.nn.Module) -> list[StepLock]:
    """The step locks of the stores of all embeddings below a module."""
    return [embedding.store.step_lock for embedding in embeddings_of(graph).values()]


class EvalGraph(CompiledGraph):
    """A graph that only evaluates: subclass it, assign modules, define `build`, and call the object.

    A call runs all modules in eval mode, in whatever mode they are, computes no gradient and inserts no id: an unknown
    id reads as its initial value. So a `TrainGraph` and an `EvalGraph` may share modules. If two threads call graphs
    that share an embedding, each waits for the step of the other. Other modules have no such lock, and their mode is
    the same for all threads. So an `EvalGraph` must not run while another thread trains its modules eagerly, or calls
    a graph that shares modules but no embedding with it; give the `EvalGraph` copies of such modules.

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

    def _step(self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        in_training_mode = [module for module in self.modules() if module.training]
        try:
            for module in in_training_mode:
                module.training = False
            with torch.no_grad():
                return super()._step(batch, prepared, on_acquired)
        finally:
            with signals_deferred:
                for module in in_training_mode:
                    module.training = True
