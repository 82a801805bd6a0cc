"""Ranks that save are processes, and are killed at random moments: what they reported saved is there, whole."""

import random

import pytest

import oneemb
from oneemb.storage.snapshots.part_folders import open_anew
from oneemb.storage.snapshots.snapshot_parts import look_at
from tests.support.rank_jobs import killed
from tests.test_rank_snapshots import FEW, assert_nothing_is_unneeded, content, expected, fill, make, read


def train(group, report, root):
    """Goes on from the last snapshot and saves until it is killed; reports what each save has announced."""
    embedding = make(group, root)
    version = 0
    if "last" in embedding.snapshots():
        embedding.load_snapshot("last")
        version = embedding.store.step // 10
        mine = content(embedding)[0]
        assert mine.items() <= expected(version, FEW).items()
    report(("begins", version))
    while True:
        version += 1
        fill(embedding, version, FEW)
        embedding.store.step = version * 10
        embedding.save_snapshot("last", overwrite=True)
        report(("saved", version))
        if version % 4 == 0:
            embedding.save_snapshot(f"s{version % 3}", overwrite=True)
        if version % 7 == 0 and "s0" in embedding.snapshots():
            embedding.delete_snapshot("s0")


def version_in(root, name):
    """Which version a snapshot has; it has to be whole."""
    rows = read(root, name)
    (table, id), row = next(iter(rows.items()))
    version = next(version for version in range(2000) if expected(version, FEW)[table, id] == row)
    assert rows == expected(version, FEW)
    return version


def kill_and_check(root, size, rng, last, *, waits):
    """Kill one of the ranks, or all, after their first save or before; returns the version that is there afterwards."""
    begun, announced = killed(size, train, str(root), rng=rng, waits=waits)
    assert begun == last
    try:
        found = version_in(root, "last")
    except oneemb.StorageError:
        found = 0
    assert found >= announced, f"version {announced} was announced, {found} was found"
    for name in ("s0", "s1", "s2"):
        try:
            version_in(root, name)
        except oneemb.StorageError as error:
            assert "there are" in str(error), error
    return found


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_ranks_lose_nothing_that_they_have_announced(tmp_path, times, seed):
    rng, last = random.Random(seed), 0
    for n in range(times):
        last = kill_and_check(tmp_path / "root", rng.choice([2, 2, 3, 0]), rng, last, waits=n % 3 == 0)
    assert last >= times // 4
    embedding = make(None, tmp_path / "root")
    fill(embedding, 1, FEW)
    embedding.save_snapshot("end")
    embedding.close()
    for folder in look_at([str(tmp_path / "root")]).folders:
        open_anew(folder).close()  # Rows that a kill has left in no snapshot go with the next open.
    assert_nothing_is_unneeded(tmp_path / "root")
