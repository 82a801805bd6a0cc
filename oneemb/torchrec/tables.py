"""One table of a collection: where its rows are, how they begin, what steps them, and which tables lie with it."""

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
from oneemb.torchrec.configs import dtype_of, first_rows, initializer_of, later_rows, policy_of
from oneemb.torchrec.optimizers import row_stepper


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Initializer and policy of a table's rows, where its config does not say."""

    initializer: Initializer
    policy: RowPolicy
    cache_budget_mb: int | None = None
    """Size of the cache on the device, for rows in the host's memory; None = rows are where lookups run. Not used with
    `store_options`, which say where rows are."""


class Table:
    """A table of a collection.

    Args:
        config: TorchRec's.
        pooling: "sum", "mean" or "none".
        options: where its rows are; None = in memory, under a temporary path.
        extra: options that are not in its config; None = there are none.
        parameter: stands for its rows.
    """

    def __init__(
        self, config: BaseEmbeddingConfig, pooling: str, options: StoreOptions | None, extra: TableRows | None,
        parameter: TableParameter,
    ):  # fmt: skip
        self.config, self.pooling, self.options, self.extra, self.parameter = config, pooling, options, extra, parameter
        self.steppers: tuple[torch.optim.Optimizer, ...] = ()
        """Optimizers that step it in the backward pass, as of the time at which its embedding was made."""
        self.state: TableState | None = None
        """State for state dicts; None = the table has no rows yet."""

    @property
    def starts_empty(self) -> bool:
        """Whether it begins without rows, which are initialized at their first lookups."""
        return self.options is not None or bool(self.config.use_virtual_table)

    @property
    def is_regrouped(self) -> bool:
        """Whether its optimizers have changed."""
        return in_backward_optimizers(self.parameter.weight) != self.steppers

    def kind(self) -> tuple[object, ...]:
        """Key of the tables that are one embedding; ValueError for an optimizer that rows cannot follow, or two
        policies of rows."""
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
        """Words of the name of the folder of its embedding."""
        dtype, steps = str(dtype_of(self.config)).removeprefix("torch."), kind_of_steps(self.steppers)
        return [f"{self.config.embedding_dim}x{dtype}", self.pooling, *([steps[1]] if steps else [])]

    def store_at(self, paths: Sequence[str]) -> StoreOptions:
        """Options of the store of its embedding, in these folders; none = in a temporary one."""
        if self.options is not None:
            return at_paths(self.options, paths)
        if self.extra is not None and self.extra.cache_budget_mb is not None:
            return make_cached_host_mem_store_options(self.extra.cache_budget_mb, list(paths) or None)
        return make_device_mem_store_options(list(paths) or None)

    def initializer(self) -> Initializer:
        """Initializer of rows at their first lookup."""
        if self.extra is not None:
            return self.extra.initializer
        return initializer_of(self.config) if self.starts_empty else later_rows(self.config)

    def rows_drawn_together(self) -> torch.Tensor | None:
        """All rows, of an `init_fn` that fills a whole table in its own way; None = each row is initialized by
        itself."""
        if self.starts_empty or self.extra is not None:
            return None
        try:
            initializer_of(self.config)
        except ValueError:
            return fill(self.config, first_rows(self.config))
        return None


def kind_of_steps(steppers: Sequence[torch.optim.Optimizer]) -> tuple[Any, ...] | None:
    """Key of the tables that can be stepped as one in the backward pass; None = they are not stepped there. ValueError
    if a table has several optimizers, or the class is not supported for rows."""
    if not steppers:
        return None
    if len(steppers) > 1:
        raise ValueError("apply_optimizer_in_backward was called twice for a table, which one optimizer steps")
    stepper = row_stepper(steppers[0])
    found = row_optimizer_of(stepper, stepper.param_groups[0])
    return type(stepper), found.name, found.weight_state, found.row_state, found.fixed


def fill(config: BaseEmbeddingConfig, weights: torch.Tensor) -> torch.Tensor:
    """The weights, filled by `init_fn`."""
    assert config.init_fn is not None, "TorchRec's configs give it one"
    with torch.no_grad():
        config.init_fn(weights)
    return weights


def at_paths(options: StoreOptions, paths: Sequence[str]) -> StoreOptions:
    """The options with other folders."""
    return dataclasses.replace(options, persistent_path=tuple(paths))
