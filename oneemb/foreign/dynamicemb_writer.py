"""Writes dumps of dynamicemb's tables. dynamicemb_files.py describes the files, and when a dump is complete."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oneemb.foreign.dynamicemb_files import META, OF_SEED, RANKED, UNFINISHED, Layout, check_name, names_in, part_of
from oneemb.storage.fs import FileSystem, LocalFileSystem, doing
from oneemb.storage.new_files import NewFile


class _File(NewFile):
    """A file of arrays that has a temporary name until `publish`; `remove_unfinished` removes files with such names."""

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
    """Writes one rank's part of a table. Call `remove_unfinished` for the table before.

    Args:
        folder: an existing folder.
        table: name of the table.
        rank, ranks: number of this writer, and number of all writers; for "seed" one writer writes for all ranks.
        version: layout, "today" or "seed".
        score_words: number of scores of a row, 0 to 2; 0 = write no file of scores.
        states: name and width of each part of the optimizer state.
        with_state: whether to write files of optimizer state, even if they are empty.
        with_counts: whether to write files of counts.

    Raises:
        ValueError: the table's name cannot be part of a file's name.
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
            key_N: keys in the form of the file, int64.
            value_ND: weights.
            score_NS: scores, int64 [N, score_words]; ignored if `score_words` is 0.
            state_NZ: optimizer state, float32; ignored without `with_state`.
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
        """Write ids without a row and their counts, int64 [M] both. Only for "today" and `with_counts`."""
        self._files["counter_keys"].append(key_M.astype(np.int64))
        self._files["counter_frequencies"].append(count_M.astype(np.int64))

    def finish(self) -> None:
        """Make the files durable; they keep their temporary names."""
        for file in self._files.values():
            file.finish()

    def publish(self) -> None:
        """Give the files their final names, keys last. Call `unpublish` before, which removes an earlier dump."""
        for group in ([name for name in self._files if name != self._keys], [self._keys]):
            for name in group:
                self._files[name].publish()
            with doing("flush", self._folder):
                self._fs.sync_directory(self._folder)

    def publish_meta(self, meta: Mapping[str, Any]) -> None:
        """Write the last file, which makes the table's dump complete, after all ranks have published."""
        file = self._files[META] = _File(self._fs, f"{self._folder}/{self._table}_{META}")
        file.append(np.frombuffer(json.dumps(meta, indent=4).encode(), np.uint8))
        file.finish()
        file.publish()
        with doing("flush", self._folder):
            self._fs.sync_directory(self._folder)

    def discard(self) -> None:
        """Close the files, and remove those that still have temporary names."""
        for file in self._files.values():
            file.drop()


def unpublish(folder: str, table: str, fs: FileSystem | None = None) -> None:
    """Remove a table's dump, of any layout and number of ranks. The file that marks the dump as complete is removed
    first."""
    fs = fs or LocalFileSystem()
    names = names_in(fs, folder)
    files = sorted(name for name in names if part_of(table, name, RANKED) or part_of(table, name, OF_SEED))
    first = [name for name in (f"{table}_{META}", f"{table}_keys") if name in names]
    for group in (*([name] for name in first), [name for name in files if name not in first]):
        for name in group:
            with doing("remove", f"{folder}/{name}"):
                fs.remove(f"{folder}/{name}")
        with doing("flush", folder):
            fs.sync_directory(folder)


def remove_unfinished(folder: str, table: str, fs: FileSystem | None = None) -> None:
    """Remove files that killed dumps of a table have left, of any number of ranks. No dump of the table may be
    running."""
    fs = fs or LocalFileSystem()
    for name in sorted(names_in(fs, folder)):
        final = name.removesuffix(UNFINISHED)
        of_table = final == f"{table}_{META}" or part_of(table, final, RANKED) or part_of(table, final, OF_SEED)
        if final != name and of_table:
            with doing("remove", f"{folder}/{name}"):
                fs.remove(f"{folder}/{name}")
