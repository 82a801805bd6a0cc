"""Loops of a graph over a loader: a thread loads and prepares coming batches; ranks end and fail together."""

import functools
import traceback
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from oneemb.embeddings.embedding import embeddings_of
from oneemb.graph import ops
from oneemb.graph.inputs import Signature
from oneemb.graph.loaders import LoaderPosition, Together
from oneemb.graph.one_rank import ALONE
from oneemb.graph.prefetch import Prepared, prefetch
from oneemb.graph.rank_messages import mark_reported, moment, whole_exchange
from oneemb.graph.ranks import AnyRanks, Ranks
from oneemb.storage.locking.step_lock import in_step
from oneemb.training.graph_views import GraphViews
from oneemb.training.plan_cache import Batch, key_of

Result = TypeVar("Result")

# Called when the rows that were prefetched for a step are the step's own.
OnAcquired = Callable[[], None]


class Loop(Generator[Any, None, None]):
    """A generator over the batches of a loader, with the loader's length, which progress bars show.

    Args:
        steps: makes the steps.
        loader: gives the batches.
    """

    def __init__(self, steps: Generator[Any, None, None], loader: Iterable[Any]):
        self._steps, self._length = steps, functools.partial(len, cast(Sized, loader))

    def __len__(self) -> int:
        return self._length()

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
        """Position of the loop that was begun last."""
        self._called_by: LoaderPosition | None = None
        """Position of the loop without a thread that is about to make a call; None = no loop is."""
        self._connections: list[tuple[object, Ranks]] = []
        """Ranks that no loop uses: the group of the embeddings, and its ranks as the thread of `run` knows them."""
        self._connected: list[Ranks] = []
        """All there are."""

    def _step(self, batch: Batch, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        raise NotImplementedError

    def _surrounds_step(self) -> bool:
        """Whether `forward` or hooks of the graph run around the step."""
        raise NotImplementedError

    def _inserts(self) -> bool:
        """Whether lookups may insert rows and get a gradient."""
        return False

    def run(self, loader: Iterable[Any], prefetch_depth: int = 1) -> "Loop":
        """Call the graph for each batch, while a thread loads and prepares the batches to come.

        `for loss in graph.run(loader): ...` gives what `for batch in loader: loss = graph(*batch)` gives, bit for
        bit. Ahead of its step a batch's unique ids are found, and its known rows are read into the cache and pinned.
        Preparing inserts nothing and reads no row's values, so a loop that is left early, or a save in it, has what the
        steps so far have made. The end of the loop, leaving it, or an error in it unpins the rows and ends the
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

        Returns:
            A generator of what `build` returns, for each batch. Its length is that of the loader, if that has one.

        Raises:
            ValueError: prefetch_depth is not an int of at least 0.
            RuntimeError: a call raised StopIteration, which would end the loop as if there were no more batches.
            What the loader raised, at the batch that it did not give, with its traceback; what a call raises.
        """
        if isinstance(prefetch_depth, bool) or not isinstance(prefetch_depth, int) or prefetch_depth < 0:
            raise ValueError(f"prefetch_depth must be an int of at least 0, got {prefetch_depth!r}")
        if self._surrounds_step():
            prefetch_depth = 0
        ranks = self._ranks()
        self._position = position = LoaderPosition(self._position.state)
        if ranks.alone:
            return Loop(self._loop(position.read(loader), prefetch_depth, ranks, position), loader)
        batches: list[Together] = []
        try:
            with whole_exchange():  # The others start the loop: an interrupt waits until it can be reported to them.
                ahead = self._connect(ranks)
                left = functools.partial(self._connections.append, (ranks.group, ahead))
                batches.append(Together(ahead, position.read(loader), left))
            return Loop(self._loop(batches[0], prefetch_depth, ahead, position), loader)
        except BaseException:
            for one in batches:
                one.leave()
            raise

    def _connect(self, ranks: Ranks) -> Ranks:
        """The ranks, with connections that no other loop uses; every rank calls it."""
        free = [one for one in self._connections if one[0] is ranks.group][-1:]
        mine = free[0][1] if free else None
        name = "" if mine is None else mine.made
        numbers = ranks.gather_number("begin a loop over a loader", lambda: zlib.crc32(name.encode()))
        if mine is None or len(set(numbers)) > 1:  # A loop that was forgotten may be gone on some ranks, not on others.
            self._connected.append(ranks.again())
            return self._connected[-1]
        self._connections.remove(free[0])
        return mine

    def _ranks(self) -> AnyRanks:
        """Ranks that own rows of the graph's embeddings."""
        groups = {one.ranks.group: one.ranks for one in embeddings_of(self).values() if not one.ranks.alone}
        if len(groups) > 1:
            raise ValueError(
                f"the embeddings of {type(self).__name__} are of {len(groups)} process groups; give them all the same"
            )
        return next(iter(groups.values()), ALONE)

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
        self, loader: Iterable[Any], depth: int, ranks: AnyRanks, position: LoaderPosition
    ) -> Generator[Any, None, None]:  # fmt: skip
        leave = loader.leave if isinstance(loader, Together) else lambda: None
        if depth:
            prepare = functools.partial(self._prepare, ranks=ranks, position=position)
            devices = [embedding.store.backend.device for embedding in embeddings_of(self).values()]
            # An error is reported before this rank waits for its thread, which waits for other ranks.
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
    def _failing_together(self) -> Iterator[None]:
        """An error of this block, which other ranks know nothing of, is one of theirs at their next exchange."""
        since, made = moment(), self._steps_made()
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail_together(error, since, made, one_step=False)
            raise

    def _fail_together(self, error: BaseException, since: int, made: int, *, one_step: bool) -> None:
        """Report an error to the ranks, of a block that started at the moment `since`, when `made` steps had been made.
        After an error of `one_step` the others expect nothing."""
        if one_step and not isinstance(error, Exception) and self._steps_made() > made:
            mark_reported(error)  # An interrupt after the step: this rank has made it, as the others have.
        embeddings = list(embeddings_of(self).values())
        # An evaluation that asks no rank is this one's own: others have come to nothing in which they wait for it.
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
        self, batch: Any, follow: Callable[[list[tuple[int, int]]], object] | None = None, ranks: AnyRanks = ALONE,
        position: LoaderPosition | None = None,
    ) -> Prepared:  # fmt: skip
        """A batch with the values that can be computed ahead of its step; runs on the worker.

        Only plans that exist are used: the thread that calls the graph records and compiles them.

        Args:
            follow: called with the versions of the tensors that preparing is about to read.
            ranks: those whom its lookups are announced to, with connections of their own.
            position: of the loop that read the batch.
        """
        with ops.Announced(ranks) as announced:
            prepared = self._prepare_lookups(batch, announced, follow)
        prepared.announced, prepared.position = announced, position
        return prepared

    def _prepare_lookups(
        self, batch: Any, announced: ops.Announced, follow: Callable[[list[tuple[int, int]]], object] | None
    ) -> Prepared:
        args, kwargs = self._signature.spread(batch)
        spread = Batch({}, args, kwargs, *self._signature.flatten(args, kwargs))
        try:
            known = self._plans.known.get(key_of(spread._replace(embeddings=embeddings_of(self)), self._inserts()))
            plan = None if known is None else known.plan
            if plan is None:
                return Prepared(spread)
            versions = plan.versions()
            if versions and follow is not None:
                follow(versions)  # A kernel that changes a tensor is launched before the tensor's version changes.
            values = plan.run_ahead(spread.values, announced, self._active_profile())
        except Exception:
            # An error of the batch will come from `build`, in its line; or modules of the graph were just exchanged.
            return Prepared(spread)
        return Prepared(spread, plan, values, versions)

    def _compute_prepared(self, prepared: Prepared, on_acquired: OnAcquired | None) -> Any:
        # Its embeddings now: the loop may have exchanged modules since the batch was prepared.
        batch = prepared.batch._replace(embeddings=embeddings_of(self))
        return _of_a_loop(lambda: self._in_step(batch, lambda: self._step(batch, prepared, on_acquired)))

    def _in_step(self, batch: Batch, step: Callable[[], Any]) -> Any:
        return in_step([embedding.store.step_lock for embedding in batch.embeddings.values()], step)


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
