"""A GPU that does nothing: what the host does for a launch, on a machine without a GPU.

For a process of its own, in which tests/support/null_driver.c is the driver. Tensors stay on the CPU; loops get their
addresses and do not run.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import torch

from oneemb.kernels import launch
from oneemb.kernels.launch import Gpu

TELLING = {"admit_loop": "count_4", "init_loop": "count_X", "check_sum_loop": "go_1"}
"""{loop that tells the host numbers: its argument with these numbers}"""

SOURCE = Path(__file__).parent / "null_driver.c"


def compiler():
    """A C compiler; None where there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def build(folder):
    """Compile the driver into a folder; returns variables of a process that finds it."""
    library = Path(folder) / "libcuda.so.1"
    subprocess.run([compiler(), "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "LD_LIBRARY_PATH": path}


class NullGpu(Gpu):
    """A GPU whose tensors are on the CPU and whose loops do not run: where the host reads numbers that they would have
    written, it reads that a batch has `unique` keys, of which `missing` have no row."""

    def __init__(self, index=0, unique=1):
        self._begin(torch.device("cpu"))
        self.unique, self.missing = unique, 0
        self.writes = True
        self.launched = None
        """A callback, given loop and arguments of each launch, and how many launches came since."""
        self.repeats = 0  # launches that repeat others
        self._anew = 0
        self._open(index, (0).__mul__)  # a function of C, as torch's
        self.context = self._driver.context

    def empty(self, *shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def free_bytes(self):
        return 1 << 28

    def _launch(self, loops, args, key=None):
        super()._launch(loops, args, key)
        self._anew += 1
        self._launched(loops, args)

    def run_in_turn(self, loops, *args, shapes):
        before = self._anew
        super().run_in_turn(loops, *args, shapes=shapes)
        if self._anew == before:
            self.repeats += len(args)
            self._launched(loops(), args)

    def stop_writing(self):
        """Write no more numbers: counts stay zeros, which is enough for known rows, and other tensors are not
        initialized. No call of this class is then between a loop and its launch, for those who measure."""
        self.writes = False
        self._launch, self.run_in_turn = super()._launch, super().run_in_turn
        self.empty, self.told = super().empty, self._came

    def _came(self, size):
        """Memory of `told` with numbers that have come: a gradient is finite, and each key has its row."""
        memory = super().told(size)
        memory[1][0], memory[1][size] = size == 1, 1
        return memory

    def _launched(self, loops, args):
        for before, ((loop, _), args_of_loop) in enumerate(zip(reversed(loops), reversed(args), strict=True)):
            self._write(loop, args_of_loop)
            if self.launched is not None:
                self.launched(loop, args_of_loop, before)

    def _write(self, loop, args):
        name = loop.function.__name__ if self.writes else ""
        if name == "collect_loop":
            found = named(loop, args)
            found["size_2"][0] = self.unique
            for array in ("table_U", "id_U", "head_U", "inverse_N"):
                found[array].zero_()
        elif name == "acquire_loop":
            slot_U, count_4 = (named(loop, args)[name] for name in ("slot_U", "count_4"))
            torch.arange(self.unique, out=slot_U[: self.unique])
            if self.missing:
                slot_U[: self.missing] = -1
            count_4[0], count_4[1] = self.missing, self.unique
        elif name in TELLING:
            number_X, told_X = (named(loop, args)[name] for name in (TELLING[name], "told_X"))
            if len(told_X):
                told_X[:-1], told_X[-1] = number_X, 1


def named(loop, args):
    """Arguments of a launch by name."""
    return dict(zip(loop.function.__code__.co_varnames, args, strict=False))


def make_default(gpu):
    """Let embeddings that move to "cuda", and lookups of any tensor, find this GPU."""
    launch.gpu_at = lambda device: gpu
    launch.gpu_of = lambda tensor: gpu


class NullDriver:
    """Counts, errors and arguments of the driver that does nothing."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.cuda.null_arguments.restype = ctypes.c_void_p
        self.cuda.null_context.restype = ctypes.c_void_p

    def count(self, name=""):
        """Calls of a function of the driver, or of all."""
        return self.cuda.null_count(name.encode())

    def fail(self, name, code, after=0):
        """Let a function return an error in its next call, or after so many calls."""
        self.cuda.null_fail(name.encode(), code, after)

    def arguments(self, before=0):
        """Bytes of the arguments of the launch that came `before` launches before the last one."""
        size = ctypes.c_size_t()
        return ctypes.string_at(self.cuda.null_arguments(before, ctypes.byref(size)), size.value)

    def context(self):
        """Context of the calling thread; None = it has none."""
        return self.cuda.null_context()
