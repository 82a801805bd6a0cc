"""Tables of TFRA (tensorflow-recommenders-addons) in checkpoints, and in the files of its FileSystemSaver.

A table of V shards on R processes is stored as keys [n] and values [n, D] of each shard v and process r. The names in
an object-based checkpoint, in a checkpoint of `tf.compat.v1.train.Saver`, and of files, little-endian:

    .../tables_of_<name>/<v>/.ATTRIBUTES/table-keys, table-values                     v from 0
    .../<name>_mht_<v>of<V>-keys, -values                                             v from 1
    <folder>/<name>_mht_<v>of<V>_rank<r>_size<R>-keys, -values                        v from 1, r from 0

In the last two, "/" in the name of a variable is "_"; in the first it is ".S", and "." is "..". The optimizer's slot of
a table is a table of its own, <name>/<op>/<slot> or <name>/<slot>, with keys in an order of its own; the statuses of
restrict policies are <name>/frequency and <name>/timestamp. The files do not say the dtype of keys, nor D, which
follows from their sizes.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from oneemb.foreign.foreign_rows import ForeignTable, StatePart
from oneemb.foreign.stored_arrays import FileArray, FilePart, rows_of_sizes
from oneemb.foreign.tf_bundle import BundleTensor, read_bundle
from oneemb.graph.row_optimizers import states_in
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.fs import FileSystem, doing

_OF_OBJECT = re.compile(r"(?:.*/)?tables_of_([^/]+)/(\d+)/\.ATTRIBUTES/table-(keys|values)")
_OF_NAME = re.compile(r"(?:.*/)?([^/]+)_mht_(\d+)of(\d+)-(keys|values)")
OF_FILE = re.compile(r"(.+)_mht_(\d+)of(\d+)_rank(\d+)_size(\d+)-(keys|values)")
"""Names of files: table, shard, shards, rank, ranks, kind."""
_STEP = re.compile(r"(?:.*/)?(?:iter|_iterations|iterations)/\.ATTRIBUTES/VARIABLE_VALUE|(?:.*/)?iteration")
STATUSES = ("frequency", "timestamp")
FOLDER = "TFRADynamicEmbedding"
"""Begin of the name of the folder beside a checkpoint in which FileSystemSaver writes."""


class _Shard(NamedTuple):
    keys: FilePart
    values: FilePart
    key_dtype: str
    dtype: str
    dim: int


_Tables = dict[str, Callable[[], list[_Shard]]]
"""{name of a table: function that finds its shards}: only the files of tables that are read are looked at."""


def find_tfra(
    fs: FileSystem, path: str, name: str | None, *, dim: int | None, key_dtype: str, state: str | None
) -> ForeignTable:
    """Table of TFRA in a checkpoint or in a folder of files.

    Args:
        path: prefix of a checkpoint, such as "model-100", with or without ".index"; or a folder with one checkpoint, or
            with files of FileSystemSaver.
        name: name of the variable; None = the only one.
        dim: number of weights of a row, if known.
        key_dtype: dtype of the keys in files; a checkpoint knows it.
        state: name of the slots without the last part, such as "films/lookup"; None = found by the name of the table.

    Raises:
        SnapshotNotFoundError: there is no such checkpoint or table; the message names the tables.
        CorruptTableError: files are missing, damaged, or have lengths that do not fit.
    """
    tables, tensors = _tables_at(fs, path, dim, key_dtype)
    slots = {slot for names in states_in("tfra").values() for slot in names.weight_state}
    bases = sorted(one for one in tables if not _owner(one, tables, slots | set(STATUSES)))
    wanted = _flat(name) if name is not None else bases[0] if len(bases) == 1 else None
    if wanted is None or wanted not in tables:
        asked = "one table" if name is None else f"table {name!r}"
        raise SnapshotNotFoundError(
            f"{path} must have {asked}, and has {', '.join(map(repr, bases)) or 'no table of TFRA'}; give name=..., the"
            " name of the variable"
        )
    found = _array_table(fs, path, wanted, tables[wanted]())
    others = [one for one in tables if one != wanted and _owner(one, tables, slots | set(STATUSES)) == wanted]
    for slot in sorted(slots):
        own = [one for one in others if one.endswith(f"_{slot}")]
        if state is not None:
            own = [one for one in tables if one == f"{_flat(state)}_{slot}"]
        if len(own) > 1:
            raise ValueError(
                f"{path} must have one slot {slot!r} of table {wanted!r}, and has {', '.join(own)}; choose with"
                f" state=..., such as {own[0].removesuffix('_' + slot)!r}"
            )
        for one in own:
            part = _array_table(fs, path, one, tables[one]())
            found.state = {**found.state, slot: StatePart(part.values, part.keys)}
    for status in STATUSES:
        if (one := f"{wanted}_{status}") in tables:
            part = _array_table(fs, path, one, tables[one]())
            found.scores = StatePart(part.values, part.keys)
    steps = [tensor for one, tensor in tensors.items() if _STEP.fullmatch(one) and tensor.shape == ()]
    if len(steps) == 1:
        array = FileArray(fs, [steps[0].part], steps[0].dtype, None)
        array.verify()
        found.step = int(array.read(0, 1)[0])
    dense = [one for one in tensors if not _OF_OBJECT.fullmatch(one) and not _OF_NAME.fullmatch(one)]
    if dense:
        found.not_carried.append(
            f"{len(dense)} other entries of the checkpoint: dense variables, options of optimizers, TensorFlow's own"
        )
    unknown = [one for one in others if not one.endswith(tuple(f"_{slot}" for slot in (*slots, *STATUSES)))]
    if unknown:
        found.not_carried.append(f"tables whose names begin as that of {wanted!r}: {', '.join(unknown)}")
    return found


def _flat(name: str) -> str:
    return name.replace("/", "_")


def _owner(one: str, tables: Iterable[str], slots: Iterable[str]) -> str | None:
    """Table to which table `one` belongs as a slot or a status: the one with the longest fitting name."""
    if not one.endswith(tuple(f"_{slot}" for slot in slots)):
        return None
    return max((other for other in tables if one.startswith(f"{other}_")), key=len, default=None)


def _array_table(fs: FileSystem, path: str, name: str, shards: list[_Shard]) -> ForeignTable:
    kinds = {(shard.key_dtype, shard.dtype, shard.dim) for shard in shards}
    if len(kinds) > 1:
        raise CorruptTableError(
            f"{path}: all shards of table {name!r} must have keys and values of one kind, got {sorted(kinds)}"
        )
    [(key_dtype, dtype, dim)] = kinds
    keys = FileArray(fs, [shard.keys for shard in shards], key_dtype, None)
    values = FileArray(fs, [shard.values for shard in shards], dtype, dim)
    return ForeignTable(f"table {name!r} in {path}", "tfra", keys, values)


# ---- where tables lie -----------------------------------------------------------------------------------------------


def _tables_at(
    fs: FileSystem, path: str, dim: int | None, key_dtype: str
) -> tuple[_Tables, Mapping[str, BundleTensor]]:
    """Tables by name, and all tensors of the checkpoint."""
    prefix, folders = path.removesuffix(".index"), []
    if os.path.isdir(path):
        names = fs.names(path)
        if any(OF_FILE.fullmatch(one) for one in names):
            return _tables_in_files(fs, path, dim, key_dtype), {}
        indexes = sorted(one for one in names if one.endswith(".index"))
        if len(indexes) != 1:
            raise SnapshotNotFoundError(
                f"{path} must hold one checkpoint of TensorFlow, or files of TFRA's FileSystemSaver, and holds"
                f" {', '.join(indexes) or 'neither'}; give the prefix of a checkpoint, such as {path}/model-100"
            )
        prefix = f"{path}/{indexes[0].removesuffix('.index')}"
    tensors = read_bundle(fs, prefix)
    tables = _tables_in_bundle(prefix, tensors)
    step = re.search(r"-(\d+)$", prefix)
    parent = os.path.dirname(prefix) or "."
    folders = [f"{parent}/{FOLDER}-{step[1]}"] if step else []
    for folder in (*folders, f"{parent}/{FOLDER}"):
        if os.path.isdir(folder):
            return {**tables, **_tables_in_files(fs, folder, dim, key_dtype)}, tensors
    return tables, tensors


def _tables_in_bundle(prefix: str, tensors: Mapping[str, BundleTensor]) -> _Tables:
    pairs: dict[str, dict[int, dict[str, BundleTensor]]] = {}
    for name, tensor in tensors.items():
        if match := _OF_OBJECT.fullmatch(name):
            table = _flat(re.sub(r"\.([.S])", lambda one: "/" if one[1] == "S" else ".", match[1]))
            pairs.setdefault(table, {}).setdefault(int(match[2]), {})[match[3]] = tensor
        elif match := _OF_NAME.fullmatch(name):
            pairs.setdefault(match[1], {}).setdefault(int(match[2]) - 1, {})[match[4]] = tensor
    return {table: partial(_shards_in_bundle, prefix, table, shards) for table, shards in pairs.items()}


def _shards_in_bundle(prefix: str, table: str, shards: Mapping[int, Mapping[str, BundleTensor]]) -> list[_Shard]:
    if sorted(shards) != list(range(len(shards))):
        raise CorruptTableError(f"{prefix}.index: table {table!r} must have all its shards, got {sorted(shards)}")
    found: list[_Shard] = []
    for _, pair in sorted(shards.items()):
        if len(pair) < 2:
            raise CorruptTableError(f"{prefix}.index: table {table!r} must have keys and values, got {min(pair)}")
        keys, values = pair["keys"], pair["values"]
        if keys.dtype not in ("int64", "int32") or values.dtype.startswith(("type", "string", "slices")):
            raise ValueError(
                f"{prefix}: table {table!r} must have keys of int64 or int32 and values of numbers, got {keys.dtype}"
                f" and {values.dtype}; such tables cannot be imported"
            )
        if len(values.shape) != 2 or keys.shape != values.shape[:1]:
            raise CorruptTableError(
                f"{prefix}.index: table {table!r} must have keys [n] and values [n, D], got {list(keys.shape)} and"
                f" {list(values.shape)}"
            )
        found.append(_Shard(keys.part, values.part, keys.dtype, values.dtype, values.shape[1]))
    return found


def _tables_in_files(fs: FileSystem, folder: str, dim: int | None, key_dtype: str) -> _Tables:
    with doing("look at", folder):
        found = [match for one in sorted(fs.names(folder)) if (match := OF_FILE.fullmatch(one))]
    of_table: dict[str, list[re.Match[str]]] = {}
    for match in found:
        of_table.setdefault(match[1], []).append(match)
    return {table: partial(_shards_in_files, fs, folder, table, own, dim, key_dtype) for table, own in of_table.items()}


def _shards_in_files(
    fs: FileSystem, folder: str, table: str, own: "Sequence[re.Match[str]]", dim: int | None, key_dtype: str
) -> list[_Shard]:
    if len(worlds := {(match[3], match[5]) for match in own}) > 1:
        raise CorruptTableError(
            f"{folder} must have the files of one save of table {table!r}, and has files of {len(worlds)}:"
            f" {', '.join(f'{v} shards on {r} ranks' for v, r in sorted(worlds))}; remove all but one"
        )
    [(shards, ranks)] = worlds
    status, names = table.endswith(tuple(f"_{one}" for one in STATUSES)), {match[0] for match in own}
    found: list[_Shard] = []
    for r in range(int(ranks)):  # ends at the first file that is missing
        for v in range(1, int(shards) + 1):
            paths = []
            for kind in ("keys", "values"):
                name = f"{table}_mht_{v}of{shards}_rank{r}_size{ranks}-{kind}"
                if name not in names:
                    raise CorruptTableError(
                        f"{folder}/{name} is not there, but other files of table {table!r} are; restore it from a copy"
                    )
                paths.append(f"{folder}/{name}")
            with doing("look at", folder):
                sizes = [fs.size(path) for path in paths]
            rows, width = rows_of_sizes(paths[0], sizes[0], key_dtype, paths[1], sizes[1], 1 if status else dim)
            keys, values = (FilePart(path, 0, rows) for path in paths)
            found.append(_Shard(keys, values, key_dtype, "int32" if status else "float32", width))
    if not any(shard.keys.rows for shard in found) and not status and dim is None:
        raise ValueError(
            f"embedding_dim must be given, since table {table!r} in {folder} has no rows, which would tell it"
        )
    return [shard for shard in found if shard.keys.rows] or found[:1]  # The files of no rows do not say D.
