"""Tables that every rank has whole: the numbers of one process, and copies that are equal bit for bit.

Table 0 of two is replicated, or both are. The oracle is one process on the batches of all ranks together.
"""

import re

import numpy as np
import pytest
import torch

import oneemb
from oneemb.embeddings import internals
from oneemb.kernels.owner import owner_of
from tests.support.optimizers import OPTIMIZERS
from tests.test_ranks import IDS, LOOKUPS, TABLES, Graph, Model as Whole, batch_of, relative, weights_of

STEPS = 12


class Model(Whole):
    """As that of tests/test_ranks.py, with some tables replicated."""

    def __init__(self, path, how, store, group, replicated=(0,)):
        tables = [oneemb.make_table(replicate=t in replicated) for t in range(TABLES)]
        super().__init__(path, how, store, group, tables=tables)


def rows_of(embedding):
    """Every row that this rank has, its state too: {(table, id): bytes}."""
    store, found = embedding.store, {}
    for table_N, id_N, row_NW in store.rows.hot.scan():
        for table, id, row in zip(table_N.tolist(), id_N.tolist(), row_NW[:, : store.format.row_width], strict=True):
            assert (table, id) not in found
            found[table, id] = row.tobytes()
    return found


def train(group, path, how, optimizer, store="device", steps=STEPS, replicated=(0,), clip=None, joined=False):
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, how, store, group, replicated)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if joined:
        optimizer = oneemb.Optimizer(optimizer)
    norms = []
    for step in range(steps):
        model.loss(*batch_of(step, rank, ranks)).backward()
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), *clip).item())
        optimizer.step()
        optimizer.zero_grad()
    result = weights_of(model.embedding), rows_of(model.embedding), model.embedding.stats(), norms
    model.embedding.close()
    return result


def check_copies(rows_R, replicated=(0,)):
    """All ranks have the same rows of replicated tables, and each other row is with its owner alone."""
    for rank, rows in enumerate(rows_R):
        copies = {key: row for key, row in rows.items() if key[0] in replicated}
        assert copies == {key: row for key, row in rows_R[0].items() if key[0] in replicated}
        for table, id in rows.keys() - copies.keys():
            assert owner_of(np.array([table], np.int32), np.array([id], np.int64), len(rows_R))[0] == rank


def check_equal_to_one(results, alone, replicated=(0,)):
    weights, rows, stats, norms = alone
    check_copies([result[1] for result in results], replicated)
    found = {key for result in results for key in result[1]}
    assert found == rows.keys()
    for its_weights, its_rows, its_stats, its_norms in results:
        assert relative(its_weights, weights) < 5e-6
        assert its_weights.tobytes() == results[0][0].tobytes()
        np.testing.assert_allclose(its_norms, norms, rtol=2e-6)
        assert its_norms == results[0][3]
        assert its_stats["step"] == stats["step"] and its_stats["device"]["pinned"] == 0
        assert its_stats["rows"] == len(its_rows)
        assert its_stats["replicated_rows"] == sum(table in replicated for table, _ in its_rows)
    assert stats["replicated_rows"] == 0


@pytest.mark.parametrize("how", LOOKUPS)
def test_ranks_with_a_replicated_table_equal_one_process(tmp_path, rank_pool, how):
    results = rank_pool(3, train, str(tmp_path / "ranks"), how, "adagrad")
    check_equal_to_one(results, train(None, str(tmp_path / "one"), how, "adagrad"))


@pytest.mark.parametrize(
    "optimizer, options",
    [
        ("momentum", {}), ("adam", {"joined": True}), ("row-wise adagrad", {"store": "ssd"}),
        ("adam", {"clip": (0.05,)}), ("sgd", {"clip": (0.02, float("inf")), "joined": True, "replicated": (0, 1)}),
    ],
)  # fmt: skip
def test_with_optimizers_and_clipping(tmp_path, rank_pool, optimizer, options):
    results = rank_pool(4, train_with, str(tmp_path / "ranks"), optimizer, options)
    alone = train(None, str(tmp_path / "one"), "plain", optimizer, **options)
    check_equal_to_one(results, alone, options.get("replicated", (0,)))


