"""Tables of other libraries: `import_foreign` imports a table, `export_foreign` writes a table for another library.

Invariants:
- memory does not grow with the weights; for each id, 20 to 60 bytes are needed to find ids that come twice;
- an import that finds a damaged source, or an id twice, has changed no row.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from oneemb.foreign.foreign_rows import ForeignRows, ForeignTable, unused_state
from oneemb.foreign.foreign_writers import StateDictWriter, hugectr_writer, tfra_path, tfra_writer
from oneemb.foreign.hugectr_files import KEYS, VALUES, find_hugectr
from oneemb.foreign.tfra_files import find_tfra
from oneemb.foreign.torch_tables import Tensors, find_torch, find_torchrec
from oneemb.rows.arguments import AnyDtype, Paths, as_embedding
from oneemb.rows.export_rows import check_targets, write_rows
from oneemb.rows.files import Progress, RowFileWriter, RowsOfFile, RowsToOpen, RowTarget
from oneemb.rows.import_rows import import_rows
from oneemb.storage.fs import AnyPath, LocalFileSystem, absolute_path
from oneemb.storage.snapshots.snapshot_rows import SnapshotRows

if TYPE_CHECKING:
    import torch

    from oneemb.embeddings.embedding import TableEmbedding

ForeignFormat = Literal["tfra", "torchrec", "torch", "hugectr"]
FOREIGN_FORMATS: tuple[ForeignFormat, ...] = get_args(ForeignFormat)


@dataclass(frozen=True)
class ForeignReport:
    """Report of an import or export: content that was carried over, and content that was not. `str(report)` has a line
    for each."""

    rows: int
    """Number of rows."""
    optimizer: str | None
    """Name of the optimizer whose state was carried over; None = no state was."""
    step: int
    """Number of optimizer steps that was carried over with the state."""
    scores: int
    """Number of scores that were carried over."""
    nonfinite: int
    """Number of rows with a weight, or in an import a value of the state, that is infinite or NaN."""
    not_carried: tuple[str, ...]
    """Content that was not carried over."""

    def __str__(self) -> str:
        came = [f"{self.rows:,} rows"]
        if self.optimizer is not None:
            came.append(f"their state of {self.optimizer!r} at step {self.step}")
        if self.scores:
            came.append(f"{self.scores:,} scores")
        lines = [f"carried over: {', '.join(came)}", *(f"not carried over: {one}" for one in self.not_carried)]
        if self.nonfinite:
            lines.append(f"{self.nonfinite:,} rows have numbers that are infinite or NaN")
        return "\n".join(lines)


def import_foreign(
    target: "TableEmbedding | Paths",
    source: "AnyPath | Tensors",
    format: ForeignFormat,
    *,
    name: str | None = None,
    ids: "str | np.ndarray | torch.Tensor | None" = None,
    state: "str | Tensors | None" = None,
    optimizer: str | None = None,
    step: int | None = None,
    embedding_dim: int | None = None,
    key_type: str = "int64",
    snapshot: str | None = None,
    table: int = 0,
    with_state: bool = False,
    with_scores: bool = False,
    allow_nonfinite: bool = False,
    dtype: "AnyDtype | None" = None,
    physical_block_size: int = 4096,
    batch_size: int = 65536,
    progress: Progress | None = None,
) -> ForeignReport:
    """Import a table of another library into an embedding, or into a new snapshot for an embedding to load.

    Checksums are compared and ids that come twice are found before the first row is imported. With ranks, every rank
    makes the call with the same source, and keeps the rows that it owns.

    Args:
        target, snapshot, table, allow_nonfinite, dtype, physical_block_size, batch_size, progress: as for
            `import_rows`.
        source: for "tfra" the prefix of a checkpoint, such as "model-100", or the folder of a checkpoint or of
            FileSystemSaver's files; for "hugectr" the folder of a sparse model; for "torch" and "torchrec" a state
            dict, or a file of one by `torch.save` or in safetensors.
        format: "tfra", "torchrec", "torch" or "hugectr".
        name: name of the table in the source; None = the only one. For "torch" the name of the weight: "a/b" = entry b
            of the mapping a.
        ids: ids of the rows, or the name of an entry with them; None = the numbers of the rows. Only for "torch".
        state: optimizer state of the weight, as `optimizer.state[weight]`, or its name in the source; for "tfra" the
            name of the slots without the last part, such as "films/lookup"; None = found by the table's name.
        optimizer: name of the optimizer whose state the source has, such as "adam"; None = the embedding's optimizer if
            its state is there, else the first whose state is there.
        step: number of optimizer steps. It must be given if the source does not have it and the optimizer counts steps,
            as Adam does.
        embedding_dim: number of weights of a row, to be checked in raw files, which do not have it; None = that of the
            embedding, or what follows from the sizes of the files, which must then have rows.
        key_type: dtype of the keys in raw files, which do not have it: "int64", "int32" or "uint32".
        with_state: if True, import the optimizer state and the count of steps too.
        with_scores: if True, set the scores of the rows from the source's frequencies or times; the embedding must have
            a policy.

    Returns:
        Report of the content that was carried over, and of the content that was not.

    Raises:
        FileNotFoundError: there is no such source.
        TypeError, ValueError: an argument is not as above, or does not fit the source.
        StorageError: the source lacks a file or a table, is damaged or has an id twice, or the target fails; the
            message names the file, and the offset where there is one.

    Example:
        >>> import tempfile, torch, oneemb
        >>> old = torch.nn.Embedding(3, 2)
        >>> report = oneemb.import_foreign(tempfile.mkdtemp(), old.state_dict(), "torch", snapshot="old")
        >>> print(report)
        carried over: 3 rows
    """
    _check_format(format)
    embedding, rows = as_embedding(target), list[ForeignRows]()
    for argument, given, formats in (
        ("ids", ids, ("torch",)), ("state", state, ("torch", "torchrec", "tfra")),
        ("embedding_dim", embedding_dim, ("tfra", "hugectr")),
        ("key_type", None if key_type == "int64" else key_type, ("tfra", "hugectr")),
    ):  # fmt: skip
        if given is not None and format not in formats:
            raise _only_for(argument, formats, format)
    if key_type not in ("int64", "int32", "uint32"):
        raise ValueError(f"key_type must be 'int64', 'int32' or 'uint32', got {key_type!r}")
    for argument, number, least in (("embedding_dim", embedding_dim, 1), ("step", step, 0)):
        _check_number(argument, number, least)
    if with_scores and (embedding is None or embedding.policies is None):
        raise ValueError("with_scores=True needs an embedding with a policy, which keeps scores; leave it out")

    def open_source() -> ForeignRows:
        dim = embedding_dim if embedding is None else embedding.embedding_dim
        found = _find(format, source, name, ids, state, dim, key_type)
        found.step = found.step if step is None else step
        if embedding is not None:
            embedding.store.build()
        attached = None if embedding is None else embedding.store.format
        rows.append(ForeignRows(found, attached, optimizer, with_state=with_state))
        return rows[-1]

    count = import_rows(
        target, RowsToOpen(open_source), snapshot=snapshot, table=table, with_state=with_state,
        allow_nonfinite=allow_nonfinite, dtype=dtype, physical_block_size=physical_block_size, batch_size=batch_size,
        progress=progress,
    )  # fmt: skip
    [opened], scores = rows, 0
    if with_scores and embedding is not None:
        scores = _set_scores(embedding, opened, table, batch_size)
    missing, steps = _not_imported(opened, with_state, scores), opened.step if with_state else 0
    return ForeignReport(count, opened.optimizer, steps, scores, opened.nonfinite, tuple(missing))


def export_foreign(
    source: "TableEmbedding | Paths",
    target: AnyPath,
    format: ForeignFormat,
    *,
    name: str | None = None,
    state: str | None = None,
    num_embeddings: int | None = None,
    managed_collisions: bool = False,
    snapshot: str | None = None,
    table: int = 0,
    with_state: bool = False,
    overwrite: bool = False,
    batch_size: int = 65536,
    progress: Progress | None = None,
) -> ForeignReport:
    """Write a table of an embedding, or of a snapshot, for another library to load.

    - "tfra": files that `Variable.load_from_file_system(target)` of TFRA loads, keys and values of the table and of
      each slot.
    - "hugectr": the files `key` and `emb_vector` that HugeCTR and HPS load, and files of state.
    - "torch": a safetensors file with the weight `name`, and `<name>.ids`, int64 [N]; or with `num_embeddings` a weight
      whose row r is id r. The state is under `<name>.state.`.
    - "torchrec": a safetensors file with the entries that table `name` has in the state dict of an
      `EmbeddingBagCollection`, where row r is id r; or, with `managed_collisions`, of a
      `ManagedCollisionEmbeddingBagCollection` with MCH. The state is under `optimizer.<name>.`.

    Args:
        source, snapshot, with_state, overwrite, batch_size, progress: as for `export_rows`.
        target: an existing folder for "tfra" and "hugectr", a file `.safetensors` for "torch" and "torchrec".
        format: "tfra", "torchrec", "torch" or "hugectr".
        name: name of the table for the other library; None = "weight" for "torch". Not for "hugectr".
        state: for "tfra", the name of the slots without the last part, such as "films/lookup"; None = `name`.
        num_embeddings: number of rows of the weight; needed for "torchrec".
        managed_collisions: whether to write the buffers of MCH for "torchrec", which give any id a row.
        table: number of the table to write.

    Returns:
        Report of the content that was carried over, and of the content that was not.

    Raises:
        FileExistsError: a file of the target exists, and `overwrite` is False.
        TypeError, ValueError: an argument is not as above; or the other library has no such optimizer state, or the ids
            do not fit in `num_embeddings` rows.
        StorageError: there is no such snapshot, or its files are damaged.
    """
    _check_format(format)
    _check_number("num_embeddings", num_embeddings, 1)
    path = absolute_path(target)
    if name is not None:
        _check_name(name, format)
    if name is None and format in ("tfra", "torchrec"):
        raise ValueError(f"name must be given for format {format!r}: the table's name there; give name=...")
    is_file = format in ("torch", "torchrec")
    if num_embeddings is None and format == "torchrec":
        raise ValueError("num_embeddings must be given for 'torchrec': the number of rows of the weight")
    if num_embeddings is not None and not is_file:
        raise _only_for("num_embeddings", ("torch", "torchrec"), format)
    if managed_collisions and format != "torchrec":
        raise _only_for("managed_collisions=True", ("torchrec",), format)
    if is_file != path.endswith(".safetensors"):
        kind = "a file .safetensors" if is_file else "a folder"
        raise ValueError(f"target must be {kind} for format {format!r}, got {path}")
    label = name or "weight"
    slots, seen = state or label, list[_Watched]()

    def files() -> list[str]:
        if is_file:
            return [path]
        if format == "hugectr":
            return [f"{path}/{one}" for one in (KEYS, VALUES)]
        return [tfra_path(path, label, kind) for kind in ("keys", "values")]

    def open_writer(rows: SnapshotRows) -> RowFileWriter:
        writer: RowFileWriter
        if format == "tfra":
            writer = tfra_writer(path, label, slots, rows.format)
        elif format == "hugectr":
            writer = hugectr_writer(path, rows.format)
        else:
            names = _torch_names(label) if format == "torch" else _torchrec_names(label, managed_collisions)
            writer = StateDictWriter(path, format, names, num_embeddings, rows.format, rows.step)
        seen.append(_Watched(writer, rows))
        return seen[-1]

    count = write_rows(
        source, RowTarget(path, lambda: check_targets(files(), overwrite), open_writer), snapshot=snapshot, table=table,
        with_state=with_state, batch_size=batch_size, progress=progress,
    )  # fmt: skip
    if not seen:  # Another rank writes.
        return ForeignReport(count, None, 0, 0, 0, ())
    return seen[0].report(count, format)


class _Watched:
    """Writer that counts rows which are not finite."""

    def __init__(self, writer: RowFileWriter, rows: SnapshotRows):
        self._writer, self._rows, self._nonfinite = writer, rows, 0
        self.finish, self.abandon = writer.finish, writer.abandon

    def write(self, batch: RowsOfFile) -> None:
        self._nonfinite += int((~np.isfinite(batch.weight_ND).all(1)).sum())
        self._writer.write(batch._replace(table_N=None))

    def report(self, count: int, format: str) -> ForeignReport:
        row_format, no_step = self._rows.format, format in ("tfra", "hugectr")
        missing = ["policies, scores and counts of ids", "options of the optimizer, such as its learning rate"]
        if not row_format.state_width:
            missing = ["the optimizer's state", *missing]
        elif no_step:
            missing.append(f"the count of optimizer steps, {self._rows.step}: set it in the other library's optimizer")
        if no_step and row_format.dtype != "float32":
            missing.append(f"the dtype {row_format.dtype}: the files have the same values as float32")
        step = self._rows.step if row_format.state_width else 0
        return ForeignReport(count, row_format.optimizer, step, 0, self._nonfinite, tuple(missing))


def _check_format(format: str) -> None:
    if format not in FOREIGN_FORMATS:
        raise ValueError(f"format must be {', '.join(map(repr, FOREIGN_FORMATS))}, got {format!r}")


def _check_number(argument: str, number: int | None, least: int) -> None:
    if number is not None and (
        isinstance(number, bool) or not isinstance(number, int | np.integer) or not least <= number < 1 << 48
    ):
        raise ValueError(f"{argument} must be None or an int from {least} to 2**48 - 1, got {number!r}")


def _check_name(name: str, format: str) -> None:
    """Raise ValueError if the other library cannot have a table of this name."""
    refused = {"torchrec": ".", "tfra": "\0\n"}.get(format, "")
    if not name or any(one in name for one in refused) or name != name.encode(errors="replace").decode():
        without = f", without {' and '.join(map(repr, refused))}" if refused else ""
        raise ValueError(f"name must be the name of a table for {format!r}, text of a character or more{without}, got"
                         f" {name!r}")  # fmt: skip


def _only_for(argument: str, formats: Sequence[str], format: str) -> ValueError:
    return ValueError(f"{argument} must only be given for {' or '.join(formats)}, got format {format!r}")


def _find(
    format: str, source: "AnyPath | Tensors", name: str | None, ids: "str | np.ndarray | torch.Tensor | None",
    state: "str | Tensors | None", dim: int | None, key_type: str,
) -> ForeignTable:  # fmt: skip
    if format == "torch":
        return find_torch(source, name, ids=ids, state=state)
    if format == "torchrec":
        return find_torchrec(source, name, state=state)
    if isinstance(source, Mapping) or not isinstance(state, str | None):
        raise TypeError(f"source must be a path, and state a name or None, for format {format!r}")
    path = absolute_path(source)
    if format == "tfra":
        return find_tfra(LocalFileSystem(), path, name, dim=dim, key_dtype=key_type, state=state)
    if name is not None:
        raise ValueError("name must not be given for 'hugectr', whose folders have one table each; leave it out")
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path} is not a folder; give the folder of the sparse model")
    return find_hugectr(LocalFileSystem(), path, dim=dim, key_dtype=key_type)


def _set_scores(embedding: "TableEmbedding", rows: ForeignRows, table: int, batch_size: int) -> int:
    import torch

    rank, ranks, count = embedding.ranks.rank, embedding.ranks.size, 0
    for id_N, score_N in rows.scores(batch_size):
        own = slice(rank, None, ranks)  # Ids must be distinct over the ranks.
        ids = torch.from_numpy(np.ascontiguousarray(id_N[own])).to(embedding.key_type)
        count += embedding.set_scores(ids, torch.from_numpy(np.ascontiguousarray(score_N[own])), table)
    return count


def _not_imported(rows: ForeignRows, with_state: bool, scores: int) -> list[str]:
    table = rows.table
    missing = list(table.not_carried)
    if not with_state and table.state:
        missing.append(f"the optimizer's state, {', '.join(sorted(table.state))}; give with_state=True")
    elif unused := unused_state(table, rows.optimizer) if with_state else ():
        missing.append(f"{', '.join(unused)}, which rows of {rows.optimizer!r} do not have")
    if table.scores is not None and not scores:
        missing.append("frequencies or times of last use; give with_scores=True for an embedding with a policy")
    if with_state and table.step is None:
        missing.append("the count of optimizer steps, which the source does not have: it begins at 1; give step=...")
    if rows.without_state:
        missing.append(f"state of {rows.without_state} rows, which have none in the source: they begin with new state")
    if str(table.values.dtype) == "float64":
        missing.append("bits of float64 weights: they are rounded to the dtype of the rows")
    return missing


def _torch_names(name: str) -> dict[str, str]:
    return {"weight": name, "ids": f"{name}.ids", "state.": f"{name}.state."}


def _torchrec_names(table: str, managed_collisions: bool) -> dict[str, str]:
    if not managed_collisions:
        return {"weight": f"embedding_bags.{table}.weight", "state.": f"optimizer.{table}."}
    modules = f"_managed_collision_collection._managed_collision_modules.{table}."
    return {
        "weight": f"_embedding_module.embedding_bags.{table}.weight", "state.": f"optimizer.{table}.",
        "ids": f"{modules}_mch_sorted_raw_ids", "mapping": f"{modules}_mch_remapped_ids_mapping",
    }  # fmt: skip
