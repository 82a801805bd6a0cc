"""Loops that read batches ahead for their ids alone: `graph.run(loader, lookahead=n)`."""

import threading

import numpy as np
import pytest
import torch

import oneemb
from oneemb.graph.read_ahead import ReadAhead
from tests.support.cold_shards import keep_index_on_disk
from tests.test_train_graph_prefetch import batches_of, check_same, graph_of, threads


def zipf_batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (torch.from_numpy(rng.zipf(1.2, (256, 2)) % 20_000), torch.from_numpy(rng.random(256, np.float32)))
        for _ in range(count)
    ]


def rows_read(graph, batches, **options):
    """Losses, and rows that the cache has read from the SSD or begun."""
    losses = list(graph.run(batches, **options))
    return losses, graph.embedding.stats()["device"]["misses"]


@pytest.mark.parametrize(("depth", "index"), [(1, "in memory"), (3, "in memory"), (3, "on disk")])
def test_no_number_depends_on_the_lookahead_and_fewer_rows_are_read(depth, index, monkeypatch):
    batches = zipf_batches(60)
    graphs, losses, read = [], [], []
    for lookahead in (0, 1, 32):
        if index == "on disk" and lookahead:  # The first graph has its index in memory.
            keep_index_on_disk(monkeypatch)
        graphs.append(graph_of("ssd", 64))
        some, misses = rows_read(graphs[-1], batches, prefetch_depth=depth, lookahead=lookahead)
        losses.append(some)
        read.append(misses)
    check_same(graphs, losses)
    assert read[2] < read[0]
    blocks = [graph.embedding.stats()["persistent"]["index_blocks_read"] for graph in graphs]
    assert [some > 0 for some in blocks] == [False, *[index == "on disk"] * 2]


def test_merged_embeddings_and_several_lookups_of_one_embedding_know_their_uses_too(tmp_path):
    def losses_of(lookahead):
        torch.manual_seed(0)
        options = [oneemb.make_cached_ssd_store_options(1, str(tmp_path / f"{lookahead}{n}")) for n in "ab"]
        graph = TwoEmbeddings(options)
        losses = list(graph.run(zipf_batches(40), lookahead=lookahead))
        misses = sum(one.stats()["device"]["misses"] for one in (graph.a, graph.b))
        graph.a.close(), graph.b.close()
        return losses, misses

    (without, many), (ahead, fewer) = losses_of(0), losses_of(16)
    assert all(torch.equal(x, y) for x, y in zip(without, ahead, strict=True))
    assert fewer < many


class TwoEmbeddings(oneemb.TrainGraph):
    def __init__(self, options):
        super().__init__()
        self.a, self.b = (
            oneemb.MultiTableEmbedding(name, 64, torch.float32, torch.int64, [oneemb.make_table()], one)
            for name, one in zip("ab", options, strict=True)
        )
        self.add_optimizer(torch.optim.Adam(self.parameters()))

    def build(self, ids, label):
        first, second = ids.unbind(1)
        logit = (self.a(first) * self.b(second)).sum(1) + self.a(second).sum(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss.detach()


def test_a_loader_that_waits_for_data_holds_up_no_step():
    graph, go_on = graph_of("ssd"), threading.Event()
    batches = batches_of(6, 20, 60)

    def live():
        yield from batches[:3]
        go_on.wait(600)
        yield from batches[3:]

    loop = graph.run(live(), lookahead=16)
    losses = [next(loop) for _ in range(3)]  # The loader waits: all that it has given is trained.
    assert graph.steps == 3
    go_on.set()
    losses += list(loop)
    again = graph_of("ssd")
    check_same([again, graph], [list(again.run(batches, prefetch_depth=0)), losses])


def test_the_loader_is_read_no_further_than_asked():
    graph, read = graph_of("ssd"), []

    def loader():
        for n, batch in enumerate(batches_of(40, 20, 60)):
            read.append(n)
            yield batch

    for trained, _ in enumerate(graph.run(loader(), prefetch_depth=1, lookahead=4), start=1):
        # One or two batches are prepared, four wait.
        assert len(read) <= trained + 2 + 4
    assert trained == 40


def test_waiting_batches_are_bounded_by_their_bytes():
    taken, read = [], []
    ahead = ReadAhead(iter(range(100)), lambda n: read.append(n) or n, lambda n: 10, count=50, bytes_max=25)
    for n in ahead:
        taken.append(n)
        # At most three batches of ten bytes wait: one more is read while fewer than 25 bytes wait.
        assert len(read) - len(taken) <= 4
    assert taken == list(range(100))


def test_an_error_of_the_loader_comes_at_its_batch_and_nothing_is_left():
    graph = graph_of("ssd")

    def failing():
        yield from batches_of(5, 20, 60)
        raise OSError("the file is cut")

    losses = []
    with pytest.raises(OSError, match="the file is cut"):
        for loss in graph.run(failing(), lookahead=16):
            losses.append(loss)
    assert len(losses) == 5 and graph.steps == 5 and threads() == []


def test_batches_left_behind_are_not_waited_for_and_the_next_loop_is_right():
    graph, other = graph_of("ssd", 64), graph_of("ssd", 64)
    batches = zipf_batches(50)
    for n, _ in enumerate(graph.run(batches, lookahead=32)):
        if n == 9:
            break
    assert threads() == [] and graph.steps == 10
    rest = list(graph.run(batches[10:], lookahead=32))
    expected = list(other.run(batches, prefetch_depth=0))
    check_same([other, graph], [expected[10:], rest])


def test_the_loader_state_is_that_of_the_batch_trained_last():
    class Counting:
        def __init__(self):
            self.given = 0

        def __iter__(self):
            for batch in batches_of(30, 20, 60):
                self.given += 1
                yield batch

        def state_dict(self):
            return self.given

    graph, loader = graph_of("ssd"), Counting()
    for n, _ in enumerate(graph.run(loader, lookahead=16)):
        assert graph.loader_state == n + 1
    assert graph.batches_ahead == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "16", None])
def test_a_lookahead_that_is_no_count_is_an_error(wrong):
    with pytest.raises(ValueError, match="lookahead must be an int of at least 0"):
        graph_of("ssd").run([], lookahead=wrong)


@pytest.mark.parametrize("store", ["device", "host"])
def test_stores_whose_rows_are_in_memory_read_no_further(store):
    graph, read = graph_of(store), []

    def loader():
        for n, batch in enumerate(batches_of(20, 20, 60)):
            read.append(n)
            yield batch

    loop = graph.run(loader(), lookahead=16)
    next(loop)
    assert len(read) <= 3
    loop.close()
