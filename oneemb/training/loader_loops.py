"""Loops of a graph over a loader. A thread loads and prepares coming batches; loops of ranks end and fail together."""

import contextlib
import functools
import inspect
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch

from oneemb.data.loader import Loader
from oneemb.embeddings.embedding import embeddings_of
from oneemb.graph import ops
from oneemb.graph.hidden_frames import hide_frames
from oneemb.graph.inputs import Signature
from oneemb.graph.loaders import LoaderPosition, Together
from oneemb.graph.one_rank import ALONE
from oneemb.graph.plan import LookupPlan
from oneemb.graph.prefetch import Follow, Prepared, prefetch
from oneemb.graph.rank_messages import mark_reported, moment, whole_exchange
from oneemb.graph.ranks import AnyRanks, Ranks
from oneemb.graph.read_ahead import ReadAhead
from oneemb.storage.coming_batches import ComingBatches
from oneemb.storage.errors import StorageError
from oneemb.storage.locking.step_lock import in_step
from oneemb.training.graph_views import GraphViews
from oneemb.training.plan_cache import Batch, key_of

Result = TypeVar("Result")

LOOKAHEAD = 16
"""Default number of batches that a loop reads for their ids alone."""

# Called when a step has acquired its rows, so that one more batch may be prepared.
OnAcquired = Callable[[], None]


class Saves(Protocol):
    """Object that saves a graph between the steps of a loop, such as a `SaveEvery`."""

    @property
    def graph(self) -> object: ...

    def __call__(self, result: Any) -> object:
        """Save if a save is due. `result`: result of the step."""

    def finish(self) -> object:
        """Save at the end of the loader."""


class Loop(Generator[Any, None, None]):
    """Generator over the steps of a loop, with the length of the loader, which progress bars show.

    Args:
        steps: generator that makes the steps.
        loader: loader whose length is the loop's length.
    """

    _gave_length = False
    """Whether the length was read. A loop that was made for its length alone is dropped without a warning."""

    def __init__(self, steps: Generator[Any, None, None], loader: Iterable[Any]):
        self._steps, self._length = steps, functools.partial(len, cast(Sized, loader))

    def __len__(self) -> int:
        self._gave_length = True
        return self._length()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        steps = vars(self).get("_steps")
        if steps is None or self._gave_length or is_finalizing():  # Then names of modules are None.
            return
        if inspect.getgeneratorstate(steps) == inspect.GEN_CREATED:
            warnings.warn(
                "a result of graph.run(loader) was dropped before its first step, so no step was made; iterate over it:"
                " for loss in graph.run(loader): ...",
                stacklevel=2,
            )

    def __bool__(self) -> bool:
        return True

    def __next__(self) -> Any:
        return next(self._steps)

    def send(self, value: None) -> Any:
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        return self._steps.throw(*error)

    def close(self) -> None:
        self._steps.close()


