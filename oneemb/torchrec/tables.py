"""One table of a collection: its store, initializer and optimizers, and which tables can share an embedding with it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from oneemb.adapters.table_state import TableState
from oneemb.adapters.tables import TableParameter, in_backward_optimizers
from oneemb.graph.row_optimizers import row_optimizer_of
from oneemb.options import Initializer, StoreOptions, make_cached_host_mem_store_options, make_device_mem_store_options
from oneemb.policies import RowPolicy
from oneemb.torchrec.configs import drawn_weights, dtype_of, initializer_of, later_rows, policy_of
from oneemb.torchrec.optimizers import row_stepper


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Initializer and policy of a table's rows, in place of those that its config asks for."""

    initializer: Initializer
    policy: RowPolicy
    cache_budget_mb: int | None = None
    """Size of the cache on the device for rows in host memory; None = rows live on the device of lookups. Has no effect
    with `store_options`, which say where rows live."""


class Table:
    """A table of a collection.

    Args:
        config: TorchRec's config.
        pooling: "sum", "mean" or "none".
        options: where the rows live; None = in memory, under a temporary path.
        extra: options that the config lacks; None = there are none.
        parameter: parameter that stands for the rows.
    """

    def __init__(
        self, config: BaseEmbeddingConfig, pooling: str, options: StoreOptions | None, extra: TableRows | None,
        parameter: TableParameter,
    ):  # fmt: skip
        self.config, self.pooling, self.options, self.extra, self.parameter = config, pooling, options, extra, parameter
        self.steppers: tuple[torch.optim.Optimizer, ...] = ()
        """Optimizers that stepped the table in the backward pass when its embedding was made."""
        self.state: TableState | None = None
        """State for state dicts; None = the table has no rows yet."""

    @property
    def starts_empty(self) -> bool:
        """Whether the table starts without rows, which are then initialized at their first lookups."""
        return self.options is not None or bool(self.config.use_virtual_table)

    @property
    def optimizers_changed(self) -> bool:
        """Whether the table's optimizers have changed since its embedding was made."""
        return in_backward_optimizers(self.parameter.weight) != self.steppers

    def kind(self) -> tuple[object, ...]:
        """Key that is equal for tables that can share an embedding. ValueError if the optimizer is not supported for
        rows, or the table has two policies."""
        config, policy = self.config, policy_of(self.config)
        if policy is not None and self.extra is not None:
            raise ValueError(
                f"table {config.name!r}: virtual_table_eviction_policy and the options of oneemb.dynamicemb both"
                " choose the rows to evict; leave out the policy"
            )
        budget = None if self.extra is None else self.extra.cache_budget_mb
        where = self.options, budget, self.starts_empty
        return config.embedding_dim, dtype_of(config), self.pooling, kind_of_steps(self.steppers), policy, *where

    def words(self) -> list[str]:
        """Words for the name of the folder of the table's embedding: width and dtype, pooling, optimizer."""
        dtype, steps = str(dtype_of(self.config)).removeprefix("torch."), kind_of_steps(self.steppers)
        return [f"{self.config.embedding_dim}x{dtype}", self.pooling, *([steps[1]] if steps else [])]

    def store_at(self, paths: Sequence[str]) -> StoreOptions:
        """Options of the embedding's store, in folders `paths`; no paths = in a temporary folder."""
        if self.options is not None:
            return at_paths(self.options, paths)
        if self.extra is not None and self.extra.cache_budget_mb is not None:
            return make_cached_host_mem_store_options(self.extra.cache_budget_mb, list(paths) or None)
        return make_device_mem_store_options(list(paths) or None)

    def initializer(self) -> Initializer:
        """Initializer of rows that start at their first lookup."""
        if self.extra is not None:
            return self.extra.initializer
        return initializer_of(self.config) if self.starts_empty else later_rows(self.config)

    def rows_drawn_together(self) -> torch.Tensor | None:
        """All rows [num_embeddings, D], if `init_fn` can only fill a whole table; None = each row is initialized by
        itself."""
        if self.starts_empty or self.extra is not None:
            return None
        try:
            initializer_of(self.config)
        except ValueError:
            return fill(self.config, drawn_weights(self.config))
        return None


def kind_of_steps(steppers: Sequence[torch.optim.Optimizer]) -> tuple[Any, ...] | None:
    """Key that is equal for tables that one optimizer can step together in the backward pass; None = the table is not
    stepped there. ValueError if a table has several optimizers, or the class is not supported for rows."""
    if not steppers:
        return None
    if len(steppers) > 1:
        raise ValueError(
            "apply_optimizer_in_backward must be called once for a table, was called twice; one optimizer can step a"
            " table"
        )
    stepper = row_stepper(steppers[0])
    found = row_optimizer_of(stepper, stepper.param_groups[0])
    return type(stepper), found.name, found.weight_state, found.row_state, found.fixed


def fill(config: BaseEmbeddingConfig, weights: torch.Tensor) -> torch.Tensor:
    """Fill `weights` by `init_fn`; returns them."""
    assert config.init_fn is not None, "TorchRec's configs give it one"
    with torch.no_grad():
        config.init_fn(weights)
    return weights


def at_paths(options: StoreOptions, paths: Sequence[str]) -> StoreOptions:
    """Copy of the options with `paths` as folders."""
    return dataclasses.replace(options, persistent_path=tuple(paths))
