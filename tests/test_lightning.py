"""Embeddings in LightningModules: the Trainer trains rows as a loop by hand trains tables of torch."""

import inspect
import pathlib

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import oneemb
from tests.support.click_model import assert_equal_bits, assert_equal_to_rounding, clicks, with_rows, with_tables
from tests.support.pairwise import diagonal

lightning = pytest.importorskip("pytorch_lightning")
checkpoints = pytest.importorskip("pytorch_lightning.callbacks.model_checkpoint")
plugins = pytest.importorskip("pytorch_lightning.plugins.io")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*starts empty, though"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
EPOCHS = 2


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.2, initial_accumulator_value=0.1)


def joined_adagrad(parameters):
    return oneemb.Optimizer(adagrad(parameters))


class Clicks(lightning.LightningModule):
    """What a user writes."""

    def __init__(self, model, make=adagrad):
        super().__init__()
        self.model, self.make = model, make
        self.losses, self.validated = [], []

    def training_step(self, batch, batch_idx):
        loss = self.model.loss(*batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.model.loss(*batch))

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def numbers(self):
        return [*self.losses, *self.validated, *self.model.numbers()]


def trainer(path, **options):
    return lightning.Trainer(**{
        "default_root_dir": path, "accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, **options,
    })  # fmt: skip


def by_hand(model, *, clip=lambda parameters: None, accumulate=1, precision=torch.float32):
    """The loop that a Trainer stands for."""
    optimizer = adagrad(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses, validated = [], []
    cast = torch.autocast("cpu", precision, enabled=precision != torch.float32)
    for _ in range(EPOCHS):
        loader = clicks()
        for i, batch in enumerate(loader):
            with cast:
                loss = model.loss(*batch)
            losses.append(loss.detach())
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                clip(model.parameters())
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        with torch.no_grad(), cast:
            validated += [model.loss(*batch) for batch in clicks(2)]
    return [*losses, *validated, *model.numbers()]


LOOPS = {
    "plain": ({}, {}),
    "clipped by norm": ({"gradient_clip_val": 0.05}, {"clip": lambda parameters: clip_grad_norm_(parameters, 0.05)}),
    "clipped by value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"clip": lambda parameters: clip_grad_value_(parameters, 0.01)},
    ),
    "accumulated": ({"accumulate_grad_batches": 3}, {"accumulate": 3}),
    "bf16": ({"precision": "bf16-mixed"}, {"precision": torch.bfloat16}),
}
"""What a Trainer is told, and the loop by hand."""


@pytest.mark.parametrize(("loop", "make"), diagonal([*LOOPS], [adagrad, joined_adagrad]))
def test_a_trainer_trains_rows_as_a_loop_by_hand_trains_tables(tmp_path, loop, make):
    options, hand = LOOPS[loop]
    expected = by_hand(with_tables(tmp_path), **hand)
    trained = {}
    for store in ("device", "ssd"):
        module = Clicks(with_rows(tmp_path / store, store), make)
        fit = trainer(tmp_path, num_sanity_val_steps=0, **options)
        fit.fit(module, clicks(), clicks(2))
        trained[store] = module.numbers
        assert module.model.items.stats()["device"]["pinned"] == 0
        assert module.model.items.stats()["step"] == fit.global_step
    assert_equal_bits(trained["device"], trained["ssd"])
    # One that is rounded to another bfloat16 is off by 1/256.
    assert_equal_to_rounding(trained["device"], expected, **({"rtol": 1e-2, "atol": 1e-3} if loop == "bf16" else {}))


# ---- manual optimization --------------------------------------------------------------------------------------------


class TwoOptimizers(Clicks):
    """Rows and dense parameters by optimizers of their own, in turns."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.model.loss(*batch)
            self.losses.append(loss.detach())
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = [self.make(group) for group in groups(self.model)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in optimizers]


def groups(model):
    return [model.items.weight, model.words.weight], list(model.head.parameters())


def two_optimizers_by_hand(model):
    optimizers = [adagrad(group) for group in groups(model)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in optimizers]
    losses, validated = [], []
    for _ in range(EPOCHS):
        for batch in clicks():
            for optimizer, group in zip(optimizers, groups(model), strict=True):
                for parameter in model.parameters():
                    parameter.requires_grad_(any(parameter is own for own in group))
                loss = model.loss(*batch)
                losses.append(loss.detach())
                loss.backward()
                clip_grad_norm_(group, 0.05)
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        with torch.no_grad():
            validated += [model.loss(*batch) for batch in clicks(2)]
    return [*losses, *validated, *model.numbers()]


@pytest.mark.parametrize("make", [adagrad, joined_adagrad], ids=["torch's own", "oneemb.Optimizer"])
def test_manual_optimization_with_toggled_optimizers_trains_rows(tmp_path, make):
    expected = two_optimizers_by_hand(with_tables(tmp_path))
    trained = {}
    for store in ("device", "ssd"):
        module = TwoOptimizers(with_rows(tmp_path / store, store), make)
        trainer(tmp_path).fit(module, clicks(), clicks(2))
        sanity = len(module.validated) - EPOCHS * 2
        del module.validated[:sanity]
        trained[store] = module.numbers
    assert_equal_bits(trained["device"], trained["ssd"])
    assert_equal_to_rounding(trained["device"], expected)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class RowsCheckpointIO(plugins.TorchCheckpointIO):
    """The plugin that docs/lightning.md shows."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def remove_checkpoint(self, path):
        super().remove_checkpoint(path)
        states = [torch.load(file)["state_dict"] for file in pathlib.Path(path).parent.glob("*.ckpt")]
        for name, embedding in self.module.named_modules():
            if isinstance(embedding, oneemb.MultiTableEmbedding):
                named = {oneemb.snapshot_name(state[f"{name}._extra_state"]) for state in states}
                for snapshot in set(embedding.snapshots()) - named:
                    embedding.delete_snapshot(snapshot)


