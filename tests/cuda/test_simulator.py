"""The threads that run CUDA loops in the simulator: `syncthreads` is a barrier, and no error is lost."""

import threading

import numpy as np
import pytest
import torch

from oneemb.kernels import jit
from oneemb.kernels.jit import cuda
from tests.cuda.conftest import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="of the simulator")


@cuda
def _reverse(in_N, out_N):
    """Each thread takes the value that another one has put into memory that they share."""
    first = cuda.shared.array(256, np.int64)
    second = cuda.shared.array(256, np.int64)
    i = cuda.threadIdx.x
    n = cuda.blockIdx.x * cuda.blockDim.x + i
    while n < in_N.shape[0]:
        first[i] = in_N[n]
        cuda.syncthreads()
        second[cuda.blockDim.x - 1 - i] = first[i]
        cuda.syncthreads()
        out_N[n] = second[i]
        cuda.syncthreads()
        n += cuda.gridDim.x * cuda.blockDim.x


@cuda
def _fail_at(number, out_N):
    n = cuda.threadIdx.x
    if n == number:
        raise IndexError(f"thread {number}")
    cuda.syncthreads()
    out_N[n] = 1


def test_each_thread_sees_what_others_wrote_before_the_barrier(gpu):
    for blocks in (1, 3, 7):  # More than there are at a time: blocks follow blocks on the same threads.
        values = np.arange(8 * blocks)
        out_N = gpu.full(8 * blocks, value=-1, dtype=torch.int64)
        gpu.run(_reverse, 8 * blocks, gpu.put(values), out_N)
        assert out_N.tolist() == values.reshape(blocks, 8)[:, ::-1].ravel().tolist()


@pytest.mark.parametrize("number", [0, 7])
def test_an_error_of_one_thread_is_raised_and_the_others_end(gpu, number):
    out_N = gpu.full(8, value=0, dtype=torch.int64)
    for _ in range(3):
        with pytest.raises(IndexError, match=f"thread {number}"):
            gpu.run(_fail_at, 8, number, out_N)
    assert out_N.tolist() == [0] * 8
    gpu.run(_fail_at, 8, -1, out_N)
    assert out_N.tolist() == [1] * 8


def test_threads_may_call_a_rule_while_its_version_is_listed(monkeypatch):
    from oneemb.kernels import jit_cuda

    @jit.rule
    def twice(x):
        return x + x

    callable_now, listed = threading.Event(), threading.Event()

    class Versions(dict):
        def __setitem__(self, kinds, version):  # numba has made the version callable just before
            callable_now.set()
            listed.wait(1)
            super().__setitem__(kinds, version)

    monkeypatch.setattr(twice, "overloads", Versions())
    rule, results = jit_cuda.simulated_rule(twice), []
    threads = [threading.Thread(target=lambda: results.append(rule(np.float32(3)))) for _ in range(2)]
    threads[0].start()
    assert callable_now.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    listed.set()
    for thread in threads:
        thread.join(60)
    assert results == [6, 6]
    assert {type(result) for result in results} == {np.float32}
