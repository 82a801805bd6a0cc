"""Every CUDA loop with the types that it is launched with: what is compiled ahead, and what tests compile.

A loop that takes elements is here in its vector form for float32 and for 16-bit weights, and one by one.
"""

import importlib
import pkgutil

import oneemb.kernels
from oneemb.kernels import (
    admit_cuda,
    finite_cuda,
    gather_cuda,
    hash_index_cuda,
    init_rows_cuda,
    pool_cuda,
    reduce_grads_cuda,
    slots_cuda,
    unique_keys_cuda,
)
from oneemb.kernels.cuda_arguments import Signature, signature_of
from oneemb.kernels.jit import CudaLoop
from oneemb.kernels.reduce_grads_cuda import sum_segment
from oneemb.kernels.row_update_cuda import given
from oneemb.kernels.rule_loops import RowUpdate

Cases = dict[str, tuple[CudaLoop, Signature]]

_BITS = {"float32": "float32", "float16": "uint16", "bfloat16": "int16"}
_WIDTHS = {"float32": 4, "float16": 8, "bfloat16": 8}

_TABLES, _KEYS, _CELLS, _ROWS, _FLOATS = "int32[1]", "int64[1]", "int64[2]", "float32[2]", "float32[1]"

# Of an update: dtype of weights, elements at a time, where the gradient comes from, whether it is scaled.
_FORMS = [
    ("float32", 4, given, False), ("float32", 4, sum_segment, False), ("float32", 1, given, False),
    ("float16", 8, given, False), ("bfloat16", 8, sum_segment, False), ("float32", 4, sum_segment, True),
]  # fmt: skip
_EVERY_FORM = [
    (dtype, width, gradient, scaled)
    for dtype in _BITS
    for width in (_WIDTHS[dtype], 1)
    for gradient, scaled in ((given, False), (sum_segment, False), (sum_segment, True))
]


def updates() -> Cases:
    """Loop of each form of each optimizer's update, and the types of its scalars. An optimizer is a file `update_*.py`
    here; updates that run the same loop have one form."""
    files = [file.name for file in pkgutil.iter_modules(oneemb.kernels.__path__) if file.name.startswith("update_")]
    modules = [importlib.import_module(f"oneemb.kernels.{name}") for name in files]
    found: Cases = {}
    for update in [value for module in modules for value in vars(module).values() if isinstance(value, RowUpdate)]:
        for name, (loops, scalars) in update.planned().items():
            case = loops.on_cuda, signature_of(scalars)
            if case not in found.values():
                found[name] = case
    return found


def cases(*, every: bool = False) -> Cases:
    """Loops, with their constants, and the types of their arguments, by name. Without `every` only some forms of each
    update, in which each dtype, width and kind of gradient occurs."""
    found = _loops_of_keys()
    for width in (4, 1) if every else (4,):
        of = "" if width == 4 else f" x{width}"
        rows = ("int32[2]", _KEYS, "int32[2]")
        found[f"copy in{of}"] = gather_cuda.copy_in_loop.at(V=width), rows
        found[f"copy out{of}"] = gather_cuda.copy_out_loop.at(V=width), rows
        found[f"join parts{of}"] = reduce_grads_cuda.join_parts_loop.at(V=width), (_KEYS, _ROWS, _KEYS, _KEYS)
    for dtype in _BITS:
        found |= _loops_of_weights(dtype)
        for width in (_WIDTHS[dtype], 1) if every else ():
            of_sums = found[f"reduce {dtype} x{width}"][1]
            found[f"reduce scaled {dtype} x{width}"] = reduce_grads_cuda.reduce_loop.at(V=width, SCALED=True), of_sums
    for name, (loop, scalars) in updates().items():
        for dtype, width, gradient, scaled in _EVERY_FORM if every else _FORMS:
            how = ("fused, scaled " if scaled else "fused ") if gradient is sum_segment else ""
            weights = f"{_BITS[dtype]}[2]"
            grads = {"": weights if gradient is sum_segment else _ROWS}
            if every and gradient is sum_segment and dtype != "float32":
                grads[", float32 gradients"] = _ROWS  # of bags, or of other ranks
            for of, grad in grads.items():
                segments = grad, _KEYS, _FLOATS, _KEYS, _KEYS, _ROWS
                found[f"{how}{name} {dtype} x{width}{of}"] = (
                    loop.at(V=width, gradient=gradient, SCALED=scaled),
                    (weights, _ROWS, _KEYS, *segments, _KEYS, "bool[1]", "int64", scalars),
                )
    return found


