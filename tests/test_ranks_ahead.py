"""Lookups that ranks announce to each other ahead of their step change no bit, whether guesses are right or not."""

import itertools
import threading
import time

import pytest
import torch

import oneemb
from oneemb.graph import prefetch
from oneemb.graph.ops import AnnouncedLookup, lookup_ahead
from tests.support.cold_shards import keep_index_on_disk
from tests.support.pairwise import diagonal

DIM, BATCH, STEPS = 4, 5, 18


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    users, items = (torch.randint(-30, 30, (BATCH + rank, 2), generator=generator) * 2**40 for _ in range(2))
    return users, items


class Graph(oneemb.TrainGraph):
    """`odd(rank, step)` says what the rank does otherwise than before in a step: a set of the words in `build`."""

    def __init__(self, path, store, group, odd):
        super().__init__()
        self.rank, self.odd, self.step = group.rank(), odd, 0
        for name, tables in (("users", 2), ("items", 1)):
            options = {
                "device": oneemb.make_device_mem_store_options(f"{path}/{name}"),
                "ssd": oneemb.make_cached_ssd_store_options(1, f"{path}/{name}"),
            }[store]
            embedding = oneemb.MultiTableEmbedding(
                name, DIM, torch.float32, torch.int64, [oneemb.make_table()] * tables, options, num_threads=1,
                process_group=group,
            )  # fmt: skip
            setattr(self, name, embedding)
        self.register_buffer("shift", torch.zeros(1, dtype=torch.int64))
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, users, items):
        odd = self.odd(self.rank, self.step)
        self.step += 1
        if "raises" in odd:
            raise OSError("no such file")
        order = [
            lambda: self.users(users.flip(0) if "users" in odd else users),
            lambda: self.items(items.flatten() + ("items" in odd) + self.shift),
        ]
        found = [look_up() for look_up in order]
        if "raises later" in odd:
            raise OSError("no such file")
        loss = sum(rows.square().sum() for rows in found)
        if "twice" in odd:
            loss = loss + self.users(users).sum()
        loss.backward()
        if "shifts" in odd:
            time.sleep(0.2)  # Meanwhile the next batch is announced.
            self.shift += 2**40
        return loss.detach()


def train(group, path, store, way, odd, depth=1):
    """The losses, the weights of all rows there are, and how many lookups got rows that were announced."""
    graph = Graph(path, store, group, odd)
    taken = []
    acquire = AnnouncedLookup.acquire
    AnnouncedLookup.acquire = lambda self: taken.append(acquire(self)) or taken[-1]
    try:
        batches = [batch_of(step, group.rank()) for step in range(STEPS)]
        if way == "run":
            losses = list(graph.run(batches, prefetch_depth=depth))
        else:
            losses = [graph(*batch) for batch in batches]
    finally:
        AnnouncedLookup.acquire = acquire
    rows = []
    for embedding in (graph.users, graph.items):
        stats = embedding.stats()
        assert stats["device"]["pinned"] == 0
        embedding.eval()
        ids = torch.arange(-31, 31) * 2**40
        ids = ids[:, None].expand(-1, 2).contiguous() if embedding is graph.users else ids
        rows += [embedding(ids + more).detach().numpy().tobytes() for more in (0, 1)] + [stats["rows"], stats["step"]]
        embedding.close()
    return torch.stack(losses).numpy().tobytes(), rows, sum(lease is not None for lease in taken)


def nothing(rank, step):
    return ()


def one_misses(rank, step):
    return ("users",) if rank == 1 and step == 7 else ()


def second_misses(rank, step):
    return ("items",) if rank == 0 and step in (7, 12) else ()


def different_misses(rank, step):
    return {0: (), 1: ("users",), 2: ("items",)}[rank] if step in (8, 9, 15) else ()


def all_miss(rank, step):
    return ("users", "items") if step > 5 and step % 5 == 0 else ()


def looks_up_more(rank, step):
    return ("twice",) if step % 7 == 6 else ()


def one_changes_what_was_read(rank, step):
    """What its ids were guessed from, once they are announced."""
    return ("shifts",) if rank == 1 and step in (7, 8, 13) else ()


@pytest.mark.parametrize(("store", "depth"), diagonal(["device", "ssd"], [1, 3]))
def test_run_announces_lookups_and_changes_no_bit(tmp_path, rank_pool, store, depth):
    called = rank_pool(3, train, str(tmp_path / "called"), store, "called", nothing)
    run = rank_pool(3, train, str(tmp_path / "run"), store, "run", nothing, depth)
    for one, other in zip(called, run, strict=True):
        assert one[:2] == other[:2]
        assert one[2] == 0 and other[2] >= 2 * (STEPS - depth - 2)


@pytest.mark.parametrize(
    "odd", [one_misses, second_misses, different_misses, all_miss, looks_up_more, one_changes_what_was_read]
)
def test_wrong_guesses_of_some_ranks_change_no_bit(tmp_path, rank_pool, odd):
    called = rank_pool(3, train, str(tmp_path / "called"), "device", "called", odd)
    run = rank_pool(3, train, str(tmp_path / "run"), "device", "run", odd)
    for one, other in zip(called, run, strict=True):
        assert one[:2] == other[:2]
        assert other[2] > STEPS // 2


