"""Figures for loggers: each kind of logger gets those of `metrics()`, by the signature of its package."""

import logging

import pytest
import torch

import oneemb
from tests.support.models import make_embedding


class Mlflow:  # mlflow.log_metrics(metrics, step=None, synchronous=None, ...)
    def __init__(self):
        self.got = {}

    def log_metrics(self, metrics, step=None, synchronous=None):
        self.got = {(name, step): float(value) for name, value in metrics.items()}


class TensorBoard:  # SummaryWriter.add_scalar(tag, scalar_value, global_step=None, ...)
    def __init__(self):
        self.got = {}

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.got[tag, global_step] = float(scalar_value)


class Wandb:  # Run.log(data, step=None, commit=None)
    def __init__(self):
        self.got = {}

    def log(self, data, step=None, commit=None):
        self.got = {(name, step): float(value) for name, value in data.items()}


class Function:
    def __init__(self):
        self.got = {}

    def __call__(self, figures, step):
        self.got = {(name, step): float(value) for name, value in figures.items()}


class Module:  # LightningModule has both; log(name, value) is of one figure
    def __init__(self):
        self.got = {}

    def log(self, name, value):
        raise AssertionError

    def log_dict(self, dictionary):
        self.got = {(name, 7): float(value) for name, value in dictionary.items()}


@pytest.mark.parametrize("kind", [Mlflow, TensorBoard, Wandb, Function, Module])
def test_a_logger_gets_the_figures_of_every_embedding(tmp_path, kind):
    one, two = make_embedding(tmp_path / "one"), make_embedding(tmp_path / "two", name="other")
    model = torch.nn.ModuleDict({"user": one, "deep": torch.nn.Sequential(two, torch.nn.Linear(4, 1))})
    one(torch.arange(5))
    one.metrics(), two.metrics()
    one(torch.tensor([3, 4, 100, 101]))
    logger = kind()
    figures = oneemb.log_metrics(model, logger, 7)
    assert logger.got == {(name, 7): value for name, value in figures.items()}
    assert {name.split("/")[0] for name in figures} == {"user", "deep.0"} and len(figures) == 2 * len(two.metrics())
    assert figures["user/rows"] == 7 and figures["user/hit_rate"] == 0.5 and figures["deep.0/rows"] == 0
    one.close(), two.close()


def test_steps_between_are_left_out_and_the_step_is_that_of_the_rows(tmp_path):
    embedding = make_embedding(tmp_path)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    logged = []
    for _ in range(6):
        embedding(torch.arange(3)).sum().backward()
        optimizer.step()
        oneemb.log_metrics(embedding, lambda figures, step: logged.append((step, figures["items/step"])), every=3)
    assert logged == [(3, 3), (6, 6)]
    embedding.close()


def test_lightning_s_logger_writes_them(tmp_path):
    loggers = pytest.importorskip("pytorch_lightning.loggers")
    logger = loggers.CSVLogger(str(tmp_path / "logs"))
    embedding = make_embedding(tmp_path / "rows")
    embedding(torch.arange(3))
    oneemb.log_metrics(embedding, logger, 5)
    logger.save()
    head, values = (tmp_path / "logs/lightning_logs/version_0/metrics.csv").read_text().splitlines()
    assert float(dict(zip(head.split(","), values.split(","), strict=True))["items/rows"]) == 3
    embedding.close()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((3, None), TypeError, "model must be a torch.nn.Module, got int"),
        ((torch.nn.Linear(1, 1), 3), TypeError, "logger must have log_metrics, add_scalar, .* got int"),
    ],
)
def test_what_is_no_model_or_logger_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        oneemb.log_metrics(*arguments)
    with pytest.raises(ValueError, match="every must be an int"):
        oneemb.log_metrics(torch.nn.Linear(1, 1), None, every=0)


def test_a_logger_of_logging_gets_a_line(caplog):
    model = oneemb.MultiTableEmbedding.from_pretrained(torch.eye(4), name="items")
    with caplog.at_level("INFO"):
        figures = oneemb.log_metrics(model, logging.getLogger("of the job"), 7)
    assert caplog.messages == [f"step 7: {figures}"]
    model.close()
