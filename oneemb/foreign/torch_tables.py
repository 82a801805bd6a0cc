"""Tables of torch modules and of TorchRec, in state dicts and in files of state dicts.

A table of torch is a weight [N, D] of `nn.Embedding` or `nn.EmbeddingBag`, whose row r has the id r, or id number r of
a vocabulary. The optimizer's state is the dict that a torch optimizer has for the weight: {"exp_avg": [N, D], ...}.

A table <t> of TorchRec is an entry <prefix>.embedding_bags.<t>.weight or <prefix>.embeddings.<t>.weight, [N, D]. With
managed collisions, buffers <prefix>._managed_collision_modules.<t>.<buffer> have the ids of the rows:

    MCH    _mch_sorted_raw_ids          int64 [N], sorted; 2^63 - 1 = no id
           _mch_remapped_ids_mapping    int64 [N], row of each id, plus the offset of a shard
           _mch_counts, ...             int64 [N], frequencies or times of last use, in the order of the ids
    MPZCH  _hash_zch_identities         int64 [N, 1], id of each row; -1 = no id
           _hash_zch_metadata           int32 [N, 1], time of last use or of eviction of each row, in hours

The last row of MCH belongs to all ids that are not there.
"""

import math
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from oneemb.foreign.foreign_rows import ForeignTable, StatePart
from oneemb.foreign.stored_arrays import MemoryArray, PickedRows, RowArray
from oneemb.kernels.extras import need
from oneemb.rows.files import reading, suffix_of
from oneemb.rows.values import array_of
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.fs import AnyPath, absolute_path

if TYPE_CHECKING:
    import torch  # It takes a second to import, and arrays do not need it.

Tensors = Mapping[str, Any]
"""State dict, or a mapping of state dicts. Any: other entries are of any type."""
NO_ID = np.iinfo(np.int64).max
MCH_SCORES = ("_mch_counts", "_mch_last_access_iter")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MODULES = "_managed_collision_modules."


def open_tensors(source: "Tensors | AnyPath") -> tuple[Tensors, str]:
    """Tensors of a mapping or of a file, and its name for errors. Only tensors and plain values are loaded from a file
    of torch, and tensors are mapped into memory.

    Raises:
        ValueError: the file is neither of torch nor of safetensors, or it is damaged.
    """
    if isinstance(source, Mapping):
        return source, "the state dict"
    path = absolute_path(source)
    if suffix_of(path) == ".safetensors":
        library = need("safetensors", "a state dict in safetensors", "safetensors")
        with reading(path, "a safetensors file", library.SafetensorError):
            file = library.safe_open(path, framework="pt")
            return {name: file.get_tensor(name) for name in file.keys()}, path
    import pickle

    import torch

    with reading(path, "a file of torch.save", ValueError, KeyError, AttributeError, IndexError):
        try:
            # Files of torch before 1.6 are no zip archives, and cannot be mapped.
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:  # Its text recommends to load without a check.
            raise ValueError(
                "it has an object that is no tensor and no plain value; save module.state_dict()"
            ) from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} must hold a state dict, got {type(found).__name__}; save module.state_dict()")
    return found, path


def find_torch(
    source: "Tensors | AnyPath", name: str | None, *, ids: "str | np.ndarray | torch.Tensor | None",
    state: "str | Tensors | None",
) -> ForeignTable:  # fmt: skip
    """Weight of a torch module as a table.

    Args:
        name: name of the weight in the state dict; "a/b" = entry b of the mapping a. None = the only matrix.
        ids: ids of the rows, or the name of an entry with the ids; None = the numbers of the rows.
        state: state that the optimizer has for the weight, or its name, such as "optimizer/state/0"; None = none.
    """
    tensors, where = open_tensors(source)
    if name is None:
        matrices = [one for one, tensor in tensors.items() if _is_matrix(tensor)]
        if len(matrices) != 1:
            raise SnapshotNotFoundError(
                f"{where} must have one matrix of weights, and has {', '.join(matrices[:20]) or 'none'}; give name=...,"
                " the name of the weight"
            )
        name = matrices[0]
    weight = _entry(tensors, name, where)
    if not _is_matrix(weight):
        raise ValueError(f"{where}: {name!r} must be a dense matrix of weights [N, D], got {_text(weight)}")
    of_rows = np.arange(len(weight)) if ids is None else ids
    if isinstance(of_rows, str):
        of_rows = _entry(tensors, of_rows, where)
    keys = _array(of_rows)
    if keys.dtype.kind not in "iu" or keys.shape != (len(weight),):
        raise ValueError(
            f"ids must be integers [{len(weight)}], one for each row of {name!r}, got {keys.dtype} {list(keys.shape)}"
        )
    found = ForeignTable(f"weight {name!r} of {where}", "torch", MemoryArray(keys), _Rows(weight))
    _add_state(found, _entry(tensors, state, where) if isinstance(state, str) else state, len(weight), None)
    return found


