"""Gradients of rows on their way from autograd to the update: summed once, and copied by nobody."""

import contextlib

import pytest
import torch

import oneemb
from tests.cuda.test_launches import Noted
from tests.cuda.test_train import on_gpu
from tests.support.models import make_embedding

DIM = 4


def trained(path, gpu, change):
    """The rows of an embedding after a step in which `change` has handled its gradient; on the CPU if `gpu` is None."""
    embedding = make_embedding(path, tables=2, dim=DIM, seed=3)
    device = "cpu" if gpu is None else gpu.device
    optimizer = make_optimizer(embedding)
    ids = torch.tensor([[1, 2], [3, 2], [1, 4], [1, 2]], device=device)
    with contextlib.nullcontext() if gpu is None else on_gpu(gpu, embedding):
        held = torch.arange(ids.numel() * DIM, dtype=torch.float32, device=device).reshape(4, 2, DIM)
        rows = embedding(ids)
        with Noted() as noted:
            rows.backward(held)
        assert "clone" not in noted.launches
        change(embedding.weight, held)
        optimizer.step()
        with torch.no_grad():
            found = embedding(ids).cpu()
    embedding.close()
    return found


def make_optimizer(embedding):
    return oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding], check_in_step=False)


def write_over(weight, held):
    """Accumulate gradients in place, as torch does in a buffer."""
    held.zero_()


def double(weight, held):
    weight.grad = weight.grad + weight.grad


@pytest.mark.parametrize("change", [write_over, double])
def test_a_gradient_that_the_user_holds_is_summed_at_once_and_not_copied(gpu, tmp_path, change):
    here, there = (trained(tmp_path / str(place), place, change) for place in (None, gpu))
    assert torch.equal(here, there)


def test_the_late_check_of_float32_gradients_looks_at_sums(gpu, tmp_path, monkeypatch):
    embedding = make_embedding(tmp_path, tables=2, dim=DIM)
    optimizer, launched = make_optimizer(embedding), []
    for name in ("run", "run_rows"):
        run = getattr(gpu, name)
        monkeypatch.setattr(
            gpu, name, lambda loop, *args, run=run, **how: launched.append(loop.__name__) or run(loop, *args, **how)
        )
    with on_gpu(gpu, embedding):
        embedding(torch.arange(12, device=gpu.device).reshape(6, 2) % 5).exp().sum().backward()
        optimizer.step()
    embedding.close()
    assert launched.count("reduce_loop") == 1 and not {"find_large_loop", "check_sums_loop"} & set(launched)
