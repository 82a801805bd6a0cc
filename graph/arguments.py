"""Arguments of a lookup, and a lookup as a graph returns it. In a graph, nodes stand for the values."""

from typing import Any, NamedTuple


class Lookup(NamedTuple):
    """Arguments of an embedding's `forward`. Any: the lookup itself refuses wrong types."""

    ids: Any
    table_ids: Any = None
    offsets: Any = None
    columns: Any = None
    """A tuple of the table of each column."""
    per_sample_weights: Any = None
    pooling: Any = "sum"
    """In a graph, None = ids are pooled by weights that are not known before `build`."""

    def by_name(self) -> dict[str, Any]:
        """The arguments by their names."""
        return self._asdict()

    @property
    def sums_bags(self) -> bool:
        """Whether it gives sums or means of bags that owners may have a part in (ops/requests.py)."""
        return self.offsets is not None and self.per_sample_weights is None and self.pooling in ("sum", "mean")


class Planned(NamedTuple):
    """A lookup that `build` is expected to make, as a graph returns it."""

    embedding: str
    """Name of the embedding in the graph."""
    lookup: Lookup
    """Copies of the batch's values; the values themselves in a plan of a single lookup."""
    reserved: Any = None
    """A lookup to acquire; None = rows were read without a lease, for an embedding that is not trained."""
    rows: Any = None
    """The rows that were read; None = nothing yet."""
    origin: Any = None
    """Tensor of the batch that the ids are a copy of, if they are a copy."""
