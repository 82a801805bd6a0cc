"""The systems that bench_embedding_step.py runs beside oneemb, each behind the same calls.

    system.lookup(i)    forward on batch i, no gradient
    system.step(i)      forward on batch i, backward from a gradient that is there already, update
    system.step(i, f)   the same with f(rows) for the backward pass; oneemb's module and torch's have it

Each gets the batch in its own native form, made before anything is measured, and starts with every row in memory.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Batch", "Case", "make_batches", "peers_of", "systems_of"]

LEARNING_RATE = 0.01


class GraphSteps:
    """A graph whose build looks ids up and begins its backward pass from a gradient that is there already."""

    def __init__(self, embedding: Any, optimizer: Any, **lookup: Any):
        import oneemb

        class Graph(oneemb.TrainGraph):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = embedding
                self.add_optimizer(optimizer)

            def build(self, ids: torch.Tensor, grad: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
                rows = self.embedding(ids, **options).reshape(grad.shape)
                rows.backward(grad)
                return rows.detach()

        self.graph = Graph()

    def __call__(self, ids: torch.Tensor, grad: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.graph(ids, grad, options)


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        optimizer: "lookup" (no update), "sgd", "adagrad", "row_wise_adagrad" or "adam".
        dim, batch, tables, rows: weights of a row, samples a step, tables, rows of each table.
        ids: "zipf" (exponent 1.05) or "uniform".
        pooled: 1 to 20 ids a bag in place of one id.
        pooling: "sum" or "max" of a bag.
        keyed: the whole call of TorchRec's EmbeddingBagCollection, and of those that take its place.
    """

    optimizer: str
    dim: int
    batch: int
    tables: int
    rows: int
    ids: str
    pooled: bool
    pooling: str = "sum"
    keyed: bool = False

    def __str__(self) -> str:
        ids = f"{self.ids} {f'1-20 {self.pooling}' if self.pooled else 'one-hot'}"
        return f"{self.optimizer} D={self.dim} B={self.batch} {ids}{' keyed' if self.keyed else ''}"


@dataclass(frozen=True)
class Batch:
    """Ids of one step, sample by sample. N ids in B * T bags, one bag a (sample, table)."""

    id_N: np.ndarray
    length_BT: np.ndarray
    unique: int
    """Unique (table, id) pairs."""

    def by_table(self) -> tuple[np.ndarray, np.ndarray]:
        """The same bags table by table: id_N and length_TB."""
        samples, tables = self.length_BT.shape
        begin_P = np.concatenate([[0], np.cumsum(self.length_BT)])
        order_P = np.arange(samples * tables).reshape(samples, tables).T.reshape(-1)
        length_P = self.length_BT.reshape(-1)[order_P]
        shift_P = begin_P[order_P] - np.concatenate([[0], np.cumsum(length_P)[:-1]])
        return self.id_N[np.repeat(shift_P, length_P) + np.arange(len(self.id_N))], length_P


def make_batches(case: Case, count: int, seed: int = 0) -> list[Batch]:
    """Random batches. A table's frequent ids lie anywhere in it, as they do when ids are hashes."""
    rng = np.random.default_rng(seed)
    weight_V = 1 / np.arange(1, case.rows + 1) ** (1.05 if case.ids == "zipf" else 0.0)
    cumulated_V = np.cumsum(weight_V / weight_V.sum())
    rank_to_id_TV = np.stack([rng.permutation(case.rows) for _ in range(case.tables)])
    batches = []
    for _ in range(count):
        shape = (case.batch, case.tables)
        length_BT = rng.integers(1, 21, shape) if case.pooled else np.ones(shape, np.int64)
        table_N = np.repeat(np.tile(np.arange(case.tables), case.batch), length_BT.reshape(-1))
        rank_N = np.searchsorted(cumulated_V, rng.random(len(table_N))).clip(max=case.rows - 1)
        id_N = rank_to_id_TV[table_N, rank_N]
        batches.append(Batch(id_N, length_BT, len(np.unique(table_N * case.rows + id_N))))
    return batches


