"""TorchRec's modules around a collection (feature processors, managed collisions, towers) when a model is sharded.

This library's sharders shard its collections, wherever in a model they are. TorchRec's sharders plan nothing for such a
collection, nor for a module around one. If a model has no other sharder, its first training step raises, on every rank;
an error of the planner would come on the first rank alone, and leave the others waiting.
"""

import functools
import gc
from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding_modules import BaseManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from oneemb.torchrec.collection import Collection

_INSIDE = "_embedding_module"
"""Attribute of a module of managed collisions that holds the collection."""

_OF_TORCHREC = (
    EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, FeatureProcessedEmbeddingBagCollectionSharder,
    BaseManagedCollisionEmbeddingCollectionSharder, EmbeddingTowerSharder, EmbeddingTowerCollectionSharder,
)  # fmt: skip


def pass_over_collections() -> None:
    """Patch TorchRec's sharders: `shardable_parameters` is empty for a module that is, or contains, a collection of
    this library.

    TorchRec's planner would divide by the rows of each table's parameter, which are 0; and since it runs on the first
    rank alone, the others would wait for its plan.
    """
    for sharder in _OF_TORCHREC:
        sharder.shardable_parameters = _passing_over(sharder.shardable_parameters)


def _passing_over(shardable_parameters: Any) -> Any:
    @functools.wraps(shardable_parameters)
    def of_others(self: Any, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        if any(isinstance(its, Collection) for its in module.modules()):
            return {}
        return shardable_parameters(self, module)

    return of_others


def managed_collision_sharders(sharders: Sequence[Any]) -> list[ModuleSharder[torch.nn.Module]]:
    """Sharders of TorchRec's modules of managed collisions, which shard the collection inside by one of `sharders`."""
    kinds = ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection
    return [_ManagedCollisionSharder(kind, sharders) for kind in kinds]


def refuse_behind_managed_collisions(collection: torch.nn.Module, module_fqn: str) -> None:
    """Raise ValueError if the collection at the path `module_fqn` is about to be sharded alone, though it is in a
    module of managed collisions: each rank would map the module's ids in its own way."""
    path, _, name = module_fqn.rpartition(".")
    if name != _INSIDE:  # A module does not know its parent, and the search below looks at every object of Python.
        return
    kinds = ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection
    for module in gc.get_objects():
        if issubclass(type(module), kinds) and module._embedding_module is collection:
            raise ValueError(
                f"sharders must have one for module {path!r}, a {type(module).__name__}, got only one for the"
                f" {type(collection).__name__} inside it; give DistributedModelParallel"
                " sharders=oneemb.torchrec.get_default_sharders(), which shards both on one rank, or leave the managed"
                " collisions out: oneemb's tables take any int64 as an id"
            )


class _ManagedCollisionSharder(BaseEmbeddingSharder[torch.nn.Module]):
    """Shards the collection in a module of managed collisions on one rank; on several ranks it raises on each."""

    def __init__(self, kind: type[torch.nn.Module], sharders: Sequence[Any]):
        super().__init__()
        self._kind = kind
        self._sharders = {sharder.module_type: sharder for sharder in sharders}

    @property
    def module_type(self) -> type[torch.nn.Module]:
        """The class whose modules are sharded."""
        return self._kind

    def shardable_parameters(self, module: Any) -> dict[str, torch.nn.Parameter]:
        """Parameters of the collection inside, under other names. By the real names TorchRec's planner would find the
        tables, and refuse those that ranks cannot share evenly, on the first rank alone."""
        inside = module._embedding_module
        sharder = self._sharders.get(type(inside))
        its = {} if sharder is None else sharder.shardable_parameters(inside)
        return {f"{name} behind managed collisions": parameter for name, parameter in its.items()}

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shard the collection inside the module; returns the module.

        Raises:
            ValueError: there are several ranks.
        """
        if env.world_size > 1:
            raise ValueError(
                f"module {module_fqn!r}, a {self._kind.__name__}, cannot be sharded over {env.world_size} ranks: each"
                " rank would map ids to rows in its own way. Leave the managed collisions out, and shard"
                " oneemb.torchrec's collections, whose tables take any int64 as an id, by"
                " oneemb.torchrec.get_default_sharders()"
            )
        inside = module._embedding_module
        its = self._sharders[type(inside)]
        fqn = f"{module_fqn or ''}.{_INSIDE}"
        module._embedding_module = its.shard_inside(inside, params, env, device, fqn)
        return module
