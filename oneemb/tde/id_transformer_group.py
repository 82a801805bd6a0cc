"""Cache ids for all collections of a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from oneemb.adapters.tables import ranks_of_job
from oneemb.tde.id_transformer_collection import IDTransformerCollection
from oneemb.tde.ps import PSCollection
from oneemb.tde.steps import BatchHandle, Steps
from oneemb.tde.table_tensors import check_optimizers
from oneemb.tde.traffic import ServerCalls
from oneemb.tde.utils import sharded_modules

__all__ = ["IDTransformerGroup"]


class IDTransformerGroup:
    """Cache ids for all tables of a model, and their parameter servers. All ranks construct it together.

    Args:
        url: URL of the parameter server; or a function that returns the URL for a module's path and a table's name.
        module: the model, in DistributedModelParallel.
        configs_dict: {path of a collection's module: configs of its tables}.
        eviction_config, transform_config: see `IDTransformer`.
        ps_config: `{"chunk_size": ..., "seed": ..., "optimizers": [...]}`: number of values that one call of the server
            pushes; seed of initial rows; optimizers of data-parallel tables, whose state is pushed with the rows.
        parallel: has no effect.

    Raises:
        ValueError: a path leads to no module that TorchRec has sharded, or a table cannot be on a server.
        ServerError: a server cannot be reached.

    Reference: torchrec_dynamic_embedding's IDTransformerGroup.
    """

    def __init__(
        self,
        url: str | Callable[[str, str], str],
        module: Any,
        configs_dict: Mapping[str, Sequence[BaseEmbeddingConfig]],
        *,
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
        ps_config: Mapping[str, Any] | None = None,
        parallel: bool = True,
    ):
        del parallel
        ps_config = ps_config or {}
        sharded = sharded_modules(module.module, "", module.plan)
        ranks, traffic = ranks_of_job(), ServerCalls()
        self._collections: dict[str, IDTransformerCollection] = {}
        self._servers: list[PSCollection] = []
        optimizers: Sequence[torch.optim.Optimizer] = ps_config.get("optimizers", ())
        for path, configs in configs_dict.items():
            if path not in sharded:
                raise ValueError(f"configs_dict must have paths of sharded modules, {list(sharded)}, got {path!r}")
            collection, plan = sharded[path]
            rows = PSCollection.fromModule(path, collection, plan, url, ps_config, traffic=traffic, rank=ranks.rank)
            check_optimizers(path, collection, plan, optimizers)
            if ranks.size > 1:
                _check_shared(path, plan, url)
            self._servers.append(rows)
            self._collections[path] = IDTransformerCollection(
                configs, eviction_config, transform_config, rows, reinitialise=True, seed=ps_config.get("seed", 0)
            )
        self.steps = Steps(self._collections, ranks, traffic)

    def __contains__(self, path: str) -> bool:
        return path in self._collections

    def transform(
        self, kjt_dict: Mapping[str, KeyedJaggedTensor]
    ) -> tuple[dict[str, KeyedJaggedTensor], list[BatchHandle]]:
        """{path: features with cache ids}, and handles to wait for before a lookup; see `Steps.transform`."""
        return self.steps.transform(kjt_dict)

    def save(self) -> None:
        """Push the rows that were used since the last call; see `Steps.save`."""
        self.steps.save()

    def close(self) -> None:
        """Close the connections to the servers."""
        for rows in self._servers:
            rows.close()


def _check_shared(path: str, plan: Mapping[str, Any], url: str | Callable[[str, str], str]) -> None:
    """Raise ValueError if several ranks share a table whose server keeps rows in one process's memory or files."""
    for table, how in plan.items():
        address = url if isinstance(url, str) else url(path, table)
        scheme, _, _ = address.partition("://")
        if scheme in ("memory", "file") and how.sharding_type != "table_wise":
            raise ValueError(
                f"table {table} of module {path!r} is shared by several ranks ({how.sharding_type}), so its server must"
                f" be one that all ranks reach, got {scheme}://, which is one process's; use another server, or shard"
                " table_wise"
            )
