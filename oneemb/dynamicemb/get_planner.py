"""A planner for tables, each of which is data-parallel, dynamic or row-wise."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import distributed
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.types import BoundsCheckMode, ShardingType
from torchrec.modules.embedding_configs import EmbeddingConfig

from oneemb.dynamicemb.dynamicemb_config import DynamicEmbTableOptions
from oneemb.dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)

__all__ = ["get_planner"]

_KERNELS = {"prefetch": ["fused_uvm_caching"], "native": ["fused", "fused_uvm"], "none": []}


def get_planner(
    eb_configs: list[EmbeddingConfig],
    data_parallel_embedding_table_names: Collection[str],
    dynamicemb_options_dict: Mapping[str, DynamicEmbTableOptions],
    device: torch.device,
    pipeline_type: str = "none",
    ddr_cap: int = 512 << 30,
    intra_host_bw: float = 450e9,
    inter_host_bw: float = 25e9,
) -> DynamicEmbeddingShardingPlanner:
    """Planner for tables of these configs.

    Args:
        eb_configs: configs of all tables.
        data_parallel_embedding_table_names: tables of which each rank has all rows.
        dynamicemb_options_dict: {dynamic table: its options}.
        device: device of the model.
        pipeline_type: "none", "native" or "prefetch"; says which of TorchRec's kernels the other tables may use.
        ddr_cap: bytes of host memory.
        intra_host_bw, inter_host_bw: bandwidth between devices of a host, and between hosts, in bytes per second.
    """
    constraints: dict[str, Any] = {}
    for config in eb_configs:
        options = dynamicemb_options_dict.get(config.name)
        kind, kernels = ShardingType.ROW_WISE, _KERNELS[pipeline_type]
        if config.name in data_parallel_embedding_table_names:
            kind, options, kernels = ShardingType.DATA_PARALLEL, None, [] if pipeline_type == "none" else ["dense"]
        constraints[config.name] = DynamicEmbParameterConstraints(
            sharding_types=[kind.value], bounds_check_mode=BoundsCheckMode.NONE, compute_kernels=kernels or None,
            use_dynamicemb=options is not None, dynamicemb_options=options or DynamicEmbTableOptions(),
        )  # fmt: skip
    on_gpu = device.type == "cuda"
    topology = Topology(
        local_world_size=get_local_size(), world_size=distributed.get_world_size(), compute_device=device.type,
        hbm_cap=torch.cuda.get_device_properties(device).total_memory if on_gpu else None, ddr_cap=ddr_cap,
        intra_host_bw=intra_host_bw, inter_host_bw=inter_host_bw,
    )  # fmt: skip
    return DynamicEmbeddingShardingPlanner(
        eb_configs, topology, enumerator=DynamicEmbeddingEnumerator(topology, constraints=constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=0.05), constraints=constraints,
    )  # fmt: skip
