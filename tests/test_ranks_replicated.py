"""Tables that every rank has whole: the numbers of one process, and copies that are equal bit for bit.

Table 0 of two is replicated, or both are. The oracle is one process on the batches of all ranks together.
"""

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels.owner import owner_of
from tests.test_ranks import IDS, LOOKUPS, OPTIMIZERS, TABLES, Graph, Model as Whole, batch_of, relative

STEPS = 12


class Model(Whole):
    """As that of tests/test_ranks.py, with some tables replicated."""

    def __init__(self, path, how, store, group, replicated=(0,)):
        tables = [oneemb.make_table(replicate=t in replicated) for t in range(TABLES)]
        super().__init__(path, how, store, group, tables=tables)


def rows_of(embedding):
    """Every row that this rank has, its state too: {(table, id): bytes}."""
    store, found = embedding.store, {}
    for table_N, id_N, row_NW in store._rows.hot.scan():
        for table, id, row in zip(table_N.tolist(), id_N.tolist(), row_NW[:, : store.format.row_width], strict=True):
            assert (table, id) not in found
            found[table, id] = row.tobytes()
    return found


def weights_of(embedding):
    """The weights of all ids there may be."""
    ids = torch.arange(-IDS, IDS) * (2**56)
    was = embedding.training
    embedding.eval()
    rows = embedding(ids[:, None].expand(-1, TABLES).contiguous())
    embedding.train(was)
    return rows.detach().numpy()


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
        ("momentum", {}), ("adam", {"joined": True}), ("rowwise_adagrad", {"store": "ssd"}),
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


def train_graph(group, path, way, scaled=False):
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, "weighted", "ssd", group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scaled else None
    graph = Graph(model, OPTIMIZERS["adagrad"](model.parameters()), 2, scaler, 0.05)
    batches = [batch_of(step, rank, ranks) for step in range(STEPS)]
    losses = list(graph.run(batches)) if way == "run" else [graph(*batch) for batch in batches]
    result = weights_of(model.embedding), rows_of(model.embedding), model.embedding.stats(), []
    model.embedding.close()
    return result, torch.stack(losses).tolist()


def test_graphs_on_ranks_equal_one_process_called_and_run(tmp_path, rank_pool):
    called, run = (rank_pool(3, train_graph, str(tmp_path / way), way, True) for way in ("called", "run"))
    alone, losses = train_graph(None, str(tmp_path / "one"), "called", True)
    check_equal_to_one([result for result, _ in called], alone)
    np.testing.assert_allclose(np.mean([its for _, its in called], axis=0), losses, rtol=1e-5)
    for (result, its_losses), (other, others_losses) in zip(called, run, strict=True):
        assert result[0].tobytes() == other[0].tobytes() and result[1] == other[1] and its_losses == others_losses


def bytes_to_others(group, path, replicated, batch):
    """What a lookup of so many ids sends to other ranks, and what it gives."""
    model = Model(path, "plain", "device", group, replicated)
    ranks, sent = model.embedding.ranks, []
    all_to_all = ranks._all_to_all

    def note(received, tensor, received_R, sent_R):
        one = tensor[:1].numel() * tensor.element_size()
        sent.append(sum(count * one for rank, count in enumerate(sent_R) if rank != group.rank()))
        all_to_all(received, tensor, received_R, sent_R)

    ranks._all_to_all = note
    ids = torch.arange(2 * batch).reshape(batch, 2) + group.rank()
    rows = model.embedding(ids)
    model.embedding.close()
    return sum(sent), rows.detach().numpy()


def test_a_lookup_of_replicated_tables_sends_nothing_but_headers(tmp_path, rank_pool):
    few, many = (rank_pool(2, bytes_to_others, str(tmp_path / f"{n}"), (0, 1), n) for n in (1, 500))
    other = rank_pool(2, bytes_to_others, str(tmp_path / "other"), (), 500)
    for (sent, _), (its_sent, rows), (others_sent, its_rows) in zip(few, many, other, strict=True):
        assert sent == its_sent < 200 and others_sent > 5000
        assert np.array_equal(rows, its_rows)


# ---- snapshots -------------------------------------------------------------------------------------------------------


def all_ids():
    ids = torch.arange(-IDS, IDS) * (2**56)
    return ids[:, None].expand(-1, TABLES).contiguous()


def trains_and_saves(group, path, replicated, steps=6):
    """Train, look some ids up on one rank alone without training them, and save."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, "plain", "ssd", group, replicated)
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    for step in range(steps):
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
    model.embedding.check_fits(name)
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
