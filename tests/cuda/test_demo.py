"""The click model of the examples on a GPU: its graph on each store, with the losses of the CPU."""

import contextlib
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cuda.conftest import SIMULATED
from tests.cuda.test_train import on_gpu

EVENTS, STEPS, BATCH = 300, 3, 6


@pytest.fixture(scope="module")
def demo():
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    sys.path.insert(0, folder)
    try:
        import kuairand_dlrm
        from generated_log import generate_tables
        from kuairand import encode

        return kuairand_dlrm, encode(generate_tables(EVENTS, 0))
    finally:
        sys.path.remove(folder)


def train(demo, path, store, gpu=None):
    module, log = demo
    arguments = module.parse(["--store", store, "--workdir", str(path), "--dim", "4", "--cache-mb", "1"])
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        embedding = module.make_embedding(arguments, len(log.fields))
        stack.callback(embedding.close)
        lookup = module.OneEmbLookup(embedding, log.fields)
        model = module.DLRM(lookup, len(log.fields), log.numeric_EX.shape[1], arguments.dim)
        step = module.TrainStep(model, module.make_optimizers(model))
        if gpu is not None:
            stack.enter_context(on_gpu(gpu, step))
        losses = []
        for first in range(0, STEPS * BATCH, BATCH):
            batch = log.batch(log.train[first : first + BATCH])
            losses.append(step(*(one.to(gpu.device) if gpu else one for one in batch)).item())
        return losses, embedding.stats()


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
def test_the_demo_trains_with_the_losses_of_the_cpu(gpu, demo, store, tmp_path):
    expected, _ = train(demo, tmp_path / "cpu", store)
    before = gpu.launches
    found, stats = train(demo, tmp_path / "gpu", store, gpu)
    assert gpu.launches > before
    apart = 0 if SIMULATED else 1e-4
    np.testing.assert_allclose(found, expected, rtol=apart)
    assert len(set(found)) == STEPS and stats["step"] == STEPS
    assert stats["device"]["rows"] > 0 and stats["device"]["pinned"] == 0
