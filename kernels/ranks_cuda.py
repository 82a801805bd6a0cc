"""Ranks of items on the GPU, for loops in which each block takes consecutive items, a share (`Gpu.run_shares`).

One loop counts the items that it wants in each share, count_B; the next loop then has the rank of the first of them in
each share, and ranks those of a share among themselves. Every thread of a block calls these functions together.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cuda
from oneemb.kernels.launch import SHARES_OF_THREAD


@cuda.inner
def share_of(size: Number) -> Number:
    """Number of items in a share of `size` items, where each block has one."""
    blocks = np.uint64(cuda.gridDim.x)
    return np.int64((np.uint64(size) + blocks - np.uint64(1)) // blocks)


@cuda.inner
def rank_in_block(count_T: Array, count: Number) -> Number:
    """Sum of `count` over the threads before this one. count_T, shared by the block, then holds the sum up to each
    thread."""
    t = cuda.threadIdx.x
    count_T[t] = count
    cuda.syncthreads()
    step = 1
    while step < cuda.blockDim.x:
        before = count_T[t - step] if t >= step else 0
        cuda.syncthreads()
        count_T[t] += before
        cuda.syncthreads()
        step *= 2
    return count_T[t] - count


@cuda.inner
def ranks_of_shares(count_B: Array, count_T: Array, rank_B: Array) -> Number:
    """rank_B[b] = sum of the counts of the shares before b, in memory that the block shares, like count_T. Returns the
    sum of all."""
    begin = cuda.threadIdx.x * SHARES_OF_THREAD
    end = min(begin + SHARES_OF_THREAD, count_B.shape[0])
    count = 0
    for b in range(begin, end):
        count += count_B[b]
    rank = rank_in_block(count_T, count)
    for b in range(begin, end):
        rank_B[b] = rank
        rank += count_B[b]
    cuda.syncthreads()
    return count_T[cuda.blockDim.x - 1]
