"""Internals of an embedding, for graphs, optimizers and adapters; users need none of them.

    stand_for_rows(embedding, weights)     lets parameters of another module, such as an adapter, stand for the rows
    attach_rows(embedding, row_optimizer, optimizer)     gives every row the state of an optimizer
    drop_grads(embedding)                  drops the gradients of rows
    keys_of(embedding, lookup)             returns the unique keys of a lookup
    check_fits(embedding, name)            raises unless a snapshot can be loaded
    load_named(embedding, snapshot)        loads a snapshot that `named_snapshot` has returned

`embedding.store` has the rows of this rank, `embedding.ranks` own all rows together, and `embedding.lookups.asks_ranks`
says whether every lookup is an exchange of the ranks.
"""

from oneemb.embeddings.lookups import keys_of
from oneemb.embeddings.snapshot_calls import check_fits, load_named
from oneemb.embeddings.weight_of_rows import attach_rows, drop_grads, stand_for_rows

__all__ = ["attach_rows", "check_fits", "drop_grads", "keys_of", "load_named", "stand_for_rows"]