def train_with(group, path, optimizer, options):
    return train(group, path, "plain", optimizer, **options)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def train_graph(group, path, way, replicated):
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, "weighted", "ssd", group, replicated)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    graph = Graph(model, OPTIMIZERS["adagrad"](model.parameters()), 2, scaler, 0.05)
    batches = [batch_of(step, rank, ranks) for step in range(STEPS)]
    losses = list(graph.run(batches)) if way == "run" else [graph(*batch) for batch in batches]
    result = weights_of(model.embedding), rows_of(model.embedding), model.embedding.stats(), []
    model.embedding.close()
    return result, torch.stack(losses).tolist()


@pytest.mark.parametrize("replicated", [(0,), (0, 1)])
def test_graphs_on_ranks_equal_one_process_called_and_run(tmp_path, rank_pool, replicated):
    called, run = (rank_pool(3, train_graph, str(tmp_path / way), way, replicated) for way in ("called", "run"))
    alone, losses = train_graph(None, str(tmp_path / "one"), "called", replicated)
    check_equal_to_one([result for result, _ in called], alone, replicated)
    np.testing.assert_allclose(np.mean([its for _, its in called], axis=0), losses, rtol=1e-5)
    for (result, its_losses), (other, others_losses) in zip(called, run, strict=True):
        assert result[0].tobytes() == other[0].tobytes() and result[1] == other[1] and its_losses == others_losses


def bytes_to_others(group, path, replicated, batch):
    """What a lookup of so many ids sends to other ranks, and what it gives."""
    model = Model(path, "plain", "device", group, replicated)
    ranks, sent = model.embedding.ranks, []
    all_to_all = ranks.all_to_all

    def note(received, tensor, received_R, sent_R):
        one = tensor[:1].numel() * tensor.element_size()
        sent.append(sum(count * one for rank, count in enumerate(sent_R) if rank != group.rank()))
        all_to_all(received, tensor, received_R, sent_R)

    ranks.all_to_all = note
    rows = model.embedding(torch.arange(batch) + group.rank(), torch.tensor(0))
    model.embedding.close()
    return sum(sent), rows.detach().numpy()


def test_what_a_lookup_of_replicated_tables_sends_to_other_ranks(tmp_path, rank_pool):
    whole, few, many, other = (
        rank_pool(2, bytes_to_others, str(tmp_path / f"{replicated}{ids}"), replicated, ids)
        for replicated, ids in [((0, 1), 500), ((0,), 1), ((0,), 500), ((), 500)]
    )
    for rank in range(2):
        assert whole[rank][0] == 0, "all tables are replicated"
        assert few[rank][0] == many[rank][0] < 200, "headers"
        assert other[rank][0] > 5000
        assert np.array_equal(whole[rank][1], other[rank][1]) and np.array_equal(many[rank][1], other[rank][1])


def looks_up_alone(group, path):
    """An embedding of replicated tables alone: each rank looks up as often as it likes, and meets its own errors."""
    embedding = Model(path, "plain", "device", group, (0, 1)).embedding
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    for step in range(4):
        ids = torch.arange(20).reshape(10, 2) + step
        sums = [embedding(ids + rank).sum() for rank in range(group.rank() + 1)]
        if group.rank() == 1:
            with pytest.raises(TypeError, match="ids must be"):
                embedding(ids.float())
            with torch.no_grad():
                embedding.eval()(ids)
                embedding.train()
        if group.rank() != step:  # One has no gradient at all.
            sum(sums).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = rows_of(embedding), embedding.stats(), weights_of(embedding)
    embedding.close()
    return result


class Seldom(oneemb.TrainGraph):
    """Looks rows up where there are ids: not on every rank in every step."""

    def __init__(self, path, group, scaled):
        super().__init__()
        self.embedding = Model(path, "plain", "device", group, (0, 1)).embedding
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1), clip_grad_norm=0.01)
        if scaled:
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0**10))

    def build(self, *batches):
        losses = [self.embedding(ids).square().sum() for ids in batches if len(ids)]
        (sum(losses, 0 * self.bias) / len(batches)).backward()


def trains_seldom(group, path, scaled):
    graph = Seldom(path, group, scaled)
    for step in range(6):
        batches = [torch.arange(step, step + 10).view(5, 2)[: 5 * ((step >> rank) % 2)] for rank in range(2)]
        graph(*(batches if group is None else [batches[group.rank()]]))
    result = weights_of(graph.embedding)
    graph.embedding.close()
    return result


