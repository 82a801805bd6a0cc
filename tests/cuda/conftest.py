"""Tests of the CUDA loops: in numba's simulator (NUMBA_ENABLE_CUDASIM=1), or on a GPU (ONEEMB_TEST_GPU=1).

Either is a process of its own, since numba reads its variable once: `make test` and `make gpu-test` start them. Any
other run of pytest leaves this folder out.

In the simulator loops are Python, so the branches of each that were taken are noted, and the last test asks for all.
"""

import os
from pathlib import Path

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ON_GPU = os.environ.get("ONEEMB_TEST_GPU") == "1"

collect_ignore_glob = [] if SIMULATED or ON_GPU else ["*.py"]


@pytest.fixture(scope="session")
def gpu():
    from oneemb.kernels.launch import Gpu

    try:
        return Gpu()
    except (ImportError, RuntimeError) as error:  # said once, not by every test
        pytest.exit(f"there is no GPU to test on: {error}", returncode=1)


@pytest.fixture(scope="session", autouse=True)
def branches_taken():
    """A `coverage.Coverage` that notes the lines and branches which the simulator's threads run; None on a GPU."""
    if not SIMULATED:
        yield None
        return
    import coverage

    import oneemb.kernels

    sources = str(Path(oneemb.kernels.__path__[0]) / "*.py")
    taken = coverage.Coverage(data_file=None, branch=True, include=[sources], config_file=False)
    taken.start()
    yield taken
    taken.stop()
