"""Columns of a batch, made of Arrow columns by whole-column kernels. N rows, T columns, X elements of lists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch

from oneemb.data.source import BadRowError, Piece, check_column
from oneemb.hashing import hash_ids

_64_BITS = (1 << 64) - 1


class Ids:
    """Ids, int64 [B, T], one of each column: integers are ids, strings and bytes are hashed as by `oneemb.hash_ids`.

    Args:
        columns: names of T columns. A tuple of names is one column: the cross of its columns, hashed.
        missing: value that takes the place of a missing one: an integer, or for columns of strings a string. None = a
            row without a value is a bad row.

    Example:
        >>> import oneemb
        >>> oneemb.data.Ids("user", "item", ("device", "hour")).names
        ('user', 'item', 'device', 'hour')
    """

    def __init__(self, *columns: str | tuple[str, ...], missing: str | int | None = None):
        self.columns = tuple((column,) if isinstance(column, str) else tuple(column) for column in columns)
        self.names = _names(self, [name for column in self.columns for name in column])
        if missing is not None and (
            isinstance(missing, bool) or not isinstance(missing, str | Integral)
            or isinstance(missing, Integral) and not -(1 << 63) <= missing < 1 << 64
        ):  # fmt: skip
            raise ValueError(f"missing must be a string, an integer of 64 bits or None, got {missing!r}")
        self.missing = missing


class Numbers:
    """Numbers, float32 [B, D], one of each column of integers, floats, decimals or booleans.

    Args:
        columns: names of D columns. A name in place of `Numbers` makes float32 [B] of one column.
        missing: number that takes the place of a missing one, and of NaN. None = a row without a value is a bad row.
            A row with an infinite number is always a bad row.
    """

    def __init__(self, *columns: str, missing: float | None = None):
        if missing is not None and not (isinstance(missing, Real) and abs(missing) <= float(np.finfo(np.float32).max)):
            raise ValueError(f"missing must be a finite number of float32 or None, got {missing!r}")
        self.names, self.missing = _names(self, columns), missing


class Lists:
    """Bags of T columns of lists for a lookup with `offsets`: (values [X], offsets int64 [B * T + 1]).

    Bag p holds values[offsets[p]:offsets[p + 1]], and belongs to sample p // T and column p % T. Values are int64 ids
    of integers, strings and bytes; or float32, if the columns hold floats. In a column without lists each value is a
    list.

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
    """The piece without its rows, so that a window holds no Arrow columns."""
    flaws: list[tuple[np.ndarray, str]]
    """(mask [N] of bad rows, what is wrong with them)."""
    bad_N: np.ndarray
    kinds: dict[str, str]
    """{column: kind of its values} of columns of ids and lists whose values are not all missing."""

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
    return Chunk(columns, replace(piece, rows=None), reader.flaws, bad_N, reader.kinds)


_INTEGERS, _STRINGS, _FLOATS = "integers", "strings", "floats"


class Kinds:
    """Kinds of values that the columns of a loader have had.

    Invariant: a column of ids has one kind, since an integer and its text are different ids; the columns of one `Lists`
    have either ids or floats.
    """

    def __init__(self, specs: Mapping[str, Spec]):
        self._lists = [spec.names for spec in specs.values() if isinstance(spec, Lists)]
        self._seen: dict[str, tuple[str, str]] = {}

    def check(self, chunk: Chunk) -> None:
        """Raise BadRowError if a column of a chunk has another kind than before."""
        for name, kind in chunk.kinds.items():
            had, where = self._seen.setdefault(name, (kind, chunk.piece.place(0)))
            if had != kind:
                raise BadRowError(
                    f"{chunk.piece.place(0)}: column {name!r} must hold {had}, as at {where}, and holds {kind}; write"
                    " all rows with one type"
                )
        for names in self._lists:
            kinds = {name: self._seen[name][0] for name in names if name in self._seen}
            if len({kind == _FLOATS for kind in kinds.values()}) > 1:
                raise BadRowError(
                    f"{chunk.piece.place(0)}: the columns of one Lists must all hold ids, or all floats, and hold"
                    f" {', '.join(f'{kind} ({name!r})' for name, kind in kinds.items())}; give them a Lists each"
                )


