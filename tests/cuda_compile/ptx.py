"""What the compiler made of a CUDA loop: PTX, and what ptxas says of it where it is installed."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from oneemb.kernels import cuda_code, jit_cuda

TARGETS = [(8, 0), (9, 0)]


def ptxas():
    """The assembler of the nvidia-cuda-nvcc wheel; None where that is not installed."""
    found = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/ptxas"))
    return found[-1] if found else None


def measure(loop, signature, target):
    """PTX and a dict: registers and bytes of spills and stack as ptxas says, accesses of 16 bytes, products merged
    into sums."""
    ptx = jit_cuda.compile_ptx(loop, signature, target)
    cuda_code.entry_of(ptx, loop, signature)
    found = {
        "wide": len(re.findall(r"\b(?:ld|st)(?:\.global)?\.v(?:4\.[bfu]32|2\.[bfu]64|8\.[bfu]16)", ptx)),
        "merged": len(re.findall(r"\bfma\.rn\.f32", ptx)),
    }
    if ptxas() is None:
        return ptx, found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loop.ptx"
        path.write_text(ptx)
        arch = f"-arch=sm_{target[0]}{target[1]}"
        command = [ptxas(), arch, "-v", "-o", path.with_suffix(".cubin"), path]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, stores, loads = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said
    )[-1]
    found["registers"] = max(map(int, re.findall(r"Used (\d+) registers", said)))
    found["stack"], found["spills"] = int(stack), int(stores) + int(loads)
    return ptx, found
