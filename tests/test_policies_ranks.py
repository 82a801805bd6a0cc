"""Policies where ranks own rows together: each owner keeps what the model of test_policies.py keeps of its ids."""

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oneemb
from oneemb.embeddings import internals
from oneemb.kernels.owner import owner_of
from oneemb.policies import LFU, LRU, AdmitAfter, AdmitChance, EpochLFU, RowPolicy
from oneemb.rows.reshard import reshard
from tests.support.rank_pool import FailedOnRank
from tests.test_policies import DIM, Clock, Model, sgd

IDS, TABLES = 80, 2
RULES = {
    "lru": [RowPolicy(LRU(), 14), RowPolicy(LRU(), 12, expire_after_steps=3, sweep_steps=1)],
    "lfu, admitted": [RowPolicy(LFU(), 10, admit=AdmitAfter(3)), RowPolicy(LFU(), 9, admit=AdmitChance(0.6, 1))],
    "epochs, by lookup": [RowPolicy(EpochLFU(), 10, admit=AdmitAfter(2, per_lookup=True))] * 2,
    "a sketch": [RowPolicy(LRU(), 12, admit=AdmitAfter(3, sketch_width=1 << 16), absent="zeros")] * 2,
}


def made(group, path, policies, *, cache=True, **more):
    options = oneemb.make_device_mem_store_options(path, physical_block_size=512)
    if cache:
        options = oneemb.make_cached_ssd_store_options(1, path, physical_block_size=512)
    return oneemb.MultiTableEmbedding(
        "rows", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES, options,
        oneemb.make_constant_initializer(1.0), num_threads=1, process_group=group, gradients_of_ranks="sum",
        policy=policies, **more,
    )  # fmt: skip


def batch_of(step, rank):
    """int64 [N, 2]: tables and ids, some several times, drifting from step to step."""
    rng = np.random.default_rng((step, rank))
    ids = (rng.random(9) ** 2 * 30).astype(np.int64) + 3 * step
    return np.stack([rng.integers(0, TABLES, 9), ids % IDS], axis=1)


def look_up(embedding, keys):
    table_ids, ids = (torch.from_numpy(column.copy()) for column in keys.T)
    return embedding(ids, table_ids)


def rows_of(embedding):
    """{(table, id): (weight, score)} of all rows that any rank has, as each rank sees them."""
    found = {}
    embedding.eval()
    for table in range(TABLES):
        scores = embedding.scores(torch.arange(IDS), table).tolist()
        weights = embedding(torch.arange(IDS), torch.full((IDS,), table))[:, 0].tolist()
        found |= {(table, n): (weight, score) for n, (weight, score) in enumerate(zip(weights, scores, strict=True))}
    embedding.train()
    return found


def train(group, path, policies, steps, load=None, save=None, cache=True, evaluates=False):
    embedding = made(group, path, policies, cache=cache)
    optimizer = sgd(embedding)
    if load is not None:
        embedding.load_snapshot(load)
    embedding.train(not evaluates)
    for step in steps:
        optimizer.zero_grad()
        look_up(embedding, batch_of(step, 0 if group is None else group.rank())).sum().backward()
        optimizer.step()
    if save is not None:
        embedding.save_snapshot(save)
    found, stats = rows_of(embedding), embedding.stats()
    embedding.close()
    return found, stats


def owners_of(keys, ranks):
    table_N, id_N = (np.array(column) for column in zip(*keys, strict=True))
    return owner_of(table_N.astype(np.int32), id_N.astype(np.int64), ranks).tolist()


class Models:
    """One model an owner."""

    def __init__(self, policies, ranks):
        self.of_rank = [Model(policies, None) for _ in range(ranks)]

    def train(self, step, batches):
        uses = Counter((int(t), int(n)) for rank in range(batches) for t, n in batch_of(step, rank))
        owners = dict(zip(uses, owners_of(list(uses), len(self.of_rank)), strict=True))
        for rank, model in enumerate(self.of_rank):
            model.train({key: count for key, count in uses.items() if owners[key] == rank}, 0)

    def resharded(self, policies, ranks):
        its = Models(policies, ranks)
        for model in self.of_rank:
            for one in its.of_rank:
                one.step, one.lookups, one.epoch, one.swept = model.step, model.lookups, model.epoch, model.swept
            for what in ("rows", "seen"):
                for key, value in getattr(model, what).items():
                    getattr(its.of_rank[owners_of([key], ranks)[0]], what)[key] = copy.copy(value)
        return its

    def rows(self):
        rows = {key: (its[0], its[1]) for model in self.of_rank for key, its in model.rows.items()}
        absent = 0.0 if self.of_rank[0].policies[0].absent == "zeros" else 1.0
        return {(t, n): rows.get((t, n), (absent, 0)) for t in range(TABLES) for n in range(IDS)}


