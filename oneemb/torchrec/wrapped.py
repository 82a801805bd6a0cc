"""TorchRec's modules around a collection (feature processors, managed collisions, towers) in a model that is sharded.

oneemb's sharders find oneemb's collections at any depth of a model. TorchRec's sharders are patched to plan nothing for
such a collection, nor for a module around one. A model that has only TorchRec's sharders then raises in its first
training step, on every rank; an error of the planner would be raised on the first rank alone while the others wait.
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
"""Name of the attribute in which a module of managed collisions holds its collection."""

_OF_TORCHREC = (
    EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, FeatureProcessedEmbeddingBagCollectionSharder,
    BaseManagedCollisionEmbeddingCollectionSharder, EmbeddingTowerSharder, EmbeddingTowerCollectionSharder,
)  # fmt: skip


def pass_over_collections() -> None:
    """Patch TorchRec's sharders: `shardable_parameters` is empty for a module that is, or contains, a collection of
    oneemb.

    Each table's parameter has 0 rows, by which TorchRec's planner would divide. The planner runs on the first rank
    alone, so the others would wait for its plan.
    """
    for sharder in _OF_TORCHREC:
        sharder.shardable_parameters = _passing_over(sharder.shardable_parameters)


def _passing_over(shardable_parameters: Any) -> Any:
    @functools.wraps(shardable_parameters)
    def of_others(self: Any, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        if any(isinstance(part, Collection) for part in module.modules()):
            return {}
        return shardable_parameters(self, module)

    return of_others


def managed_collision_sharders(sharders: Sequence[Any]) -> list[ModuleSharder[torch.nn.Module]]:
    """Sharders of TorchRec's two modules of managed collisions. Each shards the collection that its module contains
    with the sharder of `sharders` for that collection."""
    kinds = ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection
    return [_ManagedCollisionSharder(kind, sharders) for kind in kinds]


def refuse_behind_managed_collisions(collection: torch.nn.Module, module_fqn: str) -> None:
    """Raise ValueError if the collection at path `module_fqn` is inside a module of managed collisions but is about to
    be sharded without it: each rank would then map ids to rows in its own way."""
    path, _, name = module_fqn.rpartition(".")
    if name != _INSIDE:  # The search below for the parent visits every object of Python.
        return
    kinds = ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection
    for module in gc.get_objects():
        if issubclass(type(module), kinds) and module._embedding_module is collection:
            raise ValueError(
                f"sharders must have one for module {path!r}, a {type(module).__name__}, got only one for the"
                f" {type(collection).__name__} inside it; give DistributedModelParallel"
                " sharders=oneemb.torchrec.get_default_sharders(), which shards both on one rank, or leave the managed"
                " collisions out, since oneemb's tables take any int64 as an id"
            )


class _ManagedCollisionSharder(BaseEmbeddingSharder[torch.nn.Module]):
    """Shards the collection inside a module of managed collisions, on one rank; several ranks are an error on each of
    them."""

    def __init__(self, kind: type[torch.nn.Module], sharders: Sequence[Any]):
        super().__init__()
        self._kind = kind
        self._sharders = {sharder.module_type: sharder for sharder in sharders}

    @property
    def module_type(self) -> type[torch.nn.Module]:
        """Class of the modules that this sharder shards."""
        return self._kind

    def shardable_parameters(self, module: Any) -> dict[str, torch.nn.Parameter]:
        """Parameters of the collection inside, under other names than the tables'. By the tables' names TorchRec's
        planner would check them, on the first rank alone, and refuse tables that ranks cannot share evenly."""
        inside = module._embedding_module
        sharder = self._sharders.get(type(inside))
        parameters = {} if sharder is None else sharder.shardable_parameters(inside)
        return {f"{name} behind managed collisions": parameter for name, parameter in parameters.items()}

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
                f"module {module_fqn!r}, a {self._kind.__name__}, cannot be sharded over {env.world_size} ranks, since"
                " each rank would map ids to rows in its own way; leave the managed collisions out, and shard"
                " collections of oneemb.torchrec, whose tables take any int64 as an id, by"
                " oneemb.torchrec.get_default_sharders()"
            )
        inside = module._embedding_module
        sharder = self._sharders[type(inside)]
        fqn = f"{module_fqn or ''}.{_INSIDE}"
        module._embedding_module = sharder.shard_inside(inside, params, env, device, fqn)
        return module
