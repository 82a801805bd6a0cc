"""A job that is killed and resumed from its snapshot, in another process, does what the uninterrupted job does, bit
for bit: losses, rows with their optimizer state, dense weights."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.support.models import STORES
from tests.support.training import DIM, OPTIMIZERS, STEPS, Job

# Every optimizer, and every store.
CASES = [(name, "ssd") for name in OPTIMIZERS] + [("adam", store) for store in STORES if store != "ssd"]


def run_process(do, folder):
    cases = [f"{name}/{store}" for name, store in CASES]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.training", do, str(folder), *cases], timeout=300
    ).returncode


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """One process trains all cases and is killed, another resumes them."""
    folder = tmp_path_factory.mktemp("resume")
    for name, store in CASES:
        os.makedirs(folder / f"{name}-{store}")
    assert run_process("interrupted", folder) == -signal.SIGKILL
    assert run_process("resumed", folder) == 0
    return torch.load(folder / "resumed.pt", weights_only=False)


@pytest.mark.parametrize(("name", "store"), CASES)
def test_a_killed_job_resumes_as_if_nothing_had_happened(resumed, name, store, tmp_path):
    job = Job(tmp_path, name, store)
    losses = job.run(0, STEPS)
    after, rows, dense = resumed[name, store]
    assert after == losses[STEPS // 2 :]
    assert rows == job.rows() and len(rows) > 1000
    assert all(torch.equal(dense[key], value) for key, value in job.mlp.state_dict().items())
    job.embedding.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_snapshot_is_what_it_was_when_training_goes_on_in_the_same_process(name, tmp_path):
    job = Job(tmp_path, name, "ssd")
    job.run(0, 6)
    job.save()
    rows, losses = job.rows(), job.run(6, 9)
    assert job.rows() != rows
    job.load()
    assert job.rows() == rows and job.run(6, 9) == losses
    job.embedding.close()


@pytest.mark.parametrize("name", ["momentum", "adam", "smart decay adam"])
def test_rows_without_the_optimizers_step_would_not_resume(name, tmp_path):
    # What the comparison rests on: state or a count that is lost shows in the next losses.
    job = Job(tmp_path, name, "device")
    job.run(0, 6)
    job.save()
    losses = job.run(6, 9)
    job.load()
    if name == "momentum":
        job.embedding.store.row_SW[: job.embedding.stats()["rows"], DIM:] = 0
    else:
        job.embedding.store.step = 0
    assert job.run(6, 9) != losses
    job.embedding.close()


def test_each_optimizer_has_the_state_it_says(tmp_path):
    widths = {}
    for name in OPTIMIZERS:
        job = Job(tmp_path / name, name)
        widths[name] = job.embedding.store.format.state_width
        job.embedding.close()
    assert widths == {
        "sgd": 0, "momentum": 8, "adagrad": 8, "adam": 16, "adamw": 16, "sparse adam": 16, "row-wise adagrad": 1,
        "amsgrad": 24, "nadam": 16, "radam": 16, "adamax": 16, "adadelta": 16, "rmsprop": 24, "ftrl": 16, "lamb": 16,
        "lars": 8, "partial row-wise adam": 9, "smart decay adam": 17,
    }  # fmt: skip