@pytest.mark.parametrize("how", RULES)
def test_owners_keep_what_a_model_of_each_keeps_and_go_on_with_other_ranks(tmp_path, rank_pool, how):
    policies, path = RULES[how], str(tmp_path / "rows")
    models = Models(policies, 3)
    results = rank_pool(3, train, path, policies, range(7), None, "all")
    for step in range(7):
        models.train(step, 3)
    assert all(found == models.rows() for found, _ in results)
    for (_, stats), model in zip(results, models.of_rank, strict=True):
        assert stats["rows"] == len(model.rows) and stats["device"]["pinned"] == 0
    models = models.resharded(policies, 2)
    results = rank_pool(2, train, path, policies, range(7, 12), "all", None, False)
    for step in range(7, 12):
        models.train(step, 2)
    assert all(found == models.rows() for found, _ in results)


@pytest.mark.parametrize("how", RULES)
def test_steps_that_train_lookups_in_eval_mode_are_uses(tmp_path, rank_pool, how):
    models = Models(RULES[how], 2)
    results = rank_pool(2, train, str(tmp_path / "rows"), RULES[how], range(7), None, None, True, True)
    for step in range(7):
        models.train(step, 2)
    assert all(found == models.rows() for found, _ in results)


def test_a_process_goes_on_from_ranks_as_from_a_reshard(tmp_path, rank_pool):
    policies = RULES["lfu, admitted"]
    rank_pool(2, train, str(tmp_path / "two"), policies, range(6), None, "all")
    reshard(str(tmp_path / "two"), "all", ranks=1, to=str(tmp_path / "one"))
    models = Models(policies, 2)
    for step in range(6):
        models.train(step, 2)
    models = models.resharded(policies, 1)
    models.train(6, 1)
    for path in ("one", "two"):
        found, _ = train(None, str(tmp_path / path), policies, [6], "all")
        assert found == models.rows(), path


def ask(group, path):
    """Calls about rows, each rank with ids of its own."""
    policies = [RowPolicy(EpochLFU(), expire_after_steps=2), RowPolicy(EpochLFU(), expire_below_norm=100.0)]
    rank, embedding = group.rank(), made(group, path, policies)
    look_up(embedding, np.stack([np.repeat([0, 1], 10), np.tile(np.arange(10), 2)], axis=1))
    mine = torch.arange(rank * 4, rank * 4 + 4)
    told = embedding.set_scores(mine, torch.arange(4) + 100 * rank, 0)
    read = [embedding.scores(ids, 0).tolist() for ids in (mine, torch.arange(12), torch.arange(12).view(3, 4)[:rank])]
    refused = []
    for call in (
        lambda: embedding.set_scores(torch.tensor([1]), torch.tensor([5]), 0),
        lambda: embedding.set_scores(torch.tensor([rank]), torch.tensor([-rank]), 0),
        lambda: embedding.set_epoch(3 + rank),
        lambda: embedding.scores(torch.tensor([rank], dtype=[torch.int64, torch.int32][rank == 1]), 0),
    ):
        with pytest.raises((ValueError, TypeError, oneemb.RankError)) as error:
            call()
        refused.append(str(error.value))
    embedding.set_epoch(3)
    left = embedding.evict()
    erased = embedding.erase(mine, 0)
    rows = embedding.stats()["rows"]
    embedding.close()
    return told, read, refused, left, erased, rows


def test_ranks_ask_about_rows_together(tmp_path, rank_pool):
    results = rank_pool(2, ask, str(tmp_path / "rows"))
    for rank, (told, read, refused, left, erased, _) in enumerate(results):
        assert told == 8 and left == {"norm": 10} and erased == 8
        scores = [*range(4), *range(100, 104), 1, 1, 0, 0]  # new ones have been looked up once on each of two ranks
        scores[8:10] = [2, 2]
        assert read[0] == scores[rank * 4 : rank * 4 + 4] and read[1] == scores
        assert [n for row in read[2] for n in row] == scores[: 4 * rank]
        assert "some ids repeat" in refused[0] and "0 or more" in refused[1]
        assert "the same on all ranks, got [3, 4]" in refused[2] and "ids must be torch.int64" in refused[3]
    assert sum(rows for *_, rows in results) == 2


