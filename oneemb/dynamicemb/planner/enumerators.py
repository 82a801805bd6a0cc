"""TorchRec's enumerator, which sees some rows of dynamic tables; see `oneemb.dynamicemb.planner`."""

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
"""Rows of a dynamic table as TorchRec's planner sees it, which would refuse what has no end."""


def is_dynamic(constraints: ParameterConstraints) -> bool:
    """Whether the table of these constraints is dynamic."""
    return bool(getattr(constraints, "use_dynamicemb", False))


class _SomeRows:
    """A sharder that gives a planner some rows of dynamic tables, and is like `sharder` otherwise."""

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
    """TorchRec's enumerator, of models with dynamic tables.

    Args:
        topology, batch_size, estimator, use_exact_enumerate_order: as of TorchRec's.
        constraints: by table; those of dynamic ones are DynamicEmbParameterConstraints.
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
        self._dynamic = {name for name, its in (constraints or {}).items() if is_dynamic(its)}

    def enumerate(
        self, module: torch.nn.Module, sharders: list[ModuleSharder[torch.nn.Module]]
    ) -> list[ShardingOption]:
        """Sharding options of each table of a model, for a proposer of plans.

        A dynamic table is enumerated as one of 16,384 rows at most, since TorchRec's estimators count memory for all
        `num_embeddings` rows.

        Args:
            module: the model.
            sharders: by the class of each collection in it; a table of a class without one has no option.

        Raises:
            RuntimeError: constraints leave a table no sharding type or kernel.
        """
        seen: list[Any] = [_SomeRows(sharder, self._dynamic) for sharder in sharders]
        return super().enumerate(module, seen)
