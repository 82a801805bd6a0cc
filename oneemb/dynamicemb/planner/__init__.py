"""Plans of models of which some tables are dynamic.

    constraints = {"users": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=...), ...}
    enumerator = DynamicEmbeddingEnumerator(topology, constraints=constraints)
    planner = DynamicEmbeddingShardingPlanner(eb_configs, topology, enumerator=enumerator, constraints=constraints)
    plan = planner.collective_plan(model, [DynamicEmbeddingCollectionSharder()], dist.GroupMember.WORLD)

TorchRec plans the others. A dynamic table has a place in its reckoning, of some rows; its rows are spread over all
ranks by id, whatever comes out.
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