class Oneemb:
    """oneemb's device store. Its ids are scattered over all 64 bits, since it is keyed by any id."""

    name = "oneemb"

    def __init__(self, case: Case, batches: Sequence[Batch], grad: torch.Tensor, threads: int):
        import oneemb

        self._folder = tempfile.TemporaryDirectory()
        # A constant, so that the table is full in seconds: no row's value changes what a step costs.
        self.embedding = oneemb.MultiTableEmbedding(
            "bench", case.dim, torch.float32, torch.int64,
            [oneemb.make_table(oneemb.make_constant_initializer(0.01)) for _ in range(case.tables)],
            oneemb.make_device_mem_store_options(self._folder.name), num_threads=threads,
        )  # fmt: skip
        parameters = list(self.embedding.parameters())
        makers = {
            "lookup": lambda: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            "sgd": lambda: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
            "row_wise_adagrad": lambda: oneemb.optim.RowWiseAdagrad(parameters, lr=LEARNING_RATE),
            "adam": lambda: torch.optim.Adam(parameters, lr=LEARNING_RATE),
        }
        self._attach(makers[case.optimizer]())
        with torch.no_grad():
            for begin in range(0, case.rows, 16384):
                id_N = _scattered(np.arange(begin, min(begin + 16384, case.rows)))
                self.embedding(torch.from_numpy(id_N)[:, None].expand(-1, case.tables))
        self._grad = grad.reshape(case.batch, case.tables, case.dim)
        self._inputs: list[tuple[torch.Tensor, dict[str, Any]]] = []
        for batch in batches:
            id_N = torch.from_numpy(_scattered(batch.id_N))
            if case.pooled:
                offset_P1 = np.concatenate([[0], np.cumsum(batch.length_BT)])
                self._inputs.append((id_N, {"offsets": torch.from_numpy(offset_P1), "pooling": case.pooling}))
            else:
                self._inputs.append((id_N.reshape(case.batch, case.tables), {}))

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        import oneemb

        self._optimizer = oneemb.Optimizer(optimizer, [self.embedding])

    def _forward(self, i: int) -> torch.Tensor:
        ids, options = self._inputs[i % len(self._inputs)]
        return self.embedding(ids, **options).reshape(self._grad.shape)

    def lookup(self, i: int) -> Any:
        with torch.no_grad():
            return self._forward(i)

    def step(self, i: int, backward: Callable[[torch.Tensor], None] | None = None) -> Any:
        rows = self._forward(i)
        rows.backward(self._grad) if backward is None else backward(rows)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return rows

    def close(self) -> None:
        self.embedding.clear()  # The rows may go.
        self.embedding.close()
        self._folder.cleanup()


class OneembGraph(Oneemb):
    """The same embedding in a TrainGraph that is called."""

    name = "oneemb_graph"

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps = GraphSteps(self.embedding, optimizer)

    def step(self, i: int, backward: Callable[[torch.Tensor], None] | None = None) -> Any:
        assert backward is None, "the graph has a build of its own"
        ids, options = self._inputs[i % len(self._inputs)]
        return self._steps(ids, self._grad, **options)


class Fbgemm:
    """FBGEMM's SplitTableBatchedEmbeddingBagsCodegen on the CPU: static rows, one for each id below `rows`."""

    name = "fbgemm"

    def __init__(self, case: Case, batches: Sequence[Batch], grad: torch.Tensor, threads: int):
        import fbgemm_gpu  # noqa: F401 - registers the operators
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        optimizer = {
            "lookup": EmbOptimType.EXACT_SGD,
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }[case.optimizer]
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * case.tables,
            optimizer=optimizer, learning_rate=LEARNING_RATE, pooling_mode=PoolingMode.SUM,
        )  # fmt: skip
        self._tables.init_embedding_weights_uniform(-0.05, 0.05)
        self._grad = grad
        self._inputs = []
        for batch in batches:
            id_N, length_P = batch.by_table()
            offset_P1 = np.concatenate([[0], np.cumsum(length_P)])
            self._inputs.append((torch.from_numpy(id_N), torch.from_numpy(offset_P1)))

    def lookup(self, i: int) -> Any:
        with torch.no_grad():
            return self._tables(*self._inputs[i % len(self._inputs)])

    def step(self, i: int) -> Any:
        out = self._tables(*self._inputs[i % len(self._inputs)])
        out.backward(self._grad)
        return out

    def close(self) -> None:
        del self._tables


class TorchEmbeddingBag:
    """torch.nn.EmbeddingBag(sparse=True), one for all tables (faster than one for each), with torch's optimizers."""

    name = "torch"

    def __init__(self, case: Case, batches: Sequence[Batch], grad: torch.Tensor, threads: int):
        self._bag = torch.nn.EmbeddingBag(
            case.tables * case.rows, case.dim, mode=case.pooling, sparse=case.pooling == "sum"
        )
        parameters = self._bag.parameters()
        makers = {
            "lookup": lambda: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            "sgd": lambda: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
            "adam": lambda: torch.optim.SparseAdam(list(parameters), lr=LEARNING_RATE),
        }
        self._optimizer = makers[case.optimizer]()
        self._grad = grad.reshape(-1, case.dim)
        self._inputs = []
        for batch in batches:
            length_P = batch.length_BT.reshape(-1)
            table_N = np.repeat(np.tile(np.arange(case.tables), case.batch), length_P)
            offset_P = np.cumsum(length_P) - length_P
            self._inputs.append((torch.from_numpy(table_N * case.rows + batch.id_N), torch.from_numpy(offset_P)))

    def lookup(self, i: int) -> Any:
        with torch.no_grad():
            return self._bag(*self._inputs[i % len(self._inputs)])

    def step(self, i: int, backward: Callable[[torch.Tensor], None] | None = None) -> Any:
        out = self._bag(*self._inputs[i % len(self._inputs)])
        out.backward(self._grad) if backward is None else backward(out)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return out

    def close(self) -> None:
        del self._bag, self._optimizer


