"""Joins a torch optimizer with embeddings: the update of rows and the step of dense parameters are one."""

from collections.abc import Sequence
from typing import Any

import torch

from oneemb.embedding import TableEmbedding
from oneemb.graph import ops
from oneemb.graph.row_optimizers import RowOptimizer, row_optimizer_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.step_lock import alone, in_step
from oneemb.storage.turns import undisturbed

__all__ = ["Optimizer"]


class Optimizer:
    """A torch optimizer that steps the rows of embeddings too, for eager training. `TrainGraph` makes its own.

    The rows that were looked up since the last step are updated as the optimizer's class would update them, with the
    hyperparameters that the group with `embedding.weight` has at this step; other rows are not touched. Where the
    update rule counts steps, it uses the embedding's count.

    Args:
        optimizer: a torch optimizer of one of the supported classes; its groups hold `embedding.weight` of each
            embedding, and dense parameters or none.
        embeddings: the embeddings it trains. An embedding has one optimizer only.
        skip_nonfinite: skip a step in which a gradient is NaN or infinite, dense parameters included, and count it in
            `skipped`, instead of raising `NonFiniteGradientError`.

    Raises:
        ValueError: an embedding is in no group, is given twice or has an optimizer already; or the class, or an option
            of it, is not supported for rows: the message names it.
        StorageError: the rows hold another optimizer's state, or the embedding's path is in use.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "words", 8, torch.float32, torch.int64, [oneemb.make_table()],
        ...     oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        >>> optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1), [embedding])
        >>> embedding(torch.tensor([3, 5, 3])).sum().backward()
        >>> optimizer.step()
        >>> embedding.stats()["step"]
        1
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, embeddings: Sequence[TableEmbedding], *, skip_nonfinite: bool = False
    ):
        self.optimizer = optimizer
        self.embeddings = tuple(embeddings)
        self.skip_nonfinite = skip_nonfinite
        self.skipped = 0
        """Steps that were skipped because a gradient was not finite."""
        self.taken = 0
        """Steps made by this object."""
        self._rows: dict[EmbeddingStore, tuple[RowOptimizer, int]] = {}
        for embedding in self.embeddings:
            if embedding.store in self._rows:
                raise ValueError(f"embedding {embedding.name!r} is given twice; its rows would be stepped twice")
            if embedding.row_optimizer is not None:
                raise ValueError(f"embedding {embedding.name!r} has an optimizer already; one trains it")
            g = _group_of(optimizer, embedding)
            self._rows[embedding.store] = row_optimizer_of(optimizer, optimizer.param_groups[g]), g
        alone((embedding.store.step_lock for embedding in self.embeddings), self._attach)

    def _attach(self) -> None:
        try:
            with undisturbed:
                for embedding in self.embeddings:
                    embedding.attach(self._rows[embedding.store][0])
        except BaseException:  # Ctrl-C, which comes when the block has ended, too: nobody gets this object.
            for embedding in self.embeddings:
                embedding.row_optimizer = None
            raise

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups."""
        return self.optimizer.param_groups

    def rows_of(self, store: EmbeddingStore) -> tuple[RowOptimizer, dict[str, Any]] | None:
        """The row optimizer of a store and its parameter group as it is now; None if it is not trained here."""
        if store not in self._rows:
            return None
        row_optimizer, g = self._rows[store]
        return row_optimizer, self.optimizer.param_groups[g]

    @torch._disable_dynamo  # torch.compile stays out of it, as out of a lookup
    def step(self) -> None:
        """Update the dense parameters and the rows looked up since the last step.

        Raises:
            NonFiniteGradientError: a gradient is NaN or infinite; no weight, state or count has changed. Ids that the
                lookups have inserted stay, with their initial values.
            What the torch optimizer or a hook of it raises: no row has changed; dense parameters may have.
        """
        in_step((embedding.store.step_lock for embedding in self.embeddings), self._step)

    def _step(self) -> None:
        for embedding in self.embeddings:
            embedding.store.turns.check(changes=True)
        leases = [list(embedding.pending) for embedding in self.embeddings]
        grads = [ops.reduce_grads(leases_of_embedding) for leases_of_embedding in leases]
        go = ops.check_finite([self], grads)
        with undisturbed:  # An interrupt comes before the step or after all of it.
            try:
                groups = ops.step(self, go)
                for grad in grads:
                    ops.update(self, grad, go, groups)
                self.taken += go
                self._drop_gradients()
            except BaseException as error:
                # Nothing holds such an exception back: it may have come between the update of rows and of parameters.
                if not isinstance(error, Exception):
                    for embedding in self.embeddings:
                        embedding.store.turns.note(error)
                raise

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of rows and dense parameters."""
        self._drop_gradients()
        self.optimizer.zero_grad(set_to_none)

    def _drop_gradients(self) -> None:
        for embedding in self.embeddings:
            with undisturbed:
                ops.release(embedding.pending)
                embedding.pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state; the state of rows is in the snapshots of embeddings."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict)


def _group_of(optimizer: torch.optim.Optimizer, embedding: TableEmbedding) -> int:
    for g, group in enumerate(optimizer.param_groups):
        if any(parameter is embedding.weight for parameter in group["params"]):
            return g
    raise ValueError(
        f"no group of {type(optimizer).__name__} holds the weight of embedding {embedding.name!r}; make the optimizer"
        " on embedding.parameters()"
    )
