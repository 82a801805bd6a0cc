"""Batches from a source, shuffled in windows, with a position.

A window is a run of rows of one rank: `shuffle` of them, rounded up to whole batches, or a batch if rows are not
shuffled. The loader reads a window, permutes it, and gives it in batches. After each batch its state says which rows
are left in the window, and where the rows behind the window begin (loader_state.py).

Invariants:
- the batches behind a state are a function of the state, of the rows and of the arguments;
- the number of workers, and how the source cuts its rows into pieces, change no batch of rows that are there.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch

from oneemb.data.chunks import ChunkReader, RowRange
from oneemb.data.columns import Column, Kinds, Spec, convert, cut, join, names_of, take, tensors
from oneemb.data.loader_state import LoaderState, Window, read_states, share_windows
from oneemb.data.source import ChangedSourceError, DataSource, FixedSource, Position

_REREAD_S = 60.0
"""Seconds that a live source has to give rows that it has given before."""


class Loader:
    """Batches of a source: dicts of tensors, as `columns` says. `graph.run(loader)` passes them as keyword arguments.

    A loop over a fixed set of files is one epoch; the next loop is the next one, in another order. A loop over a live
    source goes on where the loop before it ended.

    `graph.loader_state` is the loader's state after the batch trained last, and a checkpoint of the graph holds it.

    Args:
        source: `Files`, or one of the live sources `GrowingFolder`, `GrowingFile`, `RedisStream` and `KafkaTopic`.
        batch_size: largest number of rows of a batch. The last batches of an epoch may have fewer, a batch that a live
            source gives after `max_wait_s`, and a batch with bad rows that are dropped.
        columns: {name in a batch: `Ids`, `Numbers`, `Lists`, or the name of a column of numbers}.
        shuffle: number of rows that are read and permuted at a time. 0 = rows stay in order.
        seed: seed of the permutations. The same seed gives the same batches.
        rank: number of this rank. None = that of torch.distributed if it is initialized, otherwise 0.
        world_size: number of ranks that share the rows.
        workers: number of threads that hash and convert rows. 0 = the thread that iterates.
        bad_rows: "raise" an error that names the first bad row of a window, or "drop" bad rows and count them.
        max_wait_s: seconds after which the rows of an incomplete window are given, if a live source has no more now.
        end_after_s: seconds without a row after which a loop over a live source ends. None = it waits for ever, or
            until `stop`.

    Example:
        >>> import oneemb, pyarrow, pyarrow.parquet, tempfile
        >>> path = tempfile.mkdtemp() + "/clicks.parquet"
        >>> pyarrow.parquet.write_table(pyarrow.table({"user": ["a", "b", "a"], "click": [1, 0, 0]}), path)
        >>> columns = {"ids": oneemb.data.Ids("user"), "label": "click"}
        >>> loader = oneemb.data.Loader(oneemb.data.Files(path), batch_size=2, columns=columns)
        >>> [(list(batch["ids"].shape), batch["label"].tolist()) for batch in loader]
        [([2, 1], [1.0, 0.0]), ([1, 1], [0.0])]
    """

    def __init__(
        self, source: DataSource, batch_size: int, columns: Mapping[str, Spec], *, shuffle: int = 0, seed: int = 0,
        rank: int | None = None, world_size: int | None = None, workers: int = 0,
        bad_rows: Literal["raise", "drop"] = "raise", max_wait_s: float = 1.0, end_after_s: float | None = None,
    ):  # fmt: skip
        for name, number, least in (("batch_size", batch_size, 1), ("shuffle", shuffle, 0), ("seed", seed, 0),
                                    ("workers", workers, 0)):  # fmt: skip
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {number!r}")
        for name, seconds in (("max_wait_s", max_wait_s), ("end_after_s", 0 if end_after_s is None else end_after_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
                raise ValueError(f"{name} must be a number of seconds, 0 or more, got {seconds!r}")
        if bad_rows not in ("raise", "drop"):
            raise ValueError(f'bad_rows must be "raise" or "drop", got {bad_rows!r}')
        self._names = names_of(columns)
        self.rank, self.world_size = _ranks(rank, world_size)
        self._source, self._batch_size, self._specs = source, batch_size, dict(columns)
        self._kinds = Kinds(self._specs)
        self._fixed = None if source.is_live else cast(FixedSource, source)
        self._seed, self._is_shuffled, self._workers = seed, shuffle > 0, workers
        self._window_rows = -(-max(shuffle, 1) // batch_size) * batch_size
        self._drops, self._max_wait_s, self._end_after_s = bad_rows == "drop", max_wait_s, end_after_s
        self._state: LoaderState | None = None  # None = before the first batch; a loop opens the source.
        self._loops = 0
        self._stopped = threading.Event()

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """Number of bad rows that this rank has left out of the batches so far."""
        return 0 if self._state is None else self._state.dropped

    def __len__(self) -> int:
        state = self._now()
        if state.batches is None:
            raise TypeError(f"a loader of {self._source.name} has no length, since more rows may come")
        return state.batches

    def stop(self) -> None:
        """End the running loop, also if it waits for rows. It may be called from any thread."""
        self._stopped.set()

    def state_dict(self) -> dict[str, Any]:
        """State after the batch that was given last."""
        identity = "" if self._fixed is None else self._fixed.identity()
        return {**self._now().as_dict(), "source": identity, "batch_size": self._batch_size}

    def load_state_dict(self, state: Any) -> None:
        """Go on behind the batch after which a state was taken.

        Args:
            state: result of `state_dict`. If the number of ranks has changed, the list of the states of all ranks, as
                `graph.loader_states`; every rank gets the same list, and the ranks together give each row that is left
                once, in other batches.

        Raises:
            ChangedSourceError: the files are not those of the state.
            ValueError: the state is of another rank, of another number of ranks, or of another batch size.
        """
        states, first = read_states(state), state[0] if isinstance(state, list) else state
        size = states[0].world_size
        mine = [one for one in states if (one.rank, one.world_size) == (self.rank, self.world_size)]
        if not mine and len(states) != size:
            raise ValueError(
                f"the state must be one of rank {self.rank} of {self.world_size}, got one of rank {states[0].rank} of"
                f" {size}; pass the list of the states of all ranks, graph.loader_states"
            )
        if self._fixed is not None:
            if first["batch_size"] != self._batch_size:
                raise ValueError(f"batch_size must be {first['batch_size']}, as in the state, got {self._batch_size}")
            self._fixed.check(first["source"])
        self._loops += 1
        self._state = mine[0] if mine else self._share(states)

    def _now(self) -> LoaderState:
        if self._state is None:
            self._state = self._begin(LoaderState([], None, self.rank, self.world_size))
        return self._state

    def _begin(self, state: LoaderState) -> LoaderState:
        """The state at the beginning of an epoch."""
        position = self._source.begin(self.rank, self.world_size)
        return self._counted(replace(state, next=position, number=0), [[] for _ in range(self.world_size)])

    def _share(self, states: Sequence[LoaderState]) -> LoaderState:
        """State of this rank after the number of ranks has changed, from the states of all former ranks."""
        epoch = max(one.epoch for one in states)
        dropped = sum(one.dropped for one in states) if self.rank == 0 else 0
        state = LoaderState([], None, self.rank, self.world_size, epoch, dropped=dropped)
        if any(one.epoch < epoch for one in states):  # Some ranks have noted the end of the epoch before.
            if any(one.number for one in states if one.epoch == epoch) or any(
                one.rows for one in states if one.epoch < epoch
            ):
                raise ValueError("load_state_dict must get the states of one save, got states of several epochs")
            return self._begin(state)
        windows = share_windows(states, self.world_size)
        position = self._source.share([one.next for one in states], self.rank, self.world_size)
        number = max(one.number for one in states)
        return self._counted(replace(state, open=windows[self.rank], next=position, number=number), windows)

    def _counted(self, state: LoaderState, windows: Sequence[Sequence[Window]]) -> LoaderState:
        """The state with the numbers of rows and of batches that this rank gives in the epoch: all ranks give equally
        many batches, so that none of them waits for another."""
        if self._fixed is None:
            return state
        rows_R = self._fixed.rows_of_ranks(state.next)
        left_R = [[one.end - one.begin for one in open] + [rows] for open, rows in zip(windows, rows_R, strict=True)]
        batches = max(sum(-(-rows // self._batch_size) for rows in left) for left in left_R)
        if min(map(sum, left_R)) < batches:
            raise ValueError(
                f"{self._source.name} must have rows for {batches} batches on each of {self.world_size} ranks, and one"
                f" rank has {min(map(sum, left_R))} rows left; train on fewer ranks, or in larger batches"
            )
        return replace(state, batches=batches, rows=sum(left_R[self.rank]))

    # ---- loop --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._stopped.clear()
        self._loops += 1
        return self._loop(self._loops)

    def _loop(self, loop: int) -> Iterator[dict[str, Any]]:
        state = self._now()
        with contextlib.ExitStack() as stack:
            executor = None
            if self._workers:
                executor = ThreadPoolExecutor(self._workers, "oneemb-data")
                stack.callback(executor.shutdown, wait=False, cancel_futures=True)
            reader: ChunkReader | None = None
            while not self._stopped.is_set():
                if state.open:
                    parts = self._read_again(state.open[0], executor)
                else:
                    if reader is None:
                        reader = stack.enter_context(self._read_from(state.next, executor))
                    parts, window = self._read_window(reader, state)
                    if window is None:
                        break
                    state = replace(state, open=[window], next=reader.position, number=state.number + 1)
                for batch, behind in self._batches(parts, state):
                    if loop != self._loops:
                        raise RuntimeError("a loop over a loader must end before another one begins; make two loaders")
                    if self._stopped.is_set():
                        return
                    self._state = state = behind
                    if batch is not None:
                        yield batch
            if not self._source.is_live and not self._stopped.is_set():
                self._state = self._begin(replace(state, epoch=state.epoch + 1))

    @contextlib.contextmanager
    def _read_from(self, position: Position, executor: Executor | None) -> Generator[ChunkReader, None, None]:
        to_chunk = partial(convert, specs=self._specs)
        reader = ChunkReader(
            self._source, position, self._names, to_chunk, self._kinds, executor, 2 * self._workers
        )  # fmt: skip
        try:
            yield reader
        finally:
            reader.close()

    def _read_window(self, reader: ChunkReader, state: LoaderState) -> tuple[list[RowRange], Window | None]:
        """Read a window, of fewer rows if no more come. None = the source has ended, or the loop is to end."""
        parts: list[RowRange] = []
        spans: list[list[Any]] = []
        rows = 0
        since = give_at = time.monotonic()
        while rows < self._window_rows and not reader.ended:
            begin = reader.position
            part = reader.next_part(self._window_rows - rows)
            now = time.monotonic()
            if part is not None:
                alone = part.chunk.piece.alone
                if alone is not None or not spans:
                    spans.append([begin if alone is None else alone(part.begin), 0])
                spans[-1][1] += part.rows
                give_at = give_at if parts else now + self._max_wait_s
                parts.append(part)
                rows, since = rows + part.rows, now
            if self._source.is_live:
                is_quiet = part is None and self._end_after_s is not None and now - since >= self._end_after_s
                if self._stopped.is_set() or is_quiet and not parts:
                    return [], None
                if part is None and parts and (is_quiet or now >= give_at):
                    break
        key = [self._seed, state.epoch, self.rank, state.number] if self._is_shuffled else []
        return parts, Window(spans, key, 0, rows) if parts else None

    def _read_again(self, window: Window, executor: Executor | None) -> list[RowRange]:
        """Rows of a window that was read before. Fewer rows come only if the loop is to end."""
        parts = []
        for position, rows in window.spans:
            since = time.monotonic()
            with self._read_from(position, executor) as reader:
                while rows and not self._stopped.is_set():
                    part = reader.next_part(rows)
                    if part is not None:
                        parts.append(part)
                        rows -= part.rows
                    elif reader.ended or time.monotonic() > since + _REREAD_S:
                        raise ChangedSourceError(
                            f"{self._source.name} must still have the rows at the loader's position, and {rows} of them"
                            " do not come; restore them, or begin anew without a position"
                        )
        return parts

    def _batches(
        self, parts: Sequence[RowRange], state: LoaderState
    ) -> Iterator[tuple[dict[str, Any] | None, LoaderState]]:  # fmt: skip
        """Yield each batch of the first open window with the state behind it; None in place of a batch without rows."""
        if self._stopped.is_set():  # The window may be incomplete.
            return
        window = state.open[0]
        bad_N = np.concatenate([part.bad_N for part in parts])
        if not self._drops and bad_N.any():
            part = next(part for part in parts if part.bad_N.any())
            raise part.chunk.error(part.begin + int(np.argmax(part.bad_N)))
        columns = {
            name: [join([part.column(name, number) for part in parts]) for number in range(len(column))]
            for name, column in parts[0].chunk.columns.items()
        }
        order_N = _permutation(window.key, len(bad_N)) if window.key else None
        while window.begin < window.end:
            size = min(self._batch_size, window.end - window.begin)
            if state.batches is not None and state.rows is not None:
                size = min(size, state.rows - (state.batches - 1))  # At least a row is left for each other batch.
                state = replace(state, batches=state.batches - 1, rows=state.rows - size)
            begin, end = window.begin, window.begin + size
            row_B = np.arange(begin, end) if order_N is None else order_N[begin:end]
            bad_B = bad_N[row_B]
            change: Callable[[Column], Column] = partial(take, row_B=row_B[~bad_B])
            if order_N is None and not bad_B.any():
                change = partial(cut, begin=begin, end=end)
            window = replace(window, begin=end)
            rest = [window] if window.begin < window.end else []
            state = replace(state, open=[*rest, *state.open[1:]], dropped=state.dropped + int(bad_B.sum()))
            batch = {name: [change(one) for one in column] for name, column in columns.items()}
            yield None if bad_B.all() else tensors(batch), state


def _permutation(key: Sequence[int], rows: int) -> np.ndarray:
    # RandomState's numbers stay the same in all versions of NumPy; those of Generator may change.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(list(key)))).permutation(rows)


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"give rank and world_size, or neither of them; got {rank} and {world_size}")
    if rank is None or world_size is None:
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_distributed else (0, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")
    return rank, world_size
