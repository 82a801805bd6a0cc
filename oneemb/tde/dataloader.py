"""A loader whose ids are cache ids, and whose rows are in the tables when a batch is given.

`__next__` decides everything: the step before has ended, the rows of the next batch are written, and ids of the batch
`num_prefetch` further on get their cache ids. A thread beside it reads the loader one batch ahead and calls servers; it
never touches a table.

Invariants:
- every batch of the loader is given once, in order; an error of the loader is raised in place of its batch;
- at most `num_prefetch` batches have cache ids and are not yet given, and one more is read;
- the numbers of a job do not depend on `num_prefetch`;
- an iterator that is gone leaves nothing running.
"""

import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from oneemb.adapters.worker import Worker
from oneemb.tde.batch_parts import find_jagged, replace_jagged
from oneemb.tde.id_transformer_group import IDTransformerGroup
from oneemb.tde.steps import Batch, Gathered, Steps

__all__ = ["DataLoader", "close", "save", "wrap"]


class DataLoader:
    """A loader with cache ids.

    Args:
        id_transformer_group: the tables.
        dataloader: anything that can be iterated over.
        data_info, paths: see `find_jagged`.
        num_prefetch: batches whose rows are sent for ahead.

    Raises:
        ValueError: `data_info` has a path of no table, or `num_prefetch` is below 0.
    """

    def __init__(
        self,
        id_transformer_group: IDTransformerGroup,
        dataloader: Any,
        *,
        data_info: Mapping[Any, str] | None = None,
        paths: Sequence[str] | None = None,
        num_prefetch: int = 0,
    ):
        for path in (data_info or {}).values():
            if path not in id_transformer_group:
                raise ValueError(f"data_info has the path {path!r}, which has no tables")
        if type(num_prefetch) is not int or num_prefetch < 0:
            raise ValueError(f"num_prefetch must be an int of 0 or more, got {num_prefetch!r}")
        self._steps = id_transformer_group.steps
        self._dataloader = dataloader
        self._data_info, self._paths = data_info, list(paths or ())
        self._num_prefetch = num_prefetch
        self._live: Callable[[], DataLoaderIter | None] = lambda: None

    def __iter__(self) -> "DataLoaderIter":
        """Begin anew; an iterator that was made before ends."""
        live = self._live()
        if live is not None:
            live.close()
        made = DataLoaderIter(self._steps, self._dataloader, self._data_info, self._paths, self._num_prefetch)
        self._live = weakref.ref(made)
        return made

    def __len__(self) -> int:
        return len(self._dataloader)


class _Read(NamedTuple):
    """Batch of the loader, and the KeyedJaggedTensors in it."""

    data: Any
    jagged: dict[str, KeyedJaggedTensor]


class _Next(NamedTuple):
    """The batch that is to get cache ids next."""

    read: _Read
    gathered: Gathered | None
    """The batch's ids on all ranks; None = not exchanged yet, since an interrupt came between."""


