"""Small models whose steps cost what Python costs: three tables of 16 weights, a batch of 64, rows in memory.

    system.step(i)      forward on batch i, backward from a gradient that is there already, update
    system.read(i)      lookup of one sample, no gradient
    system.close()

Beside oneemb, eager, as a graph, and served, stands torch.nn.Embedding(sparse=True), one for each table, with torch's
SGD.
"""

import tempfile
from typing import Any

import torch

__all__ = ["READS", "STEPS"]

TABLES, DIM, BATCH, ROWS = 3, 16, 64, 10_000


def _batches(count: int = 16) -> list[torch.Tensor]:
    """Ids [BATCH, TABLES] of each batch, uniform over the rows."""
    return list(torch.randint(ROWS, (count, BATCH, TABLES), generator=torch.Generator().manual_seed(0)))


class Eager:
    """oneemb's module and torch's own SGD, as an eager loop calls them."""

    def __init__(self) -> None:
        import oneemb

        self._folder = tempfile.TemporaryDirectory(prefix="oneemb-bench-")
        self.embedding = oneemb.MultiTableEmbedding(
            "small", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
            oneemb.make_device_mem_store_options(self._folder.name), num_threads=2,
        )  # fmt: skip
        self._torch_optimizer = torch.optim.SGD(self.embedding.parameters(), lr=0.01)
        self._ids = _batches()
        self._grad = torch.ones(BATCH, TABLES, DIM)
        self._attach()

    def _attach(self) -> None:
        import oneemb

        self._optimizer = oneemb.Optimizer(self._torch_optimizer, [self.embedding])

    def step(self, i: int) -> Any:
        rows = self.embedding(self._ids[i % len(self._ids)])
        rows.backward(self._grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return rows

    def read(self, i: int) -> Any:
        with torch.no_grad():
            return self.embedding(self._ids[i % len(self._ids)][:1])

    def close(self) -> None:
        self.embedding.clear()  # The rows may go.
        self.embedding.close()
        self._folder.cleanup()


class Evaluated(Eager):
    """The embedding in eval mode, every row of the batches trained before."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(len(self._ids)):
            self.step(i)
        self.embedding.eval()


class Served(Evaluated):
    """A snapshot of these rows, served."""

    def __init__(self) -> None:
        import oneemb

        super().__init__()
        self.embedding.save_snapshot("trained")
        self.embedding.close()
        self.embedding = oneemb.InferenceEmbedding.open(self._folder.name)

    def close(self) -> None:
        self.embedding.close()
        self._folder.cleanup()


class Graph(Eager):
    """The same step, line by line, as a TrainGraph that is called."""

    def _attach(self) -> None:
        import oneemb

        class Step(oneemb.TrainGraph):
            def build(self, ids: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
                rows = self.embedding(ids)
                rows.backward(grad)
                return rows

        self._graph = Step()
        self._graph.embedding = self.embedding
        self._graph.add_optimizer(self._torch_optimizer)

    def step(self, i: int) -> Any:
        return self._graph(self._ids[i % len(self._ids)], self._grad)


class TorchEmbedding:
    """torch.nn.Embedding(sparse=True), one for each table, and torch's SGD."""

    def __init__(self) -> None:
        self._tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, DIM, sparse=True) for _ in range(TABLES))
        self._optimizer = torch.optim.SGD(self._tables.parameters(), lr=0.01)
        self._ids = [[ids[:, t].contiguous() for t in range(TABLES)] for ids in _batches()]
        self._grad = torch.ones(BATCH, TABLES, DIM)

    def step(self, i: int) -> Any:
        ids = self._ids[i % len(self._ids)]
        rows = torch.stack([table(id_B) for table, id_B in zip(self._tables, ids, strict=True)], 1)
        rows.backward(self._grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return rows

    def read(self, i: int) -> Any:
        ids = self._ids[i % len(self._ids)]
        with torch.no_grad():
            return torch.stack([table(id_B[:1]) for table, id_B in zip(self._tables, ids, strict=True)], 1)

    def close(self) -> None:
        del self._tables


STEPS: dict[str, Any] = {"eager": Eager, "graph": Graph, "nn.Embedding": TorchEmbedding}
READS: dict[str, Any] = {"eval": Evaluated, "served": Served, "nn.Embedding": TorchEmbedding}
