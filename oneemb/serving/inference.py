"""A read-only embedding: the rows of a snapshot, mapped into memory that all processes of a machine share.

Invariants:
- a lookup reads one version of the rows, chosen at its beginning; a newer version replaces it between two lookups, and
  lookups never wait for it;
- the files of a version are unmapped when the last lookup that reads them has ended;
- rows served as trained have the same bits as in `EvalGraph` and in lookups in eval mode.
"""

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, Never, Self

import numpy as np
import torch

from oneemb.checkpoints.named_snapshot import decode
from oneemb.flags import check_flags
from oneemb.graph.ops import keys as lookup_keys
from oneemb.graph.tracers import refuse_tracers, uncompiled
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads
from oneemb.rows.arguments import Paths, as_list
from oneemb.serving.beside import WholeFiles
from oneemb.serving.build import Source, Version, check_formats, find_snapshot, open_snapshot, source_of, stored_source
from oneemb.serving.following import Following
from oneemb.serving.served import Served
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath
from oneemb.storage.objects.object_store import ObjectStore, is_url
from oneemb.storage.serving.layered_file import LayeredFile
from oneemb.storage.serving.served_file import ServedFile, is_served_file
from oneemb.storage.snapshots.row_cap import RowCap

_log = logging.getLogger("oneemb")

_CPU = torch.device("cpu")


