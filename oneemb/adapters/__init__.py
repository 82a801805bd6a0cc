"""Code that the adapters share. An adapter gives users the classes of another library, over embeddings of this library.

To write an adapter, answer these questions in turn. `oneemb.torchrec` is the fullest example.

1. Which tables share an embedding? Tables with equal width, dtype, pooling, store options and kind of optimizer: one
   loop then finds, reads and updates their rows. Make a `MultiTableEmbedding` of them, and record the number that each
   has in it (`torchrec/tables.py`, `torchrec/collection.py`).
2. What do users see of a table? A parameter [0, D] that stands for its rows. `TableParameter` holds it, and `holder_of`
   makes a module of all tables by name (`tables.py`). The parameter is in `parameters()`, param groups and state dicts.
3. What steps the rows? Either a user's optimizer that has these parameters: call `stand_for_rows`
   (`embeddings/internals.py`). Or the backward pass, as with fused optimizers: call `step_in_backward`, with a weight
   that no other optimizer has. Both read the optimizer's options at each step. Names of the other library's optimizers
   are translated once, when the optimizer is made (`torchrec/optimizers.py`).
4. What is in a state dict? `TableState` (`table_state.py`) makes and loads the entry of a table: the name of a snapshot
   if the rows have a path, else a tensor of rows 0 to num_embeddings - 1, and the optimizer's state by FBGEMM's names.
   Before each lookup and state dict `write_back` copies changes that users made in such tensors into the rows. A state
   dict that lacks some tables loads only those that it has (`table_snapshots.py`). `handed_rows.py` moves the first
   rows of a table into the embedding piece by piece.
5. Where do the rows live? Where the user's store options say; without a path in a temporary folder. With several ranks
   a row lives on the owner of its key, whatever a plan says: give the embedding the process group, and let every rank
   make the same calls in the same order. Adapters that get no process group from users call `ranks_of_job`
   (`tables.py`).
6. What runs beside the step? A `Worker` (`worker.py`) makes calls in order on one thread, such as sending keys of
   coming batches, or requests to servers. It changes no row. An error in a call is raised where its result is read.

Invariants:
- an adapter imports the other library and oneemb; only adapters import an adapter (`dynamicemb` uses `torchrec`);
- every option of the other library is followed, refused by name, or documented as without effect;
- a lookup of values bypasses the code that traces, scripts or exports a model.

CONTRIBUTING.md lists the files and tests that a new adapter touches.
"""
