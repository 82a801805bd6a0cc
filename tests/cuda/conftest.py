"""Tests of the CUDA loops: in numba's simulator (NUMBA_ENABLE_CUDASIM=1), or on a GPU (ONEEMB_TEST_GPU=1).

Either is a process of its own, since numba reads its variable once: `make test` and `make gpu-test` start them. Any
other run of pytest leaves this folder out.

In the simulator loops are Python, so the lines of each that have run are noted, and the last test asks for all.
"""

import os
import threading

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ON_GPU = os.environ.get("ONEEMB_TEST_GPU") == "1"

collect_ignore_glob = [] if SIMULATED or ON_GPU else ["*.py"]

lines_left: dict = {}
"""Code object of a CUDA loop -> numbers of its lines that have not run."""


@pytest.fixture(scope="session")
def gpu():
    from oneemb.kernels.launch import Gpu

    return Gpu()


@pytest.fixture(scope="session", autouse=True)
def note_lines_run():
    """Note which lines of CUDA loops the simulator's threads run."""
    if not SIMULATED:
        yield
        return
    from tests.cuda.loops import all_loops, lines_of

    codes = {loop.function.__code__ for loop in all_loops().values()}
    left = {code: lines_of(code) for code in codes}
    lines_left.update(left)

    def on_call(frame, event, arg):
        lines = left.get(frame.f_code)
        if not lines:  # not a loop's, or all of it has run
            return None

        def on_line(frame, event, arg):
            lines.discard(frame.f_lineno)
            return on_line if lines else None

        return on_line

    threading.settrace(on_call)
    yield
    threading.settrace(None)