def _loops_of_keys() -> Cases:
    claim = (_TABLES, _KEYS, "int64", "bool", "int64", "int64", _KEYS, _TABLES, _KEYS)
    collect = (_TABLES, _KEYS, _KEYS, _TABLES, "int64", _TABLES, _TABLES, _TABLES, *[_KEYS] * 3, _TABLES)
    return {
        "claim": (unique_keys_cuda.claim_loop, claim),
        "claim int32": (unique_keys_cuda.claim_loop, (_TABLES, "int32[1]", *claim[2:])),
        "first": (unique_keys_cuda.first_loop, (_KEYS, _TABLES, "int64", "int64", _TABLES, _TABLES)),
        "collect": (unique_keys_cuda.collect_loop, collect),
        "collect int32": (unique_keys_cuda.collect_loop, (_TABLES, "int32[1]", *collect[2:])),
        "begin": (reduce_grads_cuda.begin_loop, ("int32[1]", *[_KEYS] * 4)),
        "find": (hash_index_cuda.find_loop, (_CELLS, _TABLES, _KEYS, _KEYS, _KEYS)),
        "insert": (hash_index_cuda.insert_loop, (_CELLS, _TABLES, _KEYS, _KEYS, _KEYS)),
        "erase": (hash_index_cuda.erase_loop, (_CELLS, _TABLES, _KEYS, _KEYS)),
        "rehash": (hash_index_cuda.rehash_loop, (_CELLS, _CELLS, _KEYS)),
        "items": (hash_index_cuda.items_loop, (_CELLS, _TABLES, _KEYS, _KEYS, _KEYS)),
        "acquire": (
            slots_cuda.acquire_loop,
            (_CELLS, _TABLES, _KEYS, _KEYS, "int32[1]", _KEYS, "int64", "int64", _KEYS, _KEYS, _KEYS, "int32[1]"),
        ),
        "mark dirty": (slots_cuda.mark_dirty_loop, (_KEYS, "bool[1]")),
        "release": (slots_cuda.release_loop, (_KEYS, "int32[1]")),
        "count pinned": (slots_cuda.count_pinned_loop, ("int32[1]", "int64", _KEYS)),
        "bags": (pool_cuda.bags_loop, (_KEYS, _TABLES, "int32[1]", "int64", _KEYS, _TABLES, _KEYS)),
        "mean scales": (pool_cuda.mean_scales_loop, (_KEYS, "int32[1]", _FLOATS)),
        "check sum": (finite_cuda.check_sum_loop, (_KEYS, _KEYS, _KEYS)),
        "check norm": (finite_cuda.check_norm_loop, (_FLOATS, _KEYS)),
    }


def _loops_of_weights(dtype: str) -> Cases:
    weights = f"{_BITS[dtype]}[2]"
    first_values = ("uint64", "int64[2]", "float64[3]", _KEYS, _FLOATS, "int64")
    of_init = (weights, _ROWS, *[_KEYS] * 4, _TABLES, _KEYS, *first_values)
    of_admit = (
        *[_KEYS] * 3, "int32[1]", *[_KEYS] * 3, _CELLS, _KEYS, _TABLES, _KEYS, _KEYS, "int32[1]", "bool[1]", "int64",
        "int64", weights, _ROWS, _TABLES, _KEYS, *first_values,
    )  # fmt: skip
    look_up = (_CELLS, weights, _TABLES, *[_KEYS] * 3, "int32[1]", _KEYS, weights, *[_KEYS] * 3)
    found: Cases = {
        f"init {dtype}": (init_rows_cuda.init_loop, of_init),
        f"admit {dtype}": (admit_cuda.admit_loop, of_admit),
        f"scale grads {dtype}": (pool_cuda.scale_grads_loop, (weights, _KEYS, "int32[1]", _KEYS, weights, _FLOATS)),
    }
    segments = (weights, _KEYS, _FLOATS, _KEYS, _KEYS, _ROWS)
    parts_of = (*segments, _KEYS, _KEYS)
    bags = (weights, _KEYS, "int32[1]", _KEYS, "int32[1]")
    for width in (_WIDTHS[dtype], 1):
        of = f"{dtype} x{width}"
        found |= {
            f"gather {of}": (gather_cuda.gather_loop.at(V=width), (weights, _KEYS, "int32[1]", weights)),
            f"gather slots {of}": (gather_cuda.gather_loop.at(V=width), (weights, _KEYS, _KEYS, weights)),
            f"look up {of}": (gather_cuda.look_up_loop.at(V=width), look_up),
            f"pool {of}": (pool_cuda.pool_loop.at(V=width), (*bags, _FLOATS, weights)),
            f"pool max {of}": (pool_cuda.pool_max_loop.at(V=width), (*bags, weights, "int32[2]")),
            f"spread max grads {of}": (
                pool_cuda.spread_max_grads_loop.at(V=width), (_KEYS, "int32[1]", "int32[2]", weights, weights),
            ),
            f"sum parts {of}": (reduce_grads_cuda.sum_parts_loop.at(V=width, SCALED=False), parts_of),
            f"sum scaled parts {of}": (reduce_grads_cuda.sum_parts_loop.at(V=width, SCALED=True), parts_of),
            f"find large {of}": (finite_cuda.find_large_loop.at(V=width), (weights, "float32", _KEYS)),
            f"check sums {of}": (finite_cuda.check_sums_loop.at(V=width, SCALED=False), (*segments, _KEYS, _KEYS)),
            f"check scaled sums {of}": (
                finite_cuda.check_sums_loop.at(V=width, SCALED=True), (*segments, _KEYS, _KEYS),
            ),
            f"reduce {of}": (reduce_grads_cuda.reduce_loop.at(V=width, SCALED=False), (*segments, _ROWS, _KEYS)),
        }  # fmt: skip
    return found
