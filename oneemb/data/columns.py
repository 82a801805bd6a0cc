"""Columns of a batch, made of Arrow columns by whole-column kernels. N rows, T columns, X elements of lists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from oneemb.data.source import BadRowError, Piece
from oneemb.hashing import hash_ids


class Ids:
    """Ids, int64 [B, T], one of each column: integers are ids, strings and bytes are hashed as by `oneemb.hash_ids`.

    Args:
        columns: names of T columns. A tuple of names is one column: the cross of its columns, hashed.
        missing: value that takes the place of a missing one. None = a row without a value is a bad row.

    Example:
        >>> import oneemb
        >>> oneemb.data.Ids("user", "item", ("device", "hour")).names
        ('user', 'item', 'device', 'hour')
    """

    def __init__(self, *columns: str | tuple[str, ...], missing: str | int | None = None):
        self.columns = tuple((column,) if isinstance(column, str) else tuple(column) for column in columns)
        self.names = _names(self, [name for column in self.columns for name in column])
        self.missing = missing


class Numbers:
    """Numbers, float32 [B, D], one of each column of integers, floats, decimals or booleans.

    Args:
        columns: names of D columns. A name in place of `Numbers` makes float32 [B] of one column.
        missing: number that takes the place of a missing one, and of NaN. None = a row without a value is a bad row.
            A row with an infinite number is always a bad row.
    """

    def __init__(self, *columns: str, missing: float | None = None):
        self.names, self.missing = _names(self, columns), missing


class Lists:
    """Bags of T columns of lists for a lookup with `offsets`: (values [X], offsets int64 [B * T + 1]).

    Bag p holds values[offsets[p]:offsets[p + 1]], and belongs to sample p // T and column p % T. Values are int64 ids
    of integers, strings and bytes, or float32. In a column without lists each value is a bag.

    Args:
        columns: names of T columns.
        max_length: largest number of values in a list; a row with a longer list is a bad row. None = no limit.
        missing: if True, a missing list is an empty list. False = a row without a list is a bad row.
    """

    def __init__(self, *columns: str, max_length: int | None = None, missing: bool = False):
        self.names, self.max_length, self.missing = _names(self, columns), max_length, missing


Spec = Ids | Numbers | Lists | str


def names_of(specs: Mapping[str, Spec]) -> list[str]:
    """Names of the columns that batches are made of.

    Raises:
        TypeError: `specs` is no dict of columns.
    """
    if not isinstance(specs, Mapping) or not all(
        isinstance(spec, Ids | Numbers | Lists | str) for spec in specs.values()
    ):
        raise TypeError(
            f'columns must be a dict such as {{"ids": oneemb.data.Ids("user"), "label": "click"}}, got {specs!r}'
        )
    return sorted({name for spec in specs.values() for name in ([spec] if isinstance(spec, str) else spec.names)})


def _names(spec: object, columns: Sequence[Any]) -> tuple[str, ...]:
    if not columns or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"{type(spec).__name__} must get names of columns, got {columns!r}")
    return tuple(columns)


class ListColumn(NamedTuple):
    """Lists of N rows."""

    value_X: np.ndarray
    offset_N1: np.ndarray


Column = np.ndarray | ListColumn
"""Values of N rows, [N, ...], or their lists."""


@dataclass
class Chunk:
    """Rows of a piece as the arrays of a batch."""

    columns: dict[str, list[Column]]
    piece: Piece
    flaws: list[tuple[np.ndarray, str]]
    """(mask [N] of bad rows, what is wrong with them)."""
    bad_N: np.ndarray

    def error(self, row: int) -> BadRowError:
        """Error about a bad row."""
        text = next(text for bad_N, text in self.flaws if bad_N[row])
        why = self.piece.bad.get(row, text)
        return BadRowError(f'{self.piece.place(row)}: {why}; mend the row, or pass bad_rows="drop"')


Convert = Callable[[Piece], Chunk]


def convert(piece: Piece, specs: Mapping[str, Spec]) -> Chunk:
    """Arrays of the rows of a piece.

    Raises:
        BadRowError: a column is missing, or has a wrong type.
    """
    reader = _Reader(piece)
    if piece.bad:
        reader.flaw(np.isin(np.arange(reader.rows), list(piece.bad)), "it cannot be read")
    columns: dict[str, list[Column]] = {}
    for name, spec in specs.items():
        if isinstance(spec, str):
            columns[name] = [reader.number(spec, None)]
        elif isinstance(spec, Numbers):
            columns[name] = [np.stack([reader.number(one, spec.missing) for one in spec.names], 1)]
        elif isinstance(spec, Ids):
            columns[name] = [np.stack([reader.id(column, spec.missing) for column in spec.columns], 1)]
        else:
            columns[name] = list[Column](reader.bags(one, spec) for one in spec.names)
    bad_N = np.zeros(reader.rows, np.bool_)
    for mask_N, _ in reader.flaws:
        bad_N |= mask_N
    return Chunk(columns, piece, reader.flaws, bad_N)


class _Reader:
    """Arrow columns of one piece as arrays; notes bad rows."""

    def __init__(self, piece: Piece):
        import pyarrow as pa
        import pyarrow.compute as pc

        self._pa, self._pc, self._piece, self.rows = pa, pc, piece, len(piece.rows)
        self.flaws: list[tuple[np.ndarray, str]] = []

    def flaw(self, bad_N: np.ndarray, text: str) -> None:
        """Note bad rows."""
        if bad_N.any():
            self.flaws.append((bad_N, text))

    def _array(self, name: str) -> Any:
        """Array of a column, without chunks and without nulls in a dictionary."""
        names = self._piece.rows.schema.names
        if names.count(name) != 1:
            has = f"it has {', '.join(names)}" if name not in names else "it has several"
            raise BadRowError(f"{self._piece.place(0)}: there must be one column {name!r}; {has}")
        array = self._piece.rows.column(name)
        if isinstance(array, self._pa.ChunkedArray):
            array = array.combine_chunks()
        if isinstance(array, self._pa.ChunkedArray):  # no chunks: older versions leave it so
            array = self._pa.concat_arrays(array.chunks) if array.num_chunks else self._pa.array([], array.type)
        if self._pa.types.is_dictionary(array.type):
            values = array.dictionary
            if values.null_count or self._pa.types.is_integer(values.type):
                array = array.dictionary_decode()
        return array

    def _wrong(self, name: str, what: str, array: Any) -> BadRowError:
        return BadRowError(f"{self._piece.place(0)}: column {name!r} must hold {what}, got {array.type}")

    def _filled(self, array: Any, name: str, missing: Any, blank: Any) -> Any:
        """The array with a value in place of each null, which is a flaw if `missing` is None."""
        if not array.null_count:
            return array
        if missing is None:
            self.flaw(~np.asarray(array.is_valid()), f"column {name!r} has no value")
        if self._pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        value = blank if missing is None else missing
        try:
            return array.fill_null(self._pa.scalar(value).cast(array.type))
        except self._pa.ArrowInvalid as error:
            raise self._wrong(name, f"values of the type of missing={missing!r}", array) from error

    def number(self, name: str, missing: float | None) -> np.ndarray:
        """float32 [N]."""
        array, types = self._array(name), self._pa.types
        kinds = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal
        if not any(is_kind(array.type) for is_kind in kinds) and not types.is_null(array.type):
            raise self._wrong(name, "numbers", array)
        number_N = np.array(self._filled(array.cast(self._pa.float32(), safe=False), name, missing, 0), np.float32)
        if missing is not None:
            number_N[np.isnan(number_N)] = missing
        self.flaw(~np.isfinite(number_N), f"column {name!r} has a number that is not finite in float32")
        return number_N

    def id(self, column: tuple[str, ...], missing: str | int | None) -> np.ndarray:
        """int64 [N]; of several columns, the cross."""
        arrays = []
        for name in column:
            array = self._array(name)
            is_integer = self._pa.types.is_integer(array.type)
            arrays.append(self._filled(array, name, missing, 0 if is_integer else ""))
        return self._ids(arrays, " x ".join(column))

    def _ids(self, arrays: Sequence[Any], name: str) -> np.ndarray:
        if len(arrays) == 1 and self._pa.types.is_integer(arrays[0].type):
            return np.array(arrays[0]).astype(np.int64)
        if self._pa.types.is_null(arrays[0].type):
            return np.zeros(len(arrays[0]), np.int64)  # bad rows, all of them
        try:
            return hash_ids(*arrays).numpy()
        except TypeError as error:
            types = ", ".join(str(array.type) for array in arrays)
            raise BadRowError(f"{self._piece.place(0)}: {name} must hold strings or integers, got {types}") from error

    def bags(self, name: str, spec: Lists) -> ListColumn:
        """Lists of a column."""
        array, types = self._array(name), self._pa.types
        if not any(kind(array.type) for kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
            return ListColumn(self._values(array, name, np.arange(self.rows)), np.arange(self.rows + 1))
        if array.null_count:
            if not spec.missing:
                self.flaw(~np.asarray(array.is_valid()), f"column {name!r} has no list")
        length_N = np.array(self._pc.list_value_length(array).fill_null(0)).astype(np.int64)
        if spec.max_length is not None:
            self.flaw(length_N > spec.max_length, f"column {name!r} has a list of more than {spec.max_length} values")
        offset_N1 = _offsets(length_N)
        values = self._pc.list_flatten(array)
        return ListColumn(self._values(values, name, np.repeat(np.arange(self.rows), length_N)), offset_N1)

    def _values(self, array: Any, name: str, row_X: np.ndarray) -> np.ndarray:
        """Ids or float32 numbers; `row_X` is the row of each."""
        types = self._pa.types
        if array.null_count:
            bad_N = np.zeros(self.rows, np.bool_)
            bad_N[row_X[~np.asarray(array.is_valid())]] = True
            self.flaw(bad_N, f"column {name!r} has a missing value in a list")
            if types.is_dictionary(array.type):
                array = array.dictionary_decode()
        if types.is_floating(array.type):
            value_X = np.array(array.cast(self._pa.float32(), safe=False).fill_null(0), np.float32)
            bad_N = np.zeros(self.rows, np.bool_)
            bad_N[row_X[~np.isfinite(value_X)]] = True
            self.flaw(bad_N, f"column {name!r} has a number that is not finite in float32")
            return value_X
        is_blank = array.null_count or types.is_null(array.type)
        if is_blank and not types.is_null(array.type):
            array = array.fill_null(0 if types.is_integer(array.type) else "")
        return self._ids([array], name)


# ---- rows of columns -------------------------------------------------------------------------------------------------


def cut(column: Column, begin: int, end: int) -> Column:
    """Rows begin to end of a column, without a copy."""
    if isinstance(column, np.ndarray):
        return column[begin:end]
    offset_N1 = column.offset_N1[begin : end + 1]
    return ListColumn(column.value_X[offset_N1[0] : offset_N1[-1]], offset_N1 - offset_N1[0])


def join(columns: Sequence[Column]) -> Column:
    """Rows of several columns, one column after the other."""
    if len(columns) == 1:
        return columns[0]
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    bags = [column for column in columns if isinstance(column, ListColumn)]
    length_N = np.concatenate([np.diff(column.offset_N1) for column in bags])
    return ListColumn(np.concatenate([column.value_X for column in bags]), _offsets(length_N))


def take(column: Column, row_B: np.ndarray) -> Column:
    """Rows of a column, in the order of `row_B`."""
    if isinstance(column, np.ndarray):
        return column[row_B]
    begin_B, length_B = column.offset_N1[row_B], np.diff(column.offset_N1)[row_B]
    offset_B1 = _offsets(length_B)
    return ListColumn(column.value_X[_spread(begin_B, length_B, offset_B1)], offset_B1)


def _offsets(length_B: np.ndarray) -> np.ndarray:
    """Offset of each list, and the end of the last one: int64 [B + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(length_B)])


