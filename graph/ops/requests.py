"""The request of a rank to the owners in a lookup: rows of unique keys, or sums of rows over parts of bags.

The ids of a bag that one rank owns are a *part* of the bag. An owner answers with one row for each key, or with one sum
for each part; from these the requesting rank computes the sums or means of its bags:

    two bags     a b a c,  c d      rank 0 owns a and c, rank 1 owns b and d
    of rank 0    keys a c           parts  a a c  and  c
    of rank 1    keys b d           parts  b      and  d

The gradient of a part is the gradient of its bag, so one row goes back for each part, too. Each rank cuts the bags of
its batch if that moves fewer bytes, as where bags are long and few ids are in several bags. The decision depends on the
batch alone, so it is the same for an eager lookup and a lookup ahead.

U unique keys, N ids that are not padding, P bags, S parts, R ranks.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from oneemb.graph.ops.keys import DTYPES, BatchKeys, equal
from oneemb.graph.ranks import Ranks, Received
from oneemb.kernels import cut_bags as kernel
from oneemb.kernels.arrays import Bags
from oneemb.kernels.unique_keys import occurrences
from oneemb.storage.embedding_store import EmbeddingStore

# More tables than any embedding has: the ranks that send table numbers have checked them.
_TABLES = 1 << 31

_PLACE_BYTES = 4
"""Bytes of an id's place among keys, and of a part's size. Both go to owners twice: with lookups and with gradients."""


class KeysByRank(NamedTuple):
    """Keys sorted by the rank that they go to. N counts them; a key that goes to several ranks counts several times."""

    order_N: torch.Tensor
    """int64: index of each key among the unique keys, sorted by rank."""
    id_R: Sequence[torch.Tensor]
    """int64, for each rank: ids of the keys that go to it."""
    table_R: Sequence[torch.Tensor]
    """int32, for each rank: tables of the keys that go to it."""

    @property
    def count_R(self) -> list[int]:
        """Number of keys that go to each rank."""
        return [len(ids) for ids in self.id_R]


def keys_by_rank(
    table_U: torch.Tensor, id_U: torch.Tensor, rank_N: np.ndarray, ranks: int, key_N: np.ndarray | None = None
) -> KeysByRank:
    """The keys sorted by rank: the unique key with index `key_N[n]` goes to rank `rank_N[n]` of `ranks` ranks. None as
    `key_N` = key n goes to rank `rank_N[n]`."""
    sorted_N, begin_R1, _ = occurrences(rank_N.astype(np.int32), ranks)
    count_R = np.diff(begin_R1).tolist()
    order_N = torch.from_numpy(sorted_N.astype(np.int64) if key_N is None else key_N[sorted_N])
    return KeysByRank(order_N, id_U[order_N].split(count_R), table_U[order_N].split(count_R))


@dataclass(frozen=True)
class Parts:
    """Parts of bags that one rank sums for another."""

    key_N: torch.Tensor
    """int32: for each id, part after part, the index of its key among the requested keys."""
    size_S: torch.Tensor
    """int32: number of ids of each part, at least 1."""

    @classmethod
    def of_each(cls, keys: int) -> Self:
        """`keys` parts, each of one key."""
        return cls(
            torch.arange(keys, dtype=torch.int32, device="cpu"), torch.ones(keys, dtype=torch.int32, device="cpu")
        )


@dataclass(frozen=True)
class CutBags:
    """The parts of all bags of a lookup, sorted by the rank that sums them and then by bag."""

    parts_R: Sequence[Parts]
    bag_S: torch.Tensor
    """int32: number of the bag of each part."""
    ids_P: torch.Tensor
    """int64: number of ids of each bag that are not padding."""

    @property
    def count_R(self) -> list[int]:
        """Number of parts of each rank."""
        return [len(parts.size_S) for parts in self.parts_R]

    def of_bags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers of the parts sorted by bag, int32 [S]; index in them of each bag's first part, int64 [P + 1])."""
        order_S, begin_P1, _ = occurrences(self.bag_S.numpy(), len(self.ids_P))
        return torch.from_numpy(order_S), torch.from_numpy(begin_P1.astype(np.int64))

    @property
    def scale_S(self) -> torch.Tensor:
        """Factor of each part's sum in the mean of its bag: float32, on the CPU."""
        return (1 / self.ids_P.clamp(1).to(torch.float32)).index_select(0, self.bag_S)


