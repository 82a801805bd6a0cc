"""Lookahead beside policies, saves, loads, forks and failing loaders: no number changes, and nothing is left behind."""

import gc
import threading

import pytest
import torch

import oneemb
from oneemb.policies import LFU, AdmitAfter, RowPolicy, StepLRU
from tests.support.forks import ended_well, in_child
from tests.support.pairwise import diagonal
from tests.test_lookahead import TwoEmbeddings, zipf_batches
from tests.test_train_graph_prefetch import check_same, graph_of, threads


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert threads() == []


class PolicyGraph(oneemb.TrainGraph):
    def __init__(self, path, policy, capacity=None):
        super().__init__()
        torch.manual_seed(0)
        store = oneemb.make_cached_ssd_store_options(1, str(path), capacity=capacity)
        self.embedding = oneemb.MultiTableEmbedding(
            "items", 64, torch.float32, torch.int64, [oneemb.make_table()] * 2, store, policy=policy
        )
        self.add_optimizer(torch.optim.Adam(self.parameters()))

    def build(self, ids, label):
        loss = (self.embedding(ids).sum((1, 2)) - label).square().mean()
        loss.backward()
        return loss.detach()


POLICIES = {
    "admission": (RowPolicy(admit=AdmitAfter(2)), None),
    "eviction": (RowPolicy(evict=LFU()), 4000),
    "expiry": (RowPolicy(expire_after_steps=10), None),
    "both": (RowPolicy(admit=AdmitAfter(2), evict=StepLRU()), 3000),
}


def rows_kept(graph):
    """{(table, id): weights} of all rows."""
    found = {}
    for table_N, id_N, row_NW in graph.embedding.store.rows.rows():
        found |= zip(zip(table_N.tolist(), id_N.tolist(), strict=True), map(bytes, row_NW), strict=True)
    return found


@pytest.mark.parametrize("kind", POLICIES)
def test_rows_that_policies_refuse_and_evict_are_the_same(kind, tmp_path):
    losses, kept, read = [], [], []
    for lookahead in (0, 16):
        graph = PolicyGraph(tmp_path / str(lookahead), *POLICIES[kind])
        losses.append(list(graph.run(zipf_batches(60), lookahead=lookahead)))
        read.append(graph.embedding.stats()["device"]["misses"])
        kept.append(rows_kept(graph))
        assert graph.embedding.store.check_slots() == []
        graph.embedding.close()
    assert all(torch.equal(x, y) for x, y in zip(*losses, strict=True)) and kept[0] == kept[1]
    if kind in ("admission", "eviction"):
        assert read[1] < read[0], "rows that come soon stay"


def test_rows_that_users_erase_and_evict_in_the_loop_change_nothing_else(tmp_path):
    losses, kept = [], []
    for lookahead in (0, 16):
        graph, found = PolicyGraph(tmp_path / str(lookahead), RowPolicy(evict=LFU())), []
        for n, loss in enumerate(graph.run(zipf_batches(50), lookahead=lookahead)):
            found.append(loss)
            if n % 7 == 3:
                graph.embedding.erase(torch.arange(40 * n, 40 * n + 400))
        losses.append(found)
        kept.append(rows_kept(graph))
        graph.embedding.close()
    assert all(torch.equal(x, y) for x, y in zip(*losses, strict=True)) and kept[0] == kept[1]


@pytest.mark.parametrize(
    ("error", "merged"),
    diagonal([SystemExit, KeyboardInterrupt, MemoryError, StopIteration, GeneratorExit], [False, True]),
)
def test_whatever_ends_the_loader_comes_at_its_batch(error, merged, tmp_path):
    batches = zipf_batches(30)

    class Loader:
        def __init__(self):
            self.left = iter(batches[:12])

        def __iter__(self):
            return self

        def __next__(self):
            for batch in self.left:
                return batch
            raise error

    def make(name):
        if not merged:
            return graph_of("ssd", 64)
        torch.manual_seed(0)
        return TwoEmbeddings([oneemb.make_cached_ssd_store_options(1, str(tmp_path / f"{name}{n}")) for n in "ab"])

    graph, losses, raised = make("x"), [], []
    try:
        for loss in graph.run(Loader(), lookahead=16):
            losses.append(loss)
    except BaseException as found:
        raised.append(type(found))
    assert raised == ([] if error is StopIteration else [error]) and len(losses) == graph.steps == 12
    losses += graph.run(batches[12:], lookahead=16)
    expected = list(make("y").run(batches, prefetch_depth=0))
    assert all(torch.equal(x, y) for x, y in zip(losses, expected, strict=True))


