"""Collections whose rows ranks own together, as `DistributedModelParallel` and TorchRec's pipelines run them.

    input_dist     unique keys to the ranks that own them, on a thread
    compute        owners read their rows, initialize new ones, and send them back
    output_dist    result of the call
    backward       gradients to the owners, which update their rows

A key's owner follows from the key alone. A pipeline may send the keys of coming batches ahead: owners then bring rows
that they know into memory; rows are read, and new ones initialized, in the step. No number depends on it.
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
    """A lookup whose keys the owners have; `rows` makes it."""

    def __init__(self, rows: Callable[[], torch.Tensor]):
        self.rows = rows

    def record_stream(self, stream: torch.Stream) -> None:
        """No effect: keys are on the host."""


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
        collection: made with `on_ranks`.
        unsharded: the class of the module that is sharded.
        connections: of the ranks, for the keys of lookups; None = this process has all rows.
    """

    def __init__(
        self,
        collection: EmbeddingBagCollection | EmbeddingCollection,
        unsharded: type[torch.nn.Module],
        connections: Ranks | None,
    ):
        super().__init__()
        self._unsharded, holders = unsharded, collection.holders
        self._collection = (collection,)  # no part of this module: its parts are, by TorchRec's names
        setattr(self, holders, getattr(collection, holders))
        self.rows = collection.rows
        self._connections = connections
        self._sender = None if connections is None else Worker("oneemb-keys", dropped="a lookup that was dropped")
        """Sends the keys of lookups to their owners. Every rank makes one, and gives it the same lookups."""
        weights = dict(collection.named_parameters())
        optimizers = [in_backward_optimizers(weight)[0] for weight in weights.values()]
        self._fused_optimizer = FusedRowsOptimizer(weights, collection.states, optimizers)

    @property
    def collection(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """Collection that looks rows up; its `rows` are this module's."""
        return self._collection[0]

    @property
    def fused_optimizer(self) -> FusedRowsOptimizer:
        """Optimizer that steps the rows in the backward pass."""
        return self._fused_optimizer

    def create_context(self) -> LookupContext:
        """Context of one call."""
        return LookupContext()

    # TorchRec's signatures take any arguments.
    def input_dist(self, ctx: LookupContext, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """Send the unique keys of a batch to their owners. Nothing is inserted, and no number of a row is read.

        Raises, on several ranks where it is waited for:
            TypeError, ValueError: as of `EmbeddingBagCollection.forward`; on the other ranks RankError.
        """
        if isinstance(features, LazyAwaitable):
            features = features.wait()
        if self._sender is None or self._connections is None:
            lookups = ctx.lookups = self.collection.lookups_of(features)
            calls = [functools.partial(group.rows, **its) for group, its in zip(*lookups[:2], strict=True)]
            return KJTListSplitsAwaitable([NoWait(NoWait(cast(Any, _Sent(call)))) for call in calls], ctx)
        if self._sender.ended:
            raise StorageError("the sharded collection is closed; make it again to go on")
        failed: list[Exception] = []
        try:
            ctx.lookups = self.collection.lookups_of(features)
        except Exception as error:  # The other ranks wait for keys: the error takes the place of these.
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
        failed.clear()  # Its traceback holds this frame.
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute(self, ctx: LookupContext, dist_input: Sequence[_Sent]) -> list[torch.Tensor]:
        """Rows of the batch, from their owners.

        Raises:
            StoreFullError: rows do not fit; on the other ranks RankError.
        """
        return [sent.rows() for sent in dist_input]

    def output_dist(self, ctx: LookupContext, output: list[torch.Tensor]) -> LazyAwaitable[Any]:
        """Result of the collection."""
        assert ctx.lookups is not None
        return LazyNoWait(ctx.lookups.output(output))

    @property
    def unsharded_module_type(self) -> type[torch.nn.Module]:
        """Class that was sharded."""
        return self._unsharded

    @property
    def device(self) -> torch.device:
        """Device of lookups."""
        return self.collection.device

    def close(self) -> None:
        """Free memory, files and the locks on the paths, and end the thread."""
        if self._sender is not None:
            self._sender.end()
        self.collection.close()


class ShardedEmbeddingBagCollection(ShardedCollection):
    """Collection that `EmbeddingBagCollectionSharder` has sharded; see there."""


class ShardedEmbeddingCollection(ShardedCollection):
    """Collection that `EmbeddingCollectionSharder` has sharded; see there."""
