"""Which loops work where: those of the host's cores, or those of a GPU.

Nothing of CUDA is imported before a tensor on a GPU, or an embedding there, needs it.
"""

import sys

import torch

from oneemb.kernels.host_loops import HostLoops
from oneemb.kernels.loops import Loops
from oneemb.kernels.threads import Threads

_ONE_THREAD = Threads(1)


def loops_of(tensor: torch.Tensor, threads: Threads = _ONE_THREAD) -> Loops:
    """The loops that work on a tensor where it lies; those of the host run on `threads`."""
    if tensor.is_cuda or "oneemb.kernels.cuda_loops" in sys.modules:
        from oneemb.kernels import cuda_loops

        if (found := cuda_loops.loops_of(tensor)) is not None:
            return found
    return HostLoops(threads)


def loops_at(device: torch.device, threads: Threads) -> Loops:
    """The loops of a device; those of the host run on `threads`.

    Raises:
        RuntimeError, ImportError: CUDA cannot be used; the message says what to install.
    """
    if device.type == "cpu":
        return HostLoops(threads)
    from oneemb.kernels import cuda_loops

    return cuda_loops.loops_at(device)
