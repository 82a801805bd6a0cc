"""Parts that adapters share. An adapter gives users the classes of another library over embeddings of this one.

To write one, answer these questions in turn; `oneemb.torchrec` is the fullest example of each.

1. Which tables are one embedding? Those of one width, dtype and pooling, in one store, that optimizers of one kind
   step: their ids are found, read and updated by one loop. Make a `MultiTableEmbedding` of them, and remember which of
   its tables each is (`torchrec/tables.py`, `torchrec/collection.py`).
2. What do users see of a table? A parameter [0, D] that stands for its rows: a `TableParameter`, by name in what
   `holder_of` makes (`tables.py`). It is in `parameters()`, in param groups, and in state dicts.
3. Who steps the rows? A user's optimizer that has these parameters, for which they `stand_for_rows`
   (`embeddings/internals.py`). Or the backward pass, as fused optimizers do: `step_in_backward`, with a weight that
   nobody else has. Both read the options of each step when it is made. What the library calls its optimizers is
   translated once, when they are made (`torchrec/optimizers.py`).
4. What is in a state dict? A `TableState` (`table_state.py`) gives and takes a table's entry: the name of a snapshot
   where the rows have a path, else a tensor of rows 0 to num_embeddings - 1, and the optimizer's state by FBGEMM's
   names. Before each lookup and state dict `write_back` brings in what others have written into such tensors; a state
   dict that names some tables loads these alone (`table_snapshots.py`). Rows that fill a table at first are handed over
   piece by piece (`handed_rows.py`).
5. Where are the rows? Where the store options of the user say; without a path in a temporary folder. On
   several ranks the key's owner has a row, whatever a plan says; give the embedding the process group, and every rank
   makes the same calls in the same order. Tables that are another library's own ask `ranks_of_job` (`tables.py`).
6. What runs beside the step? A `Worker` (`worker.py`) makes calls in order on one thread: keys of coming batches, calls
   of servers. It changes no row, and what it raises is raised where its result is asked for.

Invariants:
- an adapter imports the library and this one; nothing of this one imports an adapter;
- every option of the library is followed, refused by name, or documented as without effect;
- a lookup of values goes past whatever traces, scripts or exports a model.

CONTRIBUTING.md says which files and tests a new adapter touches.
"""
