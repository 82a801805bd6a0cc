"""Models of the zoo learn, and as well as their twins on torch.nn.Embedding, which begin with the same rows."""

import pytest
import torch
import zoo


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_model_learns_what_its_twin_learns(name):
    torch.set_num_threads(1)
    ours, torchs = zoo.compare(name, steps=40, examples=12_000)
    assert ours > 0.53 and abs(ours - torchs) < 0.005
