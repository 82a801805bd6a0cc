"""Checks that every form of a loop that is launched is one that is compiled ahead."""

import contextlib

import torch

from oneemb.kernels.cuda_arguments import leaves, signature_of
from oneemb.kernels.cuda_signatures import cases
from oneemb.kernels.launch import Gpu


@contextlib.contextmanager
def check_launches():
    """Within the block a launch of another form is an AssertionError, and so is one with a key that an earlier launch
    has had with other shapes."""
    known, launch, shapes_of = set(cases(every=True).values()), Gpu._launch, {}

    def checked(self, loops, args, key=None):
        signatures = [signature_of(args_of_loop) for args_of_loop in args]
        if key is not None:
            shapes = loops, signatures, [arg.shape for arg in leaves(args) if isinstance(arg, torch.Tensor)]
            assert shapes_of.setdefault(key, shapes) == shapes, f"{loops}: {key} does not decide {shapes}"
        for (loop, _), signature in zip(loops, signatures, strict=True):
            of_tests = not loop.function.__module__.startswith("oneemb.")
            assert of_tests or (loop, signature) in known, (
                f"{loop.__name__} with {dict(loop.constants)} and {signature} is not compiled ahead"
            )
        launch(self, loops, args, key)

    Gpu._launch = checked
    try:
        yield
    finally:
        Gpu._launch = launch
