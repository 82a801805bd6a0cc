"""Trainers that wrap a whole model in DistributedDataParallel train rows, on two processes, as one process trains the
tables of torch on the batches of both."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.support.click_model import assert_equal_to_rounding, clicks, with_tables
from tests.support.trainer_job import CLIP, EPOCHS, adagrad

ROOT = Path(__file__).resolve().parent.parent
STARTED_BY_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TRAINERS = {
    "fabric": ("lightning_fabric", []),
    "lightning": ("pytorch_lightning", []),
    "accelerate": ("accelerate", STARTED_BY_TORCHRUN),
}
"""Package of each trainer, and the program that starts its processes where the trainer starts none."""


# Lightning starts processes and wraps modules by the code of Fabric, so `make test` leaves Fabric itself out.
@pytest.mark.parametrize("trainer", [pytest.param("fabric", marks=pytest.mark.slow), "lightning", "accelerate"])
def test_two_processes_of_a_trainer_train_rows_as_one_loop_trains_tables(tmp_path, trainer):
    package, starter = TRAINERS[trainer]
    pytest.importorskip(package)
    command = [sys.executable, *starter, "-m", "tests.support.trainer_job", trainer, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    model = with_tables(tmp_path / "tables")
    optimizer = adagrad(model.parameters())
    for _ in range(EPOCHS):
        for batch in clicks():
            model.loss(*batch).backward()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_to_rounding(torch.load(tmp_path / "numbers.pt"), model.numbers())
