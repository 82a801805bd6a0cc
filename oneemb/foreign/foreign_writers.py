"""Writers of tables for other libraries: raw files of TFRA and HugeCTR, and state dicts in safetensors.

Invariant: files get their names when all of them are complete, those of keys last; a writer that is abandoned leaves no
new file.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

import numpy as np

from oneemb.foreign.hugectr_files import KEYS, VALUES, is_hugectr_file
from oneemb.foreign.tfra_files import OF_FILE
from oneemb.foreign.torch_tables import NO_ID
from oneemb.graph.row_optimizers import StateNames, states_in
from oneemb.rows.files import ColumnWriter, RowsOfFile
from oneemb.rows.files_safetensors import NewTensor, write_safetensors
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.new_files import NewFile, new_files
from oneemb.storage.rows.row_format import RowFormat

_PIECE_BYTES = 1 << 20


class StateParts:
    """Parts of the optimizer state of rows, under the names of a library.

    Raises:
        ValueError: the library keeps no such state.
    """

    def __init__(self, library: str, row_format: RowFormat):
        known, name = states_in(library), row_format.optimizer
        if row_format.state_width and name not in known:
            raise ValueError(
                f"{library} must keep the state of {name!r} as rows do, and does so for {', '.join(sorted(known))};"
                " export without with_state"
            )
        parts = known[name] if row_format.state_width and name is not None else StateNames((), (), False)
        self.width = {**dict.fromkeys(parts.weight_state, row_format.dim), **dict.fromkeys(parts.row_state, 1)}
        """{name: number of values of a row}."""

    def split(self, state_NZ: np.ndarray | None) -> dict[str, np.ndarray]:
        """{name: float32 [N, X]} of the state of rows."""
        begins = np.cumsum([0, *self.width.values()])
        return {} if state_NZ is None else {
            name: state_NZ[:, begin : begin + width]
            for (name, width), begin in zip(self.width.items(), begins, strict=False)
        }  # fmt: skip


class _RawFiles:
    """Files that arrays are appended to.

    Invariant: a file of keys has its name only while all other files have theirs. Libraries read no values without
    keys, so none finds keys of one export beside values of another.

    Args:
        keys: paths of the files of keys.
        others: paths of the other files.
    """

    def __init__(self, keys: Sequence[str], others: Sequence[str]):
        self._fs, self._files, self._keys = LocalFileSystem(), dict[str, NewFile](), keys
        with signals_deferred:
            try:
                for path in (*others, *keys):  # the order in which they get their names
                    self._files[path] = NewFile(path, fs=self._fs)
            except BaseException:
                self.drop()
                raise

    def append(self, path: str, array: np.ndarray) -> None:
        self._files[path].write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8))

    def finish(self) -> None:
        for file in self._files.values():
            file.sync()
            file.close()
        folder, named = os.path.dirname(self._keys[0]), list[str]()
        with signals_deferred:
            try:
                if old := [path for path in self._keys if os.path.exists(path)]:
                    for path in old:
                        self._fs.remove(path)
                    self._fs.sync_directory(folder)
                for path, file in self._files.items():
                    if path == self._keys[0]:
                        self._fs.sync_directory(folder)
                    file.put_in_place()
                    named.append(path)
                self._fs.sync_directory(folder)
            except BaseException:
                for path in reversed(named):
                    with suppress(OSError):
                        self._fs.remove(path)
                raise

    def drop(self) -> None:
        for file in self._files.values():
            file.drop()


class RawWriter:
    """Writes keys, weights and optimizer state to raw files of their own, with the interface `RowFileWriter`.

    Args:
        keys: files of the ids, int64 [n]; each gets all ids.
        values: file of the weights, float32 [n, D].
        state: {name of a part of the optimizer state: file}.
        others: files of the table that exist before.

    Raises:
        ValueError: one of `others` is not replaced, and would lie beside rows that are not its own.
    """

    def __init__(
        self, keys: Sequence[str], values: str, state: Mapping[str, str], parts: StateParts, others: Sequence[str]
    ):
        if stale := [path for path in others if path not in {*keys, values, *state.values()}]:
            raise ValueError(
                f"{stale[0]} must not lie beside new rows, since it belongs to other rows; remove it, or choose another"
                " folder"
            )
        self._keys, self._values, self._state, self._parts = keys, values, state, parts
        self._files = _RawFiles(keys, [values, *state.values()])

    def write(self, batch: RowsOfFile) -> None:
        for path in self._keys:
            self._files.append(path, batch.id_N.astype(np.int64, copy=False))
        self._files.append(self._values, batch.weight_ND.astype(np.float32, copy=False))
        for name, part in self._parts.split(batch.state_NZ).items():
            self._files.append(self._state[name], part)

    def finish(self) -> None:
        self._files.finish()

    def abandon(self) -> None:
        self._files.drop()


def tfra_writer(folder: str, name: str, slots: str, row_format: RowFormat) -> RawWriter:
    """Writer of a table and its slots for TFRA's `Variable.load_from_file_system`, as one shard of one process."""
    parts = StateParts("tfra", row_format)
    of_slot = {slot: f"{slots}/{slot}" for slot in parts.width}
    known = {slot for names in states_in("tfra").values() for slot in names.weight_state}
    tables = {one.replace("/", "_") for one in (name, *(f"{slots}/{slot}" for slot in known))}
    there = [(one, match[1]) for one in os.listdir(folder) if (match := OF_FILE.fullmatch(one))]
    return RawWriter(
        [tfra_path(folder, one, "keys") for one in (name, *of_slot.values())], tfra_path(folder, name, "values"),
        {slot: tfra_path(folder, one, "values") for slot, one in of_slot.items()}, parts,
        sorted(f"{folder}/{one}" for one, table in there if table in tables),
    )  # fmt: skip


