"""Ranks that save are processes, and are killed at random moments: what they reported saved is there, whole."""

import multiprocessing
import os
import random
import signal
import time

import pytest

import oneemb
from tests.test_rank_snapshots import FEW, assert_nothing_is_unneeded, content, expected, fill, make, read

SECONDS = 30


def train(root, meet, rank, size, report):
    """Goes on from the last snapshot and saves until it is killed; reports what each save has announced."""
    from torch import distributed

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # What it says when others are killed.
    if size:
        distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
    group = distributed.group.WORLD if size else None
    embedding = make(group, root)
    version = 0
    if "last" in embedding.snapshots():
        embedding.load_snapshot("last")
        version = embedding.store.step // 10
        mine = content(embedding)[0]
        assert mine.items() <= expected(version, FEW).items()
    report.send(("begins", version))
    while True:
        version += 1
        fill(embedding, version, FEW)
        embedding.store.step = version * 10
        embedding.save_snapshot("last", overwrite=True)
        report.send(("saved", version))
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


def kill_and_check(root, meet, size, rng, least, context):
    """Kill one of the ranks, or all; returns the version that is there afterwards."""
    processes, reports = [], []
    for rank in range(max(1, size)):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(str(root), str(meet), rank, size, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        reports.append(ours)
    try:
        for report in reports:
            assert report.poll(SECONDS), "a rank did not begin"
            assert report.recv() == ("begins", least if least else 0) or least is None
        time.sleep(rng.uniform(0, 0.5))
        victims = processes if rng.random() < 0.3 else [rng.choice(processes)]
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        announced = 0
        for process, report in zip(processes, reports, strict=True):
            process.join(SECONDS)
            assert process.exitcode is not None, "a rank waits for one that is dead"
            while report.poll():
                try:
                    announced = max(announced, report.recv()[1])
                except EOFError:
                    break
    finally:
        for process in processes:
            process.kill()
            process.join()
    try:
        found = version_in(root, "last")
    except oneemb.StorageError:
        assert announced == 0
        found = 0
    assert found >= announced, f"version {announced} was announced, {found} was found"
    for name in ("s0", "s1", "s2"):
        try:
            version_in(root, name)
        except oneemb.StorageError as error:
            assert "there are" in str(error), error
    return found


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_ranks_lose_nothing_that_they_have_announced(tmp_path, times):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_rank_snapshots_kill"])
    seed = 7 if times < 10 else random.randrange(10**6)
    print(f"seed {seed}")
    rng, last = random.Random(seed), 0
    for n in range(times):
        last = kill_and_check(tmp_path / "root", tmp_path / f"meet{n}", rng.choice([2, 2, 3, 0]), rng, last, context)
    assert last >= times // 4, "the ranks never got to work"
    embedding = make(None, tmp_path / "root")
    fill(embedding, 1, FEW)
    embedding.save_snapshot("end")
    embedding.close()
    assert_nothing_is_unneeded(tmp_path / "root")