class InferenceEmbedding(Following, torch.nn.Module):
    """The rows of a snapshot, read-only. Made by `open`; called like `MultiTableEmbedding` in eval mode.

    Any thread, and a child of fork, may call it.
    """

    def __new__(cls, *opened: object, **more: object) -> Self:
        if not opened or not isinstance(opened[0], ServedFile | LayeredFile):
            raise TypeError(f"{cls.__name__} is made by open; call oneemb.{cls.__name__}.open(path)")
        return super().__new__(cls)

    def __init__(
        self, file: ServedFile | LayeredFile, source: Source | None, absent: str, threads: Threads,
        unread: Sequence[StorageError] = (),
    ):  # fmt: skip
        super().__init__()
        self._backend = HostBackend(threads)
        self._served: Served | None = Served(file, absent, self._backend)
        self._source, self._absent, self._threads = source, absent, threads
        self._whole_files = WholeFiles()
        self._what = "a newer snapshot" if source is None else f"a newer snapshot of {source.name}"
        self._choice: object = None  # Replaced by each call that chooses a version.
        self._set_error(unread)

    @classmethod
    def open(
        cls,
        path: Paths,
        snapshot: str | None = None,
        dtype: Literal["float32", "float16", "int8", "int4"] | torch.dtype = "float32",
        tables: Sequence[int] | None = None,
        *,
        absent: Literal["initial", "zeros"] = "initial",
        folder: AnyPath | None = None,
        verify: bool = False,
        num_threads: int | None = None,
        max_rows: int | None = None,
    ) -> Self:
        """Serve a snapshot. The call makes the snapshot's served file if it does not exist; all processes share the
        file. It does not take the lock of the table's writer.

        Args:
            path: the persistent path of the training job, or the paths of its ranks; or a file that `oneemb quantize`
                has made, which fixes snapshot, dtype, tables and `max_rows`; or a URL to which `oneemb push` has
                pushed, such as `s3://bucket/items`, or `<url>.rows/<embedding>` of a `graph.save(url)`.
            snapshot: name of the snapshot; None = the newest that can be read. If a newer one cannot be read, `error`
                and the log say so.
            dtype: dtype of the weights in the file, as text or torch's: "float32" = the weights as trained, bit for
                bit. Lookups give float32 for the other formats.
            tables: numbers of the served tables, in the order of columns of ids; None = all.
            absent: values of an id without a row: "initial" = its initial row in training, not rounded to `dtype`; or
                "zeros".
            folder: folder for served files; None = `serving` in the first path. With a URL it must be given, and
                has a copy of the served snapshot too; for a newer snapshot only what the copy lacks is downloaded.
            verify: compare all rows with their checksums now, instead of when a row is first read.
            num_threads: None = one for each core.
            max_rows: largest number of rows, of the served tables together; None = all.
                [A cap](../publish.md#a-cap) says which rows stay. The others read as ids without a row.

        Raises:
            StorageError: the snapshot does not exist, its files are damaged, a row is not finite or too large for the
                dtype (the message names the row), or the snapshot does not describe initial rows and `absent` needs
                them.
            ValueError: an argument is not as above.
        """
        served_dtype = check_formats(dtype, absent)
        check_flags(verify=verify)
        threads, paths = Threads(num_threads), [] if is_url(path) else as_list(path)
        if not paths and not is_url(path):
            raise ValueError("path must be one path or more, got none")
        if snapshot is not None and not isinstance(snapshot, str):
            got = f"{type(snapshot).__name__} {snapshot!r}"
            raise TypeError(f"snapshot must be the name of a snapshot, or None for the newest, got {got}")
        source, chosen = None, None if tables is None else _numbers(tables)
        unread: list[StorageError] = []
        cap = None if max_rows is None else RowCap(max_rows)
        if len(paths) == 1 and is_served_file(paths[0]):
            file: ServedFile | LayeredFile = ServedFile(paths[0], threads=threads)
            if file.info.since:
                raise ValueError(
                    f"{paths[0]} must be a whole served file, and has only rows that have changed since another file;"
                    " open the job's path"
                )
            right = snapshot in (None, file.info.name) and chosen in (None, file.info.tables)
            if not right or max_rows not in (None, file.info.max_rows):
                raise ValueError(
                    f"{paths[0]} has snapshot {file.info.name!r}, tables {list(file.info.tables)} and"
                    f" max_rows={file.info.max_rows or None}, got snapshot={snapshot!r}, tables={tables} and"
                    f" max_rows={max_rows}; leave these arguments out"
                )
        else:
            if is_url(path):
                source = stored_source(ObjectStore(path), folder, served_dtype, chosen)
            else:
                source = source_of(paths, folder, served_dtype, chosen)
            source = source._replace(cap=cap)
            opened = open_snapshot(source, snapshot, threads=threads, unread=unread.append)
            assert opened is not None  # without `stop` and `served` there is always a file
            file = opened
        if verify:
            file.verify()
        return cls(file, source, absent, threads, unread)

    # ---- lookups ----------------------------------------------------------------------------------------------------

    @uncompiled
    def forward(
        self,
        ids: torch.Tensor,
        table_ids: torch.Tensor | int | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        pooling: Literal["sum", "mean", "max"] | None = None,
        *,
        columns: Sequence[int] | None = None,
        include_last_offset: bool = True,
    ) -> torch.Tensor:
        """Rows of ids, or pooled bags of ids. Arguments, result and errors are those of `MultiTableEmbedding`.

        If `open` was given `tables`, the T columns of ids are these tables, in their order; `table_ids` and `columns`
        use the numbers of training. The result has no gradient. Its dtype is that of training if rows are served as
        "float32", else float32.

        Raises:
            TypeError, ValueError: same as `MultiTableEmbedding`; or a table is not served.
            CorruptTableError: a row of the lookup is damaged.
        """
        refuse_tracers(self, ids)
        if self._follower is not None:
            self._check_follower()
        served = self._version_now()
        if table_ids is not None:
            table_ids = lookup_keys.one_table(table_ids, len(served.is_served_T), ids)
        bags = None
        if pooling is not None or include_last_offset is not True:
            num_tables = len(served.table_C if table_ids is None else served.is_served_T)
            bags = lookup_keys.bags_of(
                ids, table_ids, offsets, per_sample_weights, pooling, columns, num_tables, include_last_offset
            )
            ids, table_ids, offsets, per_sample_weights, _ = bags
        pools, columns = lookup_keys.pooling_of(pooling, offsets), lookup_keys.columns_of(columns)
        if offsets is not None:
            rows = self._bags(served, ids, table_ids, offsets, per_sample_weights, pools, columns)
            return rows if bags is None else bags.shaped(rows)
        lookup_keys.check_no_columns(columns)
        if per_sample_weights is not None:
            lookup_keys.check_scales(per_sample_weights, False, pools, 0, _CPU)
        num_tables = len(served.table_C if table_ids is None else served.is_served_T)
        lookup_keys.check_ids(ids, table_ids, num_tables, served.key_type)
        _check_on_cpu(ids)
        if table_ids is None:
            id_N = ids.numpy().ravel()
            table_N = served.tables_of_columns(self._backend.tables_of_columns(len(id_N), num_tables))
            return served.rows(table_N, id_N, ids.shape)
        table_N, id_N, check = lookup_keys.tables_and_ids(ids, table_ids, num_tables, self._backend)
        if check is not None:
            check()
        return served.rows(served.only_served(table_N), id_N, ids.shape)

    def read(self, ids: torch.Tensor, table_ids: torch.Tensor | int | None = None) -> torch.Tensor:
        """Look up ids, so that a model that calls `MultiTableEmbedding.read` can be served unchanged."""
        return self(ids, table_ids)

    def _bags(
        self, served: Served, ids: torch.Tensor, table_ids: torch.Tensor | None, offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None, pooling: Literal["sum", "mean", "max"],
        columns: Sequence[int] | None,
    ) -> torch.Tensor:  # fmt: skip
        by_column = table_ids is None and columns is None
        num_tables = len(served.table_C if by_column else served.is_served_T)
        shape, offset_P1, table_P, check_bags = lookup_keys.bags_of_ids(
            ids, table_ids, num_tables, served.key_type, offsets, columns, self._backend
        )
        _check_on_cpu(ids)
        check_bags()
        bounds_P1 = self._backend.array(offset_P1)
        if columns is not None:
            trained_P = served.only_served(np.repeat(np.array(columns, np.int32), shape[0]))
        elif table_P is not None:
            trained_P = served.only_served(self._backend.array(table_P))
        else:
            trained_P = served.tables_of_columns(self._backend.tables_of_columns(len(bounds_P1) - 1, num_tables))
        table_N = np.repeat(trained_P, np.diff(bounds_P1))
        id_N, scale_N = self._backend.array(ids.detach().contiguous()), None
        if per_sample_weights is not None:
            lookup_keys.check_scales(per_sample_weights, True, pooling, len(ids), _CPU)
            scale_N = self._backend.array(per_sample_weights.detach().contiguous())
        if columns is None:
            return served.bags(table_N, id_N, bounds_P1, scale_N, pooling, shape)
        pooled = served.bags(table_N, id_N, bounds_P1, scale_N, pooling, (len(columns), shape[0]))
        return pooled.transpose(0, 1).contiguous()  # `bags` gives columns first.

    # ---- versions ---------------------------------------------------------------------------------------------------

    def _version_now(self) -> Served:
        served = self._served
        if served is None:
            raise StorageError("the embedding is closed; open it again")
        return served

    @property
    def version(self) -> Version:
        """Snapshot that the next lookup reads."""
        return self._version_now().version

    @property
    def embedding_dim(self) -> int:
        """Number of weights of a row."""
        return self._version_now().file.info.dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of results."""
        return self._version_now().dtype

    @property
    def quantization_error(self) -> tuple[float, float]:
        """Largest error, and root mean square error, of the served weights against the trained ones."""
        info = self._version_now().file.info
        return info.error_max, info.error_rms

    def refresh(self) -> bool:
        """Serve the newest snapshot, if it is newer than the current one or the current one has been deleted or
        replaced; returns whether another one is served now. Lookups go on meanwhile.

        Raises:
            StorageError: the snapshot cannot be read, its file cannot be made, or its rows have another width or dtype.
                The current snapshot is still served.
        """
        return self._load_newer(lambda: False)

    def _load_newer(self, stop: Callable[[], bool]) -> bool:
        source, choice, now = self._need_source(), self._choice, self._version_now()
        unread: list[StorageError] = []
        try:
            file = open_snapshot(
                source, None, threads=self._threads, served=now.version, before=now.layered, stop=stop,
                unread=unread.append,
            )  # fmt: skip
            taken = file is not None and not stop() and self._take(file, choice, now)
        except Exception as error:
            self.error = error
            raise
        if not stop():
            self._set_error(unread)
        return taken

    def _set_error(self, unread: Sequence[StorageError]) -> None:
        """Keep the error of a snapshot that cannot be read and is, or may be, newer than the one that is served; log
        the error, unless the attempt before has met it. Empty = there is none."""
        told, self.error = str(self.error), next(iter(unread), None)
        if self.error is not None and str(self.error) != told:
            _log.warning("%s is not served, %r is: %s", self._what, self.version.name, self.error)

    def rollback(self, snapshot: str) -> None:
        """Serve the named snapshot, older or newer, and stop following until `follow` is called again. If another
        thread is refreshing, the call does not wait, and that thread's version is not served.

        Raises:
            TypeError: `snapshot` is no text.
            StorageError: there is no such snapshot, and nothing has changed; or it cannot be read, or its rows have
                another width or dtype: then the current snapshot is still served, and following has stopped.
        """
        source, choice = self._need_source(), object()
        if not isinstance(snapshot, str):
            raise TypeError(f"snapshot must be the name of a snapshot, got {type(snapshot).__name__} {snapshot!r}")
        source.pull(snapshot)
        find_snapshot(source.looks, snapshot)  # An unknown name raises before the follower stops.
        with self._own_lock():
            self._stopped()
            self._choice = choice
        now = self._served
        file = open_snapshot(source, snapshot, threads=self._threads, before=None if now is None else now.layered)
        assert file is not None
        self._take(file, choice, None)

    def _take(self, file: LayeredFile, choice: object, before: Served | None) -> bool:
        """Serve a file. Returns False, and serves nothing, if another call has chosen a version since `choice`, or if a
        newer version was served while this file was made."""
        served = Served(file, self._absent, self._backend)
        with self._own_lock():
            now = self._version_now()
            if self._choice is not choice:
                return False
            if before is not None and before is not now and served.version.sequence <= now.version.sequence:
                return False
            served.check_as_before(now)
            self._served = served  # Lookups read this reference once, so each has one version.
        self._whole_files.serves(self._need_source(), served.version, file)
        return True

    def _need_source(self) -> Source:
        if self._source is None:
            raise StorageError("the embedding was opened from a file, which never changes; open the job's path instead")
        return self._source

    def follow(self, seconds: float = 10.0) -> None:
        """Call `refresh` in a thread, every `seconds` seconds, until `unfollow` or `close`.

        An error of `refresh` fails no lookup: `error` has it until an attempt succeeds, and the logger `oneemb` a
        warning; the thread goes on. A child of fork follows too, from its first lookup on.

        Raises:
            ValueError: `seconds` is not above 0, or more than a thread can wait.
            StorageError: the embedding is closed, or was opened from a file.
        """
        self._need_source()
        super().follow(seconds)

    def _late_call(self, seconds: float) -> str | None:
        stored = None if self._source is None else self._source.stored
        return None if stored is None else stored.late_call(seconds)

    def unfollow(self) -> None:
        """Stop following; the current version is still served."""
        super().unfollow()
        self._whole_files.stop()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Serve the snapshot that the entry of a trained embedding names, by `rollback`, unless it is served already or
        the state dict has no entry. StorageError if it is not there, or of another run."""
        key = f"{prefix}_extra_state"
        if key in state_dict:
            snapshot = decode(state_dict[key])
            name, identity = snapshot["oneemb_snapshot"], snapshot.get("oneemb_identity")
            if name is None:
                raise StorageError("the state dict was saved before the embedding had a row; train it, and save again")
            if identity != self.version.identity:
                self._need_source().pull(name)
                self._need_source().looks.look().get(name, identity, "the state dict")
                self.rollback(name)
        super()._load_from_state_dict({one: state_dict[one] for one in state_dict if one != key}, prefix, *args)

    def _check_open(self) -> None:
        self._version_now()

    def extra_repr(self) -> str:
        served = self._served
        if served is None:
            return "closed"
        info = served.file.info
        sizes = f"tables={len(info.tables)}, rows={info.rows:,}, dim={info.dim}"
        return f"snapshot={info.name!r}, {sizes}, dtype={info.weights}"

    def close(self) -> None:
        """Stop following, and release the file."""
        with self._own_lock():
            self._served, self._choice = None, object()
        self.unfollow()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            "an InferenceEmbedding cannot be copied or pickled; open it again where it is needed, since all processes"
            " share the mapped file"
        )


def _numbers(tables: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(table) for table in tables)  # NumPy's integers too
    except TypeError as error:
        raise ValueError(f"tables must be integers, got {tables!r}") from error


def _check_on_cpu(ids: torch.Tensor) -> None:
    if not ids.is_cpu:
        raise ValueError(f"ids must be on the CPU, where the rows are, got {ids.device}; call ids.cpu()")
