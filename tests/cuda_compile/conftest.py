"""Compiles every CUDA loop for two GPUs that need not be here. A process of its own, started by `make test`: any other
run of pytest leaves this folder out, and so does one without numba-cuda and its libNVVM."""

import importlib.util
import os

WANTED = os.environ.get("ONEEMB_TEST_COMPILE") == "1"

collect_ignore_glob = [] if WANTED and importlib.util.find_spec("numba_cuda") else ["*.py"]
if WANTED and not importlib.util.find_spec("numba_cuda"):
    raise ImportError("ONEEMB_TEST_COMPILE=1 needs numba-cuda; run: pip install 'oneemb[cuda]' nvidia-cuda-nvcc")
