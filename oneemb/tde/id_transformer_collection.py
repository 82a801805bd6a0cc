"""Cache ids for the tables of one collection."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from oneemb.adapters.tables import ranks_of_job
from oneemb.tde.id_transformer import IDTransformer
from oneemb.tde.ps import PSCollection
from oneemb.tde.steps import BatchHandle, CachedTable, Steps
from oneemb.tde.traffic import ServerCalls

__all__ = ["IDTransformerCollection"]


class IDTransformerCollection:
    """Replaces the ids that a collection looks up by cache ids. All ranks construct it together, and make each call
    together.

    Args:
        tables: configs of the collection's tables; ValueError if two have the same name or feature.
        eviction_config, transform_config: see `IDTransformer`.
        ps_collection: parameter server to which rows are evicted and from which they are fetched; None = no row is
            evicted, and a full table is an error.
        reinitialise: True = initialize the rows that the server lacks. False = the static table's numbers stay in such
            rows until a table of the collection first evicts a row, as in upstream.
        seed: seed of initial rows.

    Reference: torchrec_dynamic_embedding's IDTransformerCollection.
    """

    def __init__(
        self, tables: Sequence[BaseEmbeddingConfig], eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None, ps_collection: PSCollection | None = None, *,
        reinitialise: bool = False, seed: int = 0,
    ):  # fmt: skip
        self._reinitialise = reinitialise
        self._traffic = ServerCalls() if ps_collection is None else ps_collection.traffic
        self.tables: list[CachedTable] = []
        self._steps: Steps | None = None
        seen: set[str] = set()
        for config in tables:
            features = list(config.feature_names) or [config.name]
            shared = seen & set(features)
            if shared or len(set(features)) < len(features):
                raise ValueError(
                    f"a feature must be looked up in one table of a collection, but {sorted(shared) or features} of"
                    f" table {config.name!r} belong to another table too"
                )
            seen |= set(features)
            if any(table.name == config.name for table in self.tables):
                raise ValueError(f"tables of a collection must have different names, got {config.name!r} twice")
            transformer = IDTransformer(config.num_embeddings, eviction_config, transform_config)
            ps = None if ps_collection is None else ps_collection[config.name]
            bounds = functools.partial(self.bounds_of, config)
            self.tables.append(CachedTable(config.name, features, transformer, ps, bounds, seed))

    def transform(self, global_features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[BatchHandle]]:
        """The features with cache ids, and handles to wait for before a lookup; see `Steps.transform`."""
        if self._steps is None:
            self._steps = Steps({"": self}, ranks_of_job(), self._traffic)
        kjts, handles = self._steps.transform({"": global_features})
        return kjts[""], handles

    def save(self) -> None:
        """Push the rows that were used since the last call to the server."""
        if self._steps is not None:
            self._steps.save()

    def bounds_of(self, config: BaseEmbeddingConfig) -> tuple[float, float] | None:
        """Bounds of the initial weights of rows that the server lacks; None = such rows keep the static table's
        numbers."""
        if not self._reinitialise and not any(table.transformer.ever_evicted for table in self.tables):
            return None
        return config.get_weight_init_min(), config.get_weight_init_max()