def find_torchrec(source: "Tensors | AnyPath", name: str | None, *, state: "str | Tensors | None") -> ForeignTable:
    """Table of TorchRec by its name, with its managed collisions if the state dict has some.

    Args:
        name: name of the table; None = the only one.
        state: state of the table's weight in the state dict of the fused optimizer, {"<t>.momentum1": ...}, or its name
            in the source.
    """
    tensors, where = open_tensors(source)
    weights = {parts[-2]: one for one in tensors if (parts := one.split("."))[-1] == "weight" and len(parts) > 2
               and parts[-3] in ("embedding_bags", "embeddings")}  # fmt: skip
    if name is None and len(weights) == 1:
        name = next(iter(weights))
    if name not in weights:
        raise SnapshotNotFoundError(
            f"{where} must have {'one table' if name is None else f'table {name!r}'} of TorchRec, and has"
            f" {', '.join(map(repr, sorted(weights))) or 'none'}; give name=..., the name of the table"
        )
    weight = tensors[weights[name]]
    if not _is_matrix(weight):
        raise ValueError(
            f"{where}: {weights[name]!r} must be a tensor [N, D], got {_text(weight)}; gather the state dict of a"
            " sharded module on one process first, by torch.distributed.checkpoint"
        )
    buffers = {one.rpartition(".")[2]: tensor for one, tensor in tensors.items() if f"{_MODULES}{name}." in one}
    what, size = f"table {name!r} of {where}", len(weight)
    scores: StatePart | None = None
    not_carried: list[str] = []
    if "_mch_sorted_raw_ids" in buffers:
        key_N, row_N = (_buffer(buffers, one, what, size)
                        for one in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))  # fmt: skip
        used = np.flatnonzero(key_N != NO_ID)
        row_N = row_N - row_N.min() if len(row_N) else row_N  # A shard's rows begin at its offset.
        if len(row_N) and not (np.sort(row_N) == np.arange(size)).all():
            raise CorruptTableError(f"{what}: _mch_remapped_ids_mapping must have each row once; save the module again")
        key_N, row_N = key_N[used], row_N[used]
        for one in MCH_SCORES:
            if one in buffers:
                scores = StatePart(MemoryArray(_buffer(buffers, one, what, size)[used]), None)
        not_carried.append("the row of all ids that have none: here each id has a row of its own")
        known = {"_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", *MCH_SCORES}
    elif "_hash_zch_identities" in buffers:
        key_N = _buffer(buffers, "_hash_zch_identities", what, size)
        row_N = np.flatnonzero(key_N != -1)
        key_N = key_N[row_N]
        if "_hash_zch_metadata" in buffers and buffers["_hash_zch_metadata"].numel() == size:
            scores = StatePart(MemoryArray(_buffer(buffers, "_hash_zch_metadata", what, size)[row_N]), None)
        not_carried.append("rows that ids share where there was no free row near by: here each id has a row of its own")
        known = {"_hash_zch_identities", "_hash_zch_metadata"}
    else:
        key_N, row_N, known = np.arange(size), np.arange(size), set[str]()
    if others := sorted(set(buffers) - known):
        not_carried.append(f"buffers {', '.join(others)}")
    rows = PickedRows(_Rows(weight), row_N)
    found = ForeignTable(what, "torchrec", MemoryArray(key_N), rows, scores=scores, not_carried=not_carried)
    _add_state(found, _entry(tensors, state, where) if isinstance(state, str) else state, size, row_N)
    return found


class _Rows:
    """Rows of a tensor. bfloat16 weights are read as float32 with the same values."""

    def __init__(self, tensor: Any):
        self._tensor = tensor.detach() if hasattr(tensor, "detach") else tensor
        self.shape, self.dtype = tuple(tensor.shape), _dtype_of(tensor)

    def read(self, begin: int, end: int) -> np.ndarray:
        return _array(self._tensor[begin:end])

    def take(self, row_N: np.ndarray) -> np.ndarray:
        return _array(self._tensor[row_N])


