"""Tensors and numbers reach a loop with the very types it is compiled for, and in the places where it reads them."""

import struct
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oneemb.graph.row_optimizers import row_optimizer_of
from oneemb.kernels import cuda_code
from oneemb.kernels.cuda_arguments import (
    first_places,
    have_words,
    layout_of,
    packer_of,
    parameter_bytes,
    refiller_of,
    signature_of,
    with_words,
)
from oneemb.kernels.cuda_signatures import updates
from oneemb.kernels.jit_cuda import numba_types
from oneemb.optim import Ftrl
from tests.cuda_compile.signatures import CASES
from tests.support.optimizers import MORE, OPTIMIZERS

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.int16, torch.uint16, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (1, 1), (0, 4), (0,), (2, 3, 4)], ids=str)
def test_an_array_is_packed_as_its_shape_and_strides_in_bytes(shape, dtype):
    tensor = torch.zeros(shape, dtype=dtype)
    signature = signature_of([tensor])
    assert signature == (f"{str(dtype).removeprefix('torch.')}[{len(shape)}]",)
    strides = np.zeros(shape, tensor.numpy().dtype).strides if 0 not in shape else None
    buffer = bytearray(b"\xff" * 256)
    assert packer_of(signature)(buffer, [tensor])
    size = layout_of(signature).size
    words = list(struct.unpack_from(f"{size // 8}q", buffer))
    assert words[:5] == [0, 0, tensor.numel(), tensor.element_size(), tensor.data_ptr()]
    assert tuple(words[5 : 5 + len(shape)]) == shape and len(words) == 5 + 2 * len(shape)
    if strides is not None:
        assert tuple(words[5 + len(shape) :]) == strides


def test_numbers_have_their_natural_alignment_and_tuples_are_their_members():
    args = (True, 7, torch.zeros(2), False, (np.float32(0.5), True, np.float64(1.5)), np.uint64(2**63), 2.0)
    signature = signature_of(args)
    assert signature == ("bool", "int64", "float32[1]", "bool", ("float32", "bool", "float64"), "uint64", "float32")
    buffer = bytearray(256)
    assert packer_of(signature)(buffer, args)
    assert struct.unpack_from("?7xq16xqqqqq?3xf?7xdQf", buffer) == (
        True, 7, 2, 4, args[2].data_ptr(), 2, 4, False, 0.5, True, 1.5, 2**63, 2.0,
    )  # fmt: skip
    assert layout_of(signature).size == struct.calcsize("?7xq16xqqqqq?3xf?7xdQf")


@pytest.mark.parametrize("apart", [True, False])
def test_a_buffer_that_is_refilled_is_as_one_that_is_packed_anew(apart):
    def args(number, factor, flag, *, twice=True):
        arrays = with_words(torch.zeros(3, 4)), torch.zeros(2, dtype=torch.int32), torch.zeros(0, 6)
        kept, again = (arrays[0], arrays[1]) if twice else (with_words(torch.zeros(3, 4)), arrays[1].clone())
        small = (np.float32(factor), flag, factor, arrays[1])
        last = arrays[2], np.float32(factor), kept, again
        return flag, np.int32(number), arrays[0], flag, small, np.uint64(abs(number)), *last

    # A tensor that stood at two places may be two tensors now.
    first, second = args(7, 0.1, True), args(-(2**31), 3.7, False, twice=not apart)
    signature = signature_of(first)
    other = (torch.zeros(1, 2), 5), (torch.zeros(1, 2), -9)  # of another launch, which is refilled together
    pack, pack_other = packer_of(signature), packer_of(signature_of(other[0]))
    with_words_of_each = have_words(first), have_words(other[0])
    firsts = first_places((first, other[0]))
    refill, (forms, forms_of_other) = refiller_of((signature, signature_of(other[0])), with_words_of_each, firsts)
    refilled, anew = bytearray(512), bytearray(512)
    others_refilled, others_anew = bytearray(128), bytearray(128)
    assert pack(refilled, first) and pack(anew, second) and refilled != anew
    assert pack_other(others_refilled, other[0]) and pack_other(others_anew, other[1])
    views = [memoryview(refilled).cast("B").cast(form) for form in forms]
    views += [memoryview(others_refilled).cast("B").cast(form) for form in forms_of_other]
    known = SimpleNamespace(words=None)
    for _ in range(2):
        assert refill((second, other[1]), known, *views) and refilled == anew and others_refilled == others_anew
    # Nothing is written if a number has another type, for another form of the loop, or a tensor has no words.
    for args_of_each in ((first, (other[0][0], 2.0)), ((*first[:2], torch.zeros(3, 4), *first[3:]), other[0])):
        assert not refill(args_of_each, known, *views)
        assert refilled == anew and others_refilled == others_anew


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(3, dtype=torch.int64), 1), (torch.zeros(3, 1), 1), (torch.zeros(()), 1), (torch.zeros(3), True),
        (torch.zeros(3), 1.0), (torch.zeros(3), np.int32(1)), (torch.zeros(6)[::2], 1), (1, 1), (torch.zeros(3),),
        (torch.zeros(3), torch.zeros(3)), (torch.zeros(3), (1,)), (torch.zeros(3), 1, 1), (np.float32(1), 1),
    ],
    ids=repr,
)  # fmt: skip
def test_arguments_of_other_types_are_not_packed(other):
    buffer = bytearray(b"\xff" * 256)
    assert not packer_of(("float32[1]", "int64"))(buffer, other)
    assert buffer == b"\xff" * 256