def _spread(begin_B: np.ndarray, length_B: np.ndarray, offset_B1: np.ndarray) -> np.ndarray:
    """Indexes begin, begin + 1, ... of each list, one list after the other."""
    return np.repeat(begin_B - offset_B1[:-1], length_B) + np.arange(offset_B1[-1])


def tensors(columns: Mapping[str, Sequence[Column]]) -> dict[str, Any]:
    """A batch: tensors, and (values, offsets) of lists."""
    return {name: _tensor(parts) for name, parts in columns.items()}


def _tensor(parts: Sequence[Column]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return torch.from_numpy(parts[0])
    bags = [part for part in parts if isinstance(part, ListColumn)]
    if len(bags) == 1:
        return torch.from_numpy(bags[0].value_X), torch.from_numpy(bags[0].offset_N1)
    length_BT = np.stack([np.diff(one.offset_N1) for one in bags], 1)
    offset_P1 = _offsets(length_BT)
    value_X = np.empty(offset_P1[-1], np.result_type(*(one.value_X for one in bags)))
    for t, one in enumerate(bags):
        value_X[_spread(offset_P1[t : -1 : len(bags)], length_BT[:, t], one.offset_N1)] = one.value_X
    return torch.from_numpy(value_X), torch.from_numpy(offset_P1)
