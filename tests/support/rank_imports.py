"""Imports of the server that forks the processes of tests.

A process that imports torch, numba and torch._dynamo by itself takes two seconds, and four with TorchRec. Nothing here
may start a thread: a fork would not have it.
"""

import contextlib
import gc
import threading

import numba  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed
import torch.profiler  # noqa: F401

import oneemb

for _name in oneemb.__all__:
    getattr(oneemb, _name)
with contextlib.suppress(ImportError):  # Machines with a GPU have no TorchRec.
    import oneemb.torchrec
    import tests.torchrec.test_sharding  # noqa: F401 - with all of TorchRec that ranks use

gc.collect()
gc.freeze()  # A collection of a fork looks at its own objects, and copies no page of the others.

assert threading.active_count() == 1
