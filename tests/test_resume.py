"""A job that is killed and resumed from its snapshot, in another process, does what the uninterrupted job does, bit
for bit: losses, rows with their optimizer state, dense weights."""

import os
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import oneemb
from tests.support.forks import run_code
from tests.support.models import STORES, make_embedding
from tests.support.once import made_once
from tests.support.optimizers import OPTIMIZERS
from tests.support.pairwise import diagonal
from tests.support.training import DIM, STEPS, Job

# Every optimizer, and every store.
CASES = [(name, "ssd") for name in OPTIMIZERS] + [("adam", store) for store in STORES if store != "ssd"]


def run_process(do, folder):
    cases = [f"{name}/{store}" for name, store in CASES]
    code = "import runpy; runpy.run_module('tests.support.training', run_name='__main__')"
    return run_code(code, do, folder, *cases, seconds=300).returncode


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """One process trains all cases and is killed, another resumes them."""

    def resume(folder):
        for name, store in CASES:
            os.makedirs(folder / f"{name}-{store}")
        assert run_process("interrupted", folder) == -signal.SIGKILL
        assert run_process("resumed", folder) == 0

    return torch.load(made_once(tmp_path_factory, "resume", resume) / "resumed.pt", weights_only=False)


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
    assert widths == {name: case.state_width(DIM) for name, case in OPTIMIZERS.items()}


class Eager:
    """A loop of torch's own, resumed through torch.distributed.checkpoint as its documentation has it."""

    def __init__(self, folder, optimizer, joined, flat):
        torch.manual_seed(6)
        self.model = torch.nn.Sequential(
            make_embedding(f"{folder}/rows", tables=2), torch.nn.Flatten(1), torch.nn.Linear(8, 1)
        )
        rows, *dense = self.model.parameters()
        groups = [{"params": [rows]}, {"params": dense, "weight_decay": 0}]
        self.optimizer = OPTIMIZERS[optimizer]([rows] if optimizer == "sparse adam" else groups)
        if joined:
            self.optimizer = oneemb.Optimizer(self.optimizer)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def run(self, begin, end):
        losses = []
        for i in range(begin, end):
            loss = (self.model(torch.tensor([[1, 2], [3, 4]]) + i % 3) - 1).square().sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses

    def state(self):
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=self.options),
        }

    def save(self, path):
        dcp.save(self.state(), checkpoint_id=path, no_dist=True)

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path, no_dist=True)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=self.options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "flat"),
    diagonal(
        [*((name, False) for name in OPTIMIZERS), *((name, True) for name in ("sgd", "adagrad", "adam"))],
        [False, True],
    ),
    ids=str,
)
def test_an_eager_loop_resumes_through_the_state_dicts_of_torchs_checkpoints(case, flat, tmp_path):
    name, joined = case
    job = Eager(tmp_path, name, joined, flat)
    job.run(0, 4)
    job.save(tmp_path / "checkpoint")
    expected = job.run(4, 9)
    job.load(tmp_path / "checkpoint")  # in place
    assert job.run(4, 9) == expected
    job.model[0].close()
    again = Eager(tmp_path, name, joined, flat)
    again.load(tmp_path / "checkpoint")
    assert again.run(4, 9) == expected and again.model[0].stats()["step"] == 9
    state = getattr(again.optimizer, "optimizer", again.optimizer).state
    assert name == "adagrad" or again.model[0].weight not in state, "state of rows is theirs"
