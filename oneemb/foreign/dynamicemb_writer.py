"""Writes dumps of dynamicemb's tables; dynamicemb_files.py describes the files, and when they are whole."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oneemb.foreign.dynamicemb_files import META, OF_SEED, RANKED, UNFINISHED, Layout, check_name, names_in, part_of
from oneemb.storage.fs import FileSystem, LocalFileSystem, doing
from oneemb.storage.new_files import NewFile


class _File(NewFile):
    """A file of arrays under a temporary name, which no file may have: see `remove_unfinished`."""

    def __init__(self, fs: FileSystem, path: str):
        with doing("create", path + UNFINISHED):
            super().__init__(path, path + UNFINISHED, fs)

    def append(self, array: np.ndarray) -> None:
        with doing("write", self.temporary):
            self.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())

    def finish(self) -> None:
        with doing("flush", self.temporary):
            self.sync()
            self.close()

    def publish(self) -> None:
        with doing("rename", self.temporary):
            self.put_in_place()


class DumpWriter:
    """Writes one rank's part of a table, after `remove_unfinished` was called for it.

    Args:
        folder: is there.
        table: its name.
        rank, ranks: number of the writer, and of all writers; of "seed" one writes for all.
        version: "today" or "seed".
        score_words: of a row, 0 to 2; 0 = there is no file of scores.
        states: names and widths of the parts of the state.
        with_state: whether there are files of state, though they may be empty.
        with_counts: whether there are files of counts.

    Raises:
        ValueError: no file can have the table's name.
        StorageError: a file cannot be made.
    """

    def __init__(
        self, folder: str, table: str, *, rank: int, ranks: int, version: Layout = "today", score_words: int = 1,
        states: Sequence[tuple[str, int]] = (), with_state: bool = False, with_counts: bool = False,
        fs: FileSystem | None = None,
    ):  # fmt: skip
        check_name(table)
        self._fs, self._folder, self._table, self._version = fs or LocalFileSystem(), folder, table, version
        self._suffix = f".rank_{rank}.world_size_{ranks}" if version == "today" else ""
        self._states, self._files = list(states) if with_state else [], dict[str, _File]()
        self._has_scores, self._with_state, self._keys = score_words > 0, with_state, "keys"
        of_rows = ["keys", "values", *["scores"] * self._has_scores]
        names = list(of_rows)
        if version == "today":
            self._keys = "emb_keys"
            names = [f"emb_{what}" for what in of_rows] + ["opt_values"] * with_state
            names += ["counter_keys", "counter_frequencies"] if with_counts else []
        names += [f"opt_state_{name}_{what}" for name, _ in self._states if version == "seed" for what in of_rows]
        try:
            for name in names:
                self._files[name] = _File(self._fs, f"{folder}/{table}_{name}{self._suffix}")
        except BaseException:
            self.discard()
            raise

    def append(
        self, key_N: np.ndarray, value_ND: np.ndarray, score_NS: np.ndarray | None, state_NZ: np.ndarray | None
    ) -> None:
        """Write some rows.

        Args:
            key_N: int64, as the file has them.
            score_NS: int64, S as many as `score_words`; ignored where that is 0.
            state_NZ: float32; ignored without `with_state`.
        """
        before = "emb_" if self._version == "today" else ""
        self._append(before, key_N, value_ND, score_NS)
        if self._version == "seed":
            begin = 0
            for name, width in self._states:
                assert state_NZ is not None
                self._append(f"opt_state_{name}_", key_N, state_NZ[:, begin : begin + width], score_NS)
                begin += width
        elif self._with_state:
            assert state_NZ is not None
            self._files["opt_values"].append(state_NZ.astype(np.float32))

    def _append(self, before: str, key_N: np.ndarray, value_NX: np.ndarray, score_NS: np.ndarray | None) -> None:
        self._files[f"{before}keys"].append(key_N.astype(np.int64))
        self._files[f"{before}values"].append(value_NX.astype(np.float32))
        if self._has_scores:
            assert score_NS is not None
            self._files[f"{before}scores"].append(score_NS.astype(np.int64))

    def append_counter(self, key_M: np.ndarray, count_M: np.ndarray) -> None:
        """Write counts of ids without a row, both int64, of a writer `with_counts` of "today"."""
        self._files["counter_keys"].append(key_M.astype(np.int64))
        self._files["counter_frequencies"].append(count_M.astype(np.int64))

    def finish(self) -> None:
        """Make the files durable, still under temporary names."""
        for file in self._files.values():
            file.finish()

    def publish(self) -> None:
        """Give the files their names, keys last, after `unpublish` has removed those of another dump."""
        for its in ([name for name in self._files if name != self._keys], [self._keys]):
            for name in its:
                self._files[name].publish()
            with doing("flush", self._folder):
                self._fs.sync_directory(self._folder)

    def publish_meta(self, meta: Mapping[str, Any]) -> None:
        """Make the dump of the table whole, after all ranks have published."""
        file = self._files[META] = _File(self._fs, f"{self._folder}/{self._table}_{META}")
        file.append(np.frombuffer(json.dumps(meta, indent=4).encode(), np.uint8))
        file.finish()
        file.publish()
        with doing("flush", self._folder):
            self._fs.sync_directory(self._folder)

    def discard(self) -> None:
        """Close the files, and remove those that have not got their names."""
        for file in self._files.values():
            file.drop()


def unpublish(folder: str, table: str, fs: FileSystem | None = None) -> None:
    """Remove a table's dump, of any version and number of ranks: the file that makes it whole first."""
    fs = fs or LocalFileSystem()
    names = names_in(fs, folder)
    its = sorted(name for name in names if part_of(table, name, RANKED) or part_of(table, name, OF_SEED))
    first = [name for name in (f"{table}_{META}", f"{table}_keys") if name in names]
    for group in (*([name] for name in first), [name for name in its if name not in first]):
        for name in group:
            with doing("remove", f"{folder}/{name}"):
                fs.remove(f"{folder}/{name}")
        with doing("flush", folder):
            fs.sync_directory(folder)


def remove_unfinished(folder: str, table: str, fs: FileSystem | None = None) -> None:
    """Remove files of killed dumps of a table, of any number of ranks. No dump may be under way."""
    fs = fs or LocalFileSystem()
    for name in sorted(names_in(fs, folder)):
        its = name.removesuffix(UNFINISHED)
        of_table = its == f"{table}_{META}" or part_of(table, its, RANKED) or part_of(table, its, OF_SEED)
        if its != name and of_table:
            with doing("remove", f"{folder}/{name}"):
                fs.remove(f"{folder}/{name}")
