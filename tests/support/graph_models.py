"""Models for the tests of graphs, and the eager loop that a graph must equal bit for bit."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

import oneemb


def make_embedding(
    name: str = "items",
    dim: int = 4,
    tables: int = 2,
    store: str = "device",
    seed: int = 0,
    cache_mb: int = 1,
    **kwargs,
) -> oneemb.MultiTableEmbedding:
    """An embedding on a store of its own."""
    path = tempfile.mkdtemp(prefix="oneemb-test-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    if store == "ssd":
        options = oneemb.make_cached_ssd_store_options(cache_mb, path)
    elif store == "host":
        options = oneemb.make_cached_host_mem_store_options(cache_mb, path, capacity=200_000)
    else:
        options = oneemb.make_device_mem_store_options(path, capacity=200_000)
    return oneemb.MultiTableEmbedding(
        name, dim, kwargs.pop("dtype", torch.float32), torch.int64, [oneemb.make_table()] * tables, options, seed=seed,
        **kwargs,
    )  # fmt: skip


def make_graph(
    modules: dict[str, torch.nn.Module],
    build: Callable[..., Any],
    optimizers: Callable[[torch.nn.Module], Sequence[Any]],
    **options: Any,
) -> oneemb.TrainGraph:
    """A TrainGraph of these modules; `optimizers` gives torch optimizers, or tuples of one and its scheduler."""

    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)
            for one in optimizers(self):
                self.add_optimizer(*(one if isinstance(one, tuple) else (one,)), **options)

    Graph.build = build
    return Graph()


def make_eager(
    modules: dict[str, torch.nn.Module],
    build: Callable[..., Any],
    optimizers: Callable[[torch.nn.Module], Sequence[Any]],
    **options: Any,
) -> Callable[..., Any]:
    """The same step in eager mode: `build` as it is, then every optimizer of oneemb and its scheduler."""
    owner = torch.nn.ModuleDict(modules)
    for name, module in modules.items():
        setattr(owner, name, module)
    made = [one if isinstance(one, tuple) else (one, None) for one in optimizers(owner)]
    joined = []
    for optimizer, scheduler in made:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [m for m in modules.values() if isinstance(m, oneemb.MultiTableEmbedding) and id(m.weight) in held]
        joined.append((oneemb.Optimizer(optimizer, mine, **options), scheduler))

    def step(*args: Any, **kwargs: Any) -> Any:
        result = build(owner, *args, **kwargs)
        for optimizer, scheduler in joined:
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        for optimizer, _ in joined:
            optimizer.zero_grad()
        return result

    return step


def rows_of(embedding: oneemb.MultiTableEmbedding) -> dict[tuple[int, int], bytes]:
    """Every row, weights and state, by key."""
    embedding.store.hot.flush()
    found = {}
    for table_N, id_N, row_NW in embedding.store.hot.scan():
        for t, i, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True):
            found[t, i] = row.tobytes()
    return found


def weights_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for name, p in module.named_parameters()]


def sgd(owner: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(owner.parameters(), lr=0.1)]


def adam(owner: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(owner.parameters(), lr=0.01)]
