"""Base of training and evaluation graphs: it calls `build`, makes its lookups ahead of the call, and shows them."""

import functools
import inspect
import time
import traceback
import warnings
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

import torch
from torch import fx

from oneemb.embeddings.embedding import TableEmbedding, embeddings_of
from oneemb.graph import ops
from oneemb.graph.building import Building, Expected
from oneemb.graph.dense import DenseCompiler
from oneemb.graph.inputs import Signature, Structure
from oneemb.graph.loader_position import LoaderPosition
from oneemb.graph.ops.update import StepOptimizer
from oneemb.graph.plan import Merged, Plan, compile_plan
from oneemb.graph.prefetch import Prepared, prefetch
from oneemb.graph.ranks import Ranks, Together, mark_told, moment, whole_exchange
from oneemb.graph.recorder import Profile, StepStats, stats_table
from oneemb.graph.tape import Tape
from oneemb.graph.text import graph_text
from oneemb.storage.fs import AnyPath, file_path
from oneemb.storage.locking.step_lock import StepLock, in_step

__all__ = ["Batch", "PLANS_MAX", "CompiledGraph", "GraphConfig", "OnAcquired", "step_locks"]

Result = TypeVar("Result")

PLANS_MAX = 16
"""Plans that a graph keeps: those used last."""

RECORDED_MAX = 32
"""How often the lookups of one structure of inputs are recorded: anew after a step that has made others."""

MISSED_MAX = 3
"""How often an embedding may be looked up with other ids than were expected, before none are expected any more."""

_GIVEN_UP = (
    f"build has looked up other ids than expected, however often its lookups were recorded ({RECORDED_MAX} times); they"
    " are made as in eager mode"
)

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


class Batch(NamedTuple):
    """The arguments of a call of `build`, and the graph's embeddings now."""

    embeddings: dict[str, TableEmbedding]

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[Any]
    """Values nested in the inputs, see `oneemb.graph.inputs`."""
    structure: Structure


class _Known:
    """Lookups of `build` for one structure of inputs, as far as they are known."""

    def __init__(self, key: "_Key") -> None:
        self.key = key
        self.plan: Plan | None = None
        """None = they are to be recorded."""
        self.recorded = 0
        self.missed: Counter[str] = Counter()
        """How often a lookup of each embedding was expected in vain."""

    @property
    def given_up(self) -> bool:
        """Whether all lookups are made as in eager mode from now on."""
        return self.plan is None and self.recorded == RECORDED_MAX

    def tape(self, batch: Batch) -> Tape | None:
        """Tape to record the lookups with; None = they are recorded, or recording has failed too often."""
        if self.plan is not None or self.given_up:
            return None
        left_out = [name for name, missed in self.missed.items() if missed >= MISSED_MAX]
        return Tape(batch.values, list(batch.structure.names()), left_out)

    def keep(self, plan: Plan) -> None:
        """Have the lookups made that were recorded."""
        self.plan = plan
        self.recorded += 1  # not where `build` has raised: what it would have looked up is not known

    def look_back(self, building: Building, plan: Plan) -> None:
        """Have the lookups recorded anew if a step has made others than were expected."""
        in_vain = building.in_vain
        if in_vain:
            self.missed.update(in_vain)
        # A plan that misses none and lacks some is still better than none, once there is no other to be had.
        if in_vain or building.others > plan.others and self.recorded < RECORDED_MAX:
            self.plan = None


def _goes_on(forward: object) -> bool:
    """Whether a method calls `super().forward`, as one does that is around a graph's step."""
    code = getattr(inspect.unwrap(cast(Any, forward)), "__code__", None)
    return code is not None and {"super", "forward"} <= set(code.co_names)


_Key = tuple[Structure, tuple[bool, tuple[tuple[Any, ...], ...]]]
"""Key of a plan: the nesting of inputs; for each embedding its store, and options that change the plan."""


