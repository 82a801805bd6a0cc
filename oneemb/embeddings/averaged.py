"""Running averages of an embedding's rows over the steps of training.

Each averaging moves the averages of all rows, also of rows that no step has changed. While a row does not change, its
average moves by the same rule each time, so the effect of several averagings can be computed at once:

    average now = row + kept * (average then - row)        kept = decay ** (now - then), or then / now for a mean

`then` and `now` are numbers of averagings. The store holds the average and `then` of each row. An averaging only adds
one to a count. Before a step changes rows, it brings their averages up to date (`EmbeddingStore.watchers`); a lookup
computes the current averages of the rows that it reads.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch

from oneemb.embeddings.embedding import MultiTableEmbedding, TableEmbedding, copied
from oneemb.embeddings.lookups import keys_of
from oneemb.graph import ops
from oneemb.graph.arguments import Lookup
from oneemb.graph.ops.keys import BagArguments, bags_of, columns_of, one_table, pooling_of
from oneemb.graph.ops.lookup import DTYPES
from oneemb.graph.tracers import refuse_tracers, uncompiled
from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Backend, Keys
from oneemb.options import make_constant_initializer, make_table
from oneemb.storage.errors import StoreFullError
from oneemb.storage.fs import AnyPath, absolute_path
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.step_lock import alone, between_steps
from oneemb.storage.locking.store_lock import changing, whole
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.store_rows import erase_rows


class AveragedEmbedding(torch.nn.Module):
    """Running averages of all rows of an embedding; only rows that steps change cost time and memory.

    It does for rows what `torch.optim.swa_utils.AveragedModel` does for dense parameters: the first `update_rows` sets
    the averages to the rows; each later call moves every average toward the current row. A lookup reads the averages.

    Averages are float32. A store like the embedding's holds the averages of rows that were trained since the first
    averaging; the averages of other rows are the rows. A snapshot of averages belongs to a snapshot of the embedding:
    save and load both, as a state dict of a model with both modules does.

    Args:
        embedding: embedding whose rows are averaged.
        persistent_path: folder of the averages.
        decay: from 0 to 1: an averaging sets each average to decay * average + (1 - decay) * row; None = the average
            is the mean of the rows at all averagings.

    Raises:
        ValueError: `decay` is not as above.
        StorageError: the path is in use, or cannot be made or written to.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "words", 2, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(1.0))],
        ...     oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        >>> averaged = oneemb.AveragedEmbedding(embedding, tempfile.mkdtemp(), decay=0.75)
        >>> optimizer = torch.optim.SGD(embedding.parameters(), lr=4.0)
        >>> averaged.update_rows()
        >>> embedding(torch.tensor([7])).sum().backward()
        >>> optimizer.step()
        >>> averaged.update_rows()
        >>> embedding(torch.tensor([7])).tolist(), averaged(torch.tensor([7])).tolist()
        ([[-3.0, -3.0]], [[0.0, 0.0]])
    """

    def __init__(self, embedding: TableEmbedding, persistent_path: AnyPath, decay: float | None = None):
        super().__init__()
        if not isinstance(embedding, TableEmbedding):
            raise TypeError(f"embedding must be an embedding of oneemb, got {type(embedding).__name__} {embedding!r}")
        if decay is not None and (not isinstance(decay, int | float) or not 0 <= decay <= 1):
            raise ValueError(f"decay must be from 0 to 1, or None for a mean, got {decay!r}")
        if embedding.policies is not None:
            raise ValueError(
                f"embedding {embedding.name!r} must have no policy, since a policy evicts rows and averages need rows"
                " that stay; average an embedding without a policy"
            )
        self._decay = decay
        self._embedding = (embedding,)  # in a tuple, so that it is no submodule of this module
        # size_factor and storage_dim make room for optimizer state, which is not averaged.
        options = dataclasses.replace(
            embedding.store_options, persistent_path=(absolute_path(persistent_path),), size_factor=None,
            storage_dim=None,
        )  # fmt: skip
        tables = [make_table(replicate=table.replicate) for table in embedding.tables]
        self.rows = MultiTableEmbedding(
            f"{embedding.name}, averaged", embedding.embedding_dim, torch.float32, embedding.key_type,
            tables, options, make_constant_initializer(0.0), embedding.padding_idx,
            num_threads=embedding.store.threads.count,
            process_group=embedding.ranks.group,
        )  # fmt: skip
        """Stored averages."""
        weight = self.rows.to(embedding.store.backend.device).weight.detach()
        del self.rows.weight
        self.rows.register_buffer("weight", weight)  # no parameter, since no optimizer trains averages
        store = self.rows.store
        store.holder.owner = weakref.ref(self)
        store.step_lock = embedding.store.step_lock  # so that rows and averages are saved at the same step
        # Averages with another rule must not load here: this rule would bring them up to date wrongly.
        store.form.attach("mean" if decay is None else f"average, decay {float(decay)}", np.zeros(1, np.float32))
        watchers, key = embedding.store.watchers, id(self)
        watchers[key] = weakref.ref(self, lambda _: watchers.pop(key, None))

    @property
    def embedding(self) -> TableEmbedding:
        """Embedding whose rows are averaged."""
        return self._embedding[0]

    @property
    def decay(self) -> float | None:
        """Weight of the old average in an averaging; None = the average is a mean. It cannot be changed: averages that
        are not up to date would use the new value for averagings before the change."""
        return self._decay

    @property
    def n_averaged(self) -> int:
        """Number of averagings so far."""
        return self.rows.store.step

    def update_rows(self) -> None:
        """Move the average of every row toward the current row. Call it where the averages of dense parameters are
        updated, after the optimizer's step. It costs no time: steps and lookups do the work.

        Raises:
            RuntimeError: this thread is in the middle of a step.
        """
        self.rows.warn_if_empty()
        between_steps((self.rows.store.step_lock,), "update_rows", self._count)

    def _count(self) -> None:
        store = self.rows.store
        store.store_lock.check(changes=True)
        with signals_deferred:
            store.step += 1
            store.changes += 1

    # torch.compile must not look into the loops of a lookup; see `TableEmbedding.forward`.
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
        """The averages of the rows of ids, without a gradient. Arguments, result and errors are those of the embedding
        in eval mode."""
        refuse_tracers(self.embedding, ids)
        rows, averages, pools = self.rows, _Averages(self), pooling or "sum"
        failed: Exception | None = None
        tables: Any = table_ids
        try:
            tables = one_table(table_ids, self.embedding.num_tables, ids)
            bags = bags_of(
                ids, tables, offsets, per_sample_weights, pooling, columns, self.embedding.num_tables,
                include_last_offset,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            failed, bags = error, BagArguments(ids, tables, offsets, per_sample_weights, None)
        ids, tables, offsets, per_sample_weights, _ = bags
        lookup = Lookup(ids, tables, offsets, columns_of(columns), per_sample_weights, pools)

        def keys() -> ops.BatchKeys:
            if failed is not None:
                raise failed  # here, since an error of this function is raised on every rank
            pooling_of(pooling, offsets)
            return keys_of(rows, lookup)

        with torch.no_grad():
            found = alone((rows.store.step_lock,), lambda: rows.lookups.peek(rows, averages, lookup, keys))
        return bags.shaped(found.to(self.embedding.dtype))

    def copy_to(self, persistent_path: AnyPath) -> TableEmbedding:
        """Copy of the averaged embedding whose rows are the current averages, to serve or to train further.

        Args:
            persistent_path: folder of the copy's rows.

        Raises:
            ValueError, StorageError: as for `embedding.copy_to`.
        """
        return copied(self.embedding, persistent_path, weights_only=True, change=self._put_averages)

    def _put_averages(self, table_N: np.ndarray, id_N: np.ndarray, row_NW: np.ndarray) -> None:
        backend, format = self.rows.store.backend, self.embedding.store.format
        average_ND, _ = self.read(backend.distinct_keys(backend.put(table_N), backend.put(id_N)))
        weight_ND = torch.from_numpy(format.weights(row_NW))[:, : format.dim].view(DTYPES[format.dtype])
        weight_ND.copy_(average_ND)

    def close(self) -> None:
        """Free memory, files and the lock on `persistent_path`. Averages that no snapshot holds are lost; the embedding
        can be trained further, without averages."""
        step_lock = self.rows.store.step_lock
        step_lock.warn_of_late_error()
        # If this thread is in the middle of a step, `between_steps` raises before the averages are forgotten.
        between_steps((step_lock,), "close", self._close)

    def _close(self) -> None:
        self.embedding.store.watchers.pop(id(self), None)
        self.rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def before_change(self, table_U: Array, id_U: Array, weight_UD: torch.Tensor) -> None:
        """Bring averages up to date. The embedding's steps call it before they change rows. StorageError if there is no
        room for the averages.

        Args:
            table_U, id_U: keys of the rows.
            weight_UD: weights of the rows before the change.
        """
        _check_place(self)
        if self.n_averaged:
            alone((self.rows.store.step_lock,), lambda: self._catch_up(table_U, id_U, weight_UD.float()))

    def erase(self, table_U: np.ndarray, id_U: np.ndarray) -> None:
        """Forget the averages of erased rows, since these rows are initialized anew."""
        erase_rows(self.rows.store, table_U, id_U)

    def _catch_up(self, table_U: Array, id_U: Array, row_UD: torch.Tensor) -> None:
        store, dim = self.rows.store, self.rows.embedding_dim
        store.build()  # After a failure and `clear`, the store has no tiers.
        try:
            lease = ops.Lease.of_keys(store, table_U, id_U)
        except StoreFullError:  # The step's rows fit in their cache, but averages may be wider than the rows.
            half = len(id_U) // 2
            if half == 0:
                raise
            self._catch_up(table_U[:half], id_U[:half], row_UD[:half])
            self._catch_up(table_U[half:], id_U[half:], row_UD[half:])
            return
        slot_U = store.backend.tensor(lease.slot_U)
        with whole((store.store_lock,)), store.writing:  # An average without its new count would move twice.
            row_SW = store.backend.tensor(store.row_SW)
            count_SW = row_SW.view(torch.int32)
            average_UD = store.weights_in(lease.slot_U)
            moved_UD = _moved(average_UD, row_UD, self._kept(count_SW[slot_U, dim]))
            with changing:
                row_SW[slot_U, :dim] = moved_UD
                count_SW[slot_U, dim] = self.n_averaged
                store.mark_dirty(table_U, lease.slot_U)
        lease.unpin()

    def _kept(self, then_U: torch.Tensor) -> torch.Tensor:
        """`kept` of the rule in the file's first lines, for averages of after `then_U` averagings: float32 [U]. The
        first averaging keeps nothing of the value before it."""
        now, backend = self.n_averaged, self.rows.store.backend
        if self.decay is None or now == 0:
            return (then_U.double() / max(1, now)).float()
        # NumPy's power, since the last bit of torch's depends on the position in the tensor.
        kept_U = backend.tensor(self.decay ** backend.array(now - then_U.double())).float()
        return torch.where(then_U == 0, 0.0, kept_U)

    def read(self, keys: Keys) -> tuple[torch.Tensor, Keys]:
        """(current averages of the keys, float32 [U, D]; the keys, whose number the host now knows)."""
        _check_place(self)
        source, tensor, dim = self.embedding.store, self.rows.store.backend.tensor, self.rows.embedding_dim
        row_UW, keys = source.read(keys)
        stored_UW = tensor(self.rows.store.read(keys)[0])
        row_UD = tensor(source.format.weights(row_UW))[:, :dim].view(DTYPES[source.format.dtype]).float()
        return _moved(stored_UW[:, :dim], row_UD, self._kept(stored_UW.view(torch.int32)[:, dim])), keys


def _check_place(averaged: AveragedEmbedding) -> None:
    rows, averages = averaged.embedding.store.backend, averaged.rows.store.backend
    if averages.place != rows.place:
        raise ValueError(
            f"averages must be on {rows.device}, where the rows are, and are on {averages.device}; move both modules"
        )


def _moved(average_UD: torch.Tensor, row_UD: torch.Tensor, kept_U: torch.Tensor) -> torch.Tensor:
    """row + kept * (average - row), as a new tensor."""
    # Op by op, so that no device fuses multiply and add. With kept = 1 the average keeps its bits.
    moved_UD = (average_UD - row_UD).mul_(kept_U.unsqueeze(1)).add_(row_UD)
    whole_U = kept_U == 1
    if bool(whole_U.any()):
        moved_UD[whole_U] = average_UD[whole_U]
    return moved_UD


class _Averages:
    """Averages with the interface of a store that `ops.peek` reads (`ReadRows`)."""

    def __init__(self, averaged: AveragedEmbedding):
        self._averaged = averaged
        self.format = RowFormat(averaged.rows.embedding_dim, "float32")
        self.backend: Backend = averaged.embedding.store.backend

    def read(self, keys: Keys) -> tuple[Array, Keys]:
        average_UD, keys = self._averaged.read(keys)
        return self.backend.array(average_UD), keys