def train_short_of_memory(group, path):
    """Result of `train`, where one rank has no memory for each third of its announcements."""
    real, calls = lookup_ahead.request_for, itertools.count()

    def fails(*args, **kwargs):
        if threading.current_thread().name == "oneemb-prefetch" and group.rank() == 1 and next(calls) % 3 == 2:
            raise MemoryError
        return real(*args, **kwargs)

    lookup_ahead.request_for = fails
    try:
        return *train(group, path, "device", "run", nothing), next(calls)
    finally:
        lookup_ahead.request_for = real


def test_a_rank_without_memory_for_an_announcement_announces_in_vain_and_changes_no_bit(tmp_path, rank_pool):
    called = rank_pool(3, train, str(tmp_path / "called"), "device", "called", nothing)
    run = rank_pool(3, train_short_of_memory, str(tmp_path / "run"))
    for rank, (one, other) in enumerate(zip(called, run, strict=True)):
        assert one[:2] == other[:2]
        assert 0 < other[2] < 2 * (STEPS - 3), "some are announced, some in vain"
        assert (other[3] > 8) == (rank == 1)


def raises_in_a_step(group, path, when):
    """Rank 1 raises in `build` of step 7, before its lookups or after; what each has raised, and the steps made."""
    graph = Graph(path, "device", group, lambda rank, step: (when,) if rank == 1 and step == 7 else ())
    raised, steps = "", 0
    batches = [batch_of(step, group.rank()) for step in range(12)]
    try:
        for _ in graph.run(batches):
            steps += 1
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    pinned = [embedding.stats()["device"]["pinned"] for embedding in (graph.users, graph.items)]
    graph.users.close()
    graph.items.close()
    return steps, raised, pinned


@pytest.mark.parametrize("when", ["raises", "raises later"])
def test_where_one_rank_raises_before_its_lookups_or_after_them_all_raise(tmp_path, rank_pool, when):
    results = rank_pool(3, raises_in_a_step, str(tmp_path), when)
    for rank, (steps, raised, pinned) in enumerate(results):
        assert steps == 7 and pinned == [0, 0]
        assert raised.startswith("OSError" if rank == 1 else "RankError: rank 1 has failed (OSError: no such file)")


def fail_at_once(group, path):
    """Whether a lookup can be made after a loop whose loader has failed on a rank before the loop waits for it."""
    graph = Graph(path, "device", group, nothing)
    begin = prefetch.start

    def begin_and_wait(thread):
        begin(thread)
        time.sleep(0.5 * group.rank())  # The thread of rank 1 has failed before its loop waits for it.

    def loader():
        if group.rank() == 1:
            raise OSError("no such file")
        yield batch_of(0, group.rank())

    prefetch.start = begin_and_wait
    try:
        list(graph.run(loader(), prefetch_depth=2))
    except (OSError, oneemb.RankError) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        prefetch.start = begin
    graph(*batch_of(1, group.rank()))
    steps = graph.users.stats()["step"]
    for embedding in (graph.users, graph.items):
        embedding.close()
    return said, steps


def test_a_loader_that_fails_before_the_loop_waits_for_it_fails_one_loop_alone(tmp_path, rank_pool):
    (first, steps), (second, others) = rank_pool(2, fail_at_once, str(tmp_path))
    assert steps == others == 1
    assert second == "OSError: no such file" and first.startswith(
        "RankError: rank 1 has failed (OSError: no such file)"
    )


def train_many_rows(group, path, index, way):
    """Losses, weights, and blocks read of the index of an embedding with more rows than its cache has room for."""
    with pytest.MonkeyPatch.context() as patch:
        if index == "on disk":
            keep_index_on_disk(patch)
        options = oneemb.make_cached_ssd_store_options(1, path)
        graph = ManyRows(oneemb.MultiTableEmbedding(
            "items", 64, torch.float32, torch.int64, [oneemb.make_table()], options, num_threads=1, process_group=group,
        ))  # fmt: skip
        generator = torch.Generator().manual_seed(group.rank())
        batches = [(torch.randint(0, 12_000, (1000,), generator=generator),) for _ in range(12)]
        losses = list(graph.run(batches, lookahead=4)) if way == "run" else [graph(*batch) for batch in batches]
        ids = torch.arange(12_000).view(12, -1)
        weights = b"".join(graph.embedding.read(part).numpy().tobytes() for part in ids)
        blocks = graph.embedding.stats()["persistent"]["index_blocks_read"]
        graph.embedding.close()
    return torch.stack(losses).numpy().tobytes(), weights, blocks


class ManyRows(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.Adam(self.parameters()))

    def build(self, ids):
        loss = self.embedding(ids).square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("way", ["called", "run"])
def test_an_index_on_disk_changes_no_bit_on_any_rank(tmp_path, rank_pool, way):
    found = rank_pool(2, train_many_rows, str(tmp_path / "memory"), "in memory", "called")
    on_disk = rank_pool(2, train_many_rows, str(tmp_path / "disk"), "on disk", way)
    for one, other in zip(found, on_disk, strict=True):
        assert one[:2] == other[:2] and one[2] == 0 and other[2] > 0