class DataLoaderIter:
    """One pass over a loader; see `DataLoader`."""

    def __init__(
        self, steps: Steps, dataloader: Any, data_info: Mapping[Any, str] | None, paths: list[str], num_prefetch: int
    ):
        self._steps, self._depth = steps, num_prefetch
        self._reader = _Reader(dataloader, data_info, paths)
        self._given: list[Batch] = []  # the batch whose step is under way
        self._begun: deque[tuple[Batch, _Read]] = deque()
        self._next: _Next | None = None
        self._failed: BaseException | None = None  # in place of the batch after `_begun`
        self._ended = False
        self._worker = Worker("oneemb-tde") if num_prefetch else None
        self._reading: Future[_Read] | None = None
        self._finalizer = weakref.finalize(self, _leave, self._worker, steps, self._given, self._begun)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch. A call means that the step of the batch before has ended.

        Raises:
            StopIteration: there is none.
            NoRoomError: a table has fewer rows than the batch has ids.
            ServerError: a server failed; the next call tries again.
            Exception: the loader's error in place of this batch; the next call goes on with the loader.
        """
        if self._ended:
            raise StopIteration
        self._release()
        if not self._begun:
            if self._failed is None:
                self._steps.finish_all()
                self._begin_next(must=True)
            if self._failed is not None:
                failed, self._failed = self._failed, None
                if isinstance(failed, StopIteration):
                    self.close()
                    raise StopIteration
                try:
                    raise failed
                finally:
                    del failed  # or the error would keep this frame, which keeps the error, and so the thread
        batch, read = self._begun[0]
        self._steps.finish(batch)
        while len(self._begun) <= self._depth and self._failed is None:
            if not self._begin_next(must=False):
                break
        self._run_ahead()
        self._begun.popleft()  # Last: after an error above, the next call gives this batch.
        self._given.append(batch)
        return self._reader.replaced(read.data, batch.kjts)

    def close(self) -> None:
        """End here: the thread ends, and batches that were not given will not be."""
        self._ended = True
        self._release()
        self._finalizer()

    def _release(self) -> None:
        while self._given:
            self._steps.release(self._given.pop())

    def _begin_next(self, *, must: bool) -> bool:
        """Give the next batch its cache ids, or find why there is none. False if it has to wait for room."""
        if self._next is None or self._next.gathered is None:
            self._next = self._gather()
            if self._next is None:
                return False
        gathered = self._next.gathered
        assert gathered is not None
        batch = self._steps.begin(gathered)
        if batch is None:
            if must:
                failed = self._steps.no_room(gathered)
                self._next, self._failed = None, failed
            return False
        self._begun.append((batch, self._next.read))
        self._next = None
        return True

    def _gather(self) -> _Next | None:
        """The next batch of the loader, on all ranks; None if one of them has none, which `_failed` says."""
        try:
            if self._next is None:
                self._take_read()
        except Exception as error:
            self._failed = error
        ranks = self._steps.ranks
        if ranks.size > 1:
            report = _report(self._failed)
            self._failed = _of_all(ranks.all_gather("read the next batch", lambda: report), self._failed, ranks.rank)
        if self._failed is None:
            assert self._next is not None
            read = self._next.read
            try:
                return _Next(read, self._steps.gather(read.jagged))
            except Exception as error:
                self._failed = error
        return None

    def _take_read(self) -> None:
        """Put the loader's next batch into `_next`. After an interrupt the next call takes it."""
        if self._reading is None:
            self._next = _Next(self._reader.read(), None)
            return
        try:
            self._next = _Next(self._reading.result(), None)
        except BaseException as error:
            if self._reading.done() and self._reading.exception() is error:
                self._reading = None
            raise
        self._reading = None

    def _run_ahead(self) -> None:
        if self._worker is None:
            return
        traffic, until = self._steps.traffic, self._steps.traffic.added
        self._worker.submit(lambda: traffic.run_ahead(until))
        if self._reading is None and self._next is None and self._failed is None:
            self._reading = self._worker.submit(self._reader.read)


class _Reader:
    """Reads a loader, one batch after the other."""

    def __init__(self, dataloader: Any, data_info: Mapping[Any, str] | None, paths: list[str]) -> None:
        self._dataloader, self._data_info, self._paths = dataloader, data_info, paths
        self._iterator: Iterator[Any] | None = None

    def read(self) -> _Read:
        if self._iterator is None:
            self._iterator = iter(self._dataloader)
        data = next(self._iterator)
        return _Read(data, find_jagged(data, self._data_info, self._paths))

    def replaced(self, data: Any, new: Mapping[str, KeyedJaggedTensor]) -> Any:
        return replace_jagged(data, self._data_info, self._paths, new)


def _leave(worker: Worker | None, steps: Steps, given: list[Batch], begun: "deque[tuple[Batch, _Read]]") -> None:
    """Free an iterator's worker and batches. Called once, when it ends, is collected, or the interpreter exits."""
    if worker is not None:
        worker.stop()
    while given:
        steps.drop(given.pop())
    while begun:
        steps.drop(begun.popleft()[0])