def test_a_tensor_with_words_is_packed_by_them():
    kept, other = with_words(torch.zeros(3, 4)), torch.zeros(5, dtype=torch.int64)
    args, signature = (kept, 7, (other, True)), ("float32[2]", "int64", ("int64[1]", "bool"))
    assert have_words(args) == (True, False, False, False) and signature_of(args) == signature
    pack, buffers = packer_of(signature, have_words(args)), [bytearray(512), bytearray(512)]
    assert pack(buffers[0], args) and packer_of(signature)(buffers[1], args)
    assert buffers[0] == buffers[1] != bytearray(512)
    without, of_another_type = torch.zeros(3, 4), with_words(torch.zeros(3, 4, dtype=torch.int32))
    assert not pack(buffers[0], (without, *args[1:])) and not pack(buffers[0], (of_another_type, *args[1:]))
    assert pack(buffers[0], (kept, 7, (with_words(other), True))) and buffers[0] == buffers[1]


@pytest.mark.parametrize("number", [0.1, -0.0, 1e300, -1e300, float("nan"), 1e-46, 3.4028235677973366e38])
def test_a_float_is_rounded_to_float32_as_numpy_rounds_it_and_may_become_infinite(number):
    signature = signature_of(((number, True), number))
    assert signature == (("float32", "bool"), "float32")
    pack, buffers = packer_of(signature), [bytearray(16) for _ in range(3)]
    with np.errstate(over="ignore"):
        args, rounded = ((number, True), number), ((np.float32(number), True), np.float32(number))
        assert pack(buffers[0], args) and pack(buffers[1], rounded) and pack(buffers[2], ((1.0, False), 1.0))
    refill, (forms,) = refiller_of((signature,), (have_words(args),), first_places((args,)))
    assert refill(
        (args,), SimpleNamespace(words=None), *[memoryview(buffers[2]).cast("B").cast(form) for form in forms]
    )
    assert buffers[0] == buffers[1] == buffers[2]


def test_an_integer_that_has_no_64_bits_is_an_error_and_no_other_integer():
    with pytest.raises(struct.error):
        packer_of(("int64",))(bytearray(8), (2**63,))


@pytest.mark.parametrize(
    "arg", [torch.zeros(4, 4)[:, :2], torch.zeros(2, dtype=torch.float16), "text", None, np.zeros(2), 1j]
)
def test_what_no_loop_takes_is_refused(arg):
    with pytest.raises(TypeError, match="a loop takes no"):
        signature_of([arg])


def test_parameters_that_are_not_those_of_the_signature_are_an_error():
    loop, signature = CASES["release"]
    ptx = ".visible .entry f(\n\t.param .u64 f_param_0,\n\t.param .u64 .ptr .align 1 f_param_1,\n\t.param .u32 f_p_2\n)"
    assert cuda_code.entry_of(ptx, loop, ("int64", "int64", "int32")) == "f"
    for other in [signature, ("int64", "int64"), ("int64", "int32", "int32"), ("int64",) * 3]:
        with pytest.raises(TypeError, match="release_loop was compiled to take"):
            cuda_code.entry_of(ptx, loop, other)


def test_signatures_have_as_many_parameters_as_their_types_have_for_numba():
    for loop, signature in CASES.values():
        assert loop.function.__code__.co_argcount == len(signature) == len(numba_types(signature))
        assert sum(parameter_bytes(signature)) <= layout_of(signature).size <= 4096


class Noted:
    """Loops that note the loop of an update and the types of its scalars, in the place of running it."""

    def negated(self, grads):
        return grads

    def update_rows(self, loops, scalars, weight_SX, row_SW, slot_U, grads, state_begin):
        self.noted = loops.on_cuda, signature_of(scalars)


def test_updates_of_all_optimizers_are_compiled():
    known = list(updates().values())
    for make in [*OPTIMIZERS.values(), *MORE.values(), partial(Ftrl, lr=0.1, lr_power=-0.7)]:
        optimizer = make([torch.nn.Parameter(torch.zeros(1))])
        group, noted = optimizer.param_groups[0], Noted()
        rows = row_optimizer_of(optimizer, group)
        for step in (1, 6):
            rows.run(
                None, None, None, np.zeros((1, 4), np.float32), state_begin=4, group=group, step=step, backend=noted
            )
            assert noted.noted in known, optimizer