@dataclass(frozen=True)
class Request:
    """Request of a rank to the others: its unique keys and, where bags are cut, the parts to sum."""

    sent: KeysByRank
    cut: CutBags | None
    uses_R: Sequence[torch.Tensor] | None = None
    """int32, for each rank: number of ids of the lookup that each key has; None = no policy counts uses."""

    @property
    def comes_R(self) -> list[int]:
        """Number of rows that each rank sends as its answer."""
        return self.sent.count_R if self.cut is None else self.cut.count_R

    def counts(self, r: int) -> tuple[int, int, int]:
        """First message to rank `r`: (keys, parts, ids of parts) that the second one has; -1 parts = bags are not cut,
        and the answer is one row for each key."""
        return counts_of(self.sent.id_R[r], None if self.cut is None else self.cut.parts_R[r])

    def tensors(self, r: int) -> list[torch.Tensor]:
        """Second message to rank `r`: keys, parts and, for policies, uses."""
        keys = tensors_of(self.sent.id_R[r], self.sent.table_R[r], None if self.cut is None else self.cut.parts_R[r])
        return keys if self.uses_R is None else [*keys, self.uses_R[r]]

    def empty(self) -> "Request":
        """An empty request."""
        cut = self.cut
        if cut is not None:
            parts = [Parts(part.key_N[:0], part.size_S[:0]) for part in cut.parts_R]
            cut = CutBags(parts, cut.bag_S[:0], cut.ids_P)
        order_N, id_R, table_R = self.sent
        sent = KeysByRank(order_N[:0], [ids[:0] for ids in id_R], [tables[:0] for tables in table_R])
        return Request(sent, cut, None if self.uses_R is None else [uses[:0] for uses in self.uses_R])


COUNTS = 3
"""Number of counts in the first message of a request."""


def counts_of(ids: torch.Tensor, parts: Parts | None) -> tuple[int, int, int]:
    """Counts of a message with these ids of keys and parts, as in `Request.counts`."""
    return (len(ids), -1, 0) if parts is None else (len(ids), len(parts.size_S), len(parts.key_N))


def tensors_of(ids: torch.Tensor, tables: torch.Tensor, parts: Parts | None) -> list[torch.Tensor]:
    """Tensors of a message with these keys and parts, as in `Request.tensors`."""
    return [ids, tables] if parts is None else [ids, tables, parts.key_N, parts.size_S]


def parts_move_fewer_bytes(keys: int, parts: int, ids: int, row_bytes: int, grad_bytes: int) -> bool:
    """Whether the sums of `parts` parts, which have `ids` ids, move fewer bytes between ranks than `keys` rows.

    Args:
        row_bytes, grad_bytes: bytes of a row and of its gradient in messages.
    """
    return (keys - parts) * (row_bytes + grad_bytes) > 2 * _PLACE_BYTES * (ids + parts)


