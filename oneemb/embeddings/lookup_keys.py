"""The unique keys of a lookup of an embedding."""

from oneemb.embeddings.snapshot_calls import SnapshotCalls
from oneemb.graph import ops
from oneemb.graph.arguments import Lookup


def keys_of(embedding: SnapshotCalls, lookup: Lookup, inserts: bool = False) -> ops.Keys:
    """The unique keys of a lookup; raises as `forward` does of what is wrong with its arguments.

    Args:
        inserts: whether it is to insert unknown keys: see `say_if_empty`.
    """
    if inserts and embedding.may_be_empty:
        embedding.say_if_empty()
    keys = ops.unique_keys(
        lookup.ids, lookup.table_ids, embedding.num_tables, embedding.key_type, embedding.padding_idx, lookup.offsets,
        lookup.columns, threads=embedding.store.threads,
    )  # fmt: skip
    if lookup.per_sample_weights is not None or lookup.pooling != "sum":
        ops.check_pooling(keys, lookup.per_sample_weights, lookup.pooling)
    return keys
