"""Internals of an embedding, for graphs, optimizers and adapters; users need none of them.

    stand_for_rows(embedding, weights)     parameters of another module stand for the rows, as those of an adapter do
    attach_rows(embedding, row_optimizer, optimizer)     every row gets the state of an optimizer
    drop_grads(embedding)                  the gradients of rows are forgotten
    keys_of(embedding, lookup)             the unique keys of a lookup
    check_fits(embedding, name)            whether a snapshot can be loaded
    load_named(embedding, snapshot)        the snapshot that `named_snapshot` gave

`embedding.store` has the rows of this rank, `embedding.ranks` own all rows together, and `embedding.lookups.asks_ranks`
is whether a lookup is an exchange of theirs.
"""

from oneemb.embeddings.lookups import keys_of
from oneemb.embeddings.snapshot_calls import check_fits, load_named
from oneemb.embeddings.weight_of_rows import attach_rows, drop_grads, stand_for_rows

__all__ = ["attach_rows", "check_fits", "drop_grads", "keys_of", "load_named", "stand_for_rows"]
