"""Caches that are full again after a load: snapshots store which rows a cache holds."""

import shutil

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.owner import owner_of
from oneemb.kernels.threads import Threads
from oneemb.rows.reshard import reshard
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader
from oneemb.storage.tiers.cached_rows import CachedRows
from oneemb.storage.tiers.hot_tier import HotTier
from oneemb.storage.tiers.warm_caches import fill_caches
from tests.support.row_store_suite import DictStore, keys_of
from tests.test_lookahead import zipf_batches
from tests.test_rank_snapshots import as_dict, fill, ids, make, run

DEVICE = "cached rows of device"


def store_of(kind, path, cache_mb=1):
    if kind == "host":
        return oneemb.make_cached_host_mem_store_options(cache_mb, path)
    if kind == "server":
        return oneemb.make_cached_remote_store_options(f"file://{path}-server", cache_mb, path)
    policy, two = kind.split("-")[0], "two" in kind
    return oneemb.make_cached_ssd_store_options(cache_mb, path, cache_policy=policy, host_cache_budget_mb=2 * two)


def graph_of(kind, path, cache_mb=1):
    torch.manual_seed(0)
    return Graph(store_of(kind, str(path), cache_mb))


class Graph(oneemb.TrainGraph):
    def __init__(self, options):
        super().__init__()
        self.embedding = oneemb.MultiTableEmbedding(
            "items", 64, torch.float32, torch.int64, [oneemb.make_table()] * 2, options
        )
        self.top = torch.nn.Linear(128, 1)
        self.add_optimizer(torch.optim.Adam(self.parameters()))

    def build(self, ids, label):
        loss = torch.nn.functional.mse_loss(self.top(self.embedding(ids).flatten(1)).squeeze(1), label)
        loss.backward()
        return loss.detach()


BATCHES = zipf_batches(70)
SAVED = 40


def steps(graph, batches):
    """Losses; and after each step, counts of the caches."""
    losses, counts = [], []
    for batch in batches:
        losses.append(graph(*batch))
        stats = graph.embedding.stats()
        counts.append([
            stats[tier][count] for tier in ("device", "host") if "hits" in stats.get(tier, ())
            for count in ("rows", "hits", "misses", "evicted")
        ])  # fmt: skip
    return losses, np.diff(np.array(counts), axis=0)


def same(losses, others):
    assert len(losses) == len(others) and all(torch.equal(x, y) for x, y in zip(losses, others, strict=True))


def copied(tmp_path, name):
    """Folder and checkpoint of `job`, copied."""
    shutil.copytree(tmp_path / "job", tmp_path / name)
    shutil.copy(tmp_path / "job.pt", tmp_path / f"{name}.pt")
    return tmp_path / name, tmp_path / f"{name}.pt"


def trained(kind, tmp_path):
    """A graph that has made SAVED steps and saved them, and a copy of its files."""
    graph = graph_of(kind, tmp_path / "job")
    steps(graph, BATCHES[:SAVED])
    graph.save(tmp_path / "job.pt")
    return graph


@pytest.mark.parametrize("kind", ["lfu", "lru", "lfu-two", "lru-two", "host", "server"])
def test_a_job_that_continues_reads_the_rows_that_an_uninterrupted_job_reads(kind, tmp_path):
    graph = trained(kind, tmp_path)
    folder, checkpoint = copied(tmp_path, "again")
    losses, counts = steps(graph, BATCHES[SAVED:])
    again = graph_of(kind, folder)
    again.load(checkpoint)
    assert again.embedding.stats()["device"]["rows"] == 0, "the first lookup fills the cache"
    losses_again, counts_again = steps(again, BATCHES[SAVED:])
    same(losses, losses_again)
    assert np.array_equal(counts, counts_again) and counts[:, 3].sum() > 500
    graph.embedding.close(), again.embedding.close()


def without_lists(monkeypatch):
    """Let snapshots have no lists of cached rows, as those of earlier releases."""
    monkeypatch.setattr("oneemb.storage.snapshots.store_snapshots.cached_arrays", lambda tiers, waiting: {})


