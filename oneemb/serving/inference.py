"""A read-only embedding: the rows of a snapshot, mapped into memory that all processes of a machine share.

Invariants:
- a lookup takes one version, whole, at its begin: a newer one is taken over between two lookups, which never wait;
- a version is unmapped when the last lookup on it has ended;
- rows as trained give the bits that `EvalGraph` and lookups in eval mode give.
"""

import json
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Never, Self, cast

import numpy as np
import torch

from oneemb.embedding_arguments import initial_rows
from oneemb.graph.ops import batch_ids
from oneemb.graph.ops.lookup import DTYPES as TRAINED
from oneemb.kernels.arrays import Bags, RowsOfIds
from oneemb.kernels.host_loops import BITS, HostLoops
from oneemb.kernels.init_rows import InitialRows, init_rows
from oneemb.kernels.serve_rows import MISSING, PADDING
from oneemb.kernels.threads import Threads
from oneemb.options import Initializer, TableOptions, from_json
from oneemb.rows.arguments import Paths, as_list
from oneemb.serving.build import DTYPES, find_snapshot, open_made
from oneemb.storage.errors import CorruptTableError
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.row_format import RowFormat
from oneemb.storage.row_store import StorageError
from oneemb.storage.serving.served_file import ServedFile, is_served_file

__all__ = ["InferenceEmbedding", "Version"]


class Version(NamedTuple):
    """Which snapshot answers."""

    name: str
    identity: str
    sequence: int


class _Source(NamedTuple):
    """Where newer versions come from."""

    paths: list[str]
    folder: str
    dtype: str
    tables: tuple[int, ...] | None


class _Served:
    """One version: its file, and how ids without a row read."""

    def __init__(self, file: ServedFile, absent: str):
        info = file.info
        self.file, self.version = file, Version(info.name, info.identity, info.sequence)
        self.format = RowFormat(info.dim, info.trained)
        as_trained = info.weights == info.trained
        self.dtype = TRAINED[info.trained] if as_trained else torch.float32
        self.table_C = np.array(info.tables, np.int32)
        self.is_served_T = np.isin(np.arange(info.num_tables), self.table_C)
        key_type, self.padding_idx = info.embedding.get("key_type", "int64"), info.embedding.get("padding_idx")
        if key_type not in ("int64", "int32") or not (self.padding_idx is None or type(self.padding_idx) is int):
            raise CorruptTableError(f"{file.path}: wrong key_type {key_type!r} or padding_idx {self.padding_idx!r}")
        self.key_type = torch.int64 if key_type == "int64" else torch.int32
        self.initial = None if absent == "zeros" else _initial_rows(file)


def _initial_rows(file: ServedFile) -> InitialRows:
    its = file.info.embedding
    if not {"seed", "tables", "column_dims", "default_initializer"} <= its.keys():
        raise StorageError(
            f"snapshot {file.info.name!r} does not say how rows begin: a writer or an earlier release saved it; pass"
            ' absent="zeros", or save it again'
        )
    try:
        tables = cast(list[TableOptions], from_json(json.dumps(its["tables"])))
        default = cast(Initializer, from_json(json.dumps(its["default_initializer"])))
        initial = initial_rows(its["seed"], its["column_dims"], tables, default)
        if len(tables) != file.info.num_tables or sum(its["column_dims"]) != file.info.dim:
            raise ValueError("tables or columns are not those of the rows")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptTableError(f"{file.path}: what it says of the embedding is wrong: {error}") from error
    return initial