class _Keyed:
    """A collection's whole call: a KeyedJaggedTensor in, a KeyedTensor out, the update in the backward pass."""

    def __init__(self, case: Case, batches: Sequence[Batch], grad: torch.Tensor, threads: int):
        import torch.distributed
        import torchrec

        if not torch.distributed.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        optimizer: Any = {
            "lookup": torch.optim.SGD,
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "row_wise_adagrad": torchrec.optim.RowWiseAdagrad,
            "adam": torch.optim.Adam,
        }[case.optimizer]
        names = [f"f{t}" for t in range(case.tables)]
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=case.dim, num_embeddings=case.rows, feature_names=[name]
            )
            for name in names
        ]
        self._model = self._make(tables, optimizer, threads)
        self._grad = grad
        self._inputs = []
        for batch in batches:
            id_N, length_P = batch.by_table()
            self._inputs.append(
                torchrec.KeyedJaggedTensor(names, torch.from_numpy(id_N), lengths=torch.from_numpy(length_P))
            )

    def _make(self, tables: list[Any], optimizer: Any, threads: int) -> torch.nn.Module:
        raise NotImplementedError

    def lookup(self, i: int) -> Any:
        with torch.no_grad():
            return self._model(self._inputs[i % len(self._inputs)]).values()

    def step(self, i: int) -> Any:
        out = self._model(self._inputs[i % len(self._inputs)]).values()
        out.backward(self._grad)
        return out

    def close(self) -> None:
        del self._model


class TorchRec(_Keyed):
    """TorchRec's EmbeddingBagCollection under DistributedModelParallel: one rank, gloo, fused optimizer."""

    name = "torchrec"

    def _make(self, tables: list[Any], optimizer: Any, threads: int) -> torch.nn.Module:
        import torchrec
        from torch.distributed.optim import _apply_optimizer_in_backward
        from torchrec.distributed import DistributedModelParallel

        collection = torchrec.EmbeddingBagCollection(tables, device=torch.device("meta"))
        _apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": LEARNING_RATE})
        return DistributedModelParallel(collection, device=torch.device("cpu"))


class TorchRecFused(_Keyed):
    """TorchRec's FusedEmbeddingBagCollection."""

    name = "torchrec_fused"

    def _make(self, tables: list[Any], optimizer: Any, threads: int) -> torch.nn.Module:
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        return FusedEmbeddingBagCollection(tables, optimizer, {"lr": LEARNING_RATE}, device=torch.device("cpu"))


class OneembCollection(_Keyed):
    """oneemb's EmbeddingBagCollection."""

    name = "oneemb"

    def _make(self, tables: list[Any], optimizer: Any, threads: int) -> torch.nn.Module:
        from torch.distributed.optim import _apply_optimizer_in_backward

        from oneemb.torchrec import EmbeddingBagCollection

        collection = EmbeddingBagCollection(tables, device="cpu", num_threads=threads)
        _apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": LEARNING_RATE})
        return collection


class OneembSharded(_Keyed):
    """The same under DistributedModelParallel: one rank, gloo."""

    name = "oneemb_sharded"

    def _make(self, tables: list[Any], optimizer: Any, threads: int) -> torch.nn.Module:
        from torch.distributed.optim import _apply_optimizer_in_backward

        from oneemb.torchrec import DistributedModelParallel, EmbeddingBagCollection, get_default_sharders

        collection = EmbeddingBagCollection(tables, device="cpu", num_threads=threads)
        _apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": LEARNING_RATE})
        sharders = get_default_sharders(num_threads=threads)
        return DistributedModelParallel(collection, device=torch.device("cpu"), sharders=sharders)


def _scattered(id_N: np.ndarray) -> np.ndarray:
    return (id_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


SYSTEMS: dict[str, Any] = {system.name: system for system in (Oneemb, OneembGraph, Fbgemm, TorchEmbeddingBag, TorchRec)}
KEYED_SYSTEMS: dict[str, Any] = {
    system.name: system for system in (OneembCollection, TorchRecFused, TorchRec, OneembSharded)
}
"""Those of the whole call of a collection; oneemb's is the first."""

# What systems beside oneemb's module have on the CPU.
_OPTIMIZERS = {
    "oneemb_graph": ("sgd", "adagrad", "row_wise_adagrad", "adam"),
    "fbgemm": ("lookup", "sgd", "adagrad", "row_wise_adagrad"),
    "torch": ("lookup", "sgd", "adagrad", "adam"),
    "torchrec": ("lookup", "sgd", "adagrad", "row_wise_adagrad"),
    "torchrec_fused": ("lookup", "sgd", "adagrad", "row_wise_adagrad"),
    "oneemb_sharded": ("lookup", "sgd", "adagrad", "row_wise_adagrad", "adam"),
}


def peers_of(case: Case) -> list[str]:
    """The systems that can run a case. Steps of a maximum: none has them, torch but with a gradient of all rows."""
    if case.pooling == "max":
        return ["torch"] if case.optimizer == "lookup" else []
    return [name for name in systems_of(case) if case.optimizer in _OPTIMIZERS.get(name, ())]


def systems_of(case: Case) -> dict[str, Any]:
    """All that there are for a case, oneemb's first."""
    return KEYED_SYSTEMS if case.keyed else SYSTEMS
