"""The op vocabulary: the parts of a training step, as plain functions. Each function is the definition of its op.

    keys  = unique_keys(ids, table_ids, ...)       the (table, id) pairs, each once
    lease = acquire(store, keys)                   make their rows resident and pin them
    rows  = gather(lease)                          the weights of each id
    rows  = with_grad(rows, lease, weight)         the same, differentiable: backward gives weight a RowGrad
    ...                                            dense forward, loss.backward()
    grads = reduce_grads([weight.grad, ...])       sum over equal keys
    found = check_finite([optimizer], grads)       text about a gradient that is not finite, or None
    go    = may_step(found, [optimizer])           whether to take the step
    groups = step(optimizer, go)                   the dense parameters' optimizer, with its hooks
    check_options(optimizer, grads, groups)        an error if rows cannot follow options that hooks have changed
    update(optimizer, grad, go, groups)            the rows' optimizer, in place, for each grad in grads
    advance([optimizer], [lr_scheduler], go)       drop gradients; learning rates of the next step

    rows  = peek(store, keys)                      in place of acquire and gather: reads, inserts nothing
    rows  = read_ids(store, ids, ...)              in eager mode, a whole lookup that leaves no gradient
    prefetched = prefetch(store, keys)             ahead of acquire(store, keys, prefetched=prefetched): inserts nothing

Each file opens with its subject; `op.py` describes the properties of an op.

Eager mode calls the ops in this order. The compiler only reorders, merges, fuses and overlaps them, so a compiled step
can be compared with an eager one.
"""

from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.ops.keys import BatchKeys, equal, keep, unique_keys
from oneemb.graph.ops.late_check import Counts, LateCheck
from oneemb.graph.ops.lookup import Lease, acquire, acquire_later, gather, in_backward
from oneemb.graph.ops.lookup_ahead import (
    NOTHING_ANNOUNCED,
    Announced,
    AnnouncedLookup,
    LookupAhead,
    LookupOnRanks,
    announce,
    announced_lookup,
    begin_lookup,
    look_up_on_ranks,
)
from oneemb.graph.ops.merged import (
    MergedKeys,
    MergedLookup,
    MergedReserved,
    check_merged_pooling,
    gather_merged,
    part_of,
    unique_merged_keys,
)
from oneemb.graph.ops.op import OPS
from oneemb.graph.ops.owner_grads import reduce_to_owners, shuffle_grads
from oneemb.graph.ops.reading import check_pooling, peek, read_ids
from oneemb.graph.ops.reserve import Reserved, add_coming, prefetch, reserve, unprefetch
from oneemb.graph.ops.row_grad import RowGrad, refuse_dense
from oneemb.graph.ops.update import (
    Groups,
    NonFiniteGradientError,
    StepOptimizer,
    add_note,
    advance,
    check_finite,
    check_options,
    forget_unscaled,
    may_step,
    measure_reduce,
    measure_update,
    options_of,
    reduce_grads,
    step,
    unscale,
    update,
    update_scale,
    zero_grad,
)
from oneemb.graph.ops.with_grad import with_grad

__all__ = [
    "Announced", "AnnouncedLookup", "BatchKeys", "Counts", "Groups", "LateCheck", "Lease", "LookupAhead",
    "LookupOnRanks", "MergedKeys", "MergedLookup", "MergedReserved", "NOTHING_ANNOUNCED", "NonFiniteGradientError",
    "OPS", "Reserved", "RowGrad", "RowGrads", "StepOptimizer", "acquire", "acquire_later", "add_coming", "add_note",
    "advance", "announce",
    "announced_lookup", "begin_lookup", "check_finite", "check_merged_pooling", "check_options", "check_pooling",
    "equal", "forget_unscaled", "gather", "gather_merged", "in_backward", "keep", "look_up_on_ranks", "may_step",
    "measure_reduce", "measure_update", "options_of", "part_of", "peek", "prefetch", "read_ids", "reduce_grads",
    "reduce_to_owners", "refuse_dense", "reserve", "shuffle_grads", "step", "unique_keys", "unique_merged_keys",
    "unprefetch", "unscale", "update", "update_scale", "with_grad", "zero_grad",
]  # fmt: skip