def tfra_path(folder: str, name: str, kind: str) -> str:
    """File of the keys or values of a table of TFRA."""
    return f"{folder}/{name.replace('/', '_')}_mht_1of1_rank0_size1-{kind}"


def hugectr_writer(folder: str, row_format: RowFormat) -> RawWriter:
    """Writer of a sparse model for HugeCTR and HPS."""
    parts = StateParts("hugectr", row_format)
    there = [f"{folder}/{one}" for one in sorted(os.listdir(folder)) if is_hugectr_file(one)]
    of_part = {one: f"{folder}/{one}" for one in parts.width}
    return RawWriter([f"{folder}/{KEYS}"], f"{folder}/{VALUES}", of_part, parts, there)


class StateDictWriter:
    """Writes a state dict of torch or TorchRec to a safetensors file, with the interface `RowFileWriter`.

    Args:
        names: {role: name of the tensor} of the roles "weight", "ids" and, with managed collisions, "mapping"; the name
            of "state." is a prefix of the names of the parts of the optimizer state.
        size: number of rows of the weight. Without "mapping" row r is id r, and rows of other ids are 0; with "mapping"
            the rows after the last id are 0. None = the rows of the table, one after the other.
        step: number of optimizer steps.
    """

    def __init__(
        self, path: str, library: str, names: Mapping[str, str], size: int | None, row_format: RowFormat, step: int
    ):
        self._path, self._names, self._size, self._step = path, names, size, step
        self._parts, self._row_format = StateParts(library, row_format), row_format
        self._columns, self._ids = ColumnWriter(path), list[np.ndarray]()

    def write(self, batch: RowsOfFile) -> None:
        if self._size is not None and "mapping" not in self._names and len(batch.id_N):
            if batch.id_N.min() < 0 or batch.id_N.max() >= self._size:
                raise ValueError(
                    f"ids must be from 0 to {self._size - 1}, the rows of the weight, got {batch.id_N.min()} to"
                    f" {batch.id_N.max()}; give a larger num_embeddings, or leave it out to get a tensor of the ids"
                )
        self._ids.append(batch.id_N)
        weight_ND = batch.weight_ND
        if self._row_format.dtype == "bfloat16":
            # The weights are bfloat16 values in float32, so the lower half of their bits is zero.
            weight_ND = (np.ascontiguousarray(weight_ND).view(np.uint32) >> 16).astype(np.uint16)
        self._columns.append(self._names["weight"], weight_ND)
        for name, part in self._parts.split(batch.state_NZ).items():
            self._columns.append(self._names["state."] + name, part[:, 0] if part.shape[1] == 1 else part)

    def finish(self) -> None:
        id_N = np.concatenate(self._ids)
        row_N, size = np.arange(len(id_N)), len(id_N) if self._size is None else self._size
        more: dict[str, np.ndarray] = {}
        if "mapping" in self._names:
            if NO_ID in id_N:
                raise ValueError(
                    f"ids must be below {NO_ID}, which TorchRec takes for no id, got {NO_ID}; erase its row first"
                )
            if len(id_N) >= size:
                raise ValueError(
                    f"num_embeddings must be above {len(id_N)}, the number of ids, since TorchRec keeps the last row"
                    f" for all other ids, got {size}"
                )
            order = np.argsort(id_N)
            more[self._names["ids"]] = np.concatenate([id_N[order], np.full(size - len(id_N), NO_ID)])
            more[self._names["mapping"]] = np.concatenate([order, np.arange(len(id_N), size)])
        elif self._size is not None:
            row_N = id_N
        else:
            more[self._names["ids"]] = id_N
        if self._parts.width:
            more[self._names["state."] + "step"] = np.array(self._step, np.float32)
        columns, shapes = self._columns, self._columns.shape
        tensors = {
            name: NewTensor(columns.dtype[name].name, (size, *shapes[name][1:]), partial(self._put, name, row_N, size))
            for name in shapes
        }
        tensors |= {
            name: NewTensor(array.dtype.name, array.shape, partial(_write_array, array)) for name, array in more.items()
        }
        with new_files(self._path) as (file,):
            write_safetensors(file, tensors, {})
        self.abandon()

    def _put(self, name: str, row_N: np.ndarray, size: int, file: IO[bytes]) -> None:
        """Write a column with its row n as row row_N[n] of `size` rows; the others are 0."""
        column, order = self._columns.mapped(name), np.argsort(row_N)
        sorted_N = row_N[order]
        at_once = max(1, _PIECE_BYTES // max(1, column.dtype.itemsize * int(np.prod(column.shape[1:], dtype=np.int64))))
        for begin in range(0, size, at_once):
            end = min(begin + at_once, size)
            low, high = np.searchsorted(sorted_N, [begin, end])
            out = np.zeros((end - begin, *column.shape[1:]), column.dtype)
            out[sorted_N[low:high] - begin] = column[order[low:high]]
            _write_array(out, file)

    def abandon(self) -> None:
        self._columns.abandon()


def _write_array(array: np.ndarray, file: IO[bytes]) -> None:
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
