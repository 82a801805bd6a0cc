"""Sinks and servers that have at most `max_rows` rows.

The oracle of a version is a dict {(table, id): rank}: how often the job has used the row, or the number of the delta
that has written it last. Which of two rows with equal ranks stays is left open, but all readers must have the same.
"""

import functools

import numpy as np
import pytest
import torch

import oneemb
from oneemb.rows.reshard import reshard
from tests.support.published import DIM, KINDS, Place, publishing, read_function, rows_of, take

ROWS = 40


class RankedJob:
    """A job that knows the rank of each row. `ranks`: {name of a version: ranks of its rows}."""

    def __init__(self, folder, policy=None, capacity=None):
        self.folder, self.has_policy = str(folder), policy is not None
        self.rows, self.ranks, self._now, self._links = {}, {}, {}, 0
        self._drawn = np.random.default_rng(3)
        store = oneemb.make_device_mem_store_options(self.folder, physical_block_size=512, capacity=capacity)
        self.embedding = oneemb.MultiTableEmbedding(
            "items", DIM, torch.float32, torch.int64, [oneemb.make_table()] * 2, store,
            oneemb.make_uniform_initializer(-1.0, 1.0), policy=policy,
        )  # fmt: skip
        self._optimizer = torch.optim.Adagrad(self.embedding.parameters(), lr=0.1)

    def train(self, ids):
        """Train ids, [N, 2] of both tables."""
        self._optimizer.zero_grad()
        (self.embedding(torch.as_tensor(ids)) * torch.arange(ids.size * DIM).view(-1, 2, DIM).sin()).sum().backward()
        self._optimizer.step()
        for key in [(table, id) for row in ids.tolist() for table, id in enumerate(row)]:
            self._now[key] = self._now.get(key, 0) + 1 if self.has_policy else self._links

    def erase(self, ids, table):
        self.embedding.erase(torch.as_tensor(ids), table)
        for id in ids:
            self._now.pop((table, id), None)

    def erase_best(self, count):
        """Erase the rows of the highest ranks, so that others must come back."""
        best = sorted(self._now, key=self._now.get)[-count:]
        for table in (0, 1):
            self.erase([id for its, id in best if its == table] or [10**6], table)

    def save(self, name, whole=False):
        since = self.embedding.last_snapshot
        if whole or since is None:
            self._links = 0
            if not self.has_policy:
                self._now = dict.fromkeys(self._now, 0)
            self.embedding.save_snapshot(name)
        else:
            self.embedding.save_delta(name, since)
        self.rows[name] = rows_of(self.embedding)
        self._now = {key: self._now[key] for key in self.rows[name]}  # without those that the policy has evicted
        self.ranks[name] = dict(self._now)
        self._links += 1

    def some(self, count, ids):
        return self._drawn.integers(-ids // 2, ids // 2, (count, 2))

    def steps(self, ids=60, first=40, count=12):
        """Save versions of many kinds; yields their names."""
        for n in range(9):
            if n == 4:
                self.erase_best(count)
            elif n == 6:
                self.train(np.repeat(self.some(2, ids), 9, 0))
            elif n == 7:
                self.erase(list(range(-30, 30)), 0)
            else:
                self.train(self.some(first if n == 0 else count, ids))
                self.erase(self._drawn.integers(-ids // 2, ids // 2, 3).tolist(), 1)
            self.save(f"v{n}", whole=n == 5)
            yield f"v{n}"

    def close(self):
        self.embedding.close()


def made(kind, folder):
    policy = None if kind == "newest" else oneemb.policies.RowPolicy(evict=oneemb.policies.LFU())
    return RankedJob(folder / "job", policy, 90 if kind == "evicting" else None)


@pytest.fixture(params=["newest", "most used", "evicting"])
def job(request, tmp_path):
    job = made(request.param, tmp_path)
    yield job
    job.close()


def check(job, name, shown, tables=(0, 1), most=ROWS):
    """Whether rows that a reader shows are those of a version that stay, bit for bit."""
    rows = {key: row for key, row in job.rows[name].items() if key[0] in tables}
    ranks = {key: job.ranks[name][key] for key in rows}
    assert shown == {key: rows[key] for key in shown}
    assert len(shown) == min(most, len(rows))
    left = [rank for key, rank in ranks.items() if key not in shown]
    assert not left or min(ranks[key] for key in shown) >= max(left)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_has_the_rows_of_the_highest_ranks_of_each_version(tmp_path, redis_server, kind):
    job, place = made("evicting", tmp_path), Place(kind, tmp_path, redis_server)
    tables = (1,) if kind in ("faiss", "usearch") else (0, 1)
    most = ROWS // 2 if len(tables) == 1 else ROWS
    for name in job.steps():
        with publishing(job, place.make(max_rows=most)):
            pass
        shown = place.read()
        assert shown[0] == name
        check(job, name, shown[1], tables, most)
    job.close()


def test_all_ways_to_a_version_lead_to_the_same_rows(job, tmp_path):
    items = {"version": None, "rows": {}}
    by_deltas = oneemb.sinks.Function(functools.partial(take, items), max_rows=ROWS)
    with publishing(job, by_deltas) as publisher:
        for name in job.steps():
            publisher.flush()
            whole = {"version": None, "rows": {}}
            with publishing(job, oneemb.sinks.Function(functools.partial(take, whole), max_rows=ROWS)):
                pass
            assert read_function(items) == read_function(whole)
            assert whole["version"] == name
            check(job, name, whole["rows"])
        stats = publisher.stats()
    assert stats["partial"]["wholes"] == 2  # the two whole snapshots; all other versions came as deltas


@pytest.mark.parametrize(("kind", "dtype"), [("newest", "float32"), ("most used", "float32"), ("newest", "int8")])
def test_a_server_has_the_same_rows_by_layers_and_by_a_whole_file(tmp_path, kind, dtype):
    job = made(kind, tmp_path)
    names = job.steps(ids=600, first=400, count=6)
    next(names)
    most = 75 if job.has_policy else 300
    options = {"dtype": dtype, "absent": "zeros", "max_rows": most}
    served = oneemb.InferenceEmbedding.open(job.folder, **options)
    for name in names:
        assert served.refresh() and served.version.name == name
        ids = torch.arange(-310, 310).repeat_interleave(2).view(-1, 2)
        with oneemb.InferenceEmbedding.open(job.folder, folder=tmp_path / f"whole {name}", **options) as whole:
            assert torch.equal(served(ids), whole(ids))
        if dtype == "float32":
            shown = {
                (table, id): row.numpy().tobytes()
                for (id, _), rows in zip(ids.tolist(), served(ids), strict=True)
                for table, row in enumerate(rows)
                if row.any()
            }
            check(job, name, shown, most=most)
    assert list((tmp_path / "job" / "serving").glob(f"*-{dtype}-max-{most}-since-*"))
    served.close()
    job.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("faiss", "usearch")])
def test_another_cap_gives_a_sink_all_rows_that_stay(tmp_path, redis_server, kind):
    job, place = RankedJob(tmp_path / "job"), Place(kind, tmp_path, redis_server)
    names = job.steps()
    for most in (30, None, 20, 25):
        name = next(names)
        with publishing(job, place.make(max_rows=most)):
            pass
        assert place.read()[0] == name
        check(job, name, place.read()[1], most=10**9 if most is None else most)
    job.close()


def test_a_version_that_was_resharded_is_published_again_where_a_cap_depends_on_it(tmp_path):
    job, items = RankedJob(tmp_path / "job"), {"version": None, "rows": {}}
    make = functools.partial(
        oneemb.sinks.Function, functools.partial(take, items), tmp_path / "position", max_rows=ROWS
    )
    names = job.steps()
    for _ in range(3):
        next(names)
    with publishing(job, make()):
        pass
    job.close()
    reshard(job.folder, "v2", 1, str(tmp_path / "other"))  # one whole snapshot of the same identity
    job.folder = str(tmp_path / "other")
    store = oneemb.make_device_mem_store_options(job.folder, physical_block_size=512)
    job.embedding = oneemb.MultiTableEmbedding(
        "items", DIM, torch.float32, torch.int64, [oneemb.make_table()] * 2, store,
        oneemb.make_uniform_initializer(-1.0, 1.0),
    )  # fmt: skip
    job.embedding.load_snapshot("v2")
    job.embedding.erase(torch.arange(-30, 0), 0)
    job.embedding.save_delta("v3", "v2")
    rows = rows_of(job.embedding)
    with publishing(job, make()):
        pass
    whole = {"version": None, "rows": {}}
    with publishing(job, oneemb.sinks.Function(functools.partial(take, whole), max_rows=ROWS)):
        pass
    assert read_function(items) == read_function(whole) == ("v3", {key: rows[key] for key in items["rows"]})
    assert len(items["rows"]) == min(ROWS, len(rows))
    job.close()


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "all"])
def test_a_cap_that_is_no_number_of_rows_is_refused(tmp_path, most):
    for make in (oneemb.sinks.Files, oneemb.sinks.Table, oneemb.sinks.ServedFile, oneemb.InferenceEmbedding.open):
        with pytest.raises(ValueError, match="max_rows must be a number of rows, 1 or more"):
            make(tmp_path / "there", max_rows=most)
