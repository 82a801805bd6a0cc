"""Loops of Accelerate: what is prepared trains rows as a loop by hand trains tables of torch."""

import shutil

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import oneemb
from tests.support.click_model import assert_equal_bits, assert_equal_to_rounding, clicks, with_rows, with_tables
from tests.support.pairwise import covering, diagonal

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore:.*starts empty, though")

EPOCHS = 2


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.2, initial_accumulator_value=0.1)


def joined_adagrad(parameters):
    return oneemb.Optimizer(adagrad(parameters))


class Loop(torch.nn.Module):
    """A model whose `forward` gives the loss, so that autocast is around it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *batch):
        return self.model.loss(*batch)


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps the options of the first Accelerator for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Job:
    """What a user prepares."""

    def __init__(self, model, make=adagrad, *, scaler=None, **options):
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        if scaler is not None:  # Accelerate makes none on a CPU, nor lets float16 have its way there.
            self.accelerator.scaler, self.accelerator.native_amp = scaler, True
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        self.raw, self.losses = model, []
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            Loop(model), optimizer, clicks(), scheduler
        )

    def run(self, *, epochs=EPOCHS, clip_norm=None, clip_value=None, overflow_at=None):
        for _ in range(epochs):
            for i, batch in enumerate(self.loader):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(*batch)
                    self.losses.append(loss.detach())
                    self.accelerator.backward(loss * (float("inf") if i == overflow_at else 1.0))
                    if self.accelerator.sync_gradients and clip_norm is not None:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip_norm)
                    if self.accelerator.sync_gradients and clip_value is not None:
                        self.accelerator.clip_grad_value_(self.model.parameters(), clip_value)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return [*self.losses, *self.raw.numbers()]


def by_hand(model, *, accumulate=1, precision=torch.float32, scaler=None, clip_norm=None, clip_value=None,
            overflow_at=None):  # fmt: skip
    """The loop that Accelerate stands for."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizer = adagrad(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses, loader = [], clicks()
    for _ in range(EPOCHS):
        for i, batch in enumerate(loader):
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                loss = model.loss(*batch)
            losses.append(loss.detach())
            scaler.scale(loss * (float("inf") if i == overflow_at else 1.0) / accumulate).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                scaler.unscale_(optimizer)
                if clip_norm is not None:
                    clip_grad_norm_(model.parameters(), clip_norm)
                if clip_value is not None:
                    clip_grad_value_(model.parameters(), clip_value)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if scaler.get_scale() >= scale:
                    scheduler.step()
    return [*losses, *model.numbers()]


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)


LOOPS = {
    "plain": ({}, {}, {}),
    "clipped by norm": ({}, {}, {"clip_norm": 0.05}),
    "clipped by value": ({}, {}, {"clip_value": 0.01}),
    "accumulated": ({"gradient_accumulation_steps": 3}, {"accumulate": 3}, {"clip_norm": 0.05}),
    "bf16": ({"mixed_precision": "bf16"}, {"precision": torch.bfloat16}, {}),
    "fp16": (
        {"mixed_precision": "fp16", "scaler": scaler},
        {"precision": torch.float16, "scaler": scaler},
        {"clip_norm": 0.05, "overflow_at": 3},
    ),
    "fp16, not clipped": (
        {"mixed_precision": "fp16", "scaler": scaler},
        {"precision": torch.float16, "scaler": scaler},
        {"overflow_at": 3},
    ),
}
"""What an Accelerator is told, what the loop by hand does for that, and what both are told."""


def made(options):
    return {name: value() if callable(value) else value for name, value in options.items()}


@pytest.mark.parametrize(("loop", "make"), diagonal([*LOOPS], [adagrad, joined_adagrad]))
def test_what_is_prepared_trains_rows_as_a_loop_by_hand_trains_tables(tmp_path, loop, make):
    options, hand, both = LOOPS[loop]
    expected = by_hand(with_tables(tmp_path), **made(hand), **both)
    trained = {}
    for store in ("device", "ssd"):
        job = Job(with_rows(tmp_path / store, store), make, **made(options))
        trained[store] = job.run(**both)
        stats = job.raw.items.stats()
        assert stats["device"]["pinned"] == 0
        updates = EPOCHS * {"accumulated": 3, "fp16": 6, "fp16, not clipped": 6}.get(loop, 7)
        assert stats["step"] == updates
    assert_equal_bits(trained["device"], trained["ssd"])
    # One that is rounded to another bfloat16 is off by 1/256.
    narrow = "precision" in hand
    assert_equal_to_rounding(trained["device"], expected, **({"rtol": 1e-2, "atol": 1e-3} if narrow else {}))


@pytest.mark.parametrize(
    ("safe", "store", "make"), covering([True, False], ["device", "ssd"], [adagrad, joined_adagrad])
)
def test_a_run_goes_on_from_a_saved_state_with_the_same_bits(tmp_path, make, store, safe):
    whole = Job(with_rows(tmp_path / "whole", store), make).run(epochs=3)
    first = Job(with_rows(tmp_path / "rows", store), make)
    first.run(epochs=1)
    first.accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    first.run(epochs=1)
    for table in (first.raw.items, first.raw.words):
        table.close()
    second = Job(with_rows(tmp_path / "rows", store), make)
    second.accelerator.load_state(tmp_path / "state")
    numbers = second.run(epochs=2)
    assert_equal_bits(numbers, whole[len(first.losses) // 2 :])


def test_a_hook_deletes_the_rows_of_states_that_are_gone(tmp_path):
    job = Job(with_rows(tmp_path))

    def delete_rows_of_states_that_are_gone(models, weights, folder):
        for table in (job.raw.items, job.raw.words):
            named = oneemb.snapshot_name(table.get_extra_state())  # which the state that is being saved names
            for name in set(table.snapshots()) - {named}:
                table.delete_snapshot(name)

    job.accelerator.register_save_state_pre_hook(delete_rows_of_states_that_are_gone)
    for _ in range(2):
        job.run(epochs=1)
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        job.accelerator.save_state(tmp_path / "state")
        numbers = job.raw.numbers()
    assert len(job.raw.items.snapshots()) == 1
    job.run(epochs=1)
    job.accelerator.load_state(tmp_path / "state")
    assert_equal_bits(job.raw.numbers(), numbers)
