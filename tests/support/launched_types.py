"""Checks that every form of a loop that is launched is one that is compiled ahead."""

import contextlib

from oneemb.kernels.cuda_arguments import signature_of
from oneemb.kernels.cuda_signatures import cases
from oneemb.kernels.launch import Gpu


@contextlib.contextmanager
def check_launches():
    """Within the block a launch of another form is an AssertionError."""
    known, launch = set(cases(every=True).values()), Gpu._launch

    def checked(self, loop, blocks, threads_x, threads_y, args):
        form = loop, signature_of(args)
        of_tests = not loop.function.__module__.startswith("oneemb.")
        assert of_tests or form in known, (
            f"{loop.__name__} with {dict(loop.constants)} and {form[1]} is not compiled ahead"
        )
        launch(self, loop, blocks, threads_x, threads_y, args)

    Gpu._launch = checked
    try:
        yield
    finally:
        Gpu._launch = launch
