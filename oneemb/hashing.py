"""Ids of strings: 64-bit hashes that are the same in every version, and the expected number of collisions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from oneemb.kernels.checksum import rows_sum, strings_sum
from oneemb.kernels.extras import need
from oneemb.kernels.threads import Threads

__all__ = ["expected_collisions", "hash_ids"]

_STRINGS = (
    "a list of str or bytes, a NumPy array of them, a pandas or polars Series, or a pyarrow array (plain, large,"
    " dictionary, chunked)"
)


# Columns have type Any, since their libraries may not be installed.


def hash_ids(*columns: Any, salt: int = 0) -> torch.Tensor:
    """Ids of strings, or of crosses of several columns. Equal strings have equal ids, in every process and version.

    The id of a string is XXH64 of its UTF-8 bytes (of `bytes` as they are), with `salt` as seed, read as a two's
    complement int64. A cross of k columns is hashed, with the same seed, as 8 k bytes: for each column in turn a
    little-endian int64, which is the id of a string, or an integer itself.

    Args:
        columns: one column of strings: a list of str or bytes, a NumPy array, a pandas or polars Series, or a pyarrow
            array (string, large_string, binary, string_view, dictionary, chunked). Or several columns of one shape, of
            strings or integers; columns of integers may also be torch tensors, NumPy arrays and lists of int.
        salt: 0 to 2**64 - 1; another salt gives other ids.

    Returns:
        int64 in the shape of a column, on the CPU.

    Raises:
        TypeError: a column is none of these, or a single column holds integers, which are ids already.
        ValueError: a value is missing (None, NaN, null), a string cannot be encoded, shapes differ, or `salt` is out of
            its range.

    Example:
        >>> import oneemb
        >>> oneemb.hash_ids(["red", "green", "red"]).tolist()
        [-3326043860779113110, 7475655757874500677, -3326043860779113110]
        >>> oneemb.hash_ids(["red", "green"], [7, 8]).shape
        torch.Size([2])

    Reference: Collet, xxHash fast digest algorithm, version 0.1.1.
    """
    if isinstance(salt, bool) or not isinstance(salt, int) or not 0 <= salt < 1 << 64:
        raise ValueError(f"salt must be an int from 0 to 2**64 - 1, got {salt!r}")
    if not columns:
        raise TypeError(f"hash_ids needs a column of strings: {_STRINGS}")
    if len(columns) == 1:
        integers, _ = _integers_of(columns[0], "the column")
        if integers is not None:
            raise TypeError("the column holds integers, which are ids already; look them up as they are")
        id_N, shape = _ids_of(columns[0], "the column", salt)
        return torch.from_numpy(id_N).reshape(shape)
    ids, shapes = [], []
    for number, column in enumerate(columns):
        integers, shape = _integers_of(column, f"column {number}")
        if integers is None:
            integers, shape = _ids_of(column, f"column {number}", salt)
        ids.append(integers)
        shapes.append(tuple(shape))
    if len(set(shapes)) > 1:
        raise ValueError(f"the columns of a cross must have one shape, got {', '.join(map(str, shapes))}")
    word_X = np.stack(ids, 1).astype("<i8").view(np.uint64).reshape(-1)
    sum_N = np.empty(len(ids[0]), np.uint64)
    salt_N = np.full(len(sum_N), salt, np.uint64)
    Threads().run(rows_sum, len(sum_N), word_X, len(ids), len(ids), salt_N, sum_N)
    return torch.from_numpy(sum_N.view(np.int64)).reshape(shapes[0])


def expected_collisions(strings: int) -> float:
    """Expected number of pairs of different strings with equal ids, n (n - 1) / 2**65 for n strings.

    Args:
        strings: number of different strings, n.

    Example:
        >>> import oneemb
        >>> round(oneemb.expected_collisions(10**9), 3)
        0.027
    """
    return math.comb(strings, 2) / 2**64


def _integers_of(column: Any, name: str) -> tuple[np.ndarray | None, Sequence[int]]:
    """(ids int64 [N], shape) of a column of integers; (None, ()) for any other column."""
    if isinstance(column, torch.Tensor):
        if column.is_floating_point() or column.is_complex() or column.dtype == torch.bool:
            raise TypeError(f"a tensor of a cross must hold integers, got {column.dtype}")
        return column.detach().cpu().reshape(-1).to(torch.int64).numpy(), column.shape
    if _library(column) == "polars":
        column = _arrow_of(column)
    if _library(column) == "pyarrow":
        import pyarrow as pa

        if not pa.types.is_integer(column.type) or column.null_count:
            return None, ()
        return column.to_numpy().astype(np.int64), (len(column),)
    if isinstance(column, list | tuple):
        if not column or not all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in column):
            return None, ()
        try:
            return np.array(column, np.int64), (len(column),)
        except OverflowError as error:
            raise ValueError(f"{name}: integers of a list must fit in int64, got {max(column, key=abs)}") from error
    if getattr(getattr(column, "dtype", None), "kind", "") in ("i", "u"):
        missing_N = np.asarray(column.isna()) if hasattr(column, "isna") else np.zeros(0, np.bool_)
        if missing_N.any():  # A cast would make a number of it.
            raise _missing(int(np.argmax(missing_N)), name)
        array = np.asarray(column)
        return array.reshape(-1).astype(np.int64), array.shape
    return None, ()


def _ids_of(column: Any, name: str, salt: int) -> tuple[np.ndarray, Sequence[int]]:
    """(ids int64 [N], shape) of a column of strings."""
    library = _library(column)
    if library == "polars":
        column, library = _arrow_of(column), "pyarrow"
    if library == "pandas" and hasattr(column, "dtype"):  # a DataFrame has no dtype
        if getattr(column.dtype, "name", "") == "category":
            values = column.array if hasattr(column, "array") else column
            return _of_categories(values.categories, np.asarray(values.codes), name, salt), (len(column),)
        values = getattr(column, "array", column)
        # Other arrays of pandas have that method too, which needs pyarrow.
        if hasattr(values.dtype, "pyarrow_dtype") or getattr(values.dtype, "storage", "") == "pyarrow":
            column, library = values.__arrow_array__(), "pyarrow"
        else:
            column = list(column)
    if library == "pyarrow":
        return _of_arrow(column, name, salt), (len(column),)
    if isinstance(column, np.ndarray):
        return _of_list(column.reshape(-1).tolist(), name, salt), column.shape
    if isinstance(column, list | tuple):
        return _of_list(column, name, salt), (len(column),)
    raise TypeError(f"{name} must be {_STRINGS}, got {type(column).__name__}")


def _library(column: Any) -> str:
    return type(column).__module__.partition(".")[0]


def _arrow_of(series: Any) -> Any:
    """Array of pyarrow with the values of a Series of polars."""
    need("pyarrow", "hash_ids of a polars Series", "parquet")
    return series.to_arrow()


def _of_list(strings: Sequence[Any], name: str, salt: int) -> np.ndarray:
    try:
        encoded = [one if type(one) is bytes else one.encode() for one in strings]
    except (AttributeError, UnicodeEncodeError):
        encoded = [_encoded(one, n, name) for n, one in enumerate(strings)]
    offset_N1 = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offset_N1[1:])
    return _sums(np.frombuffer(b"".join(encoded), np.uint8), offset_N1, salt)


def _encoded(one: Any, n: int, name: str) -> bytes:
    """UTF-8 bytes of element n of a column; otherwise raises an error that says what is wrong with the element."""
    if isinstance(one, bytes):
        return one
    if isinstance(one, str):
        try:
            return one.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: the string at {n} has no UTF-8 encoding ({error.reason}): {one!r}") from error
    if one is None or one != one or type(one).__name__ == "NAType":
        raise _missing(n, name)
    raise TypeError(f"{name} must hold str or bytes, got {type(one).__name__} {one!r} at {n}")


def _missing(n: int, name: str) -> ValueError:
    return ValueError(f'{name} has no value at {n}; fill what is missing first, for example with ""')


def _of_categories(categories: Any, code_N: np.ndarray, name: str, salt: int) -> np.ndarray:
    """Id of the category that each code stands for; a negative code is a missing value, and an error."""
    if code_N.min(initial=0) < 0:
        raise _missing(int(np.argmax(code_N < 0)), name)
    integers, _ = _integers_of(categories, name)
    if integers is not None:
        raise TypeError(f"the categories of {name} are integers, not strings; look them up as they are")
    return _ids_of(categories, name, salt)[0][code_N]


def _of_arrow(column: Any, name: str, salt: int) -> np.ndarray:
    import pyarrow as pa

    if column.null_count:
        raise _missing(int(np.argmax(np.asarray(column.is_null()))), name)
    if not len(column):
        return np.empty(0, np.int64)
    if isinstance(column, pa.ChunkedArray):
        return np.concatenate([np.empty(0, np.int64), *(_of_arrow(chunk, name, salt) for chunk in column.chunks)])
    kinds = pa.types
    if kinds.is_dictionary(column.type):
        values, code_N = column.dictionary, np.asarray(column.indices)
        if values.null_count:
            missing_N = ~np.asarray(values.is_valid())[code_N]
            if missing_N.any():
                raise _missing(int(np.argmax(missing_N)), name)
            values = values.drop_null() if not len(code_N) else values.fill_null(values[int(code_N[0])])
        return _of_categories(values, code_N, name, salt)
    is_view = getattr(kinds, "is_string_view", lambda _: False), getattr(kinds, "is_binary_view", lambda _: False)
    if any(is_kind(column.type) for is_kind in is_view):
        column = column.cast(pa.large_binary())
    large = kinds.is_large_string(column.type) or kinds.is_large_binary(column.type)
    if not large and not kinds.is_string(column.type) and not kinds.is_binary(column.type):
        raise TypeError(f"{name} must hold strings or bytes, got a pyarrow array of {column.type}")
    _, offsets, data = column.buffers()
    offset_N1 = np.frombuffer(offsets, np.int64 if large else np.int32)[column.offset :][: len(column) + 1]
    byte_X = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return _sums(byte_X, offset_N1.astype(np.int64), salt)


def _sums(byte_X: np.ndarray, offset_N1: np.ndarray, salt: int) -> np.ndarray:
    sum_N = np.empty(len(offset_N1) - 1, np.uint64)
    Threads().run(strings_sum, len(sum_N), byte_X, offset_N1, np.uint64(salt), sum_N)
    return sum_N.view(np.int64)