class CompiledGraph(torch.nn.Module):
    """Base of `TrainGraph` and `EvalGraph`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__[: cls.__mro__.index(CompiledGraph)]:
            if "forward" in vars(base) and not _goes_on(vars(base)["forward"]):
                its = "" if base is cls else f" in its base {base.__name__}"
                remedy = "give it another name" if base is cls else "name that base after the graph"
                raise TypeError(
                    f"{cls.__name__} defines forward{its}, which would take the place of the graph's step, so that a"
                    f" call would update nothing; name it build, which the step calls, or {remedy}; one that surrounds"
                    " the step calls super().forward"
                )

    def __init__(self) -> None:
        super().__init__()
        self.config = GraphConfig()
        self._known: OrderedDict[_Key, _Known] = OrderedDict()  # that used last is the last
        self._dropped = 0
        self._merged: Merged = {}
        self._stats = StepStats()
        self._profile: Profile | None = None
        self._latest: Plan | None = None
        self._dense: dict[tuple[bool, bool], DenseCompiler | None] = {}
        self._signature = Signature(self.build)
        self._position = LoaderPosition()
        """Position of the loop that was begun last."""
        self._called_by: LoaderPosition | None = None
        """Position of the loop without a thread that is about to make a call; None = no loop is."""
        self._connections: list[tuple[object, Ranks]] = []
        """Ranks that no loop uses: the group of the embeddings, and its ranks as the thread of `run` knows them."""
        self._connected: list[Ranks] = []
        """All there are."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result of a call; each graph defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define build(self, ...)")

    # ---- compiling --------------------------------------------------------------------------------------------------

    def compiled(self) -> fx.GraphModule:
        """The lookups of the last call, as they are made ahead of `build`; `.code` and `.graph` show them.

        The first call with inputs of a nesting records how the ids of its lookups come from the batch, and they are
        compiled for the calls after it. They are compiled anew when modules are exchanged, frozen, unfrozen or switched
        between training and eval mode, when rows have moved or their state has another width, for inputs of another
        nesting, and when `build` has looked up other ids than these.

        Raises:
            RuntimeError: nothing is compiled yet, or `build` has looked up other ids too often.
        """
        return self._plan_of_last_call().as_module(type(self).__name__)

    def _plan_of_last_call(self) -> Plan:
        if why := self._why_not_compiled():
            raise RuntimeError(why)
        assert self._latest is not None
        return self._latest

    def _why_not_compiled(self) -> str:
        """Why the lookups of the last call are not compiled; empty = they are."""
        if self._known and next(reversed(self._known.values())).given_up:
            return f"nothing is compiled for such inputs any more: {_GIVEN_UP}"
        return "" if self._latest is not None else "nothing is compiled yet: call the graph with a batch first"

    def _known_of(self, batch: Batch) -> _Known:
        key = self._key(batch)
        known = self._known.get(key)
        if known is None:
            self._forget_exchanged(batch.embeddings)
            self._make_room(batch.structure)
            known = self._known[key] = _Known(key)
        if known.key is not next(reversed(self._known)):
            self._known.move_to_end(key)
        return known

    def _forget_exchanged(self, embeddings: Mapping[str, TableEmbedding]) -> None:
        """Drop what is known of embeddings that are no part of the graph any more: their rows and paths are freed."""
        stores = {embedding.store for embedding in embeddings.values()}
        for key, known in list(self._known.items()):
            if not stores.issuperset(store for store, *_ in key[1][1]):
                del self._known[key]
                if known.plan is self._latest:
                    self._latest = None
        self._merged = {members: store for members, store in self._merged.items() if stores.issuperset(members)}

    def _make_room(self, structure: Structure) -> None:
        """Drop the least recently used plan if `PLANS_MAX` are kept; the first time, with a warning."""
        if len(self._known) < PLANS_MAX:
            return
        before: Structure = next(reversed(self._known))[0]
        if self._dropped == 0:
            changed = before.difference(structure) or "the state of modules, between training, eval, frozen and others"
            warnings.warn(
                f"{type(self).__name__} has been compiled {PLANS_MAX + 1} times, for inputs of as many structures, and"
                f" keeps the {PLANS_MAX} that were used last; what changed this time is {changed}. Give what changes"
                " from call to call as tensors, or inside a tuple, list or dict of a fixed length",
                stacklevel=2,
            )
        self._known.popitem(last=False)
        self._dropped += 1

    def _key(self, batch: Batch) -> _Key:
        """Key of a call's plan. Calls with equal keys share a plan."""
        inserts = self._inserts()
        lookups = [
            (
                embedding.store, embedding.num_tables, embedding.key_type, embedding.padding_idx,
                embedding.store.format, embedding.store.loops.place,
                inserts and (embedding.training, embedding.is_trained),
            )
            for embedding in batch.embeddings.values()
        ]  # fmt: skip
        return batch.structure, (inserts, tuple(lookups))

    def _inserts(self) -> bool:
        """Whether lookups may insert rows and get a gradient."""
        return False

    def _trainers(self) -> Sequence[StepOptimizer]:
        """The optimizers that train the graph's embeddings."""
        return ()

    def _dense_compiler(self) -> DenseCompiler | None:
        options = self.config.compile_dense, self.config.cuda_graph
        if options not in self._dense:
            self._dense[options] = DenseCompiler(*options) if any(options) else None
        return self._dense[options]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # torch converts modules one by one: an embedding that refuses must do so before the first is converted.
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
        """Write an inference program: what `build` returns in eval mode, with the rows in it; docs/export.md has more.

        The graph and its embeddings are as before. Of a `TrainGraph` the program computes all that `build` returns, and
        takes all that it takes, labels too: `loss.backward()` is left out. For scores alone give an `EvalGraph` with
        the same modules.

        Args:
            path: the file, replaced when the new one is complete; its folder must be there. Torch asks for a name that
                ends in .pt2, or .pt for TorchScript.
            args, kwargs: of `build`, an example batch, on the CPU. The first dimension of every tensor, 2 or more here,
                is free in the program: any number of examples, 0 too. What is no tensor is fixed.
            format: "export" = a program for torch.export.load; "aot_inductor" = a compiled package for
                torch._inductor.aoti_load_package or C++; "torchscript" = traced, for torch.jit.load.
            dtype: of the rows in the program: "float32" = the weights as trained, bit for bit.
            lookup: "aten" = ops that every torch has; "op" = one op of oneemb, quicker in Python, where it must be
                imported: `import oneemb.serving.frozen_op`.
            absent: how an id without a row reads: "initial", as its row begins in training, or "zeros".
            snapshot: whose rows; None = the rows as they are.
            dynamic_shapes: those of torch.export.export, where other dimensions are free than the first ones.

        Raises:
            BuildError: `build` branches on values, fixes the number of examples, or does what torch.export cannot do.
            TypeError: `path` is no path, `kwargs` no dict, or `snapshot` no name.
            ValueError: an argument is not as above, something is not on the CPU, or the graph holds what no program
                can: a collection of `oneemb.torchrec`, an `InferenceEmbedding`.
            FileNotFoundError: the folder of `path` is not there.
            IsADirectoryError: `path` is a folder.
            StorageError: there is no such snapshot, rows do not fit in the dtype, or files cannot be read or written.
            Whatever is raised, `path` is as it was.

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

    # ---- showing ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The compiled lookups as text: what can run ahead of a step, and what is made in it before `build`."""
        if why := self._why_not_compiled():
            return f"{self!r}\n{why}"
        plan = self._plan_of_last_call()
        recorded, lowered = (_count_ops(graph) for graph in (plan.recorded, plan.whole.graph))
        return "\n".join(
            [
                f"{type(self).__name__}: {recorded} ops recorded, {lowered} compiled",
                _indented("prepare", plan.prepare.graph),
                _indented("lookup", plan.lookup.graph),
                f"build: Python; {plan.others} lookups of ids that are not known before",
            ]
        )

    def explain(self) -> str:
        """Where the time went since the graph was made: a table with a line for each op, and one for `build`.

        The prepare half runs on a thread of its own, beside the compute half: it costs time only where it takes longer.
        Bytes and GB/s count the rows and gradients that an op must move; of `build` only the time is known, and the
        lookups that it makes itself are part of it.
        The plans of the 16 structures that were used last are in the table, each since it was compiled last; where
        there were more structures, a line says how many are left out. Another says where `build` has looked up other
        ids than expected so often that nothing is made ahead of it any more. Of ranks that own rows together the last
        lines say what this one has exchanged with the others.
        """
        plans = [known.plan for known in list(self._known.values()) if known.plan is not None]
        executors = [executor for plan in plans for executor in plan.executors()]
        text = stats_table(
            [*((executor.half, executor.stats()) for executor in executors), ("compute", self._stats.stats())]
        )
        if self._dropped:
            text += f"\nwithout what {self._dropped} plans have done, which gave way to others"
        if given_up := sum(known.given_up for known in list(self._known.values())):
            text += f"\nfor {given_up} of {len(self._known)} structures of inputs nothing is made ahead: {_GIVEN_UP}"
        caches = ["embedding  step  hit rate  rows in cache  evicted  written down"]
        for name, embedding in embeddings_of(self).items():
            stats = embedding.stats()
            hot = stats.get("device")
            rows, evicted, written_down = (hot["rows"], hot["evicted"], hot["written_down"]) if hot else (0, 0, 0)
            caches.append(f"{name}  {stats['step']}  {stats['hit_rate']:.1%}  {rows:,}  {evicted:,}  {written_down:,}")
        return "\n\n".join([text, "\n".join(caches), *self._explain_ranks()])

    def _explain_ranks(self) -> list[str]:
        """Table of this rank's traffic, as one text; empty without ranks."""
        own = [embedding.ranks for embedding in embeddings_of(self).values() if embedding.ranks is not None]
        if not own:
            return []
        ahead = self._connected
        lines = [f"rank {own[0].rank} of {own[0].size}  messages  MB sent to others  seconds in exchanges"]
        for where, ranks in (("in steps", own), ("ahead of them", ahead)):
            traffic = [one.traffic for one in ranks]
            messages, sent = sum(one.messages for one in traffic), sum(one.sent_bytes for one in traffic)
            lines.append(f"{where}  {messages:,}  {sent / 1e6:,.1f}  {sum(one.seconds for one in traffic):,.2f}")
        return ["\n".join(lines)]

    def draw(self, path: AnyPath) -> None:
        """Draw the lookups as they were recorded and as each pass left them, side by side.

        Args:
            path: the file to write; its suffix chooses the format: svg, png or pdf.

        Raises:
            TypeError, ValueError: `path` is no path, or its suffix no format's.
            ImportError: matplotlib is not installed; the extra `draw` brings it.
            RuntimeError: nothing is compiled, as for `compiled`.
        """
        from oneemb.graph.draw import draw_history

        draw_history(self._plan_of_last_call().history, file_path(path, "the picture to write"))

    def profile(self, steps: int) -> Profile:
        """Record when each op of the next steps begins and ends; `print` shows a table, `.save` writes a Chrome trace.

        Example: `profile = graph.profile(20)`, run 20 steps, `print(profile)`, `profile.save("trace.json")`.

        Raises:
            ValueError: steps is not an int of at least 1.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an int of at least 1, got {steps!r}")
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

        Where ranks own rows together (`process_group`) every rank runs a loader, and the first that ends, ends all
        loops: batches that others have loaded beyond it are left out. If one raises, every rank does. Ranks that leave
        the loop early leave it at the same batch.

        The loader is ahead of the steps: `batches_ahead` is the number of batches between them, and `loader_state` is
        the loader's `state_dict()` as of the batch trained last.

        Args:
            loader: gives batches: a tuple or list of `build`'s arguments, a dict of them by name, or, if `build`
                cannot be called so, its one argument; `(samples,)` hands over a list of samples, however many they
                are. It runs on the thread: if both it and the steps draw random numbers from torch, give it a
                generator of its own. A batch must not be changed once it is handed over.
            prefetch_depth: batches prepared ahead; 0 = none, and no thread. Rows of that many more batches should fit
                in the cache; those that do not are read when their step comes. A graph whose `forward` surrounds the
                step, or which has forward or backward hooks when the loop begins, prepares none: a batch is known when
                `forward` or a hook hands it on. Hooks that are registered later, or for all modules at once, run in the
                graph's modules, and for the graph itself only where nothing is prepared.

        Yields:
            What `build` returns, for each batch.

        Raises:
            ValueError: prefetch_depth is not an int of at least 0.
            RuntimeError: a call raised StopIteration, which would end the loop as if there were no more batches.
            What the loader raised, at the batch that it did not give, with its traceback; what a call raises.
        """
        if isinstance(prefetch_depth, bool) or not isinstance(prefetch_depth, int) or prefetch_depth < 0:
            raise ValueError(f"prefetch_depth must be an int of at least 0, got {prefetch_depth!r}")
        if type(self).forward is not CompiledGraph.forward or self._has_hooks():
            prefetch_depth = 0
        ranks = self._ranks()
        self._position = position = LoaderPosition(self._position.state)
        if ranks is None:
            return self._loop(position.read(loader), prefetch_depth, None, position)
        batches: list[Together] = []
        try:
            with whole_exchange():  # The others begin the loop: an interrupt comes where they can be told.
                ahead = self._connect(ranks)
                left = functools.partial(self._connections.append, (ranks.group, ahead))
                batches.append(Together(ahead, position.read(loader), left))
            return self._loop(batches[0], prefetch_depth, ahead, position)
        except BaseException:
            for one in batches:
                one.leave()
            raise

    def _has_hooks(self) -> bool:
        """Whether a call of the graph runs hooks around the step."""
        its = self._forward_pre_hooks, self._forward_hooks, self._backward_pre_hooks, self._backward_hooks
        return any(its)

    def _connect(self, ranks: Ranks) -> Ranks:
        """The ranks, with connections that no other loop uses; every rank calls it."""
        free = [one for one in self._connections if one[0] is ranks.group][-1:]
        mine = free[0][1] if free else None
        name = "" if mine is None else mine.made
        numbers = ranks.tell("begin a loop over a loader", lambda: zlib.crc32(name.encode()))
        if mine is None or len(set(numbers)) > 1:  # A loop that was forgotten may be gone on some ranks, not on others.
            self._connected.append(ranks.again())
            return self._connected[-1]
        self._connections.remove(free[0])
        return mine

    def _ranks(self) -> Ranks | None:
        """Ranks that own rows of the graph's embeddings; None = this process has all rows."""
        groups = {one.ranks.group: one.ranks for one in embeddings_of(self).values() if one.ranks is not None}
        if len(groups) > 1:
            raise ValueError(
                f"the embeddings of {type(self).__name__} are of {len(groups)} process groups; give them all the same"
            )
        return next(iter(groups.values()), None)

    @property
    def batches_ahead(self) -> int:
        """Number of batches that the loop begun last has read from its loader and that are in no update yet."""
        return self._position.ahead

    @property
    def loader_state(self) -> Any:
        """State of the loader as of the batch that a loop over `run` trained last, however far the thread has read: a
        copy of its `state_dict()`. None for a loader without that method, and before the first loop.

        A checkpoint holds the state, and `load` brings it back: after `loader.load_state_dict(graph.loader_state)` the
        loop goes on with the next batch. Each rank has its own, which is None after a load of a checkpoint of another
        number of ranks.
        """
        return self._position.state

    def at_loader_state(self, state: Any) -> None:
        """Set `loader_state` to that of a checkpoint, until a loop trains a batch."""
        self._position.state = state

    def _loop(
        self, loader: Iterable[Any], depth: int, ranks: Ranks | None, position: LoaderPosition
    ) -> Generator[Any, None, None]:  # fmt: skip
        leave = loader.leave if isinstance(loader, Together) else lambda: None
        if depth:
            prepare = functools.partial(self._prepare, ranks=ranks, position=position)
            devices = [embedding.store.loops.device for embedding in embeddings_of(self).values()]
            # The others are told before this rank waits for its thread, which waits for theirs.
            failing = self._failing_together
            yield from prefetch(loader, prepare, self._compute_prepared, depth, devices, leave, failing)
            position.ended()
            return
        try:
            with self._failing_together():
                for batch in loader:
                    args, kwargs = self._signature.spread(batch)
                    self._called_by = position
                    result = _of_a_loop(functools.partial(self, *args, **kwargs))
                    if self._called_by is not None:  # A forward around the step has made none of this batch.
                        self._called_by = None
                        position.trained(updated=False)
                    yield result
            position.ended()
        finally:
            leave()

    @contextmanager
    def _failing_together(self, *, one_step: bool = False) -> Iterator[None]:
        """An error of this block, which other ranks know nothing of, is one of theirs at their next exchange.

        Args:
            one_step: whether the block is a step, after which the others expect nothing.
        """
        since, made = moment(), self._steps_made()
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail_together(error, since, made, one_step=one_step)
            raise

    def _fail_together(self, error: BaseException, since: int, made: int, *, one_step: bool) -> None:
        if one_step and not isinstance(error, Exception) and self._steps_made() > made:
            mark_told(error)  # An interrupt that came when the step was made: what the others have done, it has.
        embeddings = list(embeddings_of(self).values())
        # An evaluation that asks no rank is this one's own: others have come to nothing in which they wait for it.
        asks = any(embedding.asked_ranks is not None for embedding in embeddings)
        told = embeddings if asks or self._inserts() or not one_step else []
        for embedding in told:
            if embedding.ranks is not None:
                embedding.ranks.fail(f"run {type(self).__name__}", error, since)

    def _steps_made(self) -> int:
        """How many steps the graph has made."""
        return 0

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        return Batch(embeddings_of(self), args, kwargs, *self._signature.flatten(args, kwargs))

    def _prepare(
        self, batch: Any, follow: Callable[[list[tuple[int, int]]], object] | None = None, ranks: Ranks | None = None,
        position: LoaderPosition | None = None,
    ) -> Prepared:  # fmt: skip
        """A batch with what can be computed ahead of its step; runs on the worker.

        Only plans that exist are used: the thread that calls the graph records and compiles them.

        Args:
            follow: told the versions of the tensors that preparing is about to read.
            ranks: those whom its lookups are announced to, with connections of their own.
            position: of the loop that read the batch.
        """
        with ops.Announcement(ranks) as announcement:
            prepared = self._prepare_lookups(batch, announcement, follow)
        prepared.announced, prepared.position = announcement.announced, position
        return prepared

    def _prepare_lookups(
        self, batch: Any, announcement: ops.Announcement, follow: Callable[[list[tuple[int, int]]], object] | None
    ) -> Prepared:
        args, kwargs = self._signature.spread(batch)
        spread = Batch({}, args, kwargs, *self._signature.flatten(args, kwargs))
        try:
            known = self._known.get(self._key(spread._replace(embeddings=embeddings_of(self))))
            plan = None if known is None else known.plan
            if plan is None:
                return Prepared(spread)
            versions = plan.versions()
            if versions and follow is not None:
                follow(versions)  # A kernel that changes a tensor is launched before the tensor's version changes.
            values = plan.run_ahead(spread.values, announcement, self._active_profile())
        except Exception:
            # What is wrong with the batch, `build` will say, in its line; or it has just given the graph other modules.
            return Prepared(spread)
        return Prepared(spread, plan, values, versions)

    def _compute_prepared(self, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        # Those that it has now: the loop may have exchanged modules since the batch was prepared.
        batch = prepared.batch._replace(embeddings=embeddings_of(self))
        return _of_a_loop(lambda: self._in_step(batch, lambda: self._step(batch, prepared, on_acquired)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a batch.

        Args:
            args, kwargs: those of `build`.

        Returns:
            What `build` returns.

        Raises:
            BuildError: `build` does what has no place in a graph; the message says what, and where.
            NonFiniteGradientError: a gradient is NaN or infinite; no weight, state or count has changed. Ids that the
                lookups have inserted stay, with their initial values.
            What `build`, a hook, an optimizer or a scheduler raises: a note says what was updated before. A step whose
                scheduler failed has been made and is counted.
        """
        since, made = moment(), self._steps_made()
        try:  # As `_failing_together`.
            prepared = Prepared(None, position=self._called_by)
            if self._called_by is not None:  # Assignments to modules take long.
                self._called_by = None
            batch = self._batch(args, kwargs)
            return self._in_step(batch, functools.partial(self._step, batch, prepared, None))
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail_together(error, since, made, one_step=True)
            raise

    def _in_step(self, batch: Batch, step: Callable[[], Any]) -> Any:
        return in_step([embedding.store.step_lock for embedding in batch.embeddings.values()], step)

    def _step(self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        result = self._run_build(batch, prepared, on_acquired, [])
        prepared.trained()
        return result

    def _run_build(
        self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None, expected: list[Expected],
        **surrounding: Any,
    ) -> Any:  # fmt: skip
        """Call `build`, and return its result.

        Args:
            expected: the lookups that it is expected to make are added to this list.
            surrounding: of `Building`.
        """
        self._stats.profile = profile = self._active_profile()
        known = self._known_of(batch)
        names = {embedding.store: name for name, embedding in batch.embeddings.items()}
        tape, plan, single = known.tape(batch), known.plan, None
        if plan is None:
            prepared.drop()
        elif plan.single is not None and on_acquired is None and prepared.values is None:  # A call, nothing prepared.
            single = plan.single_embedding, functools.partial(self._expect_single, expected, plan, batch, profile)
        else:
            self._expect(expected, plan, batch, prepared, profile)
        all_made = on_acquired or (lambda: None)
        building = Building(names, expected, all_made, tape, announced=prepared.announced, single=single, **surrounding)
        dense = self._dense_compiler()
        call = functools.partial(self._stats.call, "build", building.call, self.build, *batch.args, **batch.kwargs)
        if dense is None:
            result = call()
        else:
            with dense.in_place_of(self, self._why_not_captured()):
                result = call()
        if tape is not None:
            known.keep(
                compile_plan(tape, self, batch.embeddings, self._trainers(), self._merged, inserts=self._inserts())
            )
        elif plan is not None:
            known.look_back(building, plan)
        if known.plan is not None and known.plan is not self._latest:
            self._latest = known.plan
        if profile is not None:
            profile.step += 1
        return result

    def _expect(
        self, expected: list[Expected], plan: Plan, batch: Batch, prepared: Prepared, profile: Profile | None
    ) -> None:
        """Add the lookups that `build` is expected to make."""
        try:
            fits = prepared.plan is plan and prepared.values is not None and prepared.versions == plan.versions()
            if not fits and (prepared.values is not None or prepared.announced is not None):
                prepared.drop()
            expected += plan.expect(batch.values, prepared.values if fits else None, profile)
        except Exception:  # `build` will make them as in eager mode; what is wrong it will say, in its line.
            prepared.drop()
        prepared.values = None  # Its rows are the lookups' own, or dropped.

    def _expect_single(
        self, expected: list[Expected], plan: Plan, batch: Batch, profile: Profile | None, ids: object
    ) -> Sequence[Expected]:
        """The plan's only lookup, as `build` looks up ids; it is added to `expected` too."""
        begin = time.perf_counter_ns()
        try:
            found = plan.expect_single(ids, batch.values, profile)
        except Exception:  # `build` will make it as in eager mode.
            return ()
        finally:
            self._stats.leave_out(time.perf_counter_ns() - begin)
        expected += found
        return found

    def _why_not_captured(self) -> str:
        """Reason why dense modules must not be captured as CUDA graphs; "" = they may be."""
        return ""


def step_locks(graph: torch.nn.Module) -> list[StepLock]:
    """The locks of the stores of all embeddings below a module."""
    return [embedding.store.step_lock for embedding in embeddings_of(graph).values()]


def _of_a_loop(step: Callable[[], Result]) -> Result:
    """Result of a step of a loop. A StopIteration of the step becomes a RuntimeError, since a generator cannot pass it
    on, and its caller would take it for the end of the loop."""
    try:
        return step()
    except StopIteration as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"a step raised StopIteration at {at.filename}:{at.lineno}: {at.line}; a loop over run() would take it for"
            " the end of the batches. Give next() a default, or iterate by a for loop"
        ) from error


def _count_ops(graph: fx.Graph) -> int:
    return sum(node.op not in ("placeholder", "get_attr", "output") for node in graph.nodes)


def _indented(title: str, graph: fx.Graph) -> str:
    return f"{title}:\n" + "\n".join(f"    {line}" for line in graph_text(graph).splitlines())