@pytest.mark.parametrize("kind", ["lfu", "lru-two"])
def test_a_snapshot_without_lists_loads_cold_and_gives_the_same_numbers(kind, tmp_path, monkeypatch):
    graph = trained(kind, tmp_path)
    losses, counts = steps(graph, BATCHES[SAVED:])
    graph.load(tmp_path / "job.pt")
    with monkeypatch.context() as patch:
        without_lists(patch)
        graph.save(tmp_path / "job.pt")
    folder, checkpoint = copied(tmp_path, "cold")
    graph.embedding.close()
    cold = graph_of(kind, folder)
    cold.load(checkpoint)
    losses_cold, counts_cold = steps(cold, BATCHES[SAVED:])
    same(losses, losses_cold)
    assert counts_cold[0, 2] > 1.2 * counts[0, 2] and counts_cold[:5, 2].sum() > counts[:5, 2].sum()
    cold.embedding.close()


def test_a_load_that_is_saved_again_without_a_step_keeps_the_lists(tmp_path):
    graph = trained("lfu", tmp_path)
    _, counts = steps(graph, BATCHES[SAVED:])
    graph.load(tmp_path / "job.pt")
    graph.save(tmp_path / "job.pt")
    graph.load(tmp_path / "job.pt")
    assert np.array_equal(counts, steps(graph, BATCHES[SAVED:])[1])
    graph.embedding.close()


def test_a_delta_has_the_lists_too(tmp_path):
    graph = graph_of("lfu", tmp_path / "job")
    embedding = graph.embedding
    steps(graph, BATCHES[:30])
    embedding.save_snapshot("whole")
    steps(graph, BATCHES[30:SAVED])
    embedding.save_delta("delta", since="whole")
    _, counts = steps(graph, BATCHES[SAVED:])
    embedding.load_snapshot("delta")
    assert np.array_equal(counts[:, :3], steps(graph, BATCHES[SAVED:])[1][:, :3])
    embedding.close()


@pytest.mark.parametrize("cache_mb", [2, 4])
def test_another_size_of_cache_holds_the_rows_that_fit(cache_mb, tmp_path):
    graph = graph_of("lfu", tmp_path / "job", 4)
    steps(graph, BATCHES[:SAVED])
    graph.embedding.save_snapshot("whole")
    held = graph.embedding.stats()["device"]["rows"]
    graph.embedding.close()
    with SnapshotReader.open(str(tmp_path / "job"), "whole") as reader:
        rows = CachedRows.of_array(reader.array(DEVICE), "whole")
    assert len(rows.id_N) == held
    graph = graph_of("lfu", tmp_path / "job", cache_mb)
    graph.embedding.load_snapshot("whole")
    graph(*BATCHES[0])
    stats = graph.embedding.stats()["device"]
    assert stats["rows"] <= stats["slots"] and stats["rows"] > 0.9 * min(held, stats["slots"])
    hottest = np.argsort(-rows.score_N)[:500]
    keys = HostBackend(graph.embedding.store.threads).distinct_keys(rows.table_N[hottest], rows.id_N[hottest])
    slot_U = graph.embedding.store.hot.pin_resident(keys)[0]
    graph.embedding.store.release(slot_U)
    assert (slot_U >= 0).all()
    graph.embedding.close()


def test_a_store_with_all_rows_in_memory_ignores_the_lists_and_has_none(tmp_path):
    graph = trained("lfu", tmp_path)
    losses, _ = steps(graph, BATCHES[SAVED:])
    graph.embedding.close()
    torch.manual_seed(0)
    other = Graph(oneemb.make_device_mem_store_options(str(tmp_path / "job")))
    other.load(tmp_path / "job.pt")
    same(losses, [other(*batch) for batch in BATCHES[SAVED:]])
    other.embedding.save_snapshot("here")
    other.embedding.close()
    with SnapshotReader.open(str(tmp_path / "job"), "here") as reader:
        assert reader.arrays == []


def test_a_job_that_only_reads_fills_no_cache(tmp_path):
    graph = trained("lfu", tmp_path)
    graph.load(tmp_path / "job.pt")
    before = graph.embedding.stats()["persistent"]["rows_got"]
    graph.eval()
    with torch.no_grad():
        graph.embedding(BATCHES[0][0][:1])
    assert graph.embedding.stats()["persistent"]["rows_got"] - before <= 2
    graph.embedding.close()


