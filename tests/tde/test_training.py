"""Training through `oneemb.tde` with a twentieth of the rows gives the numbers of full static tables."""

import functools
import logging
import shutil

import numpy as np
import pytest
import torch

import oneemb.torchrec
from oneemb import tde
from oneemb.storage.remote.servers import open_server
from oneemb.tde import ps as ps_module
from oneemb.tde.ps import PS
from oneemb.tde.steps import Steps
from tests.support.plugins import MEMORY_IO, compile_plugin
from tests.support.rank_jobs import RankJob
from tests.tde.models import (
    DIM,
    ID_V,
    PATH,
    ROWS,
    VOCABULARY,
    EmbOptimType,
    Samples,
    begin_as_tde,
    configs_of,
    dlrm,
    rows_of,
    sharded,
    table_optimizers,
    train,
)
from tests.tde.shared_server import SharedServer

STEPS = 40

# What rows of one optimizer are made of, and how TorchRec shards tables that it trains on a CPU.
OPTIMIZERS = {
    "sgd": (EmbOptimType.EXACT_SGD, [DIM]),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, [DIM, DIM]),
    "row-wise adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, [DIM, 1]),
    "adam": (EmbOptimType.EXACT_SGD, [DIM, DIM, DIM]),
    "torch's adagrad": (EmbOptimType.EXACT_SGD, [DIM, DIM]),
}


def runs(group, report, function, args):
    logging.disable(logging.WARNING)
    report(function(group, *args))


def on_ranks(size, function, *args):
    job = RankJob(size, runs, function, args, timeout_s=60)
    ended = job.end(200)
    assert all(code == 0 for code, _ in ended), job.texts()
    return [reports[0] for _, reports in ended]


def opened(url):
    """`open_server`, and servers that ranks share."""
    scheme, _, path = url.partition("://")
    return SharedServer(path) if scheme == "shared" else open_server(url)


def full(group, kind, sharding):
    model = sharded(dlrm(VOCABULARY), group, sharding, OPTIMIZERS[kind][0])
    begin_as_tde(model)
    losses = train(model, Samples(STEPS, group, ids=False), table_optimizers(model, kind))
    return losses, rows_of(model)


def cached(group, kind, sharding, url, depth):
    ps_module.open_server = opened
    model = sharded(dlrm(ROWS), group, sharding, OPTIMIZERS[kind][0])
    optimizers = table_optimizers(model, kind)
    loader, model = tde.wrap(
        url, Samples(STEPS, group), model, {PATH: configs_of(ROWS)}, num_prefetch=depth,
        ps_config={"optimizers": optimizers},
    )  # fmt: skip
    losses = train(model, loader, optimizers)
    tde.save(model)
    tde.close(model)
    return losses


def farthest(rows, url, kind):
    """How far the rows of a server are from those of full tables, where it has them; and how many it has."""
    server, most, size = opened(url), 0.0, 0
    for table in {table for table, _ in rows}:
        its = np.array(sorted(row for name, row in rows if name == table))
        parts, found_NP = server.pull(f"{PATH}.{table}", ID_V[its], OPTIMIZERS[kind][1])
        for row, weights, found in zip(its, parts[0], found_NP.all(1), strict=True):
            if found:
                most, size = max(most, float(np.abs(weights - rows[table, row]).max())), size + 1
    return most, size


def compare(group, cases, folder, redis_host, plugin):
    if plugin is not None:
        tde.register_io(plugin)
    found = []
    for number, (kind, sharding, depth, scheme) in enumerate(cases):
        url = {
            "memory": f"memory://{number}",
            "shared": f"shared://{folder}/{number}",
            "redis": f"redis://{redis_host}/?prefix=training_{number}",
            "file": f"file://{folder}/{number}-{group.rank()}",
            "plugin": f"memory-io://{number}",
        }[scheme]
        late = []
        counted = Steps.begin
        Steps.begin = lambda self, its, begin=counted, late=late: note(begin(self, its), late)
        losses = cached(group, kind, sharding, url, depth)
        Steps.begin = counted
        full_losses, rows = full(group, kind, sharding)
        found.append((np.abs(np.subtract(losses, full_losses)).max(), farthest(rows, url, kind), sum(late)))
    return found


def note(batch, late):
    late.append(batch is not None and batch.any_late)
    return batch


# Optimizer, sharding, batches ahead, server. In the memory of a process, or a folder of its own, is only what one rank
# has by itself.
CASES = [
    ("sgd", "row_wise", 2, "shared"),
    ("row-wise adagrad", "table_wise", 0, "memory"),
    ("adagrad", "table_wise", 1, "shared"),
    ("adam", "data_parallel", 3, "shared"),
]
MORE_CASES = [
    ("row-wise adagrad", "row_wise", 3, "shared"),
    ("adam", "data_parallel", 0, "shared"),
    ("torch's adagrad", "data_parallel", 1, "shared"),
]
SERVERS = {
    "redis": [("sgd", "row_wise", 2, "redis"), ("adam", "data_parallel", 2, "redis")],
    "file": [("row-wise adagrad", "table_wise", 2, "file")],
    "plugin": [("sgd", "table_wise", 2, "plugin")],
}