def _add_state(found: ForeignTable, state: object, size: int, row_N: np.ndarray | None) -> None:
    """Add the state that an optimizer has for the weight to the table. `row_N`: numbers of the table's rows."""
    if state is None:
        return
    if not isinstance(state, Mapping):
        raise ValueError(f"{found.what}: state must be a mapping of tensors, as optimizer.state[weight], got {state!r}")
    parts: dict[str, StatePart] = {}
    for full, value in state.items():
        name = str(full).rpartition(".")[2]
        if name == "step":
            found.step = _step_of(found, value)
        elif _is_floats(value) and 1 <= len(value.shape) <= 2 and value.shape[0] == size:
            array: RowArray = _Rows(value)
            parts["momentum1" if found.library == "torchrec" and name == "exp_avg" else name] = StatePart(
                array if row_N is None else PickedRows(array, row_N), None
            )
        else:
            found.not_carried.append(
                f"{name} of the optimizer's state, which is not one float or row of floats for each row"
            )
    found.state = parts


def _step_of(found: ForeignTable, value: Any) -> int:
    try:
        step = float(value)
    except (TypeError, ValueError, RuntimeError):
        step = math.nan
    if not 0 <= step < 1 << 63 or step != int(step):
        raise ValueError(f"{found.what}: step of the optimizer's state must be a whole number from 0 on, got {value!r}")
    return int(step)


def _entry(tensors: Tensors, name: str, where: str) -> Any:
    """Entry of a mapping, of a mapping in it ("a/b"), or {rest: entry} of all names that begin with `name.`."""
    found: Any = tensors
    for n, part in enumerate(parts := name.split("/")):
        rest = "/".join(parts[n:])
        if isinstance(found, Mapping) and rest in found:
            return found[rest]
        key = int(part) if isinstance(found, Mapping) and part not in found and part.isdecimal() else part
        if not isinstance(found, Mapping) or key not in found:
            dotted = {
                str(one).removeprefix(f"{rest}."): value
                for one, value in (found.items() if isinstance(found, Mapping) else ())
                if str(one).startswith(f"{rest}.")
            }
            if dotted:
                return dotted
            there = ", ".join(map(str, list(found)[:20])) if isinstance(found, Mapping) else type(found).__name__
            raise SnapshotNotFoundError(f"{where} must have {name!r}, and has no {part!r}, only {there}")
        found = found[key]
    return found


def _buffer(buffers: Tensors, name: str, what: str, size: int) -> np.ndarray:
    """Buffer of managed collisions as integers [N]."""
    if name not in buffers:
        raise CorruptTableError(f"{what} must have the buffer {name}, which managed collisions need; save the module")
    array = _array(buffers[name]).reshape(-1)
    if array.dtype.kind != "i" or len(array) != size:
        raise CorruptTableError(
            f"{what}: buffer {name} must be integers [{size}], one for each row, got {array.dtype} [{len(array)}]"
        )
    return array.astype(np.int64)


def _is_matrix(tensor: Any) -> bool:
    return _is_floats(tensor) and len(tensor.shape) == 2 and tensor.shape[1] > 0


def _is_floats(tensor: Any) -> bool:
    """Whether a value is an array or a dense tensor, with values in memory, of floats that rows can have."""
    is_dense = str(getattr(tensor, "layout", "torch.strided")) == "torch.strided" and not hasattr(tensor, "to_local")
    return is_dense and _dtype_of(tensor) in _FLOATS and str(getattr(tensor, "device", "")) != "meta"


def _dtype_of(tensor: Any) -> str:
    dtype = getattr(tensor, "dtype", "")
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _array(tensor: Any) -> np.ndarray:
    return array_of(tensor) if hasattr(tensor, "detach") else np.asarray(tensor)


def _text(value: Any) -> str:
    more = [str(getattr(value, name, "")) for name in ("layout", "device")]
    return " ".join([
        str(getattr(value, "dtype", type(value).__name__)), str(list(getattr(value, "shape", ()))),
        *(one for one in more if one not in ("", "torch.strided", "cpu")),
    ])  # fmt: skip