class Clicks(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(sgd(embedding))

    def build(self, ids, table_ids):
        loss = self.embedding(ids, table_ids).sum()
        loss.backward()
        return loss.detach()


def announce(group, path, policies, how, cache):
    embedding = made(group, path, policies, cache=cache)
    graph = Clicks(embedding)
    batches = [
        tuple(torch.from_numpy(column.copy()) for column in batch_of(step, group.rank()).T[::-1]) for step in range(12)
    ]
    if how == "called":
        losses = [graph(*batch).item() for batch in batches]
    else:
        losses = [loss.item() for loss in graph.run(batches, prefetch_depth=3)]
    found = rows_of(embedding)
    embedding.close()
    return losses, found


@pytest.mark.parametrize("how", ["lru", "lfu, admitted"])
def test_lookups_that_are_announced_keep_the_same_rows(tmp_path, rank_pool, how):
    called = rank_pool(2, announce, str(tmp_path / "called"), RULES[how], "called", True)
    run = rank_pool(2, announce, str(tmp_path / "run"), RULES[how], "run", False)
    assert called == run


def sum_bags(group, path, policies, evaluates):
    """Long bags, of which owners make sums: counted are the ids in them."""
    embedding = made(group, path, policies)
    ids = torch.arange(200) % 6 + 3 * group.rank()
    embedding.train(not evaluates)
    optimizer = sgd(embedding)
    embedding(ids, torch.zeros(2, dtype=torch.int64), offsets=torch.tensor([0, 90, 200])).sum().backward()
    optimizer.step()
    scores = embedding.scores(torch.arange(12), 0).tolist()
    embedding.close()
    return scores


@pytest.mark.parametrize("evaluates", [False, True])
def test_ids_in_bags_are_counted_one_by_one(tmp_path, rank_pool, evaluates):
    expected = Counter(n % 6 + 3 * rank for rank in range(2) for n in range(200))
    for scores in rank_pool(2, sum_bags, str(tmp_path / "rows"), RowPolicy(LFU()), evaluates):
        assert scores == [expected[n] for n in range(12)]


def differ(group, path):
    embedding = made(group, path, RowPolicy(LRU(), 10 + group.rank()))
    look_up(embedding, batch_of(0, 0))


def test_ranks_with_other_policies_say_so(tmp_path, rank_pool):
    with pytest.raises(FailedOnRank, match="policies"):
        rank_pool(2, differ, str(tmp_path / "rows"))


def test_replicated_tables_have_no_policy():
    with pytest.raises(ValueError, match="replicated tables must keep all rows"):
        oneemb.embeddings.embedding_arguments.policies_of(
            RowPolicy(LRU(), 5),
            [oneemb.make_table(replicate=True)],
            oneemb.make_device_mem_store_options("x"),
            SimpleNamespace(alone=False),
        )


def wait(group, path, seconds):
    clock = Clock()
    embedding = made(group, path, RowPolicy(expire_after_seconds=10, clock=clock))
    look_up(embedding, np.stack([np.zeros(20, np.int64), np.arange(20)], axis=1))
    left = []
    for now in seconds:
        clock.now += now
        left.append(embedding.evict())
    embedding.close()
    return left


def test_rows_of_all_ranks_expire_by_the_clock(tmp_path, rank_pool):
    for left in rank_pool(2, wait, str(tmp_path / "rows"), [10, 1, 1]):
        assert left == [{}, {"expired": 20}, {}]


def fail_to_say(group, path):
    """expire_where raises on rank 1."""

    def everything_leaves(table, ids, weights):
        if group.rank() == 1:
            raise ZeroDivisionError
        return np.ones(len(ids), np.bool_)

    embedding = made(group, path, RowPolicy(expire_where=everything_leaves))
    look_up(embedding, np.stack([np.zeros(20, np.int64), np.arange(20)], axis=1))
    rows = embedding.stats()["rows"]
    with pytest.raises((ValueError, oneemb.RankError)) as error:
        embedding.evict()
    after = embedding.stats()["rows"]
    embedding.close()
    return rows, after, str(error.value)


def refuse_on_one(group, path):
    """A row that a lookup of rank 0 holds is erased, and a score that its table has none of given, by all."""
    embedding = made(group, path, RowPolicy(LFU(half_life=5.0)))
    look_up(embedding, np.stack([np.zeros(20, np.int64), np.arange(20)], axis=1))
    before, said = rows_of(embedding), []
    # One of rank 0's rows gets what is no number; those of rank 1 what is one.
    mine = torch.tensor(
        [n for n, owner in enumerate(owners_of([(0, n) for n in range(20)], 2)) if owner == group.rank()]
    )
    bits = torch.full_like(mine, int(np.float64(np.nan if group.rank() == 0 else 7.0).view(np.int64)))
    held = look_up(embedding, np.array([[0, n] for n in mine.tolist()[: 1 - group.rank()]], np.int64).reshape(-1, 2))
    for call in (lambda: embedding.set_scores(mine, bits, 0), lambda: embedding.erase(torch.arange(20), 0)):
        with pytest.raises((ValueError, oneemb.StorageError, oneemb.RankError)) as error:
            call()
        said.append(str(error.value))
    held.sum().backward()
    internals.drop_grads(embedding)
    after = rows_of(embedding)
    embedding.close()
    used = {(0, n) for n in range(20) if owners_of([(0, n)], 2)[0] == 0}  # by the lookup, some of them
    return len(before) - len(used), {key for key in before if before[key] != after[key]} - used, said


def test_calls_that_one_rank_refuses_change_nothing_on_any(tmp_path, rank_pool):
    for others, changed, said in rank_pool(2, refuse_on_one, str(tmp_path / "rows")):
        assert others > 0 and not changed and "finite float64" in said[0], said


def test_no_rank_lets_rows_leave_where_one_cannot_say_which(tmp_path, rank_pool):
    for rank, (rows, after, said) in enumerate(rank_pool(2, fail_to_say, str(tmp_path / "rows"))):
        assert rows == after > 0 and ("nothing was done here" in said) == (rank == 0)