@pytest.mark.parametrize("servers", SERVERS)
def test_two_ranks_train_as_full_static_tables_do_on_servers_that_last(tmp_path, servers, request):
    host = request.getfixturevalue("redis_host") if servers == "redis" else None
    plugin = None
    if servers == "plugin":
        if shutil.which("cc") is None:
            pytest.skip("plugins need a C compiler, cc")
        plugin = str(compile_plugin(MEMORY_IO, tmp_path / "memory_io.so"))
    check_as_full(tmp_path, SERVERS[servers], host, plugin)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)])
def test_two_ranks_train_as_full_static_tables_do(tmp_path, cases):
    check_as_full(tmp_path, cases, None, None)


def check_as_full(tmp_path, cases, redis_host, plugin):
    results = on_ranks(2, compare, cases, str(tmp_path), redis_host, plugin)
    for case, *of_ranks in zip(cases, *results, strict=True):
        for loss, (rows, size), late in of_ranks:
            assert loss < 1e-6 and rows < 1e-6, (case, loss, rows)
            assert size > 2 * ROWS or case[1] == "table_wise" and size == 0, (case, size)
            assert late > 0 or case[2] < 2, f"{case}: no row came while it was on its way to the server"


def depths(group):
    """Losses by the number of batches ahead, for two optimizers; and those of rows that are not pushed."""
    found = {}
    for kind, sharding in [("row-wise adagrad", "row_wise"), ("adam", "data_parallel")]:
        want, _ = full(group, kind, sharding)
        found[kind] = want, [cached(group, kind, sharding, f"memory://{kind}{depth}", depth) for depth in range(4)]
    PS.evict_later, kept = lambda self, pairs: self.traffic.last_ticket, PS.evict_later
    found["lost"] = want, [cached(group, "adam", "data_parallel", "memory://lost", 0)]
    PS.evict_later = kept
    return found


@pytest.fixture(scope="module")
def of_depths():
    (found,) = on_ranks(1, depths)
    return found


@pytest.mark.parametrize("kind", ["row-wise adagrad", "adam"])
def test_prefetching_changes_no_number(of_depths, kind):
    want, found = of_depths[kind]
    assert all(losses == found[0] for losses in found)
    np.testing.assert_allclose(found[0], want, rtol=0, atol=1e-6)


def test_the_comparison_sees_rows_that_are_lost(of_depths):
    want, (losses,) = of_depths["lost"]
    assert np.abs(np.subtract(losses, want)).max() > 1e-4


def test_row_adam_steps_rows_with_a_gradient_as_torch_does_and_lets_others_rest():
    torch.manual_seed(0)
    table, oracle = (torch.nn.Parameter(torch.arange(20.0).view(5, 4)) for _ in range(2))
    ours = tde.RowAdam([table], lr=0.1, betas=(0.8, 0.9))
    theirs = torch.optim.SparseAdam([oracle], lr=0.1, betas=(0.8, 0.9))
    for rows in ([0, 2], [2, 3], [0, 3]):
        grad = torch.randn(2, 4)
        table.grad = torch.zeros(5, 4).index_copy_(0, torch.tensor(rows), grad)
        oracle.grad = torch.sparse_coo_tensor([rows], grad, (5, 4))
        ours.step()
        theirs.step()
    torch.testing.assert_close(table, oracle)
    assert torch.equal(table[[1, 4]], torch.arange(20.0).view(5, 4)[[1, 4]])


def refusals(group):
    found = []
    for sharding, optimizers, url, more in [
        ("data_parallel", [], "memory://refused", {}),
        ("data_parallel", [torch.optim.Adam], "memory://refused", {}),
        ("row_wise", [], "memory://refused", {"configs": "no.such.path"}),
        ("row_wise", [], "nothing://here", {}),
    ]:
        model = sharded(dlrm(ROWS), group, sharding)
        parameters = [its for name, its in model.named_parameters() if PATH in name]
        wrap = functools.partial(
            tde.wrap, url, [], model, {more.get("configs", PATH): configs_of(ROWS)},
            ps_config={"optimizers": [make(parameters) for make in optimizers]},
        )  # fmt: skip
        try:
            wrap()
        except ValueError as error:
            found.append(str(error))
    own = oneemb.torchrec.DistributedModelParallel(dlrm(ROWS), device=torch.device("cpu"))
    try:
        tde.wrap("memory://refused", [], own, {PATH: configs_of(ROWS)})
    except ValueError as error:
        found.append(str(error))
    return found


def test_what_wrap_cannot_serve_it_refuses_in_words():
    (found,) = on_ranks(1, refusals)
    words = [
        "the optimizer that trains it must be given",
        "Adam, moves rows that have no gradient",
        "no.such.path",
        "nothing",
    ]
    words.append("grow by themselves")
    assert len(found) == len(words) and all(word in text for word, text in zip(words, found, strict=True)), found


def refusals_of_two(group):
    first = []
    for url in ("memory://two", f"file:///a-folder-of-rank-{group.rank()}"):
        try:
            tde.wrap(url, [], sharded(dlrm(ROWS), group, "row_wise"), {PATH: configs_of(ROWS)})
        except ValueError as error:
            first.append(str(error))
    try:
        tde.wrap(
            "memory://two", [], sharded(dlrm(ROWS), group, "column_wise", min_partition=4), {PATH: configs_of(ROWS)}
        )
    except ValueError as error:
        return first, str(error)


def test_two_ranks_share_no_memory_and_rows_are_not_cut():
    for first, second in on_ranks(2, refusals_of_two):
        assert "got memory://, which is one process's" in first[0] and "got file://, which is one process's" in first[1]
        assert "sharded by its columns" in second or "is one process's" in second
