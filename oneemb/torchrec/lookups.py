"""Lookups of one call of a collection: of each embedding one, from whose rows the result is made."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from oneemb.embeddings.embedding import MultiTableEmbedding


class Group(NamedTuple):
    """Tables that are one embedding."""

    rows: MultiTableEmbedding
    tables: tuple[int, ...]
    """Which of the configs they are."""
    columns: tuple[int, ...]
    """Which of the embeddings of the output they give."""
    tables_of_columns: tuple[int, ...]
    """Which table of `rows` each column is of."""
    pooling: str


class Lookups(NamedTuple):
    """Lookups of one call of a collection."""

    groups: Sequence[Group]
    arguments: Sequence[dict[str, Any]]
    """Arguments of the lookup of each group, as `MultiTableEmbedding.forward` takes them."""
    output: Callable[[Sequence[torch.Tensor]], Any]
    """Makes the result of the call from the rows of each group."""

    def look_up(self) -> Any:
        """Make the lookups; returns the result of the call."""
        its = zip(self.groups, self.arguments, strict=True)
        return self.output([group.rows(**arguments) for group, arguments in its])


def arguments_of(
    ids: torch.Tensor,
    table_ids: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
    pooling: str | None = None,
    columns: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """The arguments of a lookup."""
    return {
        "ids": ids, "table_ids": table_ids, "offsets": offsets, "per_sample_weights": per_sample_weights,
        "pooling": pooling, "columns": columns,
    }  # fmt: skip