def test_a_batch_that_build_refuses_is_an_error_of_its_step_and_the_loop_can_go_on():
    graph, other = graph_of("ssd", 64), graph_of("ssd", 64)
    batches = zipf_batches(30)
    wrong = (batches[9][0].float(), batches[9][1])
    losses = []
    with pytest.raises(TypeError, match="ids"):
        for loss in graph.run([*batches[:9], wrong, *batches[9:]], lookahead=16):
            losses.append(loss)
    assert len(losses) == 9
    losses += graph.run(batches[9:], lookahead=16)
    check_same([other, graph], [list(other.run(batches, prefetch_depth=0)), losses])


@pytest.mark.parametrize("what", ["save", "load", "clear", "relayout"])
def test_calls_on_all_rows_in_the_loop(what, tmp_path):
    """A loop that is ahead of a save, a load, or a removal of all rows."""
    losses = []
    for lookahead in (0, 16):
        graph, found = graph_of("ssd", 64), []
        graph.save(tmp_path / f"{lookahead}.pt")
        for n, loss in enumerate(graph.run(zipf_batches(40), lookahead=lookahead)):
            found.append(loss)
            if n == 15 and what in ("save", "load"):
                graph.save(tmp_path / f"{lookahead}.pt")
            if n == 25 and what == "load":
                graph.load(tmp_path / f"{lookahead}.pt")
            if n == 25 and what == "clear":
                graph.embedding.clear()
            if n == 25 and what == "relayout":
                graph.embedding.save_snapshot("weights")
                graph.embedding.load_snapshot("weights", weights_only=True)
        losses.append(found)
        assert graph.embedding.store.check_slots() == []
    assert len(losses[0]) == 40 and all(torch.equal(x, y) for x, y in zip(*losses, strict=True))


def test_a_child_of_fork_reads_and_the_loop_goes_on():
    graph, other = graph_of("ssd", 64), graph_of("ssd", 64)
    batches, losses = zipf_batches(40), []
    for n, loss in enumerate(graph.run(batches, lookahead=16)):
        losses.append(loss)
        if n == 20:
            with torch.no_grad():
                graph.eval()
                expected = graph.embedding(batches[0][0])
                child = in_child(lambda want=expected: bool(torch.equal(graph.embedding(batches[0][0]), want)))
                graph.train()
            assert ended_well(child)
    check_same([other, graph], [list(other.run(batches, prefetch_depth=0)), losses])


def test_two_graphs_over_one_embedding_take_turns_and_a_forgotten_loop_ends():
    graph, other = graph_of("ssd", 64), graph_of("ssd", 64)
    batches = zipf_batches(40)
    loop = graph.run(batches[:20], lookahead=16)
    losses = [next(loop) for _ in range(5)]
    del loop
    gc.collect()
    again = graph.run(batches[5:], lookahead=32)
    losses += list(again)
    check_same([other, graph], [list(other.run(batches, prefetch_depth=0)), losses])


def test_memory_that_runs_out_for_a_hint_costs_the_hint_alone(monkeypatch):
    from oneemb.storage.tiers.victims import VictimClock

    graph, other, failed = graph_of("ssd", 64), graph_of("ssd", 64), threading.Event()
    add = VictimClock.add_batch

    def fail(self, *keys):
        if graph.steps > 5 and not failed.is_set():
            failed.set()
            raise MemoryError
        return add(self, *keys)

    monkeypatch.setattr(VictimClock, "add_batch", fail)
    batches = zipf_batches(40)
    losses = list(graph.run(batches, lookahead=8))
    assert failed.is_set()
    check_same([other, graph], [list(other.run(batches, prefetch_depth=0)), losses])
