"""Deltas: against plain dicts, with policies, ranks, kills and damage between."""

import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import oneemb
import oneemb.storage.snapshots.journal
from oneemb.cli.commands import oneemb as command
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.policies import LRU, RowPolicy
from oneemb.rows.reshard import merge_deltas, reshard
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.snapshots.linked_rows import LinkedRows
from oneemb.storage.snapshots.snapshot_parts import look_at
from oneemb.storage.store_rows import set_rows
from oneemb.storage.table.delta import GONE, Delta, chain_of, gone_array
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_file import SnapshotFiles
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from tests.support.faulty_fs import FaultyFileSystem, PowerLoss
from tests.support.inside import snapshots_of
from tests.support.thread_ranks import FaultyCalls, run_ranks

DIM = 4
pytestmark = pytest.mark.filterwarnings("ignore:.*starts empty")


def made(path, group=None, *, policy=None, store="ssd", tables=2, dim=DIM):
    options = oneemb.make_device_mem_store_options(path, physical_block_size=512)
    if store == "ssd":
        options = oneemb.make_cached_ssd_store_options(1, path, physical_block_size=512)
    return oneemb.MultiTableEmbedding(
        "rows", dim, torch.float32, torch.int64, [oneemb.make_table()] * tables, options,
        oneemb.make_uniform_initializer(-1.0, 1.0), num_threads=1, process_group=group, policy=policy,
    )  # fmt: skip


def adagrad(embedding):
    return torch.optim.Adagrad(embedding.parameters(), lr=0.1)


def step(embedding, optimizer, ids):
    its = torch.as_tensor(list(ids))[:, None].expand(-1, 2).contiguous()
    optimizer.zero_grad()
    (embedding(its) * torch.arange(its.numel() * DIM).view(-1, 2, DIM).sin()).sum().backward()
    optimizer.step()


def rows_of(embedding):
    rows = {}
    for table_N, id_N, row_NW in embedding.store.rows.rows():
        rows |= {(t, n): row.tobytes() for t, n, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True)}
    return rows


def read(path, name):
    """The rows of a snapshot as tools see them."""
    with oneemb.make_persistent_table_reader(str(path), name, torch.int64, torch.float32, with_tables=True) as reader:
        rows = {}
        for table_N, id_N, value_NV in reader:
            for t, n, value in zip(table_N.tolist(), id_N.tolist(), value_NV, strict=True):
                assert (t, n) not in rows
                rows[t, n] = value.tobytes()
        assert len(rows) == len(reader)
    return rows


def chain(path, *, store="ssd", policy=None):
    """base, d1, d2, d3 at a path; the rows at each of them, and the embedding."""
    embedding = made(path, store=store, policy=policy)
    optimizer, states = adagrad(embedding), {}
    step(embedding, optimizer, range(40))
    embedding.save_snapshot("base")
    states["base"] = rows_of(embedding)
    for name, since, ids, erased in [
        ("d1", "base", range(30, 50), range(5)), ("d2", "d1", [1, 2, 60, 61], [60, 33]), ("d3", "d2", [60], []),
    ]:  # fmt: skip
        step(embedding, optimizer, ids)
        embedding.erase(torch.tensor(list(erased), dtype=torch.int64), 0)
        embedding.save_delta(name, since)
        states[name] = rows_of(embedding)
    return embedding, optimizer, states


# ---- save and load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_a_delta_holds_what_has_changed_and_loads_as_the_rows_were(tmp_path, store):
    embedding, optimizer, states = chain(tmp_path, store=store)
    infos = {info.name: info for info in read_snapshot_info(tmp_path)}
    deltas = {name: Delta.of_meta(info.meta, name) for name, info in infos.items()}
    assert {name: info.rows for name, info in infos.items()} == {"base": 80, "d1": 40, "d2": 7, "d3": 2}
    assert [deltas[name].inserted for name in ("d1", "d2", "d3")] == [20, 5, 1]
    assert {name: its.rows for name, its in deltas.items() if its} == {n: len(states[n]) for n in ("d1", "d2", "d3")}
    with SnapshotReader.open(tmp_path, "d2") as reader:
        assert reader.array(GONE).tolist() == [[0, 33], [0, 60]]
    values = {name: read(tmp_path, name) for name in states}
    for name in ("d2", "base", "d3", "d1"):
        embedding.load_snapshot(name)
        assert rows_of(embedding) == states[name]
        assert embedding.stats()["step"] == {"base": 1, "d1": 2, "d2": 3, "d3": 4}[name]
        assert values[name].keys() == states[name].keys()
    embedding.load_snapshot("d3")
    step(embedding, optimizer, range(70, 75))
    embedding.save_delta("d4", "d3")
    after = rows_of(embedding)
    embedding.close()
    again = made(tmp_path, store=store)
    again.load_snapshot("d4")
    assert rows_of(again) == after
    again.load_snapshot("d1", weights_only=True)
    assert {key: row[: 4 * DIM] for key, row in rows_of(again).items()} == {
        key: row[: 4 * DIM] for key, row in states["d1"].items()
    }


