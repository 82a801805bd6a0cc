"""TorchRec's enumerator, for models with dynamic tables; see `oneemb.dynamicemb.planner`."""

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardEstimator, ShardingOption
from torchrec.distributed.types import ModuleSharder

__all__ = ["DynamicEmbeddingEnumerator", "is_dynamic"]

_PLANNED_ROWS = 1 << 14
"""Largest number of rows of a dynamic table that TorchRec's planner is told of; it would refuse unlimited tables."""


def is_dynamic(constraints: ParameterConstraints) -> bool:
    """Whether these are the constraints of a dynamic table."""
    return bool(getattr(constraints, "use_dynamicemb", False))


class _SomeRows:
    """Wrapper of a sharder that tells a planner of at most 16,384 rows for each dynamic table."""

    def __init__(self, sharder: ModuleSharder[torch.nn.Module], dynamic: set[str]):
        self._sharder, self._dynamic = sharder, dynamic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sharder, name)

    def shardable_parameters(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        parameters = self._sharder.shardable_parameters(module)
        for name in self._dynamic & parameters.keys():
            weight = parameters[name]
            rows = min(len(weight), _PLANNED_ROWS)
            parameters[name] = torch.nn.Parameter(torch.empty(rows, weight.shape[1], dtype=weight.dtype, device="meta"))
        return parameters


class DynamicEmbeddingEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, for models with dynamic tables.

    Args:
        topology, batch_size, estimator, use_exact_enumerate_order: same as for TorchRec's enumerator.
        constraints: {table: its constraints}; those of dynamic tables are DynamicEmbParameterConstraints.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = BATCH_SIZE,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ):
        super().__init__(
            topology, BATCH_SIZE if batch_size is None else batch_size, dict(constraints or {}), estimator,
            use_exact_enumerate_order,
        )  # fmt: skip
        self._dynamic = {name for name, constraint in (constraints or {}).items() if is_dynamic(constraint)}

    def enumerate(
        self, module: torch.nn.Module, sharders: list[ModuleSharder[torch.nn.Module]]
    ) -> list[ShardingOption]:
        """Sharding options of each table of a model, for a proposer of plans.

        A dynamic table is enumerated with at most 16,384 rows, since TorchRec's estimators count memory for all
        `num_embeddings` rows.

        Args:
            module: the model.
            sharders: sharders for the classes of the model's collections. Tables of a collection without one get no
                option.

        Raises:
            RuntimeError: constraints leave a table no sharding type or kernel.
        """
        seen: list[Any] = [_SomeRows(sharder, self._dynamic) for sharder in sharders]
        return super().enumerate(module, seen)