@pytest.mark.parametrize("scaled", [False, True])
def test_a_graph_clips_and_unscales_gradients_that_not_all_ranks_have(tmp_path, rank_pool, scaled):
    alone = trains_seldom(None, str(tmp_path / "one"), scaled)
    for weights in rank_pool(2, trains_seldom, str(tmp_path / "ranks"), scaled):
        assert relative(weights, alone) < 5e-6


def test_tables_that_are_all_replicated_are_looked_up_by_each_rank_alone(tmp_path, rank_pool):
    results = rank_pool(3, looks_up_alone, str(tmp_path))
    trained = [{key: row for key, row in rows.items() if key[1] < 20} for rows, *_ in results]
    check_copies(trained, (0, 1))
    for _, stats, _ in results:
        assert stats["step"] == 4 and stats["device"]["pinned"] == 0
    # By hand: each time that a rank has looked an id up, a third is taken from each of its weights.
    initial = oneemb.MultiTableEmbedding(
        "items", 4, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
        oneemb.make_device_mem_store_options(str(tmp_path / "one")),
    ).eval()  # fmt: skip
    for (table, id), row in trained[0].items():
        times = sum(
            id - step - rank in range(table, 20, 2) for step in range(4) for of in range(3) if of != step
            for rank in range(of + 1)
        )  # fmt: skip
        begin = initial(torch.tensor([[id, id]]))[0, table].detach().numpy()
        np.testing.assert_allclose(np.frombuffer(row, np.float32), begin - times / 3, rtol=1e-5, atol=1e-5)


def is_made_otherwise(group, path, replicated):
    """Both ranks look up and step; on rank 1 other tables are replicated. What each has raised."""
    embedding = Model(path, "plain", "device", group, replicated[group.rank()]).embedding
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    with pytest.raises(oneemb.RankError) as raised:
        embedding(torch.arange(8).reshape(4, 2)).sum().backward()
        optimizer.step()
    embedding.close()
    return str(raised.value)


@pytest.mark.parametrize("replicated", [((0,), ()), ((0, 1), ()), ((0, 1), (0,))])
def test_ranks_that_replicate_other_tables_are_told_so(tmp_path, rank_pool, replicated):
    for said in rank_pool(2, is_made_otherwise, str(tmp_path), replicated):
        assert "have made the embedding differently (rank 0: 2 tables, " in said and "with the same arguments" in said
        assert ("do different things" in said) == ((0, 1) in replicated)


def begins_otherwise(group, path):
    """Three embeddings of replicated tables, of which one begins with other weights on each rank."""
    embeddings = []
    for name, seed in (("a", 0), ("b", group.rank()), ("c", 0)):
        options = oneemb.make_device_mem_store_options(f"{path}/{name}")
        tables = [oneemb.make_table(replicate=True)]
        embeddings.append(
            oneemb.MultiTableEmbedding(
                name, 4, torch.float32, torch.int64, tables, options, seed=seed, num_threads=1, process_group=group
            )
        )
    optimizer = torch.optim.SGD([embedding.weight for embedding in embeddings], lr=1.0)
    before = [embedding(torch.arange(3)).detach() for embedding in embeddings]
    sum(embedding(torch.arange(3)).sum() for embedding in embeddings).backward()
    said = []
    for step in (optimizer.step, oneemb.Optimizer(optimizer).step):
        with pytest.raises(oneemb.RankError) as raised:
            step()
        said.append(str(raised.value))
    assert all(torch.equal(one(torch.arange(3)), rows) for one, rows in zip(embeddings, before, strict=True))
    for embedding in embeddings:
        embedding.close()
    return said


def test_copies_that_begin_otherwise_are_not_trained(tmp_path, rank_pool):
    for said in rank_pool(2, begins_otherwise, str(tmp_path)):
        for words in said:
            assert words.startswith(
                "the ranks step by SGD, and have made the embedding differently (rank 0: 'a': 1 tables, "
            )