def test_any_of_the_last_four_can_be_the_parent_and_no_other(tmp_path):
    embedding, optimizer, states = chain(tmp_path)
    embedding.save_delta("from base", "base")
    step(embedding, optimizer, [7])
    embedding.save_snapshot("whole")  # base is the fifth now
    with pytest.raises(oneemb.StorageError, match="'d2', 'd3', 'from base', 'whole'; got 'base'"):
        embedding.save_delta("x", "base")
    for since in ("from base", "d3"):
        name = f"after {since}"
        embedding.save_delta(name, since)
        embedding.delete_snapshot(name) if since != "d3" else None
        embedding.save_snapshot("whole", overwrite=True)
    now = rows_of(embedding)
    embedding.load_snapshot("from base")
    assert rows_of(embedding) == states["d3"]
    with pytest.raises(oneemb.StorageError, match="'from base'; got 'd3'"):
        embedding.save_delta("x", "d3")
    embedding.load_snapshot("after d3")
    assert rows_of(embedding) == now


def test_the_changed_ids_are_those_whose_rows_differ_or_are_gone(tmp_path):
    chain(tmp_path)
    names = ["base", "d1", "d2", "d3"]
    rows = {name: read(tmp_path, name) for name in names}
    for last in range(1, 4):
        for first in range(last):
            before, now = rows[names[first]], rows[names[last]]
            for table in range(2):
                changed, gone = oneemb.changed_ids(str(tmp_path), names[last], names[first], table)
                differ = {n for (t, n), row in now.items() if t == table and before.get((t, n)) != row}
                left = {n for t, n in before.keys() - now.keys() if t == table}
                assert differ <= {*changed.tolist()} <= {n for t, n in now if t == table} and len(differ)
                assert left <= {*gone.tolist()} and not {(table, n) for n in gone.tolist()} & now.keys()
    with pytest.raises(ValueError, match="since must be one of the parents of 'd1', .'base'., got 'd2'"):
        oneemb.changed_ids(str(tmp_path), "d1", "d2")


def test_what_a_delta_goes_on_from_can_neither_go_nor_be_replaced(tmp_path):
    embedding, _, states = chain(tmp_path)
    for call, done in [
        (lambda: embedding.delete_snapshot("d1"), "deleted"),
        (lambda: embedding.save_snapshot("base", overwrite=True), "replaced"),
        (lambda: embedding.save_delta("d2", "d3", overwrite=True), "replaced"),
    ]:
        with pytest.raises(oneemb.StorageError, match=f"cannot be {done}"):
            call()
    with pytest.raises(ValueError, match="a name of its own"):
        embedding.save_delta("d3", "d3", overwrite=True)
    with pytest.raises(oneemb.StorageError, match="already"):
        embedding.save_delta("d3", "d2")
    embedding.save_delta("d3", "d2", overwrite=True)
    assert embedding.snapshots() == ["base", "d1", "d2", "d3"]
    for name in ("d3", "d2", "d1", "base"):
        embedding.delete_snapshot(name)
    assert embedding.snapshots() == []
    with pytest.raises(oneemb.StorageError, match="none, save a whole one first"):
        embedding.save_delta("x", "base")


def test_rows_that_others_have_taken_the_place_of_have_no_parent(tmp_path):
    embedding, _, _ = chain(tmp_path)
    embedding.clear()
    with pytest.raises(oneemb.StorageError, match="save a whole one first"):
        embedding.save_delta("x", "d3")
    embedding.load_snapshot("d3", weights_only=True)
    with pytest.raises(oneemb.StorageError, match="save a whole one first"):
        embedding.save_delta("x", "d3")
    embedding.load_snapshot("d3")
    embedding.detach_optimizer("drop")  # rows become narrower
    with pytest.raises(oneemb.StorageError, match="save a whole one first"):
        embedding.save_delta("x", "d3")