class _Reader:
    """Arrow columns of one piece as arrays; notes bad rows."""

    def __init__(self, piece: Piece):
        import pyarrow as pa
        import pyarrow.compute as pc

        self._pa, self._pc, self._piece, self.rows = pa, pc, piece, len(piece.rows)
        self.flaws: list[tuple[np.ndarray, str]] = []
        self.kinds: dict[str, str] = {}

    def flaw(self, bad_N: np.ndarray, text: str) -> None:
        """Note bad rows."""
        if bad_N.any():
            self.flaws.append((bad_N, text))

    def _array(self, name: str) -> Any:
        """Array of a column, without chunks."""
        check_column(name, self._piece.rows.schema.names, self._piece.place(0))
        array = self._piece.rows.column(name)
        if isinstance(array, self._pa.ChunkedArray):
            array = array.combine_chunks()
        if isinstance(array, self._pa.ChunkedArray):  # no chunks: older versions leave it so
            array = self._pa.concat_arrays(array.chunks) if array.num_chunks else self._pa.array([], array.type)
        return self._plain(array)

    def _plain(self, array: Any) -> Any:
        """The array in a type that all kernels take: no view, and a dictionary only if it has strings and no nulls."""
        types = self._pa.types
        if types.is_dictionary(array.type):
            values = array.dictionary
            if array.null_count or values.null_count or not self._is_string(values.type):
                array = array.dictionary_decode()
        is_view = getattr(types, "is_string_view", lambda _: False), getattr(types, "is_binary_view", lambda _: False)
        return array.cast(self._pa.large_binary()) if any(is_kind(array.type) for is_kind in is_view) else array

    def _is_string(self, of: Any) -> bool:
        types = self._pa.types
        return any(one(of) for one in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))

    def _wrong(self, name: str, what: str, of: Any) -> BadRowError:
        return BadRowError(f"{self._piece.place(0)}: column {name!r} must hold {what}, got {of}")

    def number(self, name: str, missing: float | None) -> np.ndarray:
        """float32 [N]."""
        array, types = self._array(name), self._pa.types
        kinds = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null
        if not any(is_kind(array.type) for is_kind in kinds):
            raise self._wrong(name, "numbers", array.type)
        if array.null_count and missing is None:
            self.flaw(~np.asarray(array.is_valid()), f"column {name!r} has no value")
        filled = array.cast(self._pa.float32(), safe=False).fill_null(0 if missing is None else missing)
        number_N = np.array(filled, np.float32)
        if missing is not None:
            number_N[np.isnan(number_N)] = missing
        self.flaw(~np.isfinite(number_N), f"column {name!r} has a number that is not finite in float32")
        return number_N

    def id(self, column: tuple[str, ...], missing: str | int | None) -> np.ndarray:
        """int64 [N]; of several columns, the cross."""
        arrays = []
        for name in column:
            array = self._array(name)
            if array.null_count and missing is None:
                self.flaw(~np.asarray(array.is_valid()), f"column {name!r} has no value")
            arrays.append(self._ints_or_strings(array, name, missing))
        return arrays[0] if len(arrays) == 1 and isinstance(arrays[0], np.ndarray) else hash_ids(*arrays).numpy()

    def _ints_or_strings(self, array: Any, name: str, missing: str | int | None) -> Any:
        """Array without nulls: int64 [N] of integers, or strings in Arrow."""
        types = self._pa.types
        if types.is_null(array.type):
            array = array.cast(self._pa.int64() if isinstance(missing, Integral) else self._pa.string())
        else:
            self.kinds[name] = _INTEGERS if types.is_integer(array.type) else _STRINGS
        if types.is_integer(array.type):
            number_N = np.array(array.fill_null(0)).astype(np.int64)
            if array.null_count and missing is not None:
                try:
                    number_N[~np.asarray(array.is_valid())] = np.array(int(missing) & _64_BITS, np.uint64).view(
                        np.int64
                    )
                except ValueError as error:
                    raise self._wrong(name, f"values of the type of missing={missing!r}", array.type) from error
            return number_N
        if not self._is_string(array.type) and not types.is_dictionary(array.type):
            raise self._wrong(name, "strings or integers", array.type)
        if array.null_count:
            array = array.fill_null(self._pa.scalar("" if missing is None else str(missing)).cast(array.type))
        return array

    def bags(self, name: str, spec: Lists) -> ListColumn:
        """Lists of a column."""
        array, types = self._array(name), self._pa.types
        valid_N = np.asarray(array.is_valid())
        if not spec.missing:
            self.flaw(~valid_N, f"column {name!r} has no list")
        if any(kind(array.type) for kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
            length_N = np.array(self._pc.list_value_length(array).fill_null(0)).astype(np.int64)
            values = self._plain(self._pc.list_flatten(array))
        else:
            length_N, values = valid_N.astype(np.int64), array.drop_null()
        if spec.max_length is not None:
            self.flaw(length_N > spec.max_length, f"column {name!r} has a list of more than {spec.max_length} values")
        return ListColumn(self._values(values, name, np.repeat(np.arange(self.rows), length_N)), _offsets(length_N))

    def _values(self, array: Any, name: str, row_X: np.ndarray) -> np.ndarray:
        """Ids or float32 numbers; `row_X` is the row of each."""
        types = self._pa.types
        bad_N = np.zeros(self.rows, np.bool_)
        if array.null_count:
            bad_N[row_X[~np.asarray(array.is_valid())]] = True
            self.flaw(bad_N, f"column {name!r} has a missing value in a list")
        if types.is_null(array.type):
            return np.zeros(len(array), np.int64)  # They are missing, or there are none.
        if types.is_floating(array.type):
            self.kinds[name] = _FLOATS
            value_X = np.array(array.cast(self._pa.float32(), safe=False).fill_null(0), np.float32)
            bad_N = np.zeros(self.rows, np.bool_)
            bad_N[row_X[~np.isfinite(value_X)]] = True
            self.flaw(bad_N, f"column {name!r} has a number that is not finite in float32")
            return value_X
        values = self._ints_or_strings(array, name, None)
        return values if isinstance(values, np.ndarray) else hash_ids(values).numpy()


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
    values = [column.value_X for column in bags]
    return ListColumn(np.concatenate(values, dtype=_dtype_of(values), casting="unsafe"), _offsets(length_N))


def _dtype_of(values: Sequence[np.ndarray]) -> np.dtype:
    """float32 if any array is; arrays of int64 then stand for missing values alone, which `Kinds` has checked."""
    return min((one.dtype for one in values), key=lambda dtype: dtype.itemsize)


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
    value_X = np.empty(offset_P1[-1], _dtype_of([one.value_X for one in bags]))
    for t, one in enumerate(bags):
        value_X[_spread(offset_P1[t : -1 : len(bags)], length_BT[:, t], one.offset_N1)] = one.value_X
    return torch.from_numpy(value_X), torch.from_numpy(offset_P1)
