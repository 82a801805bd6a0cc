"""Several ranks that own rows together train as one process does on all of their batches together."""

import importlib
import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import oneemb
from oneemb.storage.errors import ForkedProcessError
from tests.support.optimizers import OPTIMIZERS
from tests.support.pairwise import diagonal

TABLES, DIM, BATCH, IDS = 2, 4, 6, 40

settling = importlib.import_module("oneemb.graph.ops.owner_grads")  # The package has a function of this name.

LOOKUPS = ["plain", "sum", "mean", "max", "weighted"]


def batch_of(step, rank, ranks):
    """The part of a step's batch that a rank has; all have as many samples."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(-IDS, IDS, (BATCH * 12, TABLES, 3), generator=generator) * (2**56)
    label, scale = torch.rand(BATCH * 12, generator=generator), torch.rand(ids.shape, generator=generator)
    own = slice(rank * len(ids) // ranks, (rank + 1) * len(ids) // ranks)
    return ids[own], label[own], scale[own]


class Model(torch.nn.Module):
    def __init__(self, path, how, store, group, gradients="mean", tables=None):
        super().__init__()
        torch.manual_seed(0)
        options = {
            "device": lambda: oneemb.make_device_mem_store_options(path),
            "ssd": lambda: oneemb.make_cached_ssd_store_options(1, path),
            "remote": lambda: oneemb.make_cached_remote_store_options("memory://", 1, path),
        }[store]()
        self.how = how
        self.embedding = oneemb.MultiTableEmbedding(
            "items", DIM, torch.float32, torch.int64, tables or [oneemb.make_table()] * TABLES, options,
            num_threads=1, process_group=group, gradients_of_ranks=gradients,
        )  # fmt: skip
        self.dense = torch.nn.Sequential(torch.nn.Linear(TABLES * DIM, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        if group is not None:
            self.dense = DistributedDataParallel(self.dense, process_group=group)

    def loss(self, ids, label, scale):
        if self.how == "plain":
            rows = self.embedding(ids[..., 0])
        else:
            offsets = torch.arange(0, ids.numel() + 1, ids.shape[2])
            weights = scale.flatten() if self.how == "weighted" else None
            pooling = "sum" if self.how == "weighted" else self.how
            rows = self.embedding(ids.flatten(), offsets=offsets, per_sample_weights=weights, pooling=pooling)
        return torch.nn.functional.mse_loss(self.dense(rows.flatten(1)).squeeze(1), label)


def weights_of(embedding):
    """The weights of all ids there may be."""
    ids = torch.arange(-IDS, IDS) * (2**56)
    was = embedding.training
    embedding.eval()
    rows = embedding(ids[:, None].expand(-1, TABLES))
    embedding.train(was)
    return rows.detach().numpy()


def train(group, path, how, optimizer, store="device", steps=18, accumulated=1, clip=None, joined=False):
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, how, store, group)
    optimizer = OPTIMIZERS[optimizer](list(model.parameters()))
    if joined:
        optimizer = oneemb.Optimizer(optimizer)
    losses = []
    for step in range(steps):
        loss = model.loss(*batch_of(step, rank, ranks))
        (loss / accumulated).backward()
        losses.append(loss.item())
        if step % accumulated == accumulated - 1:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), *clip)
            optimizer.step()
            optimizer.zero_grad()
    stats = model.embedding.stats()
    dense = torch.cat([parameter.detach().flatten() for parameter in model.dense.parameters()]).numpy()
    result = losses, weights_of(model.embedding), dense, (stats["rows"], stats["step"], stats["device"]["pinned"])
    model.embedding.close()
    return result


def check_equal_to_one(results, alone, apart=5e-6):
    losses, weights, dense, (rows, steps, _) = alone
    assert relative(np.mean([result[0] for result in results], axis=0), np.array(losses)) < 1e-6
    for _, its_weights, its_dense, (_, its_steps, pinned) in results:
        # Adam and the like divide a gradient by its size: the rounding of one that is nearly 0 grows.
        assert relative(its_weights, weights) < apart
        assert relative(its_dense, dense) < apart
        assert its_steps == steps and pinned == 0
    assert sum(result[3][0] for result in results) == rows
    if len(results) > 1:
        assert all(0 < result[3][0] < rows for result in results)


def relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(("how", "ranks"), diagonal(LOOKUPS, [2, 3]))
def test_ranks_equal_one_process(tmp_path, rank_pool, ranks, how):
    results = rank_pool(ranks, train, str(tmp_path / "ranks"), how, "adagrad")
    check_equal_to_one(results, train(None, str(tmp_path / "one"), how, "adagrad"))


# A count of steps, gradients of a step's rows alone, norms, a state for a row, steps that a row has sat out.
QUICK = ("adam", "sparse adam", "lars", "row-wise adagrad", "smart decay adam")


@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OPTIMIZERS]
)
def test_with_every_optimizer(tmp_path, rank_pool, optimizer):
    results = rank_pool(4, train, str(tmp_path / "ranks"), "plain", optimizer, "device", 12)
    check_equal_to_one(results, train(None, str(tmp_path / "one"), "plain", optimizer, steps=12))


# They divide by norms, or by moments that decay with the steps that a row sits out: what is rounded comes to more.
AMPLIFY = {"lars": 1e-4, "smart decay adam": 2e-5}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "mean", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_hundred_steps_with_every_optimizer(tmp_path, rank_pool, optimizer, how):
    alone = train(None, str(tmp_path / "one"), how, optimizer, steps=100)
    for ranks in (2, 3, 4):
        results = rank_pool(ranks, train, str(tmp_path / str(ranks)), how, optimizer, "device", 100)
        print(optimizer, how, ranks, relative(np.mean([its[0] for its in results], axis=0), np.array(alone[0])),
              *(max(relative(its[part], alone[part]) for its in results) for part in (1, 2)))  # fmt: skip
        check_equal_to_one(results, alone, AMPLIFY.get(optimizer, 5e-6))


@pytest.mark.parametrize(
    "options", [{"accumulated": 3}, {"clip": (0.05,)}, {"clip": (0.02, float("inf"))}, {"joined": True, "clip": (0.1,)}]
)
def test_with_accumulation_and_clipping(tmp_path, rank_pool, options):
    results = rank_pool(2, _train_with, str(tmp_path / "ranks"), options)
    check_equal_to_one(results, train(None, str(tmp_path / "one"), "mean", "adam", **options))


def _train_with(group, path, options):
    return train(group, path, "mean", "adam", **options)


def test_stores_and_runs_change_no_bit(tmp_path, rank_pool):
    first, *others = [
        rank_pool(2, train, str(tmp_path / f"{i}"), "weighted", "adam", store)
        for i, store in enumerate(("device", "device", "ssd", "remote"))
    ]
    for other in others:
        for (losses, weights, dense, _), (its_losses, its_weights, its_dense, _) in zip(first, other, strict=True):
            assert losses == its_losses
            assert weights.tobytes() == its_weights.tobytes() and dense.tobytes() == its_dense.tobytes()


class Graph(oneemb.TrainGraph):
    def __init__(self, model, optimizer, accumulated, scaler, clip):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, clip_grad_norm=clip)
        self.config.accumulation_steps = accumulated
        if scaler is not None:
            self.set_grad_scaler(scaler)

    def build(self, ids, label, scale):
        loss = self.model.loss(ids, label, scale)
        (loss / self.config.accumulation_steps).backward()
        return loss.detach()


def train_graph(group, path, way, accumulated=1, scaled=False, clip=None, steps=12):
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, "weighted", "ssd", group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scaled else None
    graph = Graph(model, OPTIMIZERS["adagrad"](model.parameters()), accumulated, scaler, clip)
    batches = [batch_of(step, rank, ranks) for step in range(steps)]
    losses = [loss.item() for loss in (graph.run(batches) if way == "run" else (graph(*batch) for batch in batches))]
    stats = model.embedding.stats()
    dense = torch.cat([parameter.detach().flatten() for parameter in model.dense.parameters()]).numpy()
    result = losses, weights_of(model.embedding), dense, (stats["rows"], stats["step"], stats["device"]["pinned"])
    model.embedding.close()
    return result


GRAPHS = [{}, {"accumulated": 3}, {"scaled": True, "clip": 0.05}]


@pytest.mark.parametrize("options", GRAPHS)
def test_graphs_on_ranks_equal_one_process_called_and_run(tmp_path, rank_pool, options):
    called, run = (rank_pool(3, _train_graph_with, str(tmp_path / way), way, options) for way in ("called", "run"))
    check_equal_to_one(called, train_graph(None, str(tmp_path / "one"), "called", **options))
    for one, other in zip(called, run, strict=True):
        assert one[0] == other[0] and one[1].tobytes() == other[1].tobytes() and one[2].tobytes() == other[2].tobytes()


def _train_graph_with(group, path, way, options):
    return train_graph(group, path, way, **options)


def fails_in_a_step(group, path, what):
    """Rank 1 fails; all raise, nothing has changed, and all go on."""
    embedding = Model(path, "plain", "device", group).embedding
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.arange(8).reshape(4, 2) + group.rank()
    embedding(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, raised = weights_of(embedding), ""
    bad = group.rank() == 1
    try:
        if what == "ids":
            embedding(ids.float() if bad else ids)
        rows = embedding(ids)
        (rows.sum() * (float("inf") if bad and what == "gradient" else 1.0)).backward()
        optimizer.step()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    optimizer.zero_grad()
    after = weights_of(embedding)
    embedding(ids).sum().backward()
    optimizer.step()
    steps, pinned = embedding.stats()["step"], embedding.stats()["device"]["pinned"]
    embedding.close()
    return raised, before.tobytes() == after.tobytes(), steps, pinned


@pytest.mark.parametrize(
    "what, own, others",
    [
        ("ids", "TypeError: ids must be torch.int64", r"rank 1 has failed (TypeError: ids must be torch.int64"),
        ("gradient", "NonFiniteGradientError: the gradients of", "NonFiniteGradientError: the gradients of"),
    ],
)
def test_where_one_rank_fails_in_a_step_all_raise_and_nothing_has_changed(tmp_path, rank_pool, what, own, others):
    for rank, (raised, unchanged, steps, pinned) in enumerate(rank_pool(3, fails_in_a_step, str(tmp_path), what)):
        assert (own if rank == 1 else others) in raised
        assert unchanged and steps == 2 and pinned == 0


class Pair(oneemb.TrainGraph):
    """Two embeddings, whose gradients go to their owners one after the other."""

    def __init__(self, path, group):
        super().__init__()
        self.first, self.second = (Model(f"{path}/{n}", "plain", "device", group).embedding for n in range(2))
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=1.0))

    def build(self, ids):
        (self.first(ids).sum() + self.second(ids).sum()).backward()


def has_no_memory_for_gradients(group, path):
    """Rank 1, for those of the first embedding that have come to it."""
    graph, ids, raised = Pair(path, group), torch.arange(8).reshape(4, 2), ""
    graph(ids)
    before, real = weights_of(graph.first), settling._owned

    def fails(asked, *args):
        if asked.store is graph.first.store:
            raise MemoryError("no memory any more")
        return real(asked, *args)

    settling._owned = fails if group.rank() == 1 else real
    try:
        graph(ids)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        settling._owned = real
    same = before.tobytes() == weights_of(graph.first).tobytes()
    graph(ids)
    steps, pinned = graph.steps, graph.first.stats()["device"]["pinned"]
    graph.first.close(), graph.second.close()
    return raised, same, steps, pinned


def test_a_rank_without_memory_for_gradients_that_have_come_leaves_none_waiting(tmp_path, rank_pool):
    for rank, (raised, same, *rest) in enumerate(rank_pool(2, has_no_memory_for_gradients, str(tmp_path))):
        own = "MemoryError: no memory any more"
        assert raised.startswith(own if rank == 1 else f"RankError: rank 1 has failed ({own}")
        assert same and rest == [2, 0]


def trains_without_a_group(group, path):
    embedding = Model(path + str(group.rank()), "plain", "device", None).embedding
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(torch.ones(1, 2, dtype=torch.int64)).sum().backward()
    with pytest.raises(ValueError, match=r"by each of 4 ranks alone, with rows that drift apart; .*group.WORLD"):
        optimizer.step()


def test_training_without_a_group_in_a_job_of_several_ranks_is_refused(tmp_path, rank_pool):
    rank_pool(2, trains_without_a_group, str(tmp_path))


def runs_unevenly(group, path, depth, how):
    """Rank 1 has fewer batches, or its loader raises, or all leave early; then they go on."""
    model = Model(path, "plain", "device", group)
    graph = Graph(model, OPTIMIZERS["sgd"](model.parameters()), 1, None, None)
    batches = [batch_of(step, group.rank(), group.size()) for step in range(8)]

    def loader():
        for step, batch in enumerate(batches):
            if group.rank() == 1 and step == 5:
                if how == "raises":
                    raise OSError("no such file")
                if how == "ends":
                    return
            yield batch

    steps, raised = 0, ""
    try:
        for _ in graph.run(loader(), prefetch_depth=depth):
            steps += 1
            if how == "leaves" and steps == 3:
                break
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    for _ in graph.run(batches[:2], prefetch_depth=depth):
        steps += 1
    model.embedding.close()
    return steps, raised, threading.active_count()


@pytest.mark.parametrize(("end", "depth"), diagonal([("ends", 5), ("raises", 5), ("leaves", 3)], [0, 1, 3]), ids=str)
def test_loops_end_together(tmp_path, rank_pool, depth, end):
    how, steps = end
    for rank, (made, raised, threads) in enumerate(rank_pool(3, runs_unevenly, str(tmp_path), depth, how)):
        assert made == steps + 2
        if how == "raises":
            expected = "OSError: no such file" if rank == 1 else "RankError: rank 1 has failed (OSError: no such file)"
            assert raised.startswith(expected)
        else:
            assert raised == ""
        assert threads < 10


@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_batches_of_other_sizes_and_empty_ones(tmp_path, rank_pool, gradients):
    results = rank_pool(3, trains_unevenly, str(tmp_path / "ranks"), gradients)
    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0], trains_unevenly(None, str(tmp_path / "one")), rtol=1e-5, atol=1e-6)


def trains_unevenly(group, path, gradients="mean"):
    """Rank r has the samples whose number leaves r of 3, of few: some ranks have none. The loss is a sum."""
    embedding = Model(path, "plain", "device", group, gradients).embedding
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    for step in range(12):
        ids, label, _ = batch_of(step, 0, 1)
        ids, label = ids[: step % 4, :, 0], label[: step % 4]
        if group is not None:
            own = (torch.arange(len(ids)) + step) % 3 == group.rank()
            ids, label = ids[own], label[own]
        loss = (embedding(ids).sum((1, 2)) - label).square().sum()
        (loss * (group.size() if group is not None and gradients == "mean" else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(embedding)
    embedding.close()
    return weights


def goes_on(group, path, name, first, last):
    """Train some steps from a snapshot, on as many ranks as there are, and save another one."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, "mean", "ssd", group)
    dense = getattr(model.dense, "module", model.dense)
    state = f"{path}/dense-{first}"
    if first:
        model.embedding.load_snapshot(name)
        saved = torch.load(state)
        dense.load_state_dict(saved["dense"])
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if first:
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, last):
        model.loss(*batch_of(step, rank, ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if group is not None:
        model.embedding.save_snapshot(f"at {last}")
        if rank == 0:
            torch.save({"dense": dense.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}/dense-{last}")
    weights = weights_of(model.embedding)
    model.embedding.close()
    return weights


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
def test_a_job_goes_on_with_another_number_of_ranks_as_if_nothing_had_happened(tmp_path, rank_pool):
    path, at = str(tmp_path / "ranks"), 0
    for ranks in (2, 3, 1, 4):
        results = rank_pool(ranks, goes_on, path, f"at {at}", at, at + 5)
        at += 5
    expected = goes_on(None, str(tmp_path / "one"), "", 0, at)
    for weights in results:
        assert relative(weights, expected) < 5e-6


def averages(group, path, decay):
    """Train with averages of rows; what they are, and what a copy and a loaded snapshot of them are."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(f"{path}/rows", "plain", "device", group)
    averaged = oneemb.AveragedEmbedding(model.embedding, f"{path}/averages", decay)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(6):
        model.loss(*batch_of(step, rank, ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_rows()
    ids = torch.arange(-IDS, IDS) * (2**56)
    ids = ids[:, None].expand(-1, TABLES)
    found = averaged(ids)
    bags = averaged(ids.flatten(), offsets=torch.arange(0, ids.numel() + 1, 4), pooling="mean")
    copy = averaged.copy_to(f"{path}/copy")
    copied = copy.eval()(ids).detach()
    assert torch.equal(copied, found)
    for module in (copy, averaged, model.embedding):
        module.close()
    return found.numpy(), bags.numpy()


@pytest.mark.parametrize("decay", [None, 0.9])
def test_averages_of_rows_of_ranks_are_those_of_one_process(tmp_path, rank_pool, decay):
    expected = averages(None, str(tmp_path / "one"), decay)
    for found in rank_pool(3, averages, str(tmp_path / "ranks"), decay):
        assert all(relative(mine, its) < 5e-6 for mine, its in zip(found, expected, strict=True))


def evaluates(group, path):
    """An EvalGraph reads rows of all ranks, and inserts none."""
    model = Model(path, "mean", "device", group)
    model.embedding(torch.arange(10).reshape(5, 2))

    class Graph(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.model = model

        def build(self, ids, label, scale):
            return self.model.loss(ids, label, scale)

    graph, rows = Graph(), model.embedding.stats()["rows"]
    batches = [batch_of(step, group.rank(), group.size()) for step in range(3)]
    called = [graph(*batch).item() for batch in batches]
    run = [loss.item() for loss in graph.run(batches)]
    assert model.embedding.stats()["rows"] == rows
    model.embedding.close()
    return called, run


def test_evaluation_on_ranks(tmp_path, rank_pool):
    for called, run in rank_pool(2, evaluates, str(tmp_path)):
        assert called == run and len(set(called)) == 3


def trains_columns(group, path, initializers):
    """Rows of two columns that begin otherwise; what they are after some steps."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    columns = [oneemb.make_column_options(oneemb.make_constant_initializer(value)) for value in initializers]
    embedding = oneemb.MultiTableMultiColumnEmbedding(
        "items", [3, 1], torch.float32, torch.int64, [oneemb.make_table(columns)] * TABLES,
        oneemb.make_device_mem_store_options(path), num_threads=1, process_group=group,
    )  # fmt: skip
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    for step in range(6):
        ids, label, _ = batch_of(step, rank, ranks)
        (embedding(ids[..., 0]).sum((1, 2)) - label).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(embedding)
    embedding.close()
    return weights


def test_columns_of_ranks_are_those_of_one_process(tmp_path, rank_pool):
    expected = trains_columns(None, str(tmp_path / "one"), (0.5, -1.0))
    for found in rank_pool(3, trains_columns, str(tmp_path / "ranks"), (0.5, -1.0)):
        assert relative(found, expected) < 5e-6


def forks(group, path):
    """How a child of the first rank ends that looks ids up; then all ranks look them up."""
    model, ids = Model(path, "plain", "device", group), torch.arange(2 * TABLES).view(2, TABLES)
    model.embedding(ids)
    ended = 0
    if group.rank() == 0:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(refused_in_child(model.embedding, ids))
        _, ended = os.waitpid(child, 0)
    rows = model.embedding(ids)
    model.embedding.close()
    return ended, rows.detach().numpy()


def refused_in_child(embedding, ids):
    """How many calls are not."""
    ranks, calls = embedding.ranks, 0
    ranks.leave("say nothing")
    ranks.fail("say nothing", RuntimeError())
    for mode in (True, False):
        try:
            embedding.train(mode)(ids)
        except ForkedProcessError as error:
            calls += "is a forked child of rank" in str(error)
    return 2 - calls


def test_a_forked_child_of_a_rank_is_refused_and_disturbs_nobody(tmp_path, rank_pool):
    (ended, rows), (_, its_rows) = rank_pool(2, forks, str(tmp_path))
    assert ended == 0
    np.testing.assert_array_equal(rows, its_rows)


def zeroes(group, path, set_to_none):
    """In the second step one rank has no gradient."""
    embedding = Model(path, "plain", "device", group).embedding
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = weights_of(embedding)
    for step in range(3):
        loss = embedding(torch.arange(TABLES)[None] * 2**56).sum()
        if (step, group.rank()) != (1, 0):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    moved = weights_of(embedding) - before
    embedding.close()
    return moved


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_a_gradient_makes_the_step_of_the_others(tmp_path, rank_pool, set_to_none):
    for moved in rank_pool(2, zeroes, str(tmp_path), set_to_none):
        trained = moved[[IDS, IDS + 1], [0, 1]]
        np.testing.assert_allclose(trained, -2.5, rtol=1e-6)
        assert np.abs(moved).sum() == pytest.approx(np.abs(trained).sum())


def shards_all(group, path):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard  # seconds

    embedding = Model(path, "plain", "device", group).embedding
    model = torch.nn.Sequential(embedding, torch.nn.Flatten(), torch.nn.Linear(TABLES * DIM, 1))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(RuntimeError, match="must not be inside fully_shard, .* shard only the dense modules"):
        model(torch.arange(TABLES)[None]).sum().backward()
    embedding.close()


def test_an_embedding_inside_fully_shard_is_refused(tmp_path, rank_pool):
    rank_pool(1, shards_all, str(tmp_path))


def is_refused(group, path):
    from torch import distributed

    model = Model(path, "plain", "device", group)
    other = distributed.new_group([0, 1, 2, 3])
    with pytest.raises(ValueError, match="gradients_of_ranks must be .mean. or .sum., got 'max'"):
        Model(f"{path}/0", "plain", "device", group, gradients="max")
    alone = distributed.new_group([0])
    if group.rank() == 1:
        with pytest.raises(ValueError, match="this process must be in the process_group of the embedding, and is not"):
            Model(f"{path}/1", "plain", "device", alone)
    two = torch.nn.ModuleList([model.embedding, Model(f"{path}/2", "plain", "device", other).embedding])
    optimizer = torch.optim.SGD(two.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must train embeddings of one process_group, got 2 for 'items', 'items'"):
        optimizer.step()
    graph = Graph(two, optimizer, 1, None, None)
    with pytest.raises(ValueError, match="the embeddings of Graph must have one process_group, got 2 process groups"):
        graph.run([])
    two[1].close()
    with pytest.raises(ValueError, match="needs a path of its own, got the path of the embedding"):
        model.embedding.copy_to(path)
    model.embedding.close()
    pair = torch.nn.ModuleList([Model(f"{path}/{n}", "plain", "device", group).embedding for n in "34"])
    with pytest.raises(ValueError, match=r"fused=True with a process_group needs one optimizer for each embedding"):
        oneemb.Optimizer(torch.optim.SGD(pair.parameters(), lr=0.1), fused=True)
    for embedding in pair:
        embedding.close()


def updates_in_backward(group, path, how):
    """Losses and weights with rows updated in the backward pass, and by a step after it."""
    found = []
    for fused in (True, False):
        model = Model(f"{path}/{fused}", how, "ssd", group)
        rows = oneemb.Optimizer(torch.optim.Adam([model.embedding.weight], lr=0.1), [model.embedding], fused=fused)
        dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
        losses = []
        for step in range(8):
            loss = model.loss(*batch_of(step, group.rank(), group.size()))
            loss.backward()
            if not fused:
                rows.step()
                rows.zero_grad()
            dense.step()
            dense.zero_grad()
            losses.append(loss.item())
        found.append((losses, weights_of(model.embedding), model.embedding.stats()["step"]))
        model.embedding.close()
    return found


@pytest.mark.parametrize("how", ["plain", "sum", "weighted"])
def test_rows_of_ranks_updated_in_backward_are_those_of_a_step(how, tmp_path, rank_pool):
    for fused, stepped in rank_pool(2, updates_in_backward, str(tmp_path), how):
        assert fused[0] == stepped[0]
        assert np.array_equal(fused[1], stepped[1])
        assert fused[2] == stepped[2] == 8


def fails_in_backward(group, path):
    model = Model(path, "plain", "device", group)
    embedding = model.embedding
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=0.1), fused=True)
    before = weights_of(embedding)
    ids = batch_of(0, group.rank(), group.size())[0][..., 0]
    with pytest.raises(oneemb.NonFiniteGradientError):
        (embedding(ids).sum() * (float("nan") if group.rank() else 1.0)).backward()
    assert np.array_equal(weights_of(embedding), before)
    optimizer.zero_grad()
    embedding(ids).sum().backward()
    assert not np.array_equal(weights_of(embedding), before)
    assert optimizer.taken == 1
    embedding.close()


def test_a_gradient_that_is_not_finite_on_one_rank_updates_nothing_on_any(tmp_path, rank_pool):
    rank_pool(2, fails_in_backward, str(tmp_path))


def test_what_ranks_cannot_do_is_refused_with_what_to_do(tmp_path, rank_pool):
    rank_pool(4, is_refused, str(tmp_path))  # All of the job: torch makes groups on all processes or on none.
