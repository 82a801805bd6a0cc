"""Sharded collections: rows spread over ranks, with the stages that `DistributedModelParallel` and pipelines call.

    input_dist     send unique keys to the ranks that own them, on a thread
    compute        the owners read their rows, initialize new rows, and send the rows back
    output_dist    make the result of the call
    backward       send gradients to the owners, which update their rows

The owner of a row depends only on its key. A pipeline may send the keys of coming batches ahead: owners then bring
existing rows into memory, but read rows and initialize new ones only in the step, so that no result changes.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, NoWait, ShardedModule
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.streamable import Multistreamable

from oneemb.adapters.tables import in_backward_optimizers
from oneemb.adapters.worker import Worker
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.embeddings.lookups import RowsAhead
from oneemb.graph.ranks import Ranks
from oneemb.storage.errors import StorageError
from oneemb.torchrec.collection import Lookups
from oneemb.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from oneemb.torchrec.optimizers import FusedRowsOptimizer


class _Sent(Multistreamable):
    """A lookup whose keys the owners have received; `rows` finishes it."""

    def __init__(self, rows: Callable[[], torch.Tensor]):
        self.rows = rows

    def record_stream(self, stream: torch.Stream) -> None:
        """No effect: the keys are in host memory."""


class _KeysSent(Awaitable[_Sent]):
    def __init__(self, lookup: RowsAhead, future: "Future[None]"):
        super().__init__()
        self._lookup, self._future = lookup, future

    def _wait_impl(self) -> _Sent:
        self._future.result()
        return _Sent(self._lookup.rows)


@dataclass
class LookupContext(Multistreamable):
    """State of one call of a sharded collection, from `input_dist` on."""

    lookups: Lookups | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """No effect: the rows are on the stream that computes."""


class ShardedCollection(ShardedModule[KJTList, list[torch.Tensor], Any, LookupContext], FusedOptimizerModule):
    """Base of both sharded collections.

    Args:
        collection: the collection, made with `on_ranks`.
        unsharded: class of the module that was sharded.
        connections: connections between the ranks, for keys; None = this process has all rows.
    """

    def __init__(
        self,
        collection: EmbeddingBagCollection | EmbeddingCollection,
        unsharded: type[torch.nn.Module],
        connections: Ranks | None,
    ):
        super().__init__()
        self._unsharded, holders = unsharded, collection.holders
        self._collection = (collection,)  # in a tuple, since not this submodule but its parts are registered
        setattr(self, holders, getattr(collection, holders))
        self.rows = collection.rows
        self._connections = connections
        self._sender = None if connections is None else Worker("oneemb-keys", dropped="a lookup that was dropped")
        """Thread that sends the keys of lookups to their owners. Every rank gives its thread the same lookups."""
        weights = dict(collection.named_parameters())
        optimizers = [in_backward_optimizers(weight)[0] for weight in weights.values()]
        self._fused_optimizer = FusedRowsOptimizer(weights, collection.states, optimizers)

    @property
    def collection(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """Collection that makes the lookups; it shares `rows` with this module."""
        return self._collection[0]

    @property
    def fused_optimizer(self) -> FusedRowsOptimizer:
        """Optimizer that steps the rows in the backward pass."""
        return self._fused_optimizer

    def create_context(self) -> LookupContext:
        """New context for one call."""
        return LookupContext()

    # TorchRec's signatures take any arguments.
    def input_dist(self, ctx: LookupContext, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """Send the unique keys of a batch to their owners. No row is inserted or read.

        Raises:
            TypeError, ValueError: same as `EmbeddingBagCollection.forward`; other ranks raise RankError. On several
                ranks the wait for the result raises them.
        """
        if isinstance(features, LazyAwaitable):
            features = features.wait()
        if self._sender is None or self._connections is None:
            lookups = ctx.lookups = self.collection.lookups_of(features)
            calls = [functools.partial(group.rows, **named) for group, named in zip(*lookups[:2], strict=True)]
            return KJTListSplitsAwaitable([NoWait(NoWait(cast(Any, _Sent(call)))) for call in calls], ctx)
        if self._sender.ended:
            raise StorageError("the sharded collection is closed; make it again to go on")
        failed: list[Exception] = []
        try:
            ctx.lookups = self.collection.lookups_of(features)
        except Exception as error:  # Other ranks wait for keys: send them the error instead.
            failed.append(error)

        def arguments(g: int) -> dict[str, Any]:
            if ctx.lookups is None:
                raise failed[0]
            return ctx.lookups.arguments[g]

        awaitables: list[Any] = []
        for g, rows in enumerate(self.rows):
            lookup = RowsAhead(
                cast(MultiTableEmbedding, rows), self._connections, functools.partial(arguments, g), self._sender.later
            )
            awaitables.append(NoWait(_KeysSent(lookup, self._sender.submit(lookup.send_keys))))
        failed.clear()  # The error's traceback holds this frame.
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute(self, ctx: LookupContext, dist_input: Sequence[_Sent]) -> list[torch.Tensor]:
        """Rows of the batch, from their owners.

        Raises:
            StoreFullError: rows do not fit; other ranks raise RankError.
        """
        return [sent.rows() for sent in dist_input]

    def output_dist(self, ctx: LookupContext, output: list[torch.Tensor]) -> LazyAwaitable[Any]:
        """Result of the collection."""
        assert ctx.lookups is not None
        return LazyNoWait(ctx.lookups.output(output))

    @property
    def unsharded_module_type(self) -> type[torch.nn.Module]:
        """Class of the module that was sharded."""
        return self._unsharded

    @property
    def device(self) -> torch.device:
        """Device on which lookups run."""
        return self.collection.device

    def close(self) -> None:
        """Free memory and files, release the locks on the paths, and end the thread."""
        if self._sender is not None:
            self._sender.end()
        self.collection.close()


class ShardedEmbeddingBagCollection(ShardedCollection):
    """Sharded form of an `EmbeddingBagCollection`, made by `EmbeddingBagCollectionSharder`."""


class ShardedEmbeddingCollection(ShardedCollection):
    """Sharded form of an `EmbeddingCollection`, made by `EmbeddingCollectionSharder`."""
