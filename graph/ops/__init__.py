"""The op vocabulary: what a training step is made of, as plain functions. Each function is the definition of its op.

    keys  = unique_keys(ids, table_ids, ...)       which rows, each once
    lease = acquire(store, keys)                   make them resident and pin them
    rows  = gather(lease, weight)                  their weights, differentiable
    ...                                            dense forward, loss.backward()
    grads = reduce_grads([lease, ...])             sum over equal keys
    go    = check_finite([optimizer], [grads])     whether to take the step
    groups = step(optimizer, go)                   the dense parameters' optimizer, with its hooks
    update(optimizer, grads, go, groups)           the rows' optimizer, in place
    release([lease, ...])                          unpin
    advance([optimizer], [lr_scheduler], go)       the step is made; rates of the next one

    rows  = peek(store, keys)                      in place of acquire and gather: reads, inserts nothing
    rows  = read_ids(store, ids, ...)              eager, in place of all that: a lookup that leaves no gradient
    prefetched = prefetch(store, keys)             ahead of acquire(store, keys, prefetched=prefetched): inserts nothing

Each file says what it is about; `op.py` says how an op is described.

Eager mode calls the ops in this order. The compiler only reorders, merges, fuses and overlaps them, so a compiled step
can be compared with an eager one.
"""

from oneemb.graph.ops.accumulate import Held, drop, hold, take
from oneemb.graph.ops.clip import clip_grad_norm, clip_grad_value, scale_loss, unscale, update_scale
from oneemb.graph.ops.contexts import enter_autocast, enter_grad_mode, enter_record_function, exit_context
from oneemb.graph.ops.finite import NonFiniteGradientError, check_finite
from oneemb.graph.ops.grads import AnyLease, RowGrads, reduce_grads
from oneemb.graph.ops.lookup import (
    POOLINGS,
    Keys,
    Lease,
    acquire,
    acquire_later,
    check_pooling,
    gather,
    lookup,
    peek,
    prefetch,
    read_ids,
    release,
    unique_keys,
    unprefetch,
)
from oneemb.graph.ops.merged import MergedKeys, MergedLease, check_merged_pooling, gather_merged, unique_merged_keys
from oneemb.graph.ops.op import OPS
from oneemb.graph.ops.shuffle import shuffle_grads, shuffle_keys, shuffle_rows
from oneemb.graph.ops.update import Groups, StepOptimizer, add_note, advance, options_of, step, update

__all__ = [
    "AnyLease",
    "Groups",
    "Held",
    "Keys",
    "Lease",
    "MergedKeys",
    "MergedLease",
    "NonFiniteGradientError",
    "OPS",
    "POOLINGS",
    "RowGrads",
    "StepOptimizer",
    "acquire",
    "add_note",
    "advance",
    "check_finite",
    "check_merged_pooling",
    "check_pooling",
    "clip_grad_norm",
    "clip_grad_value",
    "drop",
    "enter_autocast",
    "enter_grad_mode",
    "enter_record_function",
    "exit_context",
    "gather",
    "gather_merged",
    "hold",
    "lookup",
    "peek",
    "options_of",
    "prefetch",
    "read_ids",
    "reduce_grads",
    "release",
    "scale_loss",
    "shuffle_grads",
    "shuffle_keys",
    "shuffle_rows",
    "step",
    "take",
    "acquire_later",
    "unique_keys",
    "unique_merged_keys",
    "unprefetch",
    "unscale",
    "update",
    "update_scale",
]
