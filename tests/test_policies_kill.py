"""A job whose rows come, leave, expire and are erased is killed at random moments: it goes on from what it announced as
if nothing had happened, and what was erased does not come back."""

import random
import time

import numpy as np
import pytest
import torch

import oneemb
from oneemb.policies import LFU, AdmitAfter, RowPolicy
from tests.support.rank_jobs import RankJob
from tests.support.resources import resident_bytes

DIM = 16
POLICY = RowPolicy(
    LFU(half_life=20.0), expire_after_steps=12, sweep_steps=10, expire_below_norm=0.3,
    admit=AdmitAfter(2, counters=400), evict_at_snapshot=True,
)  # fmt: skip


def open_rows(path, ssd):
    options = (
        oneemb.make_cached_ssd_store_options(1, path, capacity=700, physical_block_size=512)
        if ssd
        else oneemb.make_device_mem_store_options(path, capacity=700)
    )
    embedding = oneemb.MultiTableEmbedding(
        "rows", DIM, torch.float32, torch.int64, [oneemb.make_table()] * 2, options,
        oneemb.make_uniform_initializer(-0.1, 0.1), policy=POLICY, num_threads=1,
    )  # fmt: skip
    return embedding, oneemb.Optimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.05), [embedding])


def one_step(embedding, optimizer, n):
    """Step n of the job, a function of n alone."""
    generator = torch.Generator().manual_seed(n)
    its = (torch.rand(150, 2, generator=generator) ** 2 * 500).long() + 4 * n
    optimizer.zero_grad()
    (embedding(its) * torch.randn(150, 2, DIM, generator=generator)).sum().backward()
    optimizer.step()
    if n % 3 == 0:
        embedding.erase(its[:20, n % 2], n % 2)
    if n % 7 == 0:
        embedding.evict()


def state_of(embedding):
    rows = {}
    for table_N, id_N, row_NW in embedding.store.rows.rows():
        rows |= {(t, n): row.tobytes() for t, n, row in zip(table_N.tolist(), id_N.tolist(), row_NW, strict=True)}
    return rows, embedding.store.engine.admission.to_arrays()


def same(one, other):
    return one[0] == other[0] and all(np.array_equal(one[1][name], other[1][name]) for name in one[1])


def job(group, report, path):
    """Runs until it is killed; reports the steps of each snapshot that is there."""
    embedding, optimizer = open_rows(path, ssd=True)
    latest = load_last(embedding)
    while True:
        step = embedding.stats()["step"]
        one_step(embedding, optimizer, step)
        if step % 2:
            name = f"{step + 1:06d}"
            if latest is None or step % 10 == 9:
                embedding.save_snapshot(name)
                for older in reversed(embedding.snapshots()[:-1]):  # Deltas before what they go on from.
                    embedding.delete_snapshot(older)
            else:
                embedding.save_delta(name, latest)
            latest = name
            report(step + 1)


def load_last(embedding):
    """Load the snapshot or delta that was saved last. Returns its name."""
    names = embedding.snapshots()
    if names:
        embedding.load_snapshot(names[-1])
    return names[-1] if names else None


def killed(path, saves, seconds):
    """The last step that a job announced before it was killed, some time after so many saves."""
    child = RankJob(0, job, str(path))
    end = time.monotonic() + 600
    while len(child.reports[0]) < saves:
        assert time.monotonic() < end, child.texts()
        time.sleep(0.005)
        child.read()
    time.sleep(seconds)
    child.kill(0)
    ((_, announced),) = child.end()
    return max(announced)


@pytest.mark.filterwarnings("ignore:.*starts empty")
@pytest.mark.parametrize("kills", [2, pytest.param(80, marks=pytest.mark.slow)])
def test_a_job_that_is_killed_goes_on_as_if_nothing_had_happened(tmp_path, kills, seed):
    rng, announced, straight = random.Random(seed), 0, open_rows(tmp_path / "straight", ssd=False)
    for _ in range(kills):
        announced = max(announced, killed(tmp_path / "killed", rng.randrange(8, 13), rng.uniform(0, 0.1)))
        embedding, _ = open_rows(tmp_path / "killed", ssd=True)
        load_last(embedding)
        step = embedding.stats()["step"]
        assert step >= announced
        while straight[0].stats()["step"] < step:
            at = straight[0].stats()["step"]
            one_step(*straight, at)
            if at % 2:  # Snapshots let rows that have expired leave.
                straight[0].evict()
        assert same(state_of(embedding), state_of(straight[0]))
        embedding.close()
    left = straight[0].stats()["policy"]["left"]
    assert all(left[reason] > 20 for reason in ("capacity", "expired", "norm", "erased"))


@pytest.mark.slow
@pytest.mark.parametrize("ssd", [False, True], ids=["in memory", "on an SSD"])
def test_memory_and_disk_stay_as_they_are_over_20000_steps_of_new_ids(tmp_path, ssd):
    embedding, optimizer = open_rows(tmp_path, ssd)
    memory, disk, its = [], [], torch.zeros(60, 2, dtype=torch.int64)
    for n in range(20_000):
        if n % 2:
            its = torch.randint(2**62, (60, 2))  # seen twice, and never again
        optimizer.zero_grad()
        embedding(its).sum().backward()
        optimizer.step()
        if n % 1000 == 999:
            embedding.save_snapshot("last", overwrite=True)
            memory.append(resident_bytes())
            disk.append(sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))
    assert embedding.stats()["rows"] <= 700
    assert max(memory[4:]) < memory[3] + (8 << 20), [its >> 20 for its in memory]
    row_bytes = embedding.store.format.row_bytes
    assert max(disk) < 4 * 700 * row_bytes + (1 << 20), disk
