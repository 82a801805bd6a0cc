"""Plans for models in which some tables are dynamic.

    constraints = {"users": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=...), ...}
    enumerator = DynamicEmbeddingEnumerator(topology, constraints=constraints)
    planner = DynamicEmbeddingShardingPlanner(eb_configs, topology, enumerator=enumerator, constraints=constraints)
    plan = planner.collective_plan(model, [DynamicEmbeddingCollectionSharder()], dist.GroupMember.WORLD)

TorchRec's planner plans the other tables. It counts a dynamic table as one with a few rows; the rows of a dynamic table
are spread over all ranks by key, whatever the plan says.
"""

from oneemb.dynamicemb.planner.enumerators import DynamicEmbeddingEnumerator
from oneemb.dynamicemb.planner.planner import (
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from oneemb.dynamicemb.types import absent

__all__ = [
    "DynamicEmbParameterConstraints", "DynamicEmbParameterSharding", "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
]  # fmt: skip

__getattr__ = absent(
    __name__,
    {"rw_sharding": "rows of dynamic tables go to ranks by id, whatever a plan says; use oneemb.dynamicemb.shard"},
)