def cut_if_fewer_bytes(
    sent: KeysByRank, inverse_N: np.ndarray, offset_P1: np.ndarray, row_P: np.ndarray | None, *, rank: int,
    row_bytes: int, grad_bytes: int,
) -> CutBags | None:  # fmt: skip
    """Cut the bags of a lookup into parts; None if that does not move fewer bytes.

    Args:
        sent: unique keys of the lookup, sorted by owner.
        inverse_N: index of each id's key among the unique keys; -1 for padding.
        offset_P1, row_P: as in `oneemb.kernels.arrays.Bags`.
        rank: number of this rank, whose request to itself moves no bytes.
        row_bytes, grad_bytes: bytes of a row and of its gradient in messages.
    """
    order_U, sent_R = sent.order_N.numpy(), sent.count_R
    if np.count_nonzero(np.diff(offset_P1)) >= len(order_U):  # Each bag has a part: no fewer parts than keys.
        return None
    bags = inverse_N, offset_P1, row_P, kernel.places_at_ranks(order_U, sent_R)
    parts_R, ids_R, ids_P = kernel.count_parts(*bags, len(sent_R))
    parts, ids = int(parts_R.sum() - parts_R[rank]), int(ids_R.sum() - ids_R[rank])
    if not parts_move_fewer_bytes(len(order_U) - sent_R[rank], parts, ids, row_bytes, grad_bytes):
        return None
    key_N, size_S, bag_S = map(torch.from_numpy, kernel.cut_bags(*bags, parts_R, ids_R))
    arrays_R = zip(key_N.split(ids_R.tolist()), size_S.split(parts_R.tolist()), strict=True)
    return CutBags([Parts(*arrays) for arrays in arrays_R], bag_S, torch.from_numpy(ids_P))


