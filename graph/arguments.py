"""Arguments of a lookup; a planned lookup. In a graph, fx nodes stand for the values."""

from typing import Any, NamedTuple


class Lookup(NamedTuple):
    """Arguments of an embedding's `forward`. Any: the lookup refuses values of wrong types."""

    ids: Any
    table_ids: Any = None
    offsets: Any = None
    columns: Any = None
    """Tuple with the table of each column."""
    per_sample_weights: Any = None
    pooling: Any = "sum"
    """In a graph, None = `build` computes `per_sample_weights`, so rows cannot be pooled before `build`."""

    def by_name(self) -> dict[str, Any]:
        """{name: value} of the arguments."""
        return self._asdict()

    @property
    def sums_bags(self) -> bool:
        """Whether bags are summed or averaged without `per_sample_weights`, so that owners may sum parts of bags
        (ops/requests.py)."""
        return self.offsets is not None and self.per_sample_weights is None and self.pooling in ("sum", "mean")


class Planned(NamedTuple):
    """A lookup that `build` is expected to make: one result of a graph of lookups."""

    embedding: str
    """Name of the embedding in the graph."""
    lookup: Lookup
    """Arguments: copies of the batch's values, or the values themselves in a plan with a single lookup."""
    reserved: Any = None
    """The reserved lookup, whose `acquire` gives the lease; None = rows were read without a lease, for an embedding
    that is not trained."""
    rows: Any = None
    """The weights that were read; None = not read yet."""
    origin: Any = None
    """Tensor of the batch whose copy the ids are; None = the ids are no such copy."""
