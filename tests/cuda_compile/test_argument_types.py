"""Tensors and numbers reach a loop with the very types it is compiled for here."""

import numpy as np
import pytest
import torch
from numba.cuda import types
from numba.cuda.typing.typeof import typeof

from oneemb.kernels.launch import _Array
from tests.cuda_compile.signatures import array

TENSORS = [
    (torch.float32, types.float32), (torch.float64, types.float64), (torch.int32, types.int32),
    (torch.int64, types.int64), (torch.int16, types.int16), (torch.uint16, types.uint16), (torch.bool, types.boolean),
]  # fmt: skip


@pytest.mark.parametrize("dtype, expected", TENSORS, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 1), (0, 4), (0,), (2, 3, 4)], ids=str)
def test_a_tensor_is_an_array_in_c_order(shape, dtype, expected):
    assert typeof(_Array(torch.zeros(shape, dtype=dtype))) == array(expected, len(shape))


def test_a_tensor_with_gaps_is_refused():
    with pytest.raises(AssertionError):
        _Array(torch.zeros(4, 4)[:, :2])


def test_numbers_have_the_types_of_the_signatures():
    assert typeof(np.uint64(2**63)) == types.uint64 and typeof(7) == types.int64 and typeof(True) == types.boolean
    assert typeof((np.float32(1),) * 3) == types.UniTuple(types.float32, 3)
    assert typeof((np.float32(1), True)) == types.BaseTuple.from_types((types.float32, types.boolean))
    assert typeof((3, 0.5, np.float32(1))) == types.BaseTuple.from_types((types.int64, types.float64, types.float32))
