"""Arguments of readers and writers of persistent tables: paths, formats, dtypes."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from oneemb.flags import check_flags
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.rows.row_format import WEIGHTS

if TYPE_CHECKING:
    # Each import takes a second, and readers and writers need neither module.
    import torch

    from oneemb.embeddings.embedding import TableEmbedding

AnyDtype: TypeAlias = "npt.DTypeLike | torch.dtype"
Paths = AnyPath | Sequence[AnyPath]
Format = Literal["oneemb", "oneflow"]
FORMATS = ("oneemb", "oneflow")
VALUES = ("float32", "float16")


def as_list(paths: Paths) -> list[str]:
    """List of the paths, made absolute."""
    named = [paths] if isinstance(paths, str | bytes | os.PathLike) else paths
    if not isinstance(named, list | tuple) or not all(isinstance(one, str | bytes | os.PathLike) for one in named):
        raise TypeError(f"paths must name a folder, or be a list of folders, got {type(paths).__name__} {paths!r}")
    if not all(map(os.fspath, named)):
        raise ValueError(f"paths must name folders, got an empty path in {paths!r}")
    return [absolute_path(path) for path in named]


def as_embedding(place: "TableEmbedding | Paths") -> "TableEmbedding | None":
    """`place` if it is an embedding; None = it is a folder or several folders. Does not load torch."""
    if isinstance(place, str | bytes | os.PathLike) or not hasattr(place, "store"):
        return None
    return cast("TableEmbedding", place)


def check_batches(batch_size: object, progress: object, **flags: object) -> None:
    """Raise TypeError or ValueError unless `batch_size` is an int of at least 1, `progress` a function or None, and all
    `flags` are bools."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        got = f"{type(batch_size).__name__} {batch_size!r}"
        raise TypeError(f"batch_size must be a number of rows, an int of 1 or more, got {got}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    if progress is not None and not callable(progress):
        got = f"{type(progress).__name__} {progress!r}"
        raise TypeError(f"progress must be a function of (rows done, rows in all), got {got}")
    check_flags(**flags)


def check_format(format: str) -> str:
    """`format`; ValueError if no format has this name."""
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(map(repr, FORMATS))}, got {format!r}")
    return format


def name_of(dtype: AnyDtype) -> str:
    """Name of a dtype of torch or NumPy. Does not load torch."""
    text = str(dtype)
    if text.startswith("torch.") or text in WEIGHTS:
        return text.removeprefix("torch.")
    return np.dtype(cast(npt.DTypeLike, dtype)).name


def dtype_of(argument: str, dtype: AnyDtype, *allowed: str) -> np.dtype:
    """NumPy's dtype for `dtype`; TypeError unless its name is in `allowed`. `argument`: name for the error."""
    try:
        name = name_of(dtype)
    except TypeError:
        name = ""
    if name not in allowed:
        raise TypeError(f"{argument} must be {' or '.join(allowed)}, got {dtype}")
    return np.dtype(name)


def keys_as(id_N: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Ids as int64 or int32; StorageError if an id does not fit."""
    if dtype == np.int32 and len(id_N) and not -(2**31) <= id_N.min() <= id_N.max() < 2**31:
        raise StorageError(f"keys from {id_N.min()} to {id_N.max()} do not fit in int32; read them as int64")
    return id_N.astype(dtype)
