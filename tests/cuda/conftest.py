"""Tests of the CUDA loops: in numba's simulator (NUMBA_ENABLE_CUDASIM=1), or on a GPU (ONEEMB_TEST_GPU=1).

Either is a process of its own, since numba reads its variable once: `make test` and `make gpu-test` start them. Any
other run of pytest leaves this folder out.

In the simulator loops are Python, so the lines of each that have run are noted, and the last test asks for all.
"""

import os
import sys
import threading

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ON_GPU = os.environ.get("ONEEMB_TEST_GPU") == "1"

collect_ignore_glob = [] if SIMULATED or ON_GPU else ["test_*.py"]

lines_run: dict = {}
"""Code object of a CUDA loop -> numbers of its lines that have run."""


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
    from tests.cuda.loops import all_loops

    codes = {loop.function.__code__ for loop in all_loops().values()}
    for code in codes:
        lines_run[code] = set()

    def on_call(frame, event, arg):
        lines = lines_run.get(frame.f_code)
        if lines is None:
            return None

        def on_line(frame, event, arg):
            lines.add(frame.f_lineno)
            return on_line

        return on_line

    threading.settrace(on_call)
    yield
    threading.settrace(None)
    assert sys.gettrace() is None or sys.gettrace() is not on_call