class InferenceEmbedding(torch.nn.Module):
    """The rows of a snapshot, read-only. Made by `open`; called as `MultiTableEmbedding` in eval mode.

    May be called from any thread, and in children of fork.
    """

    def __init__(self, file: ServedFile, source: _Source | None, absent: str, threads: Threads):
        super().__init__()
        self._served: _Served | None = _Served(file, absent)
        self._source, self._absent, self._threads = source, absent, threads
        self._loops = HostLoops(threads)
        self._lock = threading.Lock()
        self._follower: _Follower | None = None

    @classmethod
    def open(
        cls,
        path: Paths,
        snapshot: str | None = None,
        dtype: Literal["float32", "float16", "int8", "int4"] = "float32",
        tables: Sequence[int] | None = None,
        *,
        absent: Literal["initial", "zeros"] = "initial",
        folder: AnyPath | None = None,
        verify: bool = False,
        num_threads: int | None = None,
    ) -> Self:
        """Serve a snapshot. Its file is made where it is not there, once for all processes. Takes no writer's lock.

        Args:
            path: the persistent path of the training job, or those of its ranks; or a file that `oneemb quantize` has
                made, whose dtype and tables count.
            snapshot: which; None = the newest.
            dtype: of the file: "float32" = the weights as trained, bit for bit. Others give float32.
            tables: those that are served, in the order of columns; None = all.
            absent: how an id without a row reads: "initial", as its row begins in training, not rounded to `dtype`; or
                "zeros".
            folder: where files are made; None = `serving` in the first path.
            verify: compare all rows with their checksums now, not each when it is first read.
            num_threads: None = the cores there are.

        Raises:
            StorageError: there is no such snapshot, its files are damaged, a row is not finite or too large for the
                dtype (the message names it), or the snapshot does not say how rows begin and `absent` needs it.
            ValueError: an argument is not as above.
        """
        if dtype not in DTYPES or absent not in ("initial", "zeros"):
            raise ValueError(
                f'dtype must be one of {", ".join(DTYPES)} and absent "initial" or "zeros", got {dtype!r}, {absent!r}'
            )
        threads, paths = Threads(num_threads), as_list(path)
        source = None
        if len(paths) == 1 and is_served_file(paths[0]):
            file = ServedFile(paths[0], threads=threads)
            if snapshot not in (None, file.info.name) or tables not in (None, file.info.tables):
                raise ValueError(
                    f"{paths[0]} has snapshot {file.info.name!r} and tables {list(file.info.tables)}, asked for"
                    f" {snapshot!r} and {tables}; leave both out"
                )
        else:
            where = os.path.join(paths[0], "serving") if folder is None else absolute_path(folder)
            source = _Source(paths, where, dtype, None if tables is None else tuple(tables))
            found = find_snapshot(paths, snapshot)
            file = open_made(where, found, dtype, source.tables, threads=threads)
        if verify:
            file.verify()
        return cls(file, source, absent, threads)

    # ---- lookups ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def forward(
        self,
        ids: torch.Tensor,
        table_ids: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        pooling: Literal["sum", "mean", "max"] = "sum",
    ) -> torch.Tensor:
        """The rows of ids, or of bags of ids: arguments, result and errors are those of `MultiTableEmbedding`.

        With `tables` given to `open`, columns are those tables in their order; `table_ids` are the numbers of training.
        Nothing has a gradient. The dtype is that of training for "float32", else float32.

        Raises:
            TypeError, ValueError: an argument is not as there, or a table is not served.
            CorruptTableError: a row that is needed is damaged.
        """
        if self._follower is not None:
            self._follower.check()
        served = self._now()
        if pooling not in ("sum", "mean", "max"):
            raise ValueError(f'pooling must be "sum", "mean" or "max", got {pooling!r}')
        if per_sample_weights is not None and (offsets is None or pooling != "sum"):
            raise ValueError('per_sample_weights are for bags that are summed; pass offsets, and pooling="sum"')
        columns = len(served.table_C)
        dim = served.file.info.dim
        if offsets is None:
            num_tables = columns if table_ids is None else len(served.is_served_T)
            batch_ids.check_ids(ids, table_ids, num_tables, served.key_type)
            _check_on_cpu(ids)
            table_N, id_N, check = batch_ids.tables_and_ids(ids, table_ids, num_tables, self._loops)
            if check is not None:
                check()
            table_N = served.table_C[table_N] if table_ids is None else self._only_served(served, table_N)
            out = torch.empty(*ids.shape, dim, dtype=served.dtype)
            self._read(served, table_N, id_N, out.view(-1, dim))
            return out
        num_tables = columns if table_ids is None else len(served.is_served_T)
        shape, offset_P1, table_P, check_bags = batch_ids.bags_of_ids(
            ids, table_ids, num_tables, served.key_type, offsets, None, self._loops
        )
        _check_on_cpu(ids)
        check_bags()
        bags = Bags(self._loops.array(offset_P1))
        if table_P is None:
            its_P = np.resize(served.table_C, len(offset_P1) - 1)
        else:
            its_P = self._only_served(served, table_P.numpy())
        table_N = np.repeat(its_P, np.diff(bags.offset_P1))
        rows = torch.empty(len(ids), dim, dtype=served.dtype)
        place_N = self._read(served, table_N, self._loops.array(ids.detach().contiguous()), rows)
        order_N = np.arange(len(ids), dtype=np.int64)
        inverse_N = np.where(place_N == PADDING, -1, order_N)
        out = torch.empty(*shape, dim, dtype=served.dtype)
        out_PD, its = self._loops.array(out.view(-1, dim)), RowsOfIds(self._loops.array(rows), order_N, inverse_N)
        if pooling == "max":
            self._loops.pool_max(its, bags, out_PD, np.empty(out_PD.shape, np.int32))
        else:
            scale_N = _scales(per_sample_weights, len(ids))
            if pooling == "mean":
                scale_N = self._loops.mean_scales(bags.offset_P1, inverse_N)
            self._loops.pool(its, bags, scale_N, out_PD)
        return out

    def _read(self, served: _Served, table_N: np.ndarray, id_N: np.ndarray, out: torch.Tensor) -> np.ndarray:
        """Write the weights of keys to `out`, and return their places."""
        out_ND = self._loops.array(out)
        place_N = served.file.read(table_N, id_N, served.padding_idx, out_ND, threads=self._threads)
        if served.initial is not None:
            missing = np.flatnonzero(place_N == MISSING)
            if len(missing):
                row_MW = np.zeros((len(missing), served.format.row_width), np.float32)
                weight_MX = served.format.weights(row_MW)
                init_rows(
                    weight_MX, row_MW, np.arange(len(missing)), table_N[missing], id_N[missing].astype(np.int64),
                    served.initial, np.empty(0, np.float32), state_begin=served.format.state_begin,
                    threads=self._threads,
                )  # fmt: skip
                weight_MD = np.ascontiguousarray(weight_MX[:, : served.format.dim])
                if served.dtype in BITS and BITS[served.dtype] == BITS[TRAINED[served.format.dtype]]:
                    out_ND[missing] = weight_MD
                else:
                    trained = torch.from_numpy(weight_MD).view(TRAINED[served.format.dtype])
                    out_ND[missing] = trained.float().numpy()
        return place_N

    @staticmethod
    def _only_served(served: _Served, table_N: np.ndarray) -> np.ndarray:
        if len(table_N) and not served.is_served_T[table_N].all():
            raise ValueError(f"table_ids must be of the tables that are served, {served.table_C.tolist()}")
        return table_N

    # ---- versions ---------------------------------------------------------------------------------------------------

    def _now(self) -> _Served:
        served = self._served
        if served is None:
            raise StorageError("the embedding is closed; open it again")
        return served

    @property
    def version(self) -> Version:
        """Which snapshot answers the next lookup."""
        return self._now().version

    @property
    def errors(self) -> tuple[float, float]:
        """Of the weights served, beside those trained: the largest error, and the root of the mean square."""
        info = self._now().file.info
        return info.error_max, info.error_rms

    def refresh(self) -> bool:
        """Take over the newest snapshot, if it is newer than the one that answers. Lookups go on meanwhile.

        Returns:
            Whether there was a newer one.

        Raises:
            StorageError: it cannot be read or made; the former one answers still.
        """
        source = self._need_source()
        with self._lock:
            found = find_snapshot(source.paths, None)
            while found.sequence > self._now().version.sequence:
                try:
                    self._take(found, source)
                    return True
                except StorageError:  # The job may have replaced it meanwhile.
                    failed, found = found.info.identity, find_snapshot(source.paths, None)
                    if found.info.identity == failed:
                        raise
            return False

    def rollback(self, snapshot: str) -> None:
        """Let the snapshot of this name answer, older or newer, and stop following until `follow` is called again.

        Raises:
            StorageError: there is none, or it cannot be read; the former one answers still.
        """
        source = self._need_source()
        self.unfollow()
        with self._lock:
            self._take(find_snapshot(source.paths, snapshot), source)

    def _take(self, found: Any, source: _Source) -> None:
        file = open_made(source.folder, found, source.dtype, source.tables, threads=self._threads)
        self._now()
        self._served = _Served(file, self._absent)  # One reference: a lookup has the former version or this one.

    def _need_source(self) -> _Source:
        if self._source is None:
            raise StorageError("the embedding was opened from a file, which never changes; open the job's path instead")
        return self._source

    def follow(self, seconds: float = 10.0) -> None:
        """Call `refresh` every so many seconds in a thread, until `unfollow` or `close`.

        What it raises, the next lookup raises, once; the thread goes on. A child of fork calls this anew.

        Raises:
            ValueError: `seconds` is not above 0.
        """
        self._need_source()
        if not seconds > 0:
            raise ValueError(f"seconds must be above 0, got {seconds}")
        self.unfollow()
        self._follower = _Follower(self, seconds)

    def unfollow(self) -> None:
        """Follow no more; the snapshot that answers goes on to answer."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    def close(self) -> None:
        """Stop following and let go of the file."""
        self.unfollow()
        self._served = None

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            "an InferenceEmbedding cannot be copied or pickled; open it where it is needed: the map is shared"
        )


class _Follower:
    """A thread that refreshes an embedding."""

    def __init__(self, embedding: InferenceEmbedding, seconds: float):
        self._embedding, self._seconds, self._process = embedding, seconds, os.getpid()
        self._error: BaseException | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oneemb-follow", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(self._seconds):
            try:
                self._embedding.refresh()
            except BaseException as error:
                self._error = error

    def check(self) -> None:
        """Raise what following has raised, once; or in a child of fork, that nobody follows there."""
        if self._process != os.getpid():
            self._embedding.unfollow()
            raise StorageError("a child of fork does not follow: call follow() in it, or look up as it is")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._ends.set()
        if self._process == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join()


def _check_on_cpu(ids: torch.Tensor) -> None:
    if ids.device.type != "cpu":
        raise ValueError(f"ids must be on the CPU, where the rows are, got {ids.device}; call ids.cpu()")


def _scales(per_sample_weights: torch.Tensor | None, ids: int) -> np.ndarray | None:
    if per_sample_weights is None:
        return None
    if per_sample_weights.dtype != torch.float32 or per_sample_weights.shape != (ids,):
        raise TypeError(
            f"per_sample_weights must be float32, one for each of {ids} ids, got {per_sample_weights.dtype}"
            f" {list(per_sample_weights.shape)}"
        )
    scale_N: np.ndarray = per_sample_weights.detach().contiguous().numpy()
    return scale_N