class FailsAlone(oneemb.TrainGraph):
    """A graph whose lookups ask no rank."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))

    def build(self, ids):
        self.embedding(ids).sum().backward()


def fails_alone(group, path, way):
    """Rank 1 looks up ids of a wrong dtype; all go on afterwards."""
    graph = FailsAlone(Model(path, "plain", "device", group, (0, 1)).embedding)
    ids, raised = torch.arange(8).reshape(4, 2), ""
    graph(ids)
    wrong = ids.float() if group.rank() == 1 else ids
    try:
        if way == "called":
            graph(wrong)
        elif way == "run":
            list(graph.run([(ids,), (ids,), (wrong,), (ids,)]))
        else:
            graph.embedding(wrong)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    steps = graph.steps
    graph(ids)
    result = raised, steps, rows_of(graph.embedding), graph.embedding.stats()["device"]["pinned"]
    graph.embedding.close()
    return result


@pytest.mark.parametrize("way", ["called", "run", "eager"])
def test_where_a_rank_fails_alone_in_a_lookup_that_asks_no_rank(tmp_path, rank_pool, way):
    """In a step of a graph all raise; in an eager lookup the others notice nothing, and all go on."""
    results = rank_pool(3, fails_alone, str(tmp_path), way)
    check_copies([rows for _, _, rows, _ in results], (0, 1))
    for rank, (raised, steps, _, pinned) in enumerate(results):
        assert steps == (3 if way == "run" else 1) and pinned == 0
        own = "TypeError: ids must be torch.int64"
        others = "" if way == "eager" else f"RankError: rank 1 has failed ({own}"
        assert raised.startswith(own if rank == 1 else others) and (raised == "") == (others == "" and rank != 1)


class Evaluates(oneemb.EvalGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, ids):
        return self.embedding(ids)


def evaluates_alone(group, path):
    """Rank 1 evaluates by itself, and fails at it; all train before and afterwards."""
    graph = FailsAlone(Model(path, "plain", "device", group, (0, 1)).embedding)
    evaluation, ids = Evaluates(graph.embedding), torch.arange(8).reshape(4, 2)
    graph(ids)
    if group.rank() == 1:
        assert evaluation(ids).shape == (4, 2, 4)
        for one in (evaluation, graph.eval()):
            with pytest.raises(TypeError, match="ids must be"):
                one(ids.float())
        graph.train()
    graph(ids)
    result = graph.steps, rows_of(graph.embedding)
    graph.embedding.close()
    return result


def test_an_evaluation_that_asks_no_rank_is_each_ranks_own(tmp_path, rank_pool):
    results = rank_pool(3, evaluates_alone, str(tmp_path))
    assert [steps for steps, _ in results] == [2, 2, 2]
    check_copies([rows for _, rows in results], (0, 1))


# ---- snapshots -------------------------------------------------------------------------------------------------------


def all_ids():
    ids = torch.arange(-IDS, IDS) * (2**56)
    return ids[:, None].expand(-1, TABLES).contiguous()


def trains_and_saves(group, path, replicated):
    """Train, look some ids up on one rank alone without training them, and save."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, "plain", "ssd", group, replicated)
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    for step in range(6):
        model.loss(*batch_of(step, rank, ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.embedding(torch.arange(100, 120).reshape(10, 2) if rank == ranks - 1 else torch.empty(0, 2).long())
    changes = model.embedding.state_dict()["_extra_state"]
    assert torch.equal(changes, model.embedding.state_dict()["_extra_state"]), "nothing has changed since"
    model.embedding.save_snapshot("s")
    result = rows_of(model.embedding), model.embedding.stats()["step"]
    model.embedding.close()
    return result


def loads(group, path, replicated, name="s", store="device"):
    model = Model(path, "plain", store, group, replicated)
    OPTIMIZERS["adagrad"](model.parameters())
    internals.check_fits(model.embedding, name)
    model.embedding.load_snapshot(name)
    assert model.embedding.stats()["device"]["pinned"] == 0
    result = rows_of(model.embedding), model.embedding.stats()
    model.embedding.close()
    return result


def read(path, name="s"):
    """The rows of a snapshot by the reader, each once."""
    with oneemb.make_persistent_table_reader(path, name, "int64", "float32", with_tables=True) as reader:
        found = {}
        for table_N, id_N, value_NX in reader:
            for table, id, row in zip(table_N.tolist(), id_N.tolist(), value_NX, strict=True):
                assert (table, id) not in found
                found[table, id] = row.tobytes()
        assert len(reader) == len(found)
    return found


def check_loaded(results, saved, replicated, step):
    """Every rank has all rows of replicated tables, and those that it owns."""
    if len(results) == 1:
        replicated = (0, 1)
    check_copies([rows for rows, _ in results], replicated)
    for rows, stats in results:
        assert {key: row for key, row in rows.items() if key[0] in replicated} == {
            key: row for key, row in saved.items() if key[0] in replicated
        }
        assert stats["rows"] == len(rows) and stats["step"] == step
        assert stats["replicated_rows"] == (0 if len(results) == 1 else sum(key[0] in replicated for key in rows))
    assert {key: row for rows, _ in results for key, row in rows.items()} == saved


@pytest.mark.filterwarnings("error:snapshot 's' was saved with other")
@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
@pytest.mark.parametrize("ranks, replicated", [(0, (0,)), (1, (0,)), (2, (1,)), (3, (0, 1)), (4, ())])
def test_what_any_number_of_ranks_has_saved_any_other_loads(tmp_path, rank_pool, ranks, replicated):
    path = str(tmp_path / "ranks")
    alone = trains_and_saves(None, str(tmp_path / "one"), ())[0]
    results = rank_pool(ranks, trains_and_saves, path, replicated) if ranks else [trains_and_saves(None, path, ())]
    saved = read(path)
    assert saved.keys() == alone.keys() and alone.keys() >= {(0, 118), (1, 119)}
    check_copies([{key: row for key, row in rows.items() if key[1] < 100} for rows, _ in results],
                 replicated if ranks > 1 else (0, 1))  # fmt: skip
    assert {key: row for rows, _ in results for key, row in rows.items()} == saved
    for other in (0, 1, 2, 3, 4):
        for its_replicated in [replicated, (0,)] if other > 1 else [(0,)]:
            store = "ssd" if other == 3 else "device"
            arguments = path, its_replicated, "s", store
            loaded = rank_pool(other, loads, *arguments) if other else [loads(None, *arguments)]
            check_loaded(loaded, saved, its_replicated, 6)


def test_tools_see_each_row_once(tmp_path, rank_pool):
    from tests.test_cli import run as command, run_json

    path = tmp_path / "ranks"
    rank_pool(3, trains_and_saves, str(path), (0, 1))
    saved = read(path)
    checked = run_json("check", path)
    assert checked["sound"] and checked["rows"] == 2 * len(saved), "that of the state dict, and this one"
    assert [one["rows"] for one in run_json("inspect", path)["snapshots"] if one["name"] == "s"] == [len(saved)]
    rows = tmp_path / "rows.npz"
    assert run_json("export", path, rows, "--snapshot", "s", "--with-state")["rows"] == len(saved)
    command("import", rows, tmp_path / "b", "--snapshot", "s", "--with-state")
    assert read(tmp_path / "b") == saved
    run_json("compact", path)
    command("reshard", path, "--name", "s", "--ranks", 2)
    assert read(path) == saved
    check_loaded(rank_pool(2, loads, str(path), (0,)), saved, (0,), 6)


def goes_on(group, path, first, last, replicated):
    """Train some steps from a snapshot, on as many ranks as there are, and save another one."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    embedding = Model(path, "plain", "ssd", group, replicated).embedding
    optimizer = OPTIMIZERS["adam"](embedding.parameters())
    if first:
        embedding.load_snapshot(f"at {first}")
    for step in range(first, last):
        ids, label, _ = batch_of(step, rank, ranks)
        (embedding(ids[..., 0]).sum((1, 2)) - label).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    embedding.save_snapshot(f"at {last}")
    result = weights_of(embedding)
    embedding.close()
    return result


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
def test_a_job_goes_on_with_other_ranks_and_other_replicated_tables_as_if_nothing_had_happened(tmp_path, rank_pool):
    path, at = str(tmp_path / "ranks"), 0
    for ranks, replicated in [(2, (0,)), (3, ()), (4, (0, 1)), (2, (1,))]:
        results = rank_pool(ranks, goes_on, path, at, at + 3, replicated)
        at += 3
    expected = goes_on(None, str(tmp_path / "one"), 0, at, ())
    for weights in results:
        assert relative(weights, expected) < 5e-6


def spreading_fails(group, path):
    """Rank 1 has no room for the copies of others when it loads; then all load again."""
    embedding = Model(path, "plain", "device", group).embedding
    OPTIMIZERS["adagrad"](embedding.parameters())
    embedding.store.build()
    real, raised = embedding.store.replicas.put, []

    def fails(*rows):
        raise oneemb.StoreFullError("no room any more")

    if group.rank() == 1:
        embedding.store.replicas.put = fails
    for call in (lambda: embedding.load_snapshot("s"), lambda: embedding(all_ids())):
        try:
            call()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    embedding.store.replicas.put = real
    embedding.load_snapshot("s")
    result = rows_of(embedding), embedding.stats()
    embedding.close()
    return raised, result


def test_after_a_load_whose_copies_did_not_fit_every_rank_says_that_it_has_no_rows(tmp_path, rank_pool):
    path = str(tmp_path / "ranks")
    rank_pool(2, trains_and_saves, path, (0,))
    results = rank_pool(2, spreading_fails, path)
    check_loaded([result for _, result in results], read(path), (0,), 6)
    for rank, (raised, _) in enumerate(results):
        own = "StoreFullError: no room any more"
        assert raised[0].startswith(own if rank == 1 else f"RankError: rank 1 has failed ({own})")
        assert "load_snapshot(name) goes on from one" in raised[1] and len(raised) == 2


# ---- what goes in and out --------------------------------------------------------------------------------------------


def imports(group, path, fails):
    """Rows for both tables, with averages of them; the source of rank 1 may end in the middle."""
    embedding = Model(path, "plain", "device", group).embedding
    averaged = oneemb.AveragedEmbedding(embedding, f"{path}/averages", 0.5)
    embedding(torch.arange(20).reshape(10, 2) + (0 if group is None else group.rank()))
    averaged.update_rows()

    def batches():
        for n in range(4):
            if fails and group.rank() == 1 and n == 2:
                raise OSError("no such file")
            ids = torch.arange(10 * n, 10 * n + 10)
            for table in range(TABLES):
                yield torch.full((10,), table), ids, torch.full((10, 4), float(n + table))

    raised = ""
    try:
        assert oneemb.import_rows(embedding, batches(), batch_size=20) == 80
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    averaged.update_rows()
    ids = torch.arange(45)[:, None].expand(-1, 2).contiguous()
    weights, averages = embedding.eval()(ids), averaged(ids)
    result = weights.detach().numpy(), averages.numpy(), rows_of(embedding), raised
    averaged.close()
    embedding.close()
    return result


def test_rows_are_imported_into_every_copy(tmp_path, rank_pool):
    expected, averages, *_ = imports(None, str(tmp_path / "one"), False)
    results = rank_pool(3, imports, str(tmp_path / "ranks"), False)
    check_copies([{key: row for key, row in rows.items() if key[1] >= 30} for _, _, rows, _ in results])
    for its_weights, its_averages, _, raised in results:
        assert np.array_equal(its_weights, expected) and np.array_equal(its_averages, averages) and raised == ""


def test_an_import_that_fails_on_one_rank_leaves_copies_equal(tmp_path, rank_pool):
    results = rank_pool(3, imports, str(tmp_path / "ranks"), True)
    check_copies([rows for _, _, rows, _ in results])
    for rank, (weights, averages, _, raised) in enumerate(results):
        assert raised.startswith("OSError" if rank == 1 else "RankError: rank 1 has failed (OSError")
        assert np.array_equal(weights, results[0][0]) and np.array_equal(averages, results[0][1])
    assert np.array_equal(results[0][0][:20, 0, 0], np.repeat([0.0, 1.0], 10)), "what all have read is there"


def averages(group, path, replicated):
    """Averages while rows are trained; what they are after a load, and in a copy."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(f"{path}/rows", "plain", "device", group, replicated)
    averaged = oneemb.AveragedEmbedding(model.embedding, f"{path}/averages", 0.9)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(8):
        model.loss(*batch_of(step, rank, ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_rows()
        if step == 4:
            state = torch.nn.ModuleDict({"rows": model.embedding, "averaged": averaged}).state_dict()
            then = averaged(all_ids())
    found = averaged(all_ids())
    copy = averaged.copy_to(f"{path}/copy")
    assert torch.equal(copy.eval()(all_ids()).detach(), found)
    assert copy.stats()["replicated_rows"] == model.embedding.stats()["replicated_rows"]
    torch.nn.ModuleDict({"averaged": averaged, "rows": model.embedding}).load_state_dict(state)
    assert torch.equal(averaged(all_ids()), then), "loading the rows after the averages changes none of these"
    for module in (copy, averaged, model.embedding):
        module.close()
    return found.numpy()


def test_averages_of_replicated_rows_are_those_of_one_process(tmp_path, rank_pool):
    expected = averages(None, str(tmp_path / "one"), ())
    results = rank_pool(3, averages, str(tmp_path / "ranks"), (0,))
    for found in results:
        assert relative(found, expected) < 5e-6 and found.tobytes() == results[0].tobytes()


# ---- how much there may be -------------------------------------------------------------------------------------------


def reaches_the_limit(group, path, where):
    """Replicated rows of 16 bytes, at most 40 of them. What is raised, and whether rows and counts are as before."""
    from oneemb.storage import replicas

    embedding = Model(path, "plain", "ssd", group).embedding
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.arange(30).reshape(-1, 1).expand(-1, 2).contiguous()
    embedding(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, steps, raised, real = rows_of(embedding), embedding.stats()["step"], "", replicas.REPLICATED_BYTES_MAX
    more = ids[:6] + 1000 + 6 * group.rank()
    try:
        if where == "step":
            embedding(more).sum().backward()  # 6 on each of 2 ranks, 12 in all
        replicas.REPLICATED_BYTES_MAX = 40 * 16
        if where == "lookup":
            embedding(ids[:11] + 1000 if group.rank() == 1 else ids)
        elif where == "step":
            optimizer.step()
        elif where == "load":
            embedding.load_snapshot("s")
        elif where == "import":
            oneemb.import_rows(embedding, [(torch.arange(11) + 1000, torch.ones(11, 4))])
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    replicas.REPLICATED_BYTES_MAX = 40 * 16
    optimizer.zero_grad()
    after = rows_of(embedding)
    unchanged = all(after[key] == row for key, row in before.items()) and embedding.stats()["step"] == steps
    # The rest goes on.
    embedding(ids).sum().backward()
    optimizer.step()
    pinned = embedding.stats()["device"]["pinned"]
    embedding.close()
    replicas.REPLICATED_BYTES_MAX = real
    return raised, unchanged, pinned, after.keys() - before.keys()


@pytest.mark.parametrize("where", ["lookup", "step", "load", "import"])
@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
def test_more_replicated_rows_than_may_be_are_an_error_with_sizes_before_anything_has_changed(
    tmp_path, rank_pool, where
):
    path = str(tmp_path / "ranks")
    if where == "load":
        rank_pool(3, saves_many, path)
    full = (
        r"StoreFullError: the replicated tables in .* have (\d+) rows and were to have (\d+), of 16 bytes each: (\d+)"
    )
    rest = " bytes on each of 2 ranks, of which they may take 640; save a snapshot"
    for raised, unchanged, pinned, begun in rank_pool(2, reaches_the_limit, path, where):
        sizes = re.search(full + rest, raised)
        assert sizes and int(sizes[3]) == 16 * int(sizes[2]) > 640, raised
        assert unchanged and pinned == 0
        assert where == "step" or not {key for key in begun if key[0] == 0}


def saves_many(group, path):
    embedding = Model(path, "plain", "device", group, ()).embedding
    embedding(torch.arange(100).reshape(50, 2))
    embedding.save_snapshot("s")
    embedding.close()


def saves_at_the_limit(group, path):
    """Each rank begins other rows, as many as may be, and they save; what is said where they are loaded."""
    from oneemb.storage import replicas

    real, replicas.REPLICATED_BYTES_MAX = replicas.REPLICATED_BYTES_MAX, 40 * 16
    embedding = Model(path, "plain", "device", group, (0, 1)).embedding
    embedding(torch.arange(40).reshape(20, 2) + 1000 * group.rank())
    embedding.save_snapshot("s")
    try:
        embedding.load_snapshot("s")
        raised = ""
    except oneemb.StoreFullError as error:
        raised = str(error)
    after = rows_of(embedding)
    embedding.close()
    replicas.REPLICATED_BYTES_MAX = real
    return raised, after


@pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")
def test_what_ranks_have_begun_up_to_the_limit_can_be_saved(tmp_path, rank_pool):
    path = str(tmp_path / "ranks")
    results = rank_pool(2, saves_at_the_limit, path)
    begun = {(id % 2, 1000 * rank + id) for rank in range(2) for id in range(40)}
    assert read(path).keys() == begun
    for rank, (raised, after) in enumerate(results):
        assert "were to have 80, of 16 bytes each: 1280 bytes on each of 2 ranks" in raised
        assert after.keys() >= {key for key in begun if key[1] // 1000 == rank}, "those that it had are there"


def test_one_rank_has_no_limit_and_no_copies(tmp_path, rank_pool):
    (raised, *_), *_ = rank_pool(1, reaches_the_limit, str(tmp_path / "one"), "lookup")
    assert raised == ""


@pytest.mark.parametrize("columns", [None, oneemb.make_constant_initializer(0.5), [oneemb.make_column_options()] * 2])
def test_options_of_replicated_tables_come_back_from_json_and_others_stay_as_they_were(columns):
    from oneemb.options import from_json, to_json

    table = oneemb.make_table(columns, replicate=True)
    assert from_json(to_json([table])) == [table] and table != oneemb.make_table(columns)
    assert "replicate" not in to_json(oneemb.make_table(columns))
    with pytest.raises(TypeError, match="replicate must be True or False, got 1"):
        oneemb.make_table(columns, replicate=1)


def train_rounded(group, path, replicated, comm_dtype):
    """The rows after steps whose gradients were rounded on their way."""
    embedding = oneemb.MultiTableEmbedding(
        "items", 4, torch.float32, torch.int64,
        [oneemb.make_table(replicate=t in replicated) for t in range(TABLES)],
        oneemb.make_device_mem_store_options(path), num_threads=1, process_group=group, comm_dtype=comm_dtype,
    )  # fmt: skip
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    for step in range(STEPS):
        ids, label, _ = batch_of(step, group.rank(), group.size())
        (embedding(ids[..., 0]).sum((1, 2)) - label).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    result = rows_of(embedding)
    embedding.close()
    return result


@pytest.mark.parametrize("replicated", [(0,), (0, 1)])
def test_copies_stay_equal_whatever_gradients_are_rounded_to(tmp_path, rank_pool, replicated):
    rounded, whole = (
        rank_pool(3, train_rounded, str(tmp_path / str(dtype)), replicated, dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    check_copies(rounded, replicated)
    check_copies(whole, replicated)
    assert rounded[0] != whole[0]


def erases(group, path):
    """Table 0 is replicated."""
    embedding = oneemb.MultiTableEmbedding(
        "rows", 4, torch.float32, torch.int64, [oneemb.make_table(replicate=True), oneemb.make_table()],
        oneemb.make_device_mem_store_options(path), process_group=group,
    )  # fmt: skip
    with torch.no_grad():
        embedding(torch.arange(10).repeat(2, 1).T.contiguous())
    mine = torch.arange(4) if group.rank() == 0 else torch.arange(2, 6)
    erased = [embedding.erase(mine, table) for table in range(2)]
    rows = set(rows_of(embedding))
    held = embedding(torch.tensor([[8, 8]]))
    with pytest.raises((oneemb.StorageError, oneemb.RankError), match="in use by a lookup"):
        embedding.erase(torch.tensor([8, 9]), 1)
    kept = set(rows_of(embedding)) == rows
    del held
    erased.append(embedding.erase(torch.tensor([8, 8, 1000 + group.rank()]), 1))
    stats = embedding.stats()
    embedding.close()
    return erased, kept, rows, stats["replicated_rows"]


def test_rows_are_erased_on_every_rank_that_has_them(rank_pool, tmp_path):
    found = rank_pool(2, erases, str(tmp_path))
    assert all(erased == [6, 6, 1] and kept and replicated == 4 for erased, kept, _, replicated in found)
    copies = {(0, n) for n in range(6, 10)}
    own = [rows - copies for *_, rows, _ in found]
    assert all(copies < rows for *_, rows, _ in found)
    assert set.union(*own) == {(1, n) for n in range(6, 10)} and not set.intersection(*own)
