"""What a step asks of the device: how many loops it launches, and how often the host waits."""

import contextlib
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oneemb
import oneemb.embeddings.embedding
from tests.cuda.conftest import SIMULATED
from tests.cuda.test_pool import Pooled, bag_batches
from tests.cuda.test_row_updates import OPTIMIZERS
from tests.cuda.test_train import Graph, batches, on_gpu
from tests.support.models import make_embedding

LOOPS_MAX = 16  # of a step whose rows are all there
TORCH_MAX = 4  # calls of torch beside them that launch something, those of dense layers left out


class Noted(TorchDispatchMode):
    """Counts torch's ops that launch something, and those for whose answer the host waits."""

    VIEWS = (
        "view", "as_strided", "slice", "detach", "expand", "select", "reshape", "alias", "unsqueeze", "squeeze", "t",
        "empty", "new_empty", "lift_fresh", "transpose", "permute", "record_stream", "_record_function_enter_new",
        "_record_function_exit",
    )  # fmt: skip
    WAITS = ("_local_scalar_dense", "nonzero", "item", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.launches, self.waits = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name.startswith("index") and any(
            one.dtype == torch.bool for one in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else [])
            if isinstance(one, torch.Tensor)
        )  # fmt: skip
        if name in self.WAITS or masked:
            self.waits.append(name)
        elif name not in self.VIEWS:
            self.launches.append(name)
        return func(*args, **(kwargs or {}))


def a_step(gpu, embedding, optimizer, ids):
    embedding(ids).backward(gradient(ids))
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def gradient(ids):
    return torch.ones(*ids.shape, 4, device=ids.device)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_whose_rows_are_there_launches_few_loops_and_waits_for_nothing(gpu, name, tmp_path):
    embedding = make_embedding(tmp_path, tables=2, dim=4)
    optimizer = oneemb.Optimizer(OPTIMIZERS[name](embedding.parameters()), [embedding], check_in_step=False)
    ids = (torch.arange(80, device=gpu.device) % 3).reshape(-1, 2)  # enough for a key whose sum is made of parts
    with on_gpu(gpu, embedding):
        at = embedding.store.backend.gpu
        for _ in range(2):
            a_step(at, embedding, optimizer, ids)
        launches, waits = at.launches, at.waits
        with Noted() as noted:
            a_step(at, embedding, optimizer, ids)
    print(f"{name}: {at.launches - launches} loops, {len(noted.launches)} of torch's: {noted.launches}")
    negated = 2 if optimizer.param_groups[0].get("maximize") else 0  # summed first, by a loop, and negated
    assert at.launches - launches <= LOOPS_MAX + negated and at.waits == waits
    assert len(noted.launches) <= TORCH_MAX + negated
    if SIMULATED:
        assert noted.waits == [], "an op of torch's for whose answer the host waits"
    embedding.close()


COLUMNS = dict(offsets=torch.arange(0, 41, 2), columns=(0, 1), pooling="sum")

# (store, arguments beside the ids, whether the rows are known): waits of a step, and of a lookup in eval mode.
WAITS = {
    "known rows": ("device", {}, True, 0, 0), "new rows": ("device", {}, False, 0, 0),
    "bags by columns": ("device", COLUMNS, True, 1, 1), "tables given": ("device", dict(table_ids=[0, 1]), True, 1, 1),
    "known rows of a cache": ("host", {}, True, 1, 1), "new rows of a cache": ("host", {}, False, 9, 7),
}  # fmt: skip


@pytest.mark.parametrize("path", WAITS)
def test_each_way_of_a_lookup_waits_as_often_as_the_table_says(gpu, path, tmp_path, monkeypatch):
    # Otherwise the mode below sees no op of a lookup.
    monkeypatch.setattr(oneemb.embeddings.embedding, "hidden_from_modes", contextlib.nullcontext)
    store, more, is_known, of_step, of_eval = WAITS[path]
    embedding = make_embedding(tmp_path, tables=2, dim=4, store=store)
    optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters()), [embedding], check_in_step=False)
    more = {
        name: torch.as_tensor(value, device=gpu.device) if name in ("offsets", "table_ids") else value
        for name, value in more.items()
    }

    def lookup(first):
        ids = first + (torch.arange(40, device=gpu.device) % 7).reshape(-1, 2)
        return embedding(ids.reshape(-1) if "offsets" in more else ids, **more)

    def step(first):
        lookup(first).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def count(call, first):
        at = embedding.store.backend.gpu
        waits = at.waits
        with Noted() as noted:
            call(first)
        return at.waits - waits + len(noted.waits)

    buffers = 0 if SIMULATED or store == "device" else 2  # page-locked ones, whose last copy is waited for
    with on_gpu(gpu, embedding):
        for _ in range(3):
            step(0)
        assert count(step, 0 if is_known else 100) <= of_step + buffers
        embedding.eval()
        with torch.no_grad():
            assert count(lookup, 0 if is_known else 200) <= of_eval + buffers
    embedding.close()


@pytest.mark.skipif(SIMULATED, reason="a GPU tells which calls waited")
def test_nothing_waits_but_what_is_counted(gpu, tmp_path):
    embedding = make_embedding(tmp_path, tables=2, dim=4)
    optimizer = oneemb.Optimizer(OPTIMIZERS["adagrad"](embedding.parameters()), [embedding], check_in_step=False)
    ids = (torch.arange(80, device=gpu.device) % 3).reshape(-1, 2)  # enough for a key whose sum is made of parts
    with on_gpu(gpu, embedding):
        a_step(gpu, embedding, optimizer, ids)
        torch.cuda.set_sync_debug_mode("error")  # a read of the tier's counts is a stream's synchronize, and allowed
        try:
            a_step(gpu, embedding, optimizer, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    embedding.close()


def test_a_graph_waits_as_often_as_an_eager_step_however_many_dense_parameters_it_has(gpu, tmp_path):
    graph = Graph(tmp_path, "device", "adagrad")
    with on_gpu(gpu, graph):
        batch = batches(gpu)[0]
        at = graph.embedding.store.backend.gpu
        for _ in range(2):
            graph(*batch)
        launches, waits = at.launches, at.waits
        graph(*batch)
        assert at.launches - launches <= LOOPS_MAX and at.waits - waits == 1
    graph.embedding.close()


def test_a_step_of_several_lookups_waits_once_more_for_each_and_once_for_their_sum(gpu, tmp_path):
    graph = Pooled(tmp_path, "device", "sgd")
    with on_gpu(gpu, graph):
        batch = [part.to(gpu.device) for part in next(iter(bag_batches()))]
        at = graph.embedding.store.backend.gpu
        for _ in range(2):
            graph(*batch)
        waits = at.waits
        graph(*batch)
        assert at.waits - waits == 2 + 4 + 1
    graph.embedding.close()


def test_a_prepared_step_of_known_rows_waits_for_its_gradients_alone(gpu, tmp_path):
    graph = Graph(tmp_path, "host", "sgd")
    with on_gpu(gpu, graph):
        batch = batches(gpu)[0]
        for _ in range(2):
            graph(*batch)
        at = graph.embedding.store.backend.gpu
        prepared = graph._prepare(batch)  # as the worker does
        waits = at.waits
        graph._compute_prepared(prepared, lambda: None)
        assert at.waits - waits == 1
    graph.embedding.close()
