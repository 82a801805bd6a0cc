"""Constraints, plans and planner of dynamic tables; see `oneemb.dynamicemb.planner`."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import Enumerator, Partitioner, PerfModel, Proposer, Stats, StorageReservation
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from oneemb.dynamicemb.dynamicemb_config import (
    DEFAULT_INDEX_TYPE,
    DynamicEmbTableOptions,
    complete_initializer_args,
    data_type_to_dtype,
    get_sharded_table_capacity,
)
from oneemb.dynamicemb.planner.enumerators import DynamicEmbeddingEnumerator, is_dynamic

__all__ = [
    "DynamicEmbParameterConstraints", "DynamicEmbParameterSharding", "DynamicEmbeddingShardingPlanner",
]  # fmt: skip


@dataclass
class DynamicEmbParameterConstraints(ParameterConstraints):
    """TorchRec's constraints of a table, extended for dynamic tables.

    Args:
        use_dynamicemb: whether the table is dynamic.
        dynamicemb_options: options of a dynamic table.
    """

    use_dynamicemb: bool | None = False
    dynamicemb_options: DynamicEmbTableOptions = field(default_factory=DynamicEmbTableOptions)


@dataclass
class DynamicEmbParameterSharding(ParameterSharding):
    """TorchRec's plan for a table, with the options of a dynamic table."""

    compute_kernel: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
    customized_compute_kernel: str | None = "DynamicEmb"
    dist_type: str = "roundrobin"
    dynamicemb_options: DynamicEmbTableOptions = field(default_factory=DynamicEmbTableOptions)


class DynamicEmbeddingShardingPlanner:
    """TorchRec's planner, for models with dynamic tables.

    Args:
        eb_configs: configs of all tables.
        topology: None = this machine, without limits.
        batch_size, storage_reservation, proposer, partitioner, performance_model, stats, debug: same as for TorchRec's
            planner.
        enumerator: None = a DynamicEmbeddingEnumerator.
        constraints: {table: its constraints}, with an entry for every table.

    Raises:
        ValueError: a table has no constraints, constraints name no table, or two tables have one name.
    """

    def __init__(
        self,
        eb_configs: list[BaseEmbeddingConfig],
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
    ):
        constraints = dict(constraints or {})
        names = [config.name for config in eb_configs]
        if len(set(names)) < len(names) or set(names) != constraints.keys():
            raise ValueError(
                f"constraints must be given for each table, and names of tables must differ; tables are {names},"
                f" constraints are for {list(constraints)}"
            )
        if topology is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            topology = Topology(
                world_size=distributed.get_world_size(), compute_device=device, local_world_size=get_local_size()
            )
        if enumerator is None:
            enumerator = DynamicEmbeddingEnumerator(topology, batch_size, constraints)
        others: dict[str, ParameterConstraints] = {}
        for name, constraint in constraints.items():
            # The planner needs sharding types for each table.
            others[name] = (
                ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])
                if is_dynamic(constraint)
                else constraint
            )
        self._planner = EmbeddingShardingPlanner(
            topology, batch_size, enumerator, storage_reservation, proposer, partitioner, performance_model, stats,
            others, debug,
        )  # fmt: skip
        self._dynamic = {
            config.name: _sharding_of(config, constraint.dynamicemb_options, topology)
            for config in eb_configs
            if isinstance(constraint := constraints[config.name], DynamicEmbParameterConstraints)
            and is_dynamic(constraint)
        }

    def collective_plan(
        self,
        module: torch.nn.Module,
        sharders: list[ModuleSharder[torch.nn.Module]],
        pg: "distributed.ProcessGroup | None" = None,
    ) -> ShardingPlan:
        """Make a plan, the same on all ranks of `pg` (None = all ranks). Every rank makes the call."""
        plan = self._planner.collective_plan(module, sharders, pg or distributed.group.WORLD)
        for of_module in plan.plan.values():
            shardings: Any = of_module
            for name in shardings.keys() & self._dynamic.keys():
                shardings[name] = copy.copy(self._dynamic[name])
        return plan


def _sharding_of(
    config: BaseEmbeddingConfig, options: DynamicEmbTableOptions, topology: Topology
) -> DynamicEmbParameterSharding:
    ranks = topology.world_size
    rows = options.max_capacity or get_sharded_table_capacity(config, ranks, options.bucket_capacity)
    options = replace(
        options, initializer_args=complete_initializer_args(options.initializer_args, embedding_config=config),
        max_capacity=rows, init_capacity=min(options.init_capacity or rows, rows), dim=config.embedding_dim,
        index_type=options.index_type or DEFAULT_INDEX_TYPE,
        embedding_dtype=options.embedding_dtype or data_type_to_dtype(config.data_type),
        local_hbm_for_values=-(-options.global_hbm_for_values // ranks),
    )  # fmt: skip
    shards: Sequence[ShardMetadata] = [
        ShardMetadata(
            shard_sizes=[rows, config.embedding_dim],
            shard_offsets=[rows * r, 0],
            placement=placement(topology.compute_device, r, topology.local_world_size),
        )  # fmt: skip
        for r in range(ranks)
    ]
    return DynamicEmbParameterSharding(
        sharding_type=ShardingType.ROW_WISE.value, ranks=list(range(ranks)),
        sharding_spec=EnumerableShardingSpec(list(shards)), dist_type=options.dist_type, dynamicemb_options=options,
    )  # fmt: skip
