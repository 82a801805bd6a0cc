"""Turns calls of embedding modules into ops."""

from typing import Any, cast

from torch import fx

from oneemb.graph import ops
from oneemb.graph.arguments import Lookup, Planned
from oneemb.graph.modules import Embeddings
from oneemb.graph.passes import copy_graph, node_of, output_of


def lower_embeddings(graph: fx.Graph, embeddings: Embeddings, *, inserts: bool = True) -> fx.Graph:
    """Replace each call of an embedding by ops. `embeddings` maps the targets of calls to embedding modules.

    Before:  rows = embedding(ids);  return (rows,)
    After:   kept = keep(ids);  keys = unique_keys(kept, ...);  reserved = reserve(store, keys)
             return (Planned("embedding", Lookup(kept), reserved=reserved, origin=ids),)

    Values of the batch are copied, since `build` may change them in place before it looks them up. Of the tensors from
    outside the batch, only ids are copied. Rows are acquired and read when `build` makes the lookup, so no other ids
    are inserted.

    A trained embedding in eval mode inserts nothing before its step; a frozen embedding, and every embedding if
    `inserts` is False, inserts nothing at all. Their rows are read at once:

    After:   keys = unique_keys(kept, ...);  lease = acquire_later(store, keys);  rows = gather(lease)
    After:   keys = unique_keys(kept, ...);  rows = peek(store, keys)

    The keys of bags hold the offsets, and `gather` and `peek` get the pooling. Arguments that `gather` could refuse are
    checked before any row is inserted:

    After:   keys = unique_keys(kept, ...);  check_pooling(keys, weights, "sum");  reserved = reserve(store, keys) ...

    Lookups of rows that ranks own together are announced in one op, which gets an additional last input of the graph:

    After:   announced = announce(announcement, (LookupOnRanks("items", ranks, store, keys, ...), ...))
             reserved = announced_lookup(announced, 0) ...
    """
    graph = copy_graph(graph)
    output = output_of(graph)
    made: list[Planned] = []
    announced: dict[int, ops.LookupOnRanks] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.users:
            with graph.inserting_after(node):
                kept = graph.call_function(ops.keep, (node,))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    copies = _Copies(graph)
    for node in list(graph.nodes):
        if node.op != "call_module" or node.target not in embeddings:
            continue
        module = embeddings[node.target]
        with graph.inserting_before(node):
            call = Lookup(**{name: copies.of(argument) for name, argument in node.kwargs.items()})
            store = graph.get_attr(f"{node.target}.store")
            key_arguments = call.ids, call.table_ids, module.num_tables, module.key_type, module.padding_idx
            offsets = () if call.offsets is None else (call.offsets,)
            columns = () if call.columns is None else (call.columns,)
            keys = graph.call_function(ops.unique_keys, (*key_arguments, *offsets, *columns))
            if call.per_sample_weights is not None:
                graph.call_function(ops.check_pooling, (keys, call.per_sample_weights, call.pooling))
            pooled = () if call.offsets is None else (call.per_sample_weights, call.pooling)
            reserved = rows = None
            if module.lookups.asks_ranks:
                ranks = graph.get_attr(f"{node.target}.ranks")
                fields: Any = module.name, ranks, store, keys, inserts and module.training, call.sums_bags
                announced[len(made)] = ops.LookupOnRanks(*fields)
            elif inserts and (module.training or module.is_trained):
                reserved = graph.call_function(ops.reserve if module.training else ops.acquire_later, (store, keys))
                if call.pooling is not None and not module.training:
                    rows = graph.call_function(ops.gather, (reserved, *pooled))
            elif call.pooling is not None:
                rows = graph.call_function(ops.peek, (store, keys, *pooled))
        ids = node_of(call.ids)
        origin = ids.args[0] if ids.target is ops.keep else None
        made.append(Planned(str(node.target), call, reserved, rows, origin))
    if announced:
        for i, reserved in _announce(graph, announced).items():
            made[i] = made[i]._replace(reserved=reserved)
    output.args = (tuple(made),)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_module" and node.target in embeddings:
            graph.erase_node(node)
    return graph


def _announce(graph: fx.Graph, lookups: dict[int, ops.LookupOnRanks]) -> dict[int, fx.Node]:
    """Add the op that announces `lookups`; returns the node of each lookup. Keys are places in the graph's result."""
    first = next(iter(graph.nodes))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(first):
        announcement = graph.placeholder("announcement")
    with graph.inserting_before(output_of(graph)):
        announced = graph.call_function(ops.announce, (announcement, cast(Any, tuple(lookups.values()))))
        return {i: graph.call_function(ops.announced_lookup, (announced, number)) for number, i in enumerate(lookups)}


class _Copies:
    """Copies of arguments that may be tensors from outside the batch, or views of such tensors. Such a tensor may be
    large, so only arguments of lookups are copied."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._outside: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "get_attr" or not self._outside.isdisjoint(node.all_input_nodes):
                self._outside.add(node)
        self._copies: dict[fx.Node, fx.Node] = {}

    def of(self, argument: fx.node.Argument) -> fx.node.Argument:
        """The node to use for an argument of a lookup: its copy, or the argument if no copy is needed."""
        if not isinstance(argument, fx.Node) or argument not in self._outside:
            return argument
        if argument not in self._copies:
            self._copies[argument] = self._graph.call_function(ops.keep, (argument,))
        return self._copies[argument]