class LoaderLoops(GraphViews):
    """Part of a graph: its loops over loaders."""

    _signature: Signature

    def __init__(self) -> None:
        super().__init__()
        self._position = LoaderPosition()
        """Loader position of the loop that was begun last."""
        self._loaded_states: list[Any] | None = None
        self._called_by: LoaderPosition | None = None
        """Position of a loop without thread that is about to call the graph; None = the next call is not a loop's."""
        self._connections: list[tuple[object, Ranks]] = []
        """(process group, its ranks with connections for a loop's thread) that no loop uses now."""
        self._connected: list[Ranks] = []
        """All ranks with connections for a loop's thread."""

    def _step(self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        raise NotImplementedError

    def _surrounds_step(self) -> bool:
        """Whether a `forward` of the user's or hooks of the graph run around the step."""
        raise NotImplementedError

    def _inserts(self) -> bool:
        """Whether lookups may insert rows and get gradients."""
        return False

    def run(
        self, loader: Iterable[Any], prefetch_depth: int = 1, lookahead: int = LOOKAHEAD, save: Saves | None = None
    ) -> "Loop":  # fmt: skip
        """Call the graph for each batch of a loader, while a thread loads and prepares coming batches.

        `for loss in graph.run(loader): ...` computes the same bits as `for batch in loader: loss = graph(*batch)`.
        Preparing a batch finds its unique ids, reads its known rows into the cache and pins them. It inserts nothing
        and uses no values of rows, so leaving the loop early, or saving in it, has only the effects of the steps so
        far. The end of the loop, leaving it, or an error in it unpins the rows and ends the thread. If the loader
        blocks the thread for more than 30 s after that, a warning says so, and this happens when the loader returns.

        With ranks (`process_group`), every rank runs a loader. The first loader that ends, ends all loops: further
        batches that other ranks have loaded are not used. If one rank raises, every rank raises. Ranks that leave the
        loop early must leave it at the same batch.

        The loader is ahead of the steps: `batches_ahead` is the number of batches between them, and `loader_state` is
        the loader's `state_dict()` right after the batch trained last.

        Args:
            loader: yields batches. Elements of a tuple or list are positional arguments of `build`, items of a dict are
                keyword arguments; if `build` cannot be called so, the batch is its only argument. To pass a list of
                samples as one argument, yield `(samples,)`. The loader runs on the thread: if both the loader and the
                steps draw random numbers from torch, give the loader a generator of its own. A batch must not be
                changed after the loader has yielded it.
            prefetch_depth: number of batches prepared ahead; 0 = no batch, and no thread. The rows of these batches
                should fit in the cache in addition; other rows are read in their step. No batch is prepared if a
                `forward` surrounds the graph's step, or if the graph has forward or backward hooks when the loop
                begins, since these may change the batch. Hooks registered later, or for all modules, run for the
                graph's modules, but for the graph itself only if no batch is prepared ahead.
            lookahead: number of further batches that a second thread reads from the loader, up to 256 MiB of them, for
                their ids alone: a cache over a disk or a server then evicts last the rows that come soonest, and reads
                fewer rows. 0 = none. It has no effect with other stores, with ranks, once the process uses CUDA, or if
                no batch is prepared ahead.
            save: an `oneemb.SaveEvery` of this graph. It is called after the body of the loop, and once more when the
                loader has ended. None = the loop saves nothing.

        Returns:
            A generator of the results of `build`, one for each batch, with the length of the loader if it has one.

        Raises:
            TypeError: `loader` is not iterable.
            ValueError: prefetch_depth or lookahead is not an int of at least 0; or `save` saves another graph.
            RuntimeError: a call raised StopIteration, which would end the loop as if there were no more batches.
            An error of the loader, at the batch that it did not yield, with its traceback; an error of a call.
        """
        for name, number in (("prefetch_depth", prefetch_depth), ("lookahead", lookahead)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {number!r}")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(
                f"loader must yield batches, as a torch DataLoader or a list of batches does, got"
                f" {type(loader).__name__} {loader!r:.100}"
            )
        if save is not None and getattr(save, "graph", None) is not self:
            raise ValueError(f"save must be an oneemb.SaveEvery of this graph, got {type(save).__name__} {save!r:.100}")
        if self._surrounds_step():
            prefetch_depth = 0
        ranks = self._ranks()
        if not (ranks.alone and prefetch_depth) or torch.cuda.is_initialized():
            lookahead = 0
        self._position = position = LoaderPosition(self._position.state)
        stop = loader.stop if isinstance(loader, Loader) else lambda: None
        if ranks.alone:
            batches, leave = self._read(position.read(loader), lookahead)
            return Loop(_saving(self._loop(batches, prefetch_depth, ranks, position, stop, leave), save), loader)
        together: list[Together] = []
        try:
            with whole_exchange():  # An interrupt waits until it can be reported to the ranks, which start the loop.
                ahead = self._connect(ranks)
                left = functools.partial(self._connections.append, (ranks.group, ahead))
                together.append(Together(ahead, position.read(loader), left))
            one = together[0]
            return Loop(_saving(self._loop(one, prefetch_depth, ahead, position, stop, one.leave), save), loader)
        except BaseException:
            for one in together:
                one.leave()
            raise

    def _read(self, loader: Iterable[Any], lookahead: int) -> tuple[Iterable[Any], Callable[[], object]]:
        """The batches of a loader, read ahead if a store uses the ids of coming batches; and the function to call when
        the loop has ended."""
        coming = [embedding.store.coming for embedding in embeddings_of(self).values()]
        if not lookahead or not any(part.are_useful for part in coming):
            return loader, lambda: None
        ahead = ReadAhead(loader, self._look_ahead, _bytes_of, lookahead)
        return ahead, functools.partial(_forget_coming, coming)

    def _connect(self, ranks: Ranks) -> Ranks:
        """The ranks with connections that no other loop uses. Every rank must call it."""
        free = [one for one in self._connections if one[0] is ranks.group][-1:]
        mine = free[0][1] if free else None
        name = "" if mine is None else mine.made
        numbers = ranks.gather_number("begin a loop over a loader", lambda: zlib.crc32(name.encode()))
        if mine is None or len(set(numbers)) > 1:  # A forgotten loop may be gone on some ranks only.
            self._connected.append(ranks.again())
            return self._connected[-1]
        self._connections.remove(free[0])
        return mine

    def _ranks(self) -> AnyRanks:
        """The ranks that own rows of the graph's embeddings; `ALONE` if this process owns all rows."""
        groups = {one.ranks.group: one.ranks for one in embeddings_of(self).values() if not one.ranks.alone}
        if len(groups) > 1:
            raise ValueError(
                f"the embeddings of {type(self).__name__} must have one process_group, got {len(groups)} process"
                " groups; give all embeddings the same"
            )
        return next(iter(groups.values()), ALONE)

    @property
    def batches_ahead(self) -> int:
        """Number of batches that the last begun loop has read from its loader and that are not in an update yet."""
        return self._position.ahead

    @property
    def loader_state(self) -> Any:
        """Copy of the loader's `state_dict()` right after the batch that a loop over `run` has trained last, even if
        the thread has read further batches. None for a loader without `state_dict`, and before the first loop.

        A checkpoint holds this state, and `load` restores it: after `loader.load_state_dict(graph.loader_state)` a new
        loop continues with the next batch. Each rank has its own state; it is None after a load of a checkpoint from
        another number of ranks, whose states are in `loader_states`.
        """
        return self._position.state

    @property
    def loader_states(self) -> list[Any] | None:
        """States of the loaders of all ranks in the checkpoint loaded last, in the order of ranks; None = no checkpoint
        was loaded, or a rank had no state. `oneemb.data.Loader.load_state_dict` takes them on any number of ranks."""
        return self._loaded_states

    def at_loader_state(self, state: Any, states: list[Any] | None = None) -> None:
        """Set `loader_state` to the state in a checkpoint; the next batch that a loop trains replaces it."""
        self._position.state, self._loaded_states = state, states

    def _loop(
        self, loader: Iterable[Any], depth: int, ranks: AnyRanks, position: LoaderPosition, stop: Callable[[], object],
        leave: Callable[[], object],
    ) -> Generator[Any, None, None]:  # fmt: skip
        if depth:
            prepare = functools.partial(self._prepare, ranks=ranks, position=position)
            devices = [embedding.store.backend.device for embedding in embeddings_of(self).values()]
            # `failing` reports an error before this rank waits for its thread, which may wait for other ranks.
            failing = self._failing_together
            yield from prefetch(
                loader, prepare, self._compute_prepared, depth, devices, leave, failing, self._stats.waited, stop
            )
            position.ended()
            return
        try:
            with self._failing_together():
                for batch in loader:
                    args, kwargs = self._signature.spread(batch)
                    self._called_by = position
                    result = _of_a_loop(functools.partial(self, *args, **kwargs))
                    if self._called_by is not None:  # A `forward` around the step made no step of this batch.
                        self._called_by = None
                        position.trained(updated=False)
                    yield result
            position.ended()
        finally:
            leave()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Block whose errors all ranks raise: an error that other ranks do not know is reported to them."""
        since, made = moment(), self._steps_made()
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail_together(error, since, made, one_step=False)
            raise

    def _fail_together(self, error: BaseException, since: int, made: int, *, one_step: bool) -> None:
        """Report an error to the ranks.

        Args:
            since: `moment` at which the block that raised has started.
            made: number of steps that the graph had made at that moment.
            one_step: whether the block is a single step, after which the ranks need not exchange anything; False = it
                is a loop.
        """
        hide_frames(error)
        if one_step and not isinstance(error, Exception) and self._steps_made() > made:
            mark_reported(error)  # an interrupt after the step, which this rank has made as the others have
        embeddings = list(embeddings_of(self).values())
        # An evaluation without exchanges concerns this rank alone: no other rank waits for it.
        asks = any(embedding.lookups.asks_ranks for embedding in embeddings)
        informed = embeddings if asks or self._inserts() or not one_step else []
        for embedding in informed:
            embedding.ranks.fail(f"run {type(self).__name__}", error, since)

    def _steps_made(self) -> int:
        """Number of steps that the graph has made."""
        return 0

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        return Batch(embeddings_of(self), args, kwargs, *self._signature.flatten(args, kwargs))

    def _prepare(
        self, batch: Any, follow: Follow | None = None, ranks: AnyRanks = ALONE,
        position: LoaderPosition | None = None,
    ) -> Prepared:  # fmt: skip
        """A batch with the values that can be computed ahead of its step. Runs on the worker's thread.

        Only existing plans are used; the thread that calls the graph records and compiles plans.

        Args:
            follow: called with the versions of the tensors that the preparation will read.
            ranks: ranks to which lookups are announced, with connections for this thread.
            position: position of the loop that read the batch.
        """
        with ops.Announced(ranks) as announced:
            prepared = batch if isinstance(batch, Prepared) else Prepared(self._spread(batch))
            try:
                if prepared.plan is None or prepared.plan is not self._plan_for(prepared.batch):
                    self._find_keys(prepared, announced, follow)
                if prepared.plan is not None and prepared.found is not None:
                    prepared.values = prepared.plan.prefetch(prepared.found, self._active_profile())
            except Exception:
                # `build` will raise an error of the batch at its line. Or modules of the graph were just replaced.
                prepared.plan = None
        prepared.found = None
        prepared.announced, prepared.position = announced, position
        return prepared

    def _spread(self, batch: Any) -> Batch:
        args, kwargs = self._signature.spread(batch)
        return Batch({}, args, kwargs, *self._signature.flatten(args, kwargs))

    def _find_keys(self, prepared: Prepared, announced: ops.Announced, follow: Follow | None) -> None:
        """Find the keys of a batch, if there is a plan for it."""
        prepared.plan = prepared.found = None
        plan = self._plan_for(prepared.batch)
        if plan is None:
            return
        versions = plan.versions()
        if versions and follow is not None:
            follow(versions)  # A kernel that changes a tensor is launched before the tensor's version changes.
        prepared.found = plan.find_keys(prepared.batch.values, announced, self._active_profile())
        prepared.plan, prepared.versions = plan, versions

    def _plan_for(self, batch: Batch) -> LookupPlan | None:
        known = self._plans.known.get(key_of(batch._replace(embeddings=embeddings_of(self)), self._inserts()))
        return None if known is None else known.plan

    def _look_ahead(self, batch: Any) -> Prepared:
        """A batch that the loader has just given, with its keys, which the stores are told. Runs on the thread of
        `ReadAhead`."""
        prepared = Prepared(self._spread(batch))
        try:
            self._find_keys(prepared, ops.NOTHING_ANNOUNCED, None)
            if prepared.plan is not None and prepared.found is not None:
                prepared.coming = prepared.plan.add_coming(prepared.found)
        except Exception:  # as in `_prepare`
            prepared.found = None
        return prepared

    def _compute_prepared(self, prepared: Prepared, on_acquired: OnAcquired) -> Any:
        # The current embeddings: modules may have been replaced since the batch was prepared.
        batch = prepared.batch._replace(embeddings=embeddings_of(self))

        def acquired() -> None:
            prepared.reach()
            on_acquired()

        return _of_a_loop(lambda: self._in_step(batch, lambda: self._step(batch, prepared, acquired)))

    def _in_step(self, batch: Batch, step: Callable[[], Any]) -> Any:
        return in_step([embedding.store.step_lock for embedding in batch.embeddings.values()], step)


def _saving(steps: Generator[Any, None, None], save: Saves | None) -> Generator[Any, None, None]:
    """The steps of a loop, with saves between them."""
    return steps if save is None else _steps_and_saves(steps, save)


def _steps_and_saves(steps: Generator[Any, None, None], save: Saves) -> Generator[Any, None, None]:
    with contextlib.closing(steps):
        for result in steps:
            yield result
            save(result)
        save.finish()


def _bytes_of(prepared: Prepared) -> int:
    """Bytes of a batch's tensors and arrays."""
    return sum(int(getattr(value, "nbytes", 0)) for value in prepared.batch.values)


def _forget_coming(parts: Iterable[ComingBatches]) -> None:
    """Forget the batches that were read and will not be looked up."""
    for part in parts:
        with contextlib.suppress(StorageError):  # The store was closed, or this process is a child of fork.
            part.forget()


def _of_a_loop(step: Callable[[], Result]) -> Result:
    """Result of a step of a loop. A StopIteration of the step becomes a RuntimeError, since a generator cannot raise
    it, and the caller of the generator would take it for the end of the loop."""
    try:
        return step()
    except StopIteration as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"a step must not raise StopIteration, which a loop over run() would take for the end of the batches; it"
            f" was raised at {at.filename}:{at.lineno}: {at.line}; give next() a default, or iterate by a for loop"
        ) from error