class StopsAtStep17(Clicks):
    def training_step(self, batch, batch_idx):
        if self.global_step == 17:
            raise KeyError("step 17")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("store", ["device", "ssd"])
@pytest.mark.parametrize("make", [adagrad, joined_adagrad], ids=["torch's own", "oneemb.Optimizer"])
def test_a_run_resumed_from_a_lightning_checkpoint_ends_with_the_same_bits(tmp_path, make, store):
    whole = Clicks(with_rows(tmp_path / "whole", store), make)
    trainer(tmp_path, max_epochs=3).fit(whole, clicks())
    saved = checkpoints.ModelCheckpoint(tmp_path / "saved")
    first = StopsAtStep17(with_rows(tmp_path / "rows", store), make)
    options = {"enable_checkpointing": True, "callbacks": [saved], "plugins": [RowsCheckpointIO(first)]}
    with pytest.raises(KeyError, match="step 17"):
        trainer(tmp_path, max_epochs=3, **options).fit(first, clicks())
    for table in (first.model.items, first.model.words):
        assert len(table.snapshots()) == 1  # that of the first epoch has gone with its checkpoint
        table.close()
    assert saved.best_model_path.endswith("step=14.ckpt")
    second = Clicks(with_rows(tmp_path / "rows", store), make)
    trainer(tmp_path, max_epochs=3).fit(second, clicks(), ckpt_path=saved.best_model_path, weights_only=True)
    assert_equal_bits(second.numbers, [*whole.losses[14:], *whole.model.numbers()])
    assert second.model.items.stats()["step"] == len(whole.losses)


def test_a_checkpoint_of_another_folder_is_refused(tmp_path):
    first, other = (Clicks(with_rows(tmp_path / name)) for name in ("first", "other"))
    fit = trainer(tmp_path)
    fit.fit(first, clicks())
    fit.save_checkpoint(tmp_path / "c.ckpt")
    with pytest.raises(oneemb.StorageError, match="names a snapshot that is not there"):
        trainer(tmp_path, max_epochs=3).fit(other, clicks(), ckpt_path=tmp_path / "c.ckpt")


def test_a_trainer_validates_and_predicts_without_inserting(tmp_path):
    module = Clicks(with_rows(tmp_path))
    fit = trainer(tmp_path)
    fit.validate(module, clicks(2), verbose=False)
    assert module.model.items.stats()["rows"] == 0
    expected = with_tables(tmp_path / "tables")
    assert_equal_to_rounding(module.validated, [expected.loss(*batch) for batch in clicks(2)])


def test_a_model_summary_counts_dense_parameters_only(tmp_path):
    summary = lightning.utilities.model_summary.ModelSummary(Clicks(with_rows(tmp_path)))
    assert summary.total_parameters == 2 * 4 + 1


@pytest.mark.parametrize(
    "averaging",
    [lambda: lightning.callbacks.StochasticWeightAveraging(1e-2), lambda: lightning.callbacks.EMAWeightAveraging()],
    ids=["SWA", "EMA"],
)
def test_what_copies_the_model_is_refused_with_what_to_do(tmp_path, averaging):
    module = Clicks(with_rows(tmp_path))
    with pytest.raises(TypeError, match=r"oneemb\.AveragedEmbedding averages rows"):
        trainer(tmp_path, callbacks=[averaging()]).fit(module, clicks())


def test_the_plugin_is_that_of_the_documents():
    root = pathlib.Path(__file__).parent.parent
    code = [part.split("```")[0] for part in (root / "docs" / "lightning.md").read_text().split("```python\n")]
    shown = next(part for part in code if "class RowsCheckpointIO" in part).split("\n\n\n")[1]
    own = inspect.getsource(RowsCheckpointIO)
    assert shown.partition("def remove_checkpoint")[2].strip() == own.partition("def remove_checkpoint")[2].strip()
