"""Kept ids have memory of their own, and are compared as torch compares them, whatever copies them."""

import numpy as np
import pytest
import torch

from oneemb.graph import ops


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (1 << 14, 3), (1 << 21,)], ids=str)
def test_kept_ids_do_not_follow_the_batch(shape, dtype):
    given = torch.from_numpy(np.random.default_rng(0).integers(0, 2, shape, np.int64)).to(dtype)
    kept, before = ops.keep(given), given.clone()
    assert kept.dtype == dtype and torch.equal(kept, before)
    assert kept.data_ptr() != given.data_ptr() or given.numel() == 0
    given.logical_not_()
    assert torch.equal(kept, before)
    assert ops.equal(kept, before) and ops.equal(given, kept) == (given.numel() == 0)


def test_ids_in_strides_and_of_inference_mode_are_kept_and_compared():
    given = torch.arange(1 << 17).reshape(1 << 9, -1)
    assert ops.equal(ops.keep(given.T), given.T) and not ops.equal(given.T.contiguous().reshape(given.shape), given)
    with torch.inference_mode():
        made = given + 0
    assert ops.equal(ops.keep(made), given)
