"""Checks that every form of a loop that is launched is one that is compiled ahead."""

import contextlib

import torch

from oneemb.kernels.cuda_arguments import signature_of
from oneemb.kernels.cuda_signatures import cases
from oneemb.kernels.launch import Gpu


def leaves(args):
    for arg in args:
        if isinstance(arg, tuple):
            yield from leaves(arg)
        else:
            yield arg


@contextlib.contextmanager
def check_launches():
    """Within the block a launch of another form is an AssertionError, and so is one with a key that an earlier launch
    has had with other shapes."""
    known, launch, shapes_of = set(cases(every=True).values()), Gpu._launch, {}

    def checked(self, loop, blocks, threads_x, threads_y, args, key=None):
        form = loop, signature_of(args)
        if key is not None:
            shapes = form[1], [arg.shape for arg in leaves(args) if isinstance(arg, torch.Tensor)]
            assert shapes_of.setdefault(key, shapes) == shapes, f"{loop.__name__}: {key} does not decide {shapes}"
        of_tests = not loop.function.__module__.startswith("oneemb.")
        assert of_tests or form in known, (
            f"{loop.__name__} with {dict(loop.constants)} and {form[1]} is not compiled ahead"
        )
        launch(self, loop, blocks, threads_x, threads_y, args, key)

    Gpu._launch = checked
    try:
        yield
    finally:
        Gpu._launch = launch