def test_a_state_dict_names_a_delta(tmp_path):
    embedding, optimizer, states = chain(tmp_path)
    state = embedding.state_dict()
    assert oneemb.snapshot_name(state["_extra_state"]) == "d3" and len(embedding.snapshots()) == 4
    step(embedding, optimizer, range(9))
    embedding.load_state_dict(state)
    assert rows_of(embedding) == states["d3"]


class Clicks(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(adagrad(embedding))

    def build(self, ids):
        loss = self.embedding(ids).square().sum()
        loss.backward()
        return loss.detach()


def test_checkpoints_keep_what_deltas_go_on_from(tmp_path):
    graph = Clicks(made(tmp_path / "rows"))
    embedding, ids, names = graph.embedding, torch.arange(10)[:, None].expand(-1, 2).contiguous(), []
    for n in range(4):
        graph(ids + n)
        graph.save(tmp_path / "checkpoint", keep=2)
        names.append(embedding.snapshots()[-1])
        if n == 0:
            graph(ids + 100)
            embedding.save_delta("mine", names[0])
    assert embedding.snapshots() == [names[0], "mine", *names[2:]]
    assert rows_of(embedding).keys() > read(tmp_path / "rows", "mine").keys()


def resumed(group, path, until):
    """The snapshots, and the rows of each, after a job that begins at its checkpoint, if there is one."""
    graph = Clicks(made(path / "rows", group))
    embedding = graph.embedding
    if (path / "c").exists():
        graph.load(path / "c", delete_newer=True)
        assert embedding.last_snapshot == oneemb.snapshot_name(torch.load(path / "c")["embeddings"]["embedding"])
        assert embedding.snapshots()[-1] == embedding.last_snapshot
    while graph.steps < until:
        graph(torch.arange(graph.steps, graph.steps + 12)[:, None].expand(-1, 2).contiguous())
        if graph.steps % 3 == 0:
            graph.save(path / "c", keep=2, keep_deltas=False)
        elif embedding.last_snapshot is not None:
            embedding.save_delta(f"d{graph.steps}", since=embedding.last_snapshot)
    names = [re.sub("-0*([0-9]+)-[0-9a-f]{8}", r"-\1", name) for name in embedding.snapshots()]
    state = names, [read(path / "rows", name) for name in embedding.snapshots()], rows_of(embedding)
    embedding.close()
    return state


def test_a_job_that_is_killed_and_set_back_has_the_snapshots_of_one_that_was_not(tmp_path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    whole = [resumed(None, tmp_path / "whole", until) for until in (5, 9, 11)]
    assert resumed(None, tmp_path / "killed", 5)[0] == ["checkpoint-3", "d4", "d5"] == whole[0][0]
    for until in (8, 7, 8, 10, 11):
        killed = resumed(None, tmp_path / "killed", until)
    assert whole[1][0] == ["checkpoint-6", "d7", "d8", "checkpoint-9"], "the chain of checkpoint-3 is gone whole"
    assert killed == whole[2]
    assert killed[0] == ["checkpoint-6", "d7", "d8", "checkpoint-9", "d10", "d11"]


def test_what_an_argument_asks_to_delete_is_a_snapshot_there_is(tmp_path):
    embedding, *_ = chain(tmp_path)
    with pytest.raises(oneemb.SnapshotNotFoundError, match="'d9'; there are: 'base', 'd1'"):
        embedding.delete_snapshots_after("d9")
    assert embedding.snapshots() == ["base", "d1", "d2", "d3"] and embedding.last_snapshot == "d3"
    with pytest.raises(oneemb.SnapshotNeededError, match="'d2', deltas since it, need it; delete them first") as said:
        embedding.delete_snapshot("d1")
    assert "delete_snapshots_after" not in str(said.value), "it deletes every later snapshot, not only these"
    assert embedding.delete_snapshots_after("d1") == ["d3", "d2"] and embedding.last_snapshot is None
    embedding.load_snapshot("base")
    assert embedding.last_snapshot == "base"
    assert embedding.delete_snapshots_after(None) == ["d1", "base"] and embedding.snapshots() == []


def test_a_refused_deletion_leaves_the_snapshot_the_last(tmp_path):
    embedding, *_ = chain(tmp_path)
    embedding.load_snapshot("d1")
    with pytest.raises(oneemb.SnapshotNeededError):
        embedding.delete_snapshot("d1")
    assert embedding.last_snapshot == "d1"
    embedding.save_delta("d1b", since=embedding.last_snapshot)


def test_a_checkpoint_without_rows_deletes_all_that_was_saved_later(tmp_path):
    graph = Clicks(made(tmp_path / "rows"))
    graph.save(tmp_path / "c")
    graph(torch.arange(12)[:, None].expand(-1, 2).contiguous())
    graph.embedding.save_snapshot("later")
    graph.load(tmp_path / "c", delete_newer=True)
    assert graph.embedding.snapshots() == []


def test_changes_of_a_table_that_there_is_not_are_an_error(tmp_path):
    chain(tmp_path)
    for table in (2, -1, True, "0"):
        with pytest.raises(ValueError, match="table must be from 0 to 1, the tables of snapshot 'd1', got"):
            oneemb.changed_ids(str(tmp_path), "d1", "base", table)


def test_rows_move_in_the_background_and_nothing_is_lost(tmp_path):
    """Many small saves of a table of which most is written again and again."""
    embedding = made(tmp_path)
    optimizer = adagrad(embedding)
    rng, saved = np.random.default_rng(0), []
    step(embedding, optimizer, range(3000))
    embedding.save_snapshot("0")
    for n in range(1, 12):
        for _ in range(3):
            step(embedding, optimizer, rng.permutation(3000)[:700])
        embedding.erase(torch.from_numpy(rng.permutation(3000)[:30]), 1)
        if n == 6:
            embedding.save_snapshot("6")
        else:
            embedding.save_delta(str(n), str(n - 1))
        saved.append((str(n), rows_of(embedding)))
    for name, rows in saved:
        embedding.load_snapshot(name)
        assert rows_of(embedding) == rows


# ---- rows that policies let go ---------------------------------------------------------------------------------------


def test_who_loads_a_delta_may_keep_what_was_evicted_and_nothing_that_was_erased(tmp_path):
    embedding = made(tmp_path, policy=RowPolicy(LRU(), 20))
    optimizer = adagrad(embedding)
    step(embedding, optimizer, range(20))
    embedding.save_snapshot("base")
    kept = {n for t, n in rows_of(embedding) if t == 0}
    for n, (ids, erased) in enumerate([(range(15, 30), [16]), (range(30, 40), [2]), (range(40, 50), [])]):
        step(embedding, optimizer, ids)
        embedding.erase(torch.tensor(erased, dtype=torch.int64), 0)
        embedding.erase(torch.tensor(erased, dtype=torch.int64), 1)
        embedding.save_delta(f"d{n}", "base" if n == 0 else f"d{n - 1}", keep_evicted=True)
        kept = (kept | set(ids)) - set(erased)
    with pytest.raises(oneemb.StorageError, match="was saved with keep_evicted=True"):
        embedding.save_delta("x", "d2")
    embedding.save_delta("dropped", "base")
    here = rows_of(embedding)
    assert len(here) == 40
    found = read(tmp_path, "d2")
    assert {n for t, n in found if t == 0} == kept == {n for t, n in found if t == 1}
    assert read(tmp_path, "dropped").keys() == here.keys()
    embedding.load_snapshot("d2")
    assert rows_of(embedding).keys() == {(t, n) for t in range(2) for n in kept}
    assert {key: rows_of(embedding)[key] for key in here} == here
    embedding.load_snapshot("dropped")
    assert rows_of(embedding) == here
    embedding.save_delta("kept", "dropped", keep_evicted=True)
    assert oneemb.snapshot_name(embedding.state_dict()["_extra_state"]) == "dropped"


def test_an_erase_that_fails_halfway_brings_nothing_back(tmp_path, monkeypatch):
    embedding = made(tmp_path)
    step(embedding, adagrad(embedding), range(20))
    embedding.save_snapshot("base")
    erase = embedding.store.pins.erase

    def failing(table_V, id_V):
        erase(table_V, id_V)
        raise oneemb.StorageError("the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(embedding.store.pins, "erase", failing)
        with pytest.raises(oneemb.StorageError, match="the disk failed"):
            embedding.erase(torch.arange(5), 0)
    embedding.save_delta("d1", "base", keep_evicted=True)
    embedding.load_snapshot("d1")
    assert {n for t, n in rows_of(embedding) if t == 0} == set(range(5, 20))


def test_too_many_erased_keys_need_a_whole_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(oneemb.storage.snapshots.journal, "ERASED_MAX", 50)
    embedding, _, _ = chain(tmp_path)
    for _ in range(6):
        embedding.erase(torch.arange(10), 0)
    with pytest.raises(oneemb.StorageError, match="too many for a delta"):
        embedding.save_delta("x", "d3")
    embedding.save_snapshot("whole")
    embedding.save_delta("x", "whole")


def test_all_that_was_erased_in_many_calls_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(oneemb.storage.snapshots.journal, "_ARRAYS_MAX", 2)
    embedding, _, _ = chain(tmp_path)
    embedding.save_snapshot("before")
    there = {n for n in range(200) if embedding.erase(torch.tensor([n]), 0)}
    assert len(there) > 5
    embedding.save_delta("kept", "before", keep_evicted=True)
    rows = embedding.stats()["rows"]
    embedding.load_snapshot("kept")
    assert embedding.stats()["rows"] == rows


def test_a_parent_that_is_gone_by_other_means_is_none(tmp_path):
    embedding, _, _ = chain(tmp_path)
    (tmp_path / "snapshots" / "d3.snapshot").rename(tmp_path / "elsewhere")
    embedding.close()
    again = made(tmp_path)
    again.load_snapshot("d2")
    snapshots_of(again.store.rows.bottom_store)._held.pop("d2")  # as after a removal whose end is not certain
    with pytest.raises(oneemb.StorageError, match="'d2' is not there any more"):
        again.save_delta("x", "d2")


# ---- tools -----------------------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_tools_know_deltas(tmp_path):
    embedding, _, states = chain(tmp_path / "rows")
    embedding.close()
    path = tmp_path / "rows"
    listed = {one["name"]: one for one in json.loads(run("inspect", path, "--json"))["snapshots"]}
    said = [listed["d2"][key] for key in ("since", "rows", "changed_rows", "inserted_rows")]
    assert said == ["d1", len(states["d2"]), 7, 5]
    assert listed["base"]["since"] is None and listed["base"]["changed_rows"] is None
    assert "since 'd1': 7 changed, 5 of them new" in run("inspect", path)
    run("check", path)
    run("compact", path)
    assert "d3" in run("snapshot", "delete", path, "d2", "-y", code=2)
    assert "of 4 snapshots" in run("merge-deltas", path, "--name", "d3", "--into", "whole")
    assert "of 3 snapshots" in run("merge-deltas", path, "--name", "d3", "--into", "d13", "--since", "base")
    assert "already" in run("merge-deltas", path, "--name", "d3", "--into", "d1", code=2)
    assert "since must be one of" in run("merge-deltas", path, "--name", "d3", "--into", "x", "--since", "d3", code=2)
    merged = {info.name: info for info in read_snapshot_info(path)}
    assert merged["whole"].rows == len(states["d3"]) and "delta" not in merged["whole"].meta
    assert merged["d13"].rows < 60
    run("check", path)
    assert "norm" in run("inspect", path, "--histogram", "d3")
    assert oneemb.export_rows(str(path), str(tmp_path / "x.npz"), snapshot="d3") == len(states["d3"])
    again = made(path)
    for name in ("whole", "d13", "d3"):
        again.load_snapshot(name)
        assert rows_of(again) == states["d3"]
    again.save_delta("more", "d3")
    again.close()
    for name in ("more", "d3", "d2", "d13", "d1", "base"):
        run("snapshot", "delete", path, name, "-y")
    assert read(path, "whole").keys() == states["d3"].keys()


def test_a_row_that_a_delta_has_lost_does_not_come_back_as_it_was(tmp_path):
    embedding, _, states = chain(tmp_path / "rows")
    embedding.close()
    run("salvage", tmp_path / "rows", tmp_path / "whole")
    again = made(tmp_path / "whole")
    for name in states:
        again.load_snapshot(name)
        assert rows_of(again) == states[name]
    again.close()
    record = SnapshotFiles(LocalFileSystem(), str(tmp_path / "rows" / "snapshots")).read("d1")
    part = max(record.parts, key=lambda part: part.rows)
    path = tmp_path / "rows" / "chunks" / f"{part.number:012d}.rows"
    data = bytearray(path.read_bytes())
    data[4096 + 512 * (part.blocks - 1)] ^= 1  # Its last block has rows that d1 has written.
    path.write_bytes(data)
    report = json.loads(run("salvage", tmp_path / "rows", tmp_path / "new", "--json", code=1))
    lost = report["by_snapshot"]["d1"]["lost"]
    assert sum(lost.values()) > 0 and not report["whole"]
    again = made(tmp_path / "new")
    again.load_snapshot("base")
    assert rows_of(again) == states["base"]
    again.load_snapshot("d1")
    left = rows_of(again)
    assert left.items() <= states["d1"].items() and len(states["d1"]) - len(left) == sum(lost.values())
    again.close()


def test_a_delta_of_ranks_that_lacks_a_part_is_lost_as_a_whole(tmp_path, rank_pool):
    rank_pool(2, train_on_ranks, str(tmp_path / "rows"), None, [("s0", None), ("s1", "s0")], None)
    (tmp_path / "rows" / "rank-1-of-2" / "snapshots" / "s1.snapshot").unlink()
    found = json.loads(run("salvage", tmp_path / "rows", tmp_path / "new", "--json", code=1))["by_snapshot"]
    assert found["s0"]["whole"] and found["s1"]["unreadable"] == ["part 1", "file"]
    run("check", tmp_path / "new")
    assert read(tmp_path / "new", "s0") == read(tmp_path / "rows", "s0")


def test_check_and_loads_say_what_is_missing(tmp_path):
    embedding, _, _ = chain(tmp_path)
    (tmp_path / "snapshots" / "d1.snapshot").rename(tmp_path / "elsewhere")
    for call in (lambda: embedding.load_snapshot("d3"), lambda: read(tmp_path, "d3")):
        with pytest.raises(
            oneemb.StorageError, match="'d2' is a delta since 'd1' .* which is not there.*'base', 'd2', 'd3'"
        ):
            call()
    embedding.close()
    assert "is a delta since 'd1'" in run("check", tmp_path, code=1)
    assert "is a delta since 'd1'" in run("merge-deltas", tmp_path, "--name", "d3", "--into", "x", code=2)
    listed = json.loads(run("snapshot", "list", tmp_path, "--json", code=1))
    assert listed["snapshots"] == ["base"] and set(listed["incomplete"]) == {"d2", "d3"}
    assert "incomplete: snapshot 'd2' is a delta since 'd1'" in run("snapshot", "list", tmp_path, code=1)
    assert "incomplete: snapshot 'd2' is a delta since 'd1'" in run("inspect", tmp_path)
    # Another one of its name is not it.
    again = made(tmp_path)
    step(again, adagrad(again), range(3))
    again.save_snapshot("d1")
    again.close()
    with pytest.raises(oneemb.StorageError, match="has been replaced"):
        read(tmp_path, "d3")
    (tmp_path / "snapshots" / "d1.snapshot").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "snapshots" / "d1.snapshot")
    assert read(tmp_path, "d3")


def test_chains_that_no_save_makes_are_refused():
    class Info:
        def __init__(self, name, **delta):
            self.name, self.identity, self.rows = name, f"id of {name}", 0
            self.meta = {"delta": delta} if delta else {}

    def since(name, number, more=1, **other):
        its = dict(since=name, identity=f"id of {name}", since_number=number, number=number + more, rows=1, inserted=0)
        return its | other

    base, one = Info("base"), Info("one", **since("base", 0))
    two = Info("two", **since("one", 1))

    def resolve(last, *there):
        return [info.name for info in chain_of(last, lambda: there, lambda info: info)]

    assert resolve(two, base, one, two) == ["base", "one", "two"]
    assert resolve(base) == ["base"]
    with pytest.raises(oneemb.StorageError, match="is a delta since 'one'"):
        resolve(two, base, two)
    gap = Info("gap", **since("base", 3))
    with pytest.raises(oneemb.StorageError, match="since number 3 .* is number 0"):
        resolve(gap, base)
    circle = [Info("a", **since("b", 1)), Info("b", **since("a", 2))]
    with pytest.raises(oneemb.StorageError, match="is number"):
        resolve(circle[0], *circle)
    for wrong in (
        {}, {"number": 0}, {"number": 1.0}, {"rows": -1}, {"since": ""}, {"since": 3}, {"identity": None}, {"more": 1},
        {"inserted": True}, {"number": 1 << 63},
    ):  # fmt: skip
        info = Info("wrong", **(since("base", 0) | wrong))
        if wrong:
            with pytest.raises(oneemb.StorageError, match="its description as a delta is invalid"):
                resolve(info, base)
    info = Info("wrong")
    info.meta = {"delta": ["base"]}
    with pytest.raises(oneemb.StorageError, match="its description as a delta is invalid"):
        resolve(info, base)


# ---- loss of power, kills --------------------------------------------------------------------------------------------


def put(table, rows, more):
    rows |= more
    table.put(
        np.array([t for t, _ in more], np.int32), np.array([n for _, n in more]),
        np.array([[value] * 3 for value in more.values()], np.float32),
    )  # fmt: skip


def of_chain(fs, path, names):
    """The rows that a chain has, by a table and by a reader."""
    with PersistentTable.open(
        path, row_width=3, physical_block_size=512, threads=Threads(1), fs=fs, background=False
    ) as t:
        t.load_snapshot(names[0], names[1:])
        found = {(int(a), int(b)): float(row[0]) for batch in t.scan() for a, b, row in zip(*batch, strict=True)}
    with LinkedRows([[SnapshotReader.open(path, name, fs=fs)] for name in names]) as linked:
        rows = {(int(a), int(b)): float(row[0]) for batch in linked.scan() for a, b, row in zip(*batch, strict=True)}
        assert len(linked) == len(rows)
    assert rows == found
    return found


def save_chain(fs, states):
    """Saves base, d1 and d2 in a table, noting what each holds once it is saved."""
    rows = {}
    table = PersistentTable.open(
        "/t", row_width=3, physical_block_size=512, threads=Threads(1), fs=fs, background=False, chunk_bytes=1 << 14
    )
    with table:
        put(table, rows, {(0, n): n for n in range(300)})
        table.save_snapshot("base", {})
        states["base"], identity = dict(rows), table.snapshots()[0].identity
        for number, name in enumerate(["d1", "d2"]):
            places = table.places
            put(table, rows, {(0, n): n + 1000 * (number + 1) for n in range(50 * number, 50 * number + 100)})
            gone = np.arange(20 * number, 20 * number + 10)
            table.erase(np.zeros(10, np.int32), gone)
            for n in gone.tolist():
                rows.pop((0, n), None)
            table.flush()
            gone = table.gone_since(places)
            delta = Delta("x", identity, number, number + 1, len(rows), 0)
            info = table.save_snapshot(name, delta.to_meta(), arrays={GONE: gone_array(*gone)}, since=places)
            states[name], identity = dict(rows), info.identity


def test_power_is_lost_at_every_call_of_a_chain_of_saves():
    whole, states = FaultyFileSystem(), {}
    save_chain(whole, states)
    calls = len(whole.calls)
    assert of_chain(whole, "/t", ["base", "d1", "d2"]) == states["d2"] and states["d2"] != states["d1"]
    for call in range(0, calls, 3):
        fs, announced = FaultyFileSystem(), {}
        fs.crash_at, fs.half = call, call % 2
        with pytest.raises(PowerLoss):
            save_chain(fs, announced)
        for fate, disk in fs.survivors(torn=1, seed=call):
            there = [info.name for info in read_snapshot_info("/t", fs=disk)]
            assert set(announced) <= set(there) and there == ["base", "d1", "d2"][: len(there)]
            for n in range(len(there)):
                assert of_chain(disk, "/t", there[: n + 1]) == states[there[n]], (call, fate)


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_a_merge_that_is_killed_anywhere_leaves_the_chain_and_all_of_the_new_one_or_nothing(
    tmp_path, monkeypatch, stride
):
    def save(ranks, path):
        embedding = made(str(path), ranks)
        embedding.store.build()

        def put(first, value):
            table_N, id_N = np.zeros(20, np.int32), np.arange(first, first + 20)
            own = owner_of(table_N, id_N, ranks.size) == ranks.rank
            set_rows(embedding.store, table_N[own], id_N[own], np.full((own.sum(), DIM), value, np.float32))

        put(0, 1.0)
        embedding.save_snapshot("base")
        embedding.erase(torch.arange(5), 0)
        put(15, 2.0)
        embedding.save_delta("d1", "base")
        embedding.close()

    at, reached, outcomes = 0, True, Counter()
    run_ranks(2, save, tmp_path / "template", patch=monkeypatch)
    expected = {name: read(tmp_path / "template", name) for name in ("base", "d1")}
    while reached:
        root = tmp_path / "killed"
        shutil.copytree(tmp_path / "template", root)
        with monkeypatch.context() as patch:
            calls = FaultyCalls(patch, at=at)

            def act(_, root=root, calls=calls):
                with calls.counted():
                    merge_deltas(str(root), "d1", "whole")

            run_ranks(1, act, dies=[0])
            reached = calls.reached
            calls.free_locks()
        there = [one.name for one in look_at([str(root)]).snapshots()]
        assert there in (["base", "d1"], ["base", "d1", "whole"])
        outcomes[len(there)] += 1
        for name in there:
            assert read(root, name) == expected["d1" if name == "whole" else name]
        run("check", root)
        shutil.rmtree(root)
        at += stride
    assert outcomes[2] > 2 and outcomes[3] > 0


# ---- ranks -----------------------------------------------------------------------------------------------------------


def train_on_ranks(group, path, load, deltas, policy):
    embedding = made(path, group, policy=policy)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    rank, states, refused = 0 if group is None else group.rank(), [], None
    if load is not None:
        embedding.load_snapshot(load)
        states.append(rows_of(embedding))
    for n, (name, since) in enumerate(deltas):
        first = 10 * int(name[1:])
        step(embedding, optimizer, range(first + rank, first + 25 + rank))
        embedding.erase(torch.tensor([first + 3 + rank]), n % 2)
        if since is None:
            embedding.save_snapshot(name)
        else:
            embedding.save_delta(name, since)
        states.append(rows_of(embedding))
    if load is not None:
        with pytest.raises(oneemb.StorageError) as error:
            embedding.save_delta("x", "s0")
        refused = str(error.value)
    embedding.close()
    return states, refused


@pytest.mark.parametrize(
    "policy", [pytest.param(None, marks=pytest.mark.slow, id="all"), pytest.param(RowPolicy(LRU(), 18), id="lru")]
)
def test_ranks_save_deltas_that_any_number_of_ranks_loads(tmp_path, rank_pool, policy):
    path = str(tmp_path / "rows")
    of_ranks = rank_pool(2, train_on_ranks, path, None, [("s0", None), ("s1", "s0"), ("s2", "s1")], policy)
    joined = [of_ranks[0][0][n] | of_ranks[1][0][n] for n in range(3)]
    tables = {n: read(path, f"s{n}") for n in range(3)}
    assert all(tables[n].keys() == joined[n].keys() for n in range(3))
    on_three = rank_pool(3, train_on_ranks, path, "s2", [("s4", None), ("s5", "s4")], policy)
    assert {key: row for states, _ in on_three for key, row in states[0].items()} == joined[2]
    assert all("got 's0'" in refused for _, refused in on_three)
    on_two = rank_pool(2, train_on_ranks, path, "s2", [("s6", "s2")], policy)
    assert [states[0] for states, _ in on_two] == [states[2] for states, _ in of_ranks]
    alone, _ = train_on_ranks(None, path, "s6", [], policy)
    assert alone[0] == on_two[0][0][1] | on_two[1][0][1]
    merge_deltas(path, "s6", "whole")
    merge_deltas(path, "s6", "s26", since="s0")
    for name in ("whole", "s26"):
        assert read(path, name) == read(path, "s6")
    listed = {one["name"]: one for one in json.loads(run("inspect", path, "--json"))["snapshots"]}
    assert listed["s6"]["rows"] == len(alone[0]) and listed["s1"]["rows"] == len(joined[1])
    assert listed["s1"]["inserted_rows"] == len(joined[1].keys() - joined[0].keys())
    reshard(path, "s6", 1, str(tmp_path / "one"))
    assert read(tmp_path / "one", "s6") == read(path, "s6")
    reshard(path, "s1", 3)  # in its place, whole: what goes on from it goes on
    assert read(path, "s1").keys() == joined[1].keys() and read(path, "s2") == tables[2]
    with pytest.raises(oneemb.StorageError, match="must be of the same number of ranks"):
        merge_deltas(path, "s2", "y")


def test_ranks_are_set_back_together(tmp_path, rank_pool):
    states = []
    for name, stops in (("killed", (5, 7, 11)), ("whole", (11,))):
        (tmp_path / name).mkdir()
        for until in stops:
            of_ranks = rank_pool(2, resumed, tmp_path / name, until)
        states.append(of_ranks)
    assert states[0] == states[1]
    assert states[0][0][0] == ["checkpoint-6", "d7", "d8", "checkpoint-9", "d10", "d11"] == states[0][1][0]