def arrays_of(path, name):
    with SnapshotReader.open(str(path), name) as reader:
        return {array: reader.array(array) for array in reader.arrays}


def test_a_list_takes_16_bytes_a_row(tmp_path):
    graph = trained("lfu-two", tmp_path)
    stats, name = graph.embedding.stats(), graph.embedding.last_snapshot
    found = arrays_of(tmp_path / "job", name)
    assert {array: found[array].nbytes for array in found} == {
        f"cached rows of {tier}": 16 * (stats[tier]["rows"] + 1) for tier in ("device", "host")
    }
    graph.embedding.close()


def hostile(word_N4):
    """Arrays that no save writes, by name."""
    yield "another dtype", word_N4.view(np.int32)
    yield "no rows", word_N4[:0]
    yield "three words", np.ascontiguousarray(word_N4[:, :3])
    yield "one dimension", word_N4.reshape(-1)
    for name, row, column, word in [
        ("policy", 0, 0, 2), ("shard", 0, 1, 256), ("table", 5, 0, 1 << 23), ("negative score", 5, 3, 0xBF800000),
        ("no number", 5, 3, 0x7FC00000), ("infinite", 5, 3, 0x7F800000),
    ]:  # fmt: skip
        changed = word_N4.copy()
        changed[row, column] = word
        yield name, changed


def test_a_list_that_no_save_writes_is_an_error_and_changes_nothing(tmp_path):
    graph = trained("lfu", tmp_path)
    embedding, name = graph.embedding, graph.embedding.last_snapshot
    word_N4 = arrays_of(tmp_path / "job", name)[DEVICE]
    rows = embedding.stats()["rows"]
    for what, array in hostile(word_N4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("oneemb.storage.snapshots.store_snapshots.cached_arrays", lambda *_, a=array: {DEVICE: a})
            embedding.save_snapshot(what)
        with pytest.raises(CorruptTableError, match="array of cached rows must be uint32"):
            embedding.load_snapshot(what)
        assert embedding.stats()["rows"] == rows
    steps(graph, BATCHES[SAVED:])
    embedding.close()


def test_a_list_with_keys_twice_or_without_rows_gives_each_key_one_slot(tmp_path):
    graph = trained("lfu", tmp_path)
    embedding, name = graph.embedding, graph.embedding.last_snapshot
    losses, _ = steps(graph, BATCHES[SAVED:])
    word_N4 = arrays_of(tmp_path / "job", name)[DEVICE]
    unknown = word_N4[1:100].copy()
    unknown[:, 2] = 77  # upper half of the id
    array = np.concatenate([word_N4, word_N4[200:1:-1], unknown])
    graph.load(tmp_path / "job.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oneemb.storage.snapshots.store_snapshots.cached_arrays", lambda *_: {DEVICE: array})
        graph.save(tmp_path / "job.pt")
    graph.load(tmp_path / "job.pt")
    rows = embedding.stats()["rows"]
    graph(*BATCHES[SAVED])
    assert embedding.store.check_slots() == []
    assert embedding.stats()["rows"] - rows < 2 * 512
    graph.load(tmp_path / "job.pt")
    same(losses, steps(graph, BATCHES[SAVED:])[0])
    embedding.close()


def test_a_flipped_bit_of_a_list_is_an_error_that_names_the_file(tmp_path):
    graph = trained("lfu", tmp_path)
    name = graph.embedding.last_snapshot
    [path] = (tmp_path / "job" / "snapshots").glob("*.snapshot")
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptTableError, match=f"array '{DEVICE}' at offset"):
        graph.embedding.load_snapshot(name)
    steps(graph, BATCHES[SAVED:])
    graph.embedding.close()


def test_rows_that_cannot_be_read_stay_away_until_a_lookup_needs_them(tmp_path, monkeypatch):
    graph = trained("lfu", tmp_path)
    losses, _ = steps(graph, BATCHES[SAVED:])
    graph.load(tmp_path / "job.pt")
    get, failing = PersistentTable.get, [True]

    def fail(self, *args):
        if failing and len(args[1]) > 600:  # more keys than a step has
            failing.pop()
            raise StorageError("a sector is damaged")
        return get(self, *args)

    monkeypatch.setattr(PersistentTable, "get", fail)
    same(losses, steps(graph, BATCHES[SAVED:])[0])
    assert failing == []
    graph.embedding.close()