@dataclass(frozen=True)
class Requested:
    """The requests of all ranks to this rank: N keys, sorted by requesting rank, and parts of bags to sum."""

    store: EmbeddingStore
    ranks: Ranks
    table_N: torch.Tensor
    """int32: tables of the keys."""
    id_N: torch.Tensor
    """int64: ids of the keys."""
    count_R: Sequence[int]
    """Number of keys of each rank."""
    parts_R: Sequence[Parts | None]
    """Parts of bags that each rank requests; None = the row of each of its keys."""
    uses_N: torch.Tensor | None = None
    """int32: number of ids that each key has in the batch of its rank; None = no policy counts uses."""

    @property
    def answers_R(self) -> list[int]:
        """Number of rows that go to each rank."""
        counts_and_parts = zip(self.count_R, self.parts_R, strict=True)
        return [count if parts is None else len(parts.size_S) for count, parts in counts_and_parts]

    @functools.cached_property
    def keys(self) -> BatchKeys:
        """Unique keys of the requests. A lookup of these keys returns the message to send: for each rank, rows of zeros
        with room for the header, then the rows that the rank has requested."""
        return self.keys_behind(self.ranks.heads(rows_like(self.store, self.ranks)))

    def keys_behind(self, heads: int) -> BatchKeys:
        """Unique keys whose lookup returns, for each rank, `heads` rows of zeros, then the rows for this rank."""
        store, ranks, answers_R = self.store, self.ranks, self.answers_R
        backend, inverse_N = store.backend, store.backend.tensor(self._unique.unique.inverse_N)
        answers, bags, of_answer_N = sum(answers_R) + heads * ranks.size, None, inverse_N
        if any(parts is not None for parts in self.parts_R):
            of_answer_N, bags = self._key_of_ids, bags_of_sizes(self._sizes_behind(heads), store)
        elif heads:
            of_answer_N = inverse_N.new_full((answers,), -1)
            for at, keys in zip(ranks.behind_heads(answers_R, heads), inverse_N.split(answers_R), strict=True):
                of_answer_N[at] = keys
        uses_U = None
        if self.uses_N is not None:
            uses_U = np.zeros(len(self._unique.unique.id_U), np.int64)
            np.add.at(uses_U, inverse_N.cpu().numpy(), self.uses_N.numpy())
        unique = self._unique.unique._replace(inverse_N=backend.array(of_answer_N))  # type: ignore[attr-defined]  # a NamedTuple
        return BatchKeys(torch.Size((answers,)), unique, bags, backend, uses_U)

    @functools.cached_property
    def _unique(self) -> BatchKeys:
        return keys_of_ranks(self.store, self.table_N, self.id_N)

    @functools.cached_property
    def _key_of_ids(self) -> torch.Tensor:
        """Index of the unique key of each id of the parts, rank after rank."""
        inverse_N = self.store.backend.tensor(self._unique.unique.inverse_N)
        keys_and_parts = zip(inverse_N.split(list(self.count_R)), self.parts_R, strict=True)
        return torch.cat(
            [
                keys if parts is None else keys.index_select(0, parts.key_N.to(keys.device))
                for keys, parts in keys_and_parts
            ]
        )

    def _sizes_behind(self, heads: int) -> torch.Tensor:
        """Number of ids of each part, and 0 for each head row: int64, on the CPU."""
        size_A = torch.zeros(sum(self.answers_R) + heads * self.ranks.size, dtype=torch.int64, device="cpu")
        for at, parts in zip(self.ranks.behind_heads(self.answers_R, heads), self.parts_R, strict=True):
            size_A[at] = 1 if parts is None else parts.size_S
        return size_A

    def is_as(self, other: "Requested") -> bool:
        """Whether `other` has the same keys and parts. False for embeddings with a policy."""
        if self.uses_N is not None or self.sizes != other.sizes:
            return False
        return all(equal(*pair) for pair in zip(self.tensors, other.tensors, strict=True))

    @property
    def sizes(self) -> list[tuple[int, int, bool]]:
        """(number of keys, number of rows in the answer, whether these are sums of parts) of each rank."""
        counts_and_parts = zip(self.count_R, self.answers_R, self.parts_R, strict=True)
        return [(keys, answers, parts is not None) for keys, answers, parts in counts_and_parts]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the keys and of the parts of bags."""
        parts = [tensor for part in self.parts_R if part is not None for tensor in (part.key_N, part.size_S)]
        return [self.table_N, self.id_N, *parts]


def requested_by(
    store: EmbeddingStore, ranks: Ranks, received: Sequence[Received], counts_R: Sequence[Sequence[int]], *,
    uses: bool = False,
) -> Requested:  # fmt: skip
    """The requests of all ranks to this rank, read from messages.

    Args:
        received: second message of each rank.
        counts_R: first message of each rank (`Request.counts`).
        uses: whether ranks have sent the number of ids that each key has.
    """
    tables, ids, parts_R, uses_R = [], [], [], []
    for block, (keys, parts, ids_of_parts) in zip(received, counts_R, strict=True):
        ids.append(block.take(keys, torch.int64))
        tables.append(block.take(keys, torch.int32))
        part = None
        if parts >= 0:
            part = Parts(block.take(ids_of_parts, torch.int32), block.take(parts, torch.int32))
        parts_R.append(part)
        if uses:
            uses_R.append(block.take(keys, torch.int32))
    uses_N = torch.cat(uses_R) if uses else None
    return Requested(store, ranks, torch.cat(tables), torch.cat(ids), [keys for keys, *_ in counts_R], parts_R, uses_N)


def keys_of_ranks(store: EmbeddingStore, table_N: torch.Tensor, id_N: torch.Tensor) -> BatchKeys:
    """The unique keys among the keys that all ranks have sent, on the device of the store's rows. Several ranks may
    have sent the same key."""
    backend = store.backend
    table_N, id_N = table_N.to(backend.device), id_N.to(backend.device)
    unique = backend.unique_keys(
        backend.array(table_N), backend.array(id_N), tables=_TABLES, padding_id=None, check=None
    )
    return BatchKeys(id_N.shape, backend.counted(unique), None, backend)


def bags_of_sizes(size_P: torch.Tensor, store: EmbeddingStore) -> Bags:
    """Bags that follow one another; bag p has `size_P[p]` ids."""
    backend = store.backend
    offset_P1 = torch.cat([size_P.new_zeros(1), size_P.cumsum(0)])
    if not backend.waits:
        return Bags(backend.array(offset_P1))
    bag_N = torch.repeat_interleave(size_P.to(backend.device))
    return Bags(backend.array(offset_P1.to(backend.device)), backend.array(bag_N))


def rows_like(store: EmbeddingStore, ranks: Ranks) -> torch.Tensor:
    """An empty tensor [0, D] on the device of the store's rows, in the dtype of rows in messages: the store's dtype, or
    `comm_dtype` if that is smaller."""
    dtype = min(DTYPES[store.format.dtype], ranks.comm_dtype, key=lambda dtype: dtype.itemsize)
    return torch.empty(0, store.format.dim, dtype=dtype, device=store.backend.device)
