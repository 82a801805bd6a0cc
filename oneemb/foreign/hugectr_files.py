"""Folders in which HugeCTR keeps a sparse model, and which its parameter server (HPS) loads.

Little-endian, without headers; n rows, D weights of a row:

    key                                   int64 [n]; uint32 [n] in some releases
    emb_vector                            float32 [n, D]
    slot_id                               uint64 [n], slot of each key; only of localized embeddings
    Adam.m, Adam.v, AdaGrad.accm, ...     float32 [n, D], optimizer state of the embedding training cache

The files do not say D: it follows from their sizes. A file <model>_opt_sparse_<step>.model beside the folder is a dump
of the memory of the GPUs, which has no keys; it cannot be read.

The format is read from HugeCTR's sources: no file here was made by HugeCTR itself.
"""

from oneemb.foreign.foreign_rows import ForeignTable, StatePart
from oneemb.foreign.stored_arrays import FileArray, FilePart, rows_of_sizes
from oneemb.graph.row_optimizers import states_in
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from oneemb.storage.fs import FileSystem, doing

KEYS, VALUES = "key", "emb_vector"
SLOTS = "slot_id"
_SCALED_STATE = (".momtentum", ".accm")
"""Ends of the names of files whose optimizer state was multiplied by the learning rate, as the state of rows is not."""
STATE_FILES = sorted({part for known in states_in("hugectr").values() for part in known.weight_state})


def is_hugectr_file(name: str) -> bool:
    """Whether a file of this name belongs to a table."""
    return name in {KEYS, VALUES, SLOTS, *STATE_FILES} or name.endswith(_SCALED_STATE)


def find_hugectr(fs: FileSystem, folder: str, *, dim: int | None, key_dtype: str) -> ForeignTable:
    """Table in a folder of a sparse model. `dim`: number of weights of a row, if known.

    Raises:
        SnapshotNotFoundError: the folder has no files `key` and `emb_vector`.
        CorruptTableError: the lengths of files do not fit.
    """
    with doing("look at", folder):
        names = set(fs.names(folder))
        if missing := [name for name in (KEYS, VALUES) if name not in names]:
            raise SnapshotNotFoundError(
                f"{folder} must hold a sparse model of HugeCTR, but has no file {' and no file '.join(missing)}; give"
                " the folder whose name ends in _sparse_<step>.model"
            )
        keys, values = f"{folder}/{KEYS}", f"{folder}/{VALUES}"
        rows, width = rows_of_sizes(keys, fs.size(keys), key_dtype, values, fs.size(values), dim)
        if not rows and dim is None:
            raise ValueError(f"embedding_dim must be given, since {folder} has no rows, which would tell it")
        found = ForeignTable(
            f"the table in {folder}", "hugectr",
            FileArray(fs, [FilePart(keys, 0, rows)], key_dtype, None),
            FileArray(fs, [FilePart(values, 0, rows)], "float32", width),
        )  # fmt: skip
        for part in STATE_FILES:
            if part in names:
                if fs.size(f"{folder}/{part}") != 4 * rows * width:
                    raise CorruptTableError(
                        f"{folder}/{part} must be float32 [{rows}, {width}], {4 * rows * width} bytes, and ends at"
                        f" offset {fs.size(f'{folder}/{part}')}; restore it from a copy"
                    )
                array = FileArray(fs, [FilePart(f"{folder}/{part}", 0, rows)], "float32", width)
                found.state = {**found.state, part: StatePart(array, None)}
    if SLOTS in names:
        found.not_carried.append("slot_id: rows have no slots; import the keys of each slot as a table of their own")
    for name in sorted(names - {KEYS, VALUES, SLOTS, *STATE_FILES}):
        why = "has the learning rate multiplied in" if name.endswith(_SCALED_STATE) else "is unknown"
        found.not_carried.append(f"file {name}, which {why}")
    if not found.state:
        found.not_carried.append("optimizer state in a file _opt_sparse_<step>.model, if there is one: it has no keys")
    return found