def test_a_cache_below_another_keeps_no_row_that_is_read_for_the_upper_one():
    below = DictStore(2)
    below.put(*keys_of((0, i) for i in range(90)), np.ones((90, 2), np.float32))
    host = HotTier("host", row_width=2, slots=20, below=below, resident=False, threads=Threads(1))
    device = HotTier("device", row_width=2, slots=10, below=host, resident=False, threads=Threads(1))
    lists = {"device": listed(range(50, 60)), "host": listed(range(20))}
    fill_caches([device, host], dict(lists))
    for tier in (device, host):
        held, rows = tier.cached(), lists[tier.name]
        order = np.argsort(held.id_N)
        assert held.id_N[order].tolist() == rows.id_N.tolist()
        assert held.score_N[order] == pytest.approx(rows.score_N)


def listed(ids):
    table_N, id_N = keys_of((0, i) for i in ids)
    return CachedRows("lfu", 0, table_N, id_N, np.arange(1, len(id_N) + 1, dtype=np.float32))


def test_only_the_rows_that_are_used_most_are_read_into_a_smaller_cache():
    below = DictStore(2)
    below.put(*keys_of((0, i) for i in range(90)), np.ones((90, 2), np.float32))
    tier = HotTier("device", row_width=2, slots=10, below=below, resident=False, threads=Threads(1))
    tier.warm(listed(range(40)))
    assert sorted(tier.cached().id_N.tolist()) == list(range(30, 40)) and tier.stats()["evicted"] == 0


# ---- ranks -----------------------------------------------------------------------------------------------------------


def save_lists(ranks, path):
    embedding = make(ranks, path, options="ssd")
    fill(embedding, 1)
    embedding.save_snapshot("s")
    [rows] = [one.cached() for one in embedding.store.rows.tiers]
    embedding.close()
    return list(zip(rows.table_N.tolist(), rows.id_N.tolist(), rows.score_N.tolist(), strict=True))


def load_lists(ranks, path):
    embedding = make(ranks, path, options="ssd")
    embedding.load_snapshot("s")
    rows = embedding.store.rows.cached["device"]
    rank, size = embedding.ranks.rank, embedding.ranks.size
    assert (owner_of(rows.table_N, rows.id_N, size) == rank).all()
    held = set(zip(rows.table_N.tolist(), rows.id_N.tolist(), strict=True))
    if held:
        keys = HostBackend(embedding.store.threads).distinct_keys(rows.table_N[:1], rows.id_N[:1])
        embedding.store.release(embedding.store.acquire(keys)[0])
    assert embedding.store.rows.cached == {} or not held
    assert embedding.stats()["device"]["rows"] == len(held)
    found = as_dict(rows.table_N, rows.id_N, rows.score_N[:, None])
    embedding.close()
    return [(*key, score) for key, (score,) in found.items()]


@pytest.mark.parametrize("saved, loaded", [(0, 3), (1, 2), (3, 3), (3, 2), (2, 5), (4, 0)])
def test_any_number_of_ranks_loads_the_lists_of_any_other(saved, loaded, tmp_path, monkeypatch):
    kept = run(saved, save_lists, tmp_path, patch=monkeypatch)
    found = run(loaded, load_lists, tmp_path, patch=monkeypatch)
    assert sorted(sum(kept, [])) == sorted(sum(found, [])) and len(sum(kept, [])) == len(ids(40)) * 2


def test_a_resharded_snapshot_has_the_lists(tmp_path, monkeypatch):
    kept = run(3, save_lists, tmp_path / "job", patch=monkeypatch)
    reshard(str(tmp_path / "job"), "s", 1, str(tmp_path / "one"))
    rows = CachedRows.of_array(arrays_of(tmp_path / "one", "s")[DEVICE], "s")
    assert sorted(zip(rows.table_N.tolist(), rows.id_N.tolist(), rows.score_N.tolist(), strict=True)) == sorted(
        sum(kept, [])
    )
