"""What readers and writers of persistent tables are given: paths, formats, dtypes."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from oneemb.storage.fs import absolute_path
from oneemb.storage.row_format import WEIGHTS
from oneemb.storage.row_store import StorageError

__all__ = ["FORMATS", "VALUES", "Paths", "as_list", "check_format", "dtype_of", "keys_as", "name_of"]

Paths = str | bytes | os.PathLike | Sequence[str | bytes | os.PathLike]
FORMATS = ("oneemb", "oneflow")
VALUES = ("float32", "float16")


def as_list(paths: Paths) -> list[str]:
    """The paths, absolute."""
    return [absolute_path(path) for path in ([paths] if isinstance(paths, str | bytes | os.PathLike) else paths)]


def check_format(format: str) -> str:
    """The format, if there is one of that name."""
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(map(repr, FORMATS))}, got {format!r}")
    return format


def name_of(given: Any) -> str:
    """The name of a dtype of torch or NumPy. Does not load torch."""
    text = str(given)
    return text.removeprefix("torch.") if text.startswith("torch.") or text in WEIGHTS else np.dtype(given).name


def dtype_of(what: str, given: Any, *allowed: str) -> np.dtype:
    """A dtype, if it is one of those allowed."""
    name = name_of(given)
    if name not in allowed:
        raise TypeError(f"{what} must be {' or '.join(allowed)}, got {given}")
    return np.dtype(name)


def keys_as(id_N: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Ids in the dtype that was asked for; an id that does not fit is an error."""
    if dtype == np.int32 and len(id_N) and not -(2**31) <= id_N.min() <= id_N.max() < 2**31:
        raise StorageError(f"keys from {id_N.min()} to {id_N.max()} do not fit in int32; read them as int64")
    return id_N.astype(dtype)