def _report(failed: BaseException | None) -> str | None:
    if failed is None:
        return None
    return "" if isinstance(failed, StopIteration) else "".join(traceback.format_exception(failed))


def _of_all(reports: list[str | None], failed: BaseException | None, rank: int) -> BaseException | None:
    """Error, or end, of the loaders of all ranks; None = all have a next batch."""
    if failed is not None and not isinstance(failed, StopIteration):
        return failed
    for other, text in enumerate(reports):
        if text:
            return RuntimeError(f"the loader of rank {other} failed instead of this batch; there it was:\n{text}")
    if failed is None and "" in reports:
        return RuntimeError(
            f"the loader of rank {reports.index('')} has ended, but that of rank {rank} has one more batch; ranks that"
            " train together need equally many"
        )
    return failed


def wrap(
    url: str | Callable[[str, str], str],
    dataloader: Any,
    module: Any,
    configs_dict: Mapping[str, Sequence[BaseEmbeddingConfig]],
    *,
    data_info: Mapping[Any, str] | None = None,
    eviction_config: Mapping[str, Any] | None = None,
    transform_config: Mapping[str, Any] | None = None,
    ps_config: Mapping[str, Any] | None = None,
    parallel: bool = True,
    num_prefetch: int = 0,
) -> tuple[DataLoader, Any]:
    """The loader and the model, by which small static tables train on any int64 id: rows beyond them are on a server.

    All ranks of the default process group make the call together, and go through the loader together.

    Args:
        url: of the parameter server, such as `redis://127.0.0.1:6379/?prefix=model`; or a function that gives it for a
            module's path and a table's name.
        dataloader: gives batches with KeyedJaggedTensors of ids.
        module: the model, in TorchRec's DistributedModelParallel.
        configs_dict: of each collection, by the path of its module, the configs of its tables. Their `num_embeddings`
            are the rows that are in memory: at least the distinct ids of one batch on all ranks.
        data_info: of each index, key or field of a batch the path that its KeyedJaggedTensor is for; None = paths take
            the KeyedJaggedTensors in their order.
        eviction_config: `{"type": "mixed_lru_lfu", "min_used_freq_power": 5}`.
        transform_config: `{"type": "naive"}` or `{"type": "cacheline"}`, which are the same.
        ps_config: see `IDTransformerGroup`.
        parallel: has no effect.
        num_prefetch: batches whose rows are sent for while others train; 0 = none, and no thread.

    Raises:
        ValueError: a path is no sharded module of TorchRec's, or its tables cannot be served: the message says why.
        ServerError: a server cannot be reached.

    Reference: torchrec_dynamic_embedding's wrap.
    """
    group = IDTransformerGroup(
        url, module, configs_dict, eviction_config=eviction_config, transform_config=transform_config,
        ps_config=ps_config, parallel=parallel,
    )  # fmt: skip
    # `save` finds it there. Not a parameter, not in state dicts.
    object.__setattr__(module, "_id_transformer_group", group)
    loader = DataLoader(group, dataloader, data_info=data_info, paths=list(configs_dict), num_prefetch=num_prefetch)
    return loader, module


def save(module: Any) -> None:
    """Push the rows of a model of `wrap` that were used since the last call. All ranks make the call together, between
    two steps.

    Raises:
        ValueError: `module` is not of `wrap`.
        ServerError: a server failed; the next call pushes the rest.
    """
    _group_of(module).save()


def close(module: Any) -> None:
    """Close the servers of a model of `wrap`; ValueError if it is none. Rows that were trained since the last `save`
    are not pushed."""
    _group_of(module).close()


def _group_of(module: Any) -> IDTransformerGroup:
    group = getattr(module, "_id_transformer_group", None)
    if not isinstance(group, IDTransformerGroup):
        raise ValueError("module must be the model that oneemb.tde.wrap returned; this one has no rows on a server")
    return group
