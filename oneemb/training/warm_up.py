"""Compiles the loops that most jobs need, by running small jobs of each kind on rows in a temporary folder."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from oneemb import optim
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.kernels import cuda_driver
from oneemb.kernels.compile_notice import compile_notice
from oneemb.options import (
    StoreOptions,
    make_cached_host_mem_store_options,
    make_cached_ssd_store_options,
    make_device_mem_store_options,
    make_table_options,
)
from oneemb.storage.policies.row_policy import LFU, RowPolicy
from oneemb.training.train_graph import TrainGraph

OPTIMIZERS = ("SGD", "Adagrad", "Adam", "RowWiseAdagrad")
"""Optimizers whose loops are compiled if the caller names none. AdamW uses the loops of Adam."""

DTYPES = ("float32",)
"""Dtypes of rows for which loops are compiled if the caller names none."""

_IDS, _TABLES = 64, 2


def compile_loops(
    optimizers: Sequence[str] = OPTIMIZERS, dtypes: Sequence[str] = DTYPES, tell: Callable[[str], object] = str
) -> tuple[int, float]:
    """Compile the loops of the CPU for lookups, pooling, updates, stores and policies, and the function that launches
    loops of a GPU.

    Args:
        optimizers: names of classes of torch.optim or oneemb.optim.
        dtypes: "float32", "float16" or "bfloat16".
        tell: called with the name of each job before it runs.

    Returns:
        Number of loops that were compiled, since no folder had them, and the seconds that it took.

    Raises:
        ValueError: an optimizer or a dtype is unknown.
    """
    classes = [_class_of(name) for name in optimizers]
    for dtype in dtypes:
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype!r}")
    compile_notice.silent = True
    before, seconds = compile_notice.loops, compile_notice.seconds
    cuda_driver.compile_launches()
    for dtype in dtypes:
        for name, run in _jobs(getattr(torch, dtype), classes):
            tell(f"{dtype}: {name}")
            run()
    return compile_notice.loops - before, compile_notice.seconds - seconds


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    for module in (torch.optim, optim):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
            return found
    raise ValueError(f"optimizer must be a class of torch.optim or oneemb.optim, such as Adam, got {name!r}")


def _jobs(
    dtype: torch.dtype, classes: Sequence[type[torch.optim.Optimizer]]
) -> Iterator[tuple[str, Callable[[], None]]]:
    def job(
        options: Callable[[str], StoreOptions], cls: type[torch.optim.Optimizer], policy: RowPolicy | None = None
    ) -> Callable[[], None]:
        def run() -> None:
            with tempfile.TemporaryDirectory(prefix="oneemb-warmup-") as folder:
                _train(options(os.path.join(folder, "rows")), dtype, cls, policy)

        return run

    first = classes[0] if classes else torch.optim.SGD
    yield "rows in memory", job(make_device_mem_store_options, first)
    yield "a cache over host memory", job(lambda folder: make_cached_host_mem_store_options(1, folder), first)
    yield "a cache over a disk", job(lambda folder: make_cached_ssd_store_options(1, folder), first)
    yield "a graph", lambda: _run_graph(dtype, first)
    yield "policies", job(make_device_mem_store_options, first, RowPolicy(evict=LFU(), capacity=1000))
    for cls in classes[1:]:
        yield cls.__name__, job(make_device_mem_store_options, cls)


def _train(
    options: StoreOptions, dtype: torch.dtype, cls: type[torch.optim.Optimizer], policy: RowPolicy | None
) -> None:
    """Train a few rows: steps with ids and with bags of each pooling, lookups without gradient, a snapshot."""
    tables = [make_table_options()] * _TABLES
    with MultiTableEmbedding("warmup", 8, dtype, torch.int64, tables, options, policy=policy) as embedding:
        optimizer = cast(Any, cls)(embedding.parameters())
        ids = torch.arange(_IDS, dtype=torch.int64, device="cpu")
        offsets = torch.arange(0, _IDS + 1, _TABLES, dtype=torch.int64, device="cpu")
        lookups = [
            lambda: embedding(ids.view(-1, _TABLES)),
            lambda: embedding(ids, torch.zeros_like(ids)),
            *(lambda how=how: embedding(ids, offsets=offsets, pooling=how) for how in ("sum", "mean", "max")),
        ]
        for look_up in lookups:
            look_up().float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                look_up()
            embedding.eval()
            look_up()
            embedding.train()
        embedding.save_snapshot("warmup")
        embedding.load_snapshot("warmup")


class _Graph(TrainGraph):
    """Graph of embeddings that are looked up together and ahead of a step."""

    def __init__(self, embeddings: Sequence[MultiTableEmbedding], cls: type[torch.optim.Optimizer]):
        super().__init__()
        self.embeddings = torch.nn.ModuleList(embeddings)
        self.add_optimizer(cast(Any, cls)(self.parameters()))

    def build(self, ids: torch.Tensor) -> None:
        rows = [embedding(ids) for embedding in self.embeddings]
        torch.cat(rows).float().sum().backward()


def _run_graph(dtype: torch.dtype, cls: type[torch.optim.Optimizer]) -> None:
    options = make_device_mem_store_options()
    with (
        MultiTableEmbedding("one", 8, dtype, torch.int64, [make_table_options()], options) as one,
        MultiTableEmbedding("two", 8, dtype, torch.int64, [make_table_options()], options) as two,
    ):
        batches = [torch.arange(_IDS, dtype=torch.int64, device="cpu")] * 4
        for embeddings in ([one], [one, two]):
            graph = _Graph(embeddings, cls)
            for _ in graph.run(batches):
                pass
            for embedding in embeddings:
                embedding.detach_optimizer()
