"""Every CUDA loop with the types it is launched with, for compiling it where there is no GPU.

    CASES: name -> (loop with its constants, argument types, what it must hold)

A loop that takes elements is here in its vector form for float32 and for half-width weights, and one by one.
"""

from functools import partial

import numpy as np
import torch
from numba.cuda import types
from numba.cuda.typing.typeof import typeof

from oneemb.graph.row_optimizers import row_optimizer_of
from oneemb.kernels import (
    gather_cuda,
    hash_index_cuda,
    init_rows_cuda,
    pool_cuda,
    reduce_grads_cuda,
    slots_cuda,
    unique_keys_cuda,
)
from oneemb.kernels.reduce_grads_cuda import sum_segment
from oneemb.kernels.row_update_cuda import element_loop, given
from oneemb.optim import Ftrl
from tests.support.optimizers import MORE, OPTIMIZERS

i32, i64, f32, f64, u64, b1 = types.int32, types.int64, types.float32, types.float64, types.uint64, types.boolean
BITS = {"float32": types.float32, "float16": types.uint16, "bfloat16": types.int16}
VECTORS = {"float32": 4, "float16": 8, "bfloat16": 8}


def array(kind, ndim=1):
    return types.Array(kind, ndim, "C")


CELLS, KEYS, ROWS = array(i64, 2), array(i64), array(f32, 2)

CASES = {
    "claim": (unique_keys_cuda.claim_loop, (array(i32), KEYS, i64, b1, i64, KEYS, KEYS, KEYS)),
    "claim int32": (unique_keys_cuda.claim_loop, (array(i32), array(i32), i64, b1, i64, KEYS, KEYS, KEYS)),
    "first": (unique_keys_cuda.first_loop, (KEYS, KEYS, KEYS)),
    "collect": (
        unique_keys_cuda.collect_loop,
        (array(i32), KEYS, KEYS, KEYS, KEYS, array(i32), KEYS, KEYS, KEYS, KEYS),
    ),
    "begin": (unique_keys_cuda.begin_loop, (array(i32), KEYS)),
    "find": (hash_index_cuda.find_loop, (CELLS, array(i32), KEYS, KEYS, KEYS)),
    "insert": (hash_index_cuda.insert_loop, (CELLS, array(i32), KEYS, KEYS, KEYS)),
    "erase": (hash_index_cuda.erase_loop, (CELLS, array(i32), KEYS, KEYS)),
    "rehash": (hash_index_cuda.rehash_loop, (CELLS, CELLS, KEYS)),
    "items": (hash_index_cuda.items_loop, (CELLS, array(i32), KEYS, KEYS, KEYS)),
    "admit": (
        slots_cuda.acquire_loop,
        (CELLS, array(i32), KEYS, KEYS, array(i32), KEYS, i64, i64, KEYS, KEYS, KEYS),
    ),
    "release": (slots_cuda.release_loop, (KEYS, array(i32))),
    "count pinned": (slots_cuda.count_pinned_loop, (array(i32), i64, KEYS)),
    "bags": (pool_cuda.bags_loop, (KEYS, array(i32), array(i32), i64, KEYS, array(i32), KEYS)),
    "mean scales": (pool_cuda.mean_scales_loop, (KEYS, KEYS, array(f32))),
    "count parts": (reduce_grads_cuda.count_parts_loop, (KEYS, KEYS)),
    "copy in": (gather_cuda.copy_in_loop.at(V=4), (array(i32, 2), KEYS, array(i32, 2))),
    "copy out": (gather_cuda.copy_out_loop.at(V=4), (array(i32, 2), KEYS, array(i32, 2))),
}

for dtype, bits in BITS.items():
    weights = array(bits, 2)
    CASES[f"init {dtype}"] = (
        init_rows_cuda.init_loop,
        (weights, ROWS, KEYS, array(i32), KEYS, u64, array(i64, 2), array(f64, 3), KEYS, array(f32), i64),
    )
    CASES[f"scale grads {dtype}"] = (
        pool_cuda.scale_grads_loop,
        (weights, KEYS, KEYS, KEYS, weights, array(f32)),
    )
    for V in (VECTORS[dtype], 1):
        of = f"{dtype} x{V}"
        segments = (weights, KEYS, array(f32), KEYS, KEYS, ROWS)
        CASES[f"gather {of}"] = (gather_cuda.gather_loop.at(V=V), (weights, KEYS, KEYS, weights))
        CASES[f"pool {of}"] = (
            pool_cuda.pool_loop.at(V=V),
            (weights, KEYS, KEYS, KEYS, array(i32), array(f32), weights),
        )
        CASES[f"pool max {of}"] = (
            pool_cuda.pool_max_loop.at(V=V),
            (weights, KEYS, KEYS, KEYS, array(i32), weights, array(i32, 2)),
        )
        CASES[f"spread max grads {of}"] = (
            pool_cuda.spread_max_grads_loop.at(V=V),
            (KEYS, array(i32), array(i32, 2), weights, weights),
        )
        CASES[f"sum parts {of}"] = (reduce_grads_cuda.sum_parts_loop.at(V=V), segments)
        CASES[f"sum scaled parts {of}"] = (reduce_grads_cuda.sum_parts_loop.at(V=V, SCALED=True), segments)
        CASES[f"reduce {of}"] = (reduce_grads_cuda.reduce_loop.at(V=V), (*segments, ROWS, array(b1)))


class Noted:
    """Loops that note the loop of an update and the types of its scalars, in the place of running it."""

    def negated(self, grads):
        return grads

    def update_rows(self, on_host, on_cuda, weight_SX, row_SW, slot_U, grads, state_begin, *scalars, state_width):
        self.noted = on_cuda, tuple(map(typeof, scalars))


def update_of(make):
    """The loop of an optimizer's update and the types of its scalars."""
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    group, noted = optimizer.param_groups[0], Noted()
    rows = row_optimizer_of(optimizer, group)
    rows.update(None, None, None, np.zeros((1, 4), np.float32), state_begin=4, group=group, step=6, backend=noted)
    return noted.noted


UPDATES = {}
"""Loops of updates, each under the name of the first optimizer that has it."""
for name, make in {**OPTIMIZERS, **MORE, "ftrl, another power": partial(Ftrl, lr=0.1, lr_power=-0.7)}.items():
    if (found := update_of(make)) not in UPDATES.values():
        UPDATES[name] = found

OF_ADAM = {}
"""The same form of Adam's loop for each form of an update that looks at one weight at a time, as Adam's does."""

for name, (loop, scalars) in UPDATES.items():
    for dtype, V, gradient, scaled in [
        ("float32", 4, given, False), ("float32", 4, sum_segment, False), ("float32", 1, given, False),
        ("float16", 8, given, False), ("bfloat16", 8, sum_segment, False), ("float32", 4, sum_segment, True),
    ]:  # fmt: skip
        grad = array(BITS[dtype], 2) if gradient is sum_segment else ROWS
        how = ("fused, scaled " if scaled else "fused ") if gradient is sum_segment else ""
        # Tuples of one type and of several are different types to numba.
        packed = types.BaseTuple.from_types(scalars)
        CASES[case := f"{how}{name} {dtype} x{V}"] = (
            loop.at(V=V, gradient=gradient, SCALED=scaled),
            (array(BITS[dtype], 2), ROWS, KEYS, grad, KEYS, array(f32), KEYS, KEYS, ROWS, KEYS, i64, packed),
        )
        if loop.function is element_loop.function:
            OF_ADAM[case] = f"{how}adam {dtype} x{V}"
