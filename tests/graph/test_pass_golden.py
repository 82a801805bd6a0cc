"""Each pass: the graph before and after it as text, its input as it was, and the rules of its stage."""

import operator

import pytest
import torch
from torch import fx

import oneemb
from oneemb.graph import ops
from oneemb.graph.building import Building
from oneemb.graph.inputs import Signature
from oneemb.graph.modules import embeddings_in
from oneemb.graph.ops.op import check_stage
from oneemb.graph.passes.lower_embeddings import lower_embeddings
from oneemb.graph.passes.merge_embeddings import Member, merge_embeddings
from oneemb.graph.passes.share_unique import share_unique
from oneemb.graph.passes.split_keys import split_keys
from oneemb.graph.passes.split_prepare import split_prepare
from oneemb.graph.tape import Tape
from oneemb.graph.text import graph_text
from tests.support.graph_models import adam, make_embedding, make_graph, sgd

KEYS = "(keep, None, 2, int64, None)"
IDS, OFFSETS, SCALES = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([0, 1, 1, 2, 6]), torch.rand(6)


def record(build, *batch, change=None):
    """(recorded graph, its embeddings) of `build` with embeddings a, b and c; `change` is applied to them first."""
    modules = {name: make_embedding(name) for name in "abc"}
    graph = make_graph(modules | {"mlp": torch.nn.Linear(2, 2)}, build, sgd)
    if change is not None:
        change(graph)
    values, structure = Signature(graph.build).flatten(batch, {})
    tape = Tape(values, list(structure.names()))
    Building({module.store: name for name, module in modules.items()}, tape=tape).call(graph.build, *batch)
    recorded, embeddings = tape.graph(), embeddings_in(graph)
    check_stage(recorded, "recorded", embeddings)
    return recorded, embeddings


def lowered(build, *batch, change=None, **kwargs):
    recorded, embeddings = record(build, *batch, change=change)
    return lower_embeddings(recorded, embeddings, **kwargs)


def check_pass(run, before, expected):
    """The text after a pass is as expected, lines that begin with a space going on with the one before; the input is
    untouched and the output is legal."""
    text = graph_text(before)
    after = run(before)
    assert graph_text(before) == text
    check_stage(after, "lowered", {})
    assert graph_text(after) == expected.strip().replace("\n ", "")


def simple(self, ids):
    return self.a(ids).sum()


def twice(self, ids):
    return self.a(ids).sum() + self.b(ids).sum()


def bags(self, ids, offsets, scales):
    """One of known weights, one of weights that the step computes, one of maxima."""
    ids = ids.reshape(-1)
    a = self.a(ids, None, offsets, scales)
    b = self.b(ids, None, offsets, self.mlp.weight.sum() * scales)
    return a.sum() + b.sum() + self.c(ids, offsets[1:] % 2, offsets, pooling="max").sum()


# ---- lower_embeddings ------------------------------------------------------------------------------------------------


def test_lower_embeddings():
    recorded, embeddings = record(simple, IDS)
    assert graph_text(recorded).splitlines()[1:] == [
        "a = a(ids=ids, table_ids=None, offsets=None, columns=None, per_sample_weights=None, pooling='sum')",
        "return (a,)",
    ]
    check_pass(
        lambda graph: lower_embeddings(graph, embeddings),
        recorded,
        f"""
inputs: ids
keep = keep(ids)
unique_keys = unique_keys{KEYS}
reserve = reserve(a.store, unique_keys)
return (Planned('a', Lookup(keep), reserved=reserve, origin=ids),)""",
    )


def test_lower_embeddings_of_bags():
    recorded, embeddings = record(bags, IDS, OFFSETS, SCALES)
    check_pass(
        lambda graph: lower_embeddings(graph, embeddings),
        recorded,
        """
inputs: ids, offsets, scales
keep = keep(ids)
keep_1 = keep(offsets)
keep_2 = keep(scales)
reshape = keep.reshape(-1)
unique_keys = unique_keys(reshape, None, 2, int64, None, keep_1)
check_pooling(unique_keys, keep_2, 'sum')
reserve = reserve(a.store, unique_keys)
unique_keys_1 = unique_keys(reshape, None, 2, int64, None, keep_1)
reserve_1 = reserve(b.store, unique_keys_1)
getitem = keep_1[1:]
remainder = getitem.remainder(2)
unique_keys_2 = unique_keys(reshape, remainder, 2, int64, None, keep_1)
reserve_2 = reserve(c.store, unique_keys_2)
return (Planned('a', Lookup(reshape, offsets=keep_1, per_sample_weights=keep_2), reserved=reserve),
  Planned('b', Lookup(reshape, offsets=keep_1, pooling=None), reserved=reserve_1),
  Planned('c', Lookup(reshape, table_ids=remainder, offsets=keep_1, pooling='max'), reserved=reserve_2))""",
    )


def test_of_tensors_from_outside_only_what_is_looked_up_is_copied():
    table, some = torch.arange(1000), torch.arange(2)

    def build(self, ids):
        return self.a(table[ids]).sum() + self.b(ids, some).sum() + self.c(ids, some).sum()

    assert graph_text(share_unique(lowered(build, IDS))).splitlines()[1:-1] == [
        "keep = keep(ids)",
        "getitem = constant_0[keep]",
        "keep_1 = keep(getitem)",
        "unique_keys = unique_keys(keep_1, None, 2, int64, None)",
        "reserve = reserve(a.store, unique_keys)",
        "keep_2 = keep(constant_1)",
        "unique_keys_1 = unique_keys(keep, keep_2, 2, int64, None)",
        "reserve_1 = reserve(b.store, unique_keys_1)",
        "reserve_2 = reserve(c.store, unique_keys_1)",
    ]


@pytest.mark.parametrize(
    "change, inserts, after",
    [
        (lambda graph: None, False, ["peek = peek(a.store, unique_keys)", "rows=peek"]),
        (lambda graph: graph.a.eval().requires_grad_(False), True, ["peek = peek(a.store, unique_keys)", "rows=peek"]),
        (
            lambda graph: graph.a.requires_grad_(False),
            True,
            ["reserve = reserve(a.store, unique_keys)", "reserved=reserve"],
        ),
        (
            lambda graph: graph.a.eval(),
            True,
            ["acquire_later = acquire_later(a.store, unique_keys)", "gather = gather(acquire_later)"]
            + ["reserved=acquire_later, rows=gather"],
        ),
    ],
    ids=["inserts nothing", "eval and frozen", "frozen", "eval"],
)
def test_lower_embeddings_that_do_not_insert(change, inserts, after):
    *lines, rows = after
    check_pass(
        lambda graph: graph,
        lowered(simple, IDS, change=change, inserts=inserts),
        "\n".join(
            ["inputs: ids", "keep = keep(ids)", f"unique_keys = unique_keys{KEYS}", *lines]
            + [f"return (Planned('a', Lookup(keep), {rows}, origin=ids),)"]
        ),
    )


def test_bags_that_are_read_at_once_are_pooled_where_it_is_known_how():
    text = graph_text(lowered(bags, IDS, OFFSETS, SCALES, inserts=False))
    assert "peek = peek(a.store, unique_keys, keep_2, 'sum')" in text and "peek(b.store" not in text
    assert "peek_1 = peek(c.store, unique_keys_2, None, 'max')" in text
    assert "Planned('b', Lookup(reshape, offsets=keep_1, pooling=None))" in text


def test_a_lookup_with_a_pooling_that_no_bag_has_is_not_recorded():
    def build(self, ids):
        with pytest.raises(ValueError, match="pooling must be"):
            self.a(ids, pooling="median")

    assert graph_text(lowered(build, IDS)) == "inputs: ids\nreturn ()"


# ---- merge_embeddings ------------------------------------------------------------------------------------------------

MEMBERS = {"a.store": Member("merged_0", 0), "b.store": Member("merged_0", 2), "c.store": Member("merged_0", 4)}


def test_merge_embeddings():
    def build(self, ids, offsets, scales):
        c = self.c(ids)
        a = self.a((ids + 1).reshape(-1), None, offsets, scales)
        return c.sum() + a.sum() + self.b(ids).sum()

    lookups = "(MergedLookup(0, 2, reshape, offsets=keep_1), MergedLookup(4, 2, keep))"
    check_pass(
        lambda graph: merge_embeddings(graph, {name: MEMBERS[name] for name in ("a.store", "c.store")}),
        lowered(build, IDS, OFFSETS, SCALES),
        f"""
inputs: ids, offsets, scales
keep = keep(ids)
keep_1 = keep(offsets)
keep_2 = keep(scales)
add = keep.add(1)
reshape = add.reshape(-1)
unique_merged_keys = unique_merged_keys({lookups}, int64, None)
check_merged_pooling(unique_merged_keys, ((0, keep_2, 'sum'),))
reserve_3 = reserve(merged_0, unique_merged_keys)
part_of = part_of(reserve_3, 0)
part_of_1 = part_of(reserve_3, 1)
gather_merged = gather_merged(reserve_3, ((0, keep_2, 'sum'), (1, None, 'sum')))
getitem = gather_merged[0]
getitem_1 = gather_merged[1]
unique_keys_2 = unique_keys(keep, None, 2, int64, None)
reserve_2 = reserve(b.store, unique_keys_2)
return (Planned('c', Lookup(keep), reserved=part_of_1, rows=getitem_1, origin=ids),
  Planned('a', Lookup(reshape, offsets=keep_1, per_sample_weights=keep_2), reserved=part_of, rows=getitem),
  Planned('b', Lookup(keep), reserved=reserve_2, origin=ids))""",
    )


def test_a_merged_lookup_whose_weights_are_not_known_is_not_read():
    text = graph_text(merge_embeddings(lowered(bags, IDS, OFFSETS, SCALES), MEMBERS))
    assert "check_merged_pooling(unique_merged_keys, ((0, keep_2, 'sum'),))" in text
    assert "gather_merged(reserve_3, ((0, keep_2, 'sum'), (2, None, 'max')))" in text
    assert "Planned('b', Lookup(reshape, offsets=keep_1, pooling=None), reserved=part_of_1)" in text

    def unknown(self, ids, offsets):
        scales = self.mlp.weight.sum() * torch.ones(6)
        return self.a(ids, None, offsets, scales).sum() + self.b(ids, None, offsets, scales).sum()

    text = graph_text(merge_embeddings(lowered(unknown, IDS.reshape(-1), OFFSETS), MEMBERS))
    assert "part_of_1 = part_of(" in text and "gather_merged" not in text


def lookups(build, *batch, change=None):
    """The embeddings of each merged lookup, and those looked up alone."""
    merged = merge_embeddings(lowered(build, *batch, change=change), MEMBERS)
    check_stage(merged, "lowered", {})
    found = []
    for node in merged.nodes:
        if node.target is ops.unique_merged_keys:
            found.append("".join("abc"[lookup.first_table // 2] for lookup in node.args[0]))
        elif node.target in (ops.reserve, ops.acquire_later) and node.args[0].target != "merged_0":
            found.append(node.args[0].target)
    return found


def test_each_lookup_of_an_embedding_is_merged_with_those_of_others_that_are_as_many():
    def several(self, ids):
        return self.a(ids).sum() + self.a(ids + 1).sum() + self.b(ids).sum() + self.b(ids * 2).sum() + self.c(ids).sum()

    def of_rows(self, ids):
        a = self.a(ids)
        return self.b(ids + a.sum().long()).sum() + self.c(ids).sum()

    def across_backward(self, ids):
        self.a(ids).sum().backward()
        return self.b(ids).sum() + self.c(ids).sum()

    def alone(self, ids):
        return self.a(ids).sum() + self.a(ids + 1).sum()

    assert lookups(several, IDS) == ["ab", "abc"]
    assert lookups(of_rows, IDS) == ["ac"]  # The ids of b are not known before.
    assert lookups(across_backward, IDS) == ["abc"]
    assert lookups(alone, IDS) == ["a.store", "a.store"]
    eval_b = lookups(several, IDS, change=lambda graph: graph.b.eval())
    assert sorted(eval_b) == ["a.store", "ac", "b.store", "b.store"]


# ---- share_unique ----------------------------------------------------------------------------------------------------


def test_share_unique():
    check_pass(
        share_unique,
        lowered(twice, IDS),
        f"""
inputs: ids
keep = keep(ids)
unique_keys = unique_keys{KEYS}
reserve = reserve(a.store, unique_keys)
reserve_1 = reserve(b.store, unique_keys)
return (Planned('a', Lookup(keep), reserved=reserve, origin=ids),
  Planned('b', Lookup(keep), reserved=reserve_1, origin=ids))""",
    )


def test_share_unique_of_bags():
    text = graph_text(share_unique(lowered(bags, IDS, OFFSETS, SCALES)))
    assert text.count("= unique_keys(") == 2  # c has other tables
    assert "reserve_1 = reserve(b.store, unique_keys)" in text and "reserve_2 = reserve(c.store, unique_keys_2)" in text


def test_share_unique_of_merged_lookups():
    def build(self, ids):
        return sum(module(ids).sum() for module in (self.a, self.b, self.a, self.b))

    graph = share_unique(merge_embeddings(lowered(build, IDS), MEMBERS))
    check_stage(graph, "lowered", {})
    assert sum(node.target is ops.unique_merged_keys for node in graph.nodes) == 1
    assert sum(node.target is ops.reserve for node in graph.nodes) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda ids, offsets: (ids * 1, None, offsets),
        lambda ids, offsets: (ids, None, offsets * 1),
        lambda ids, offsets: (ids.reshape(-1, 2), None, None),
        lambda ids, offsets: (ids, offsets[1:] % 2, offsets),
    ],
    ids=["other ids", "other offsets", "no offsets", "other tables"],
)
def test_keys_of_other_ids_are_not_shared(other):
    def build(self, ids, offsets):
        return self.a(ids, None, offsets).sum() + self.b(*other(ids, offsets)).sum()

    graph = share_unique(lowered(build, IDS.reshape(-1), OFFSETS))
    assert sum(node.target is ops.unique_keys for node in graph.nodes) == 2


# ---- split_prepare ---------------------------------------------------------------------------------------------------


def test_split_prepare():
    def build(self, ids):
        return self.a(ids).sum() + self.b(ids + 1).sum() + self.a(ids).sum()

    before = share_unique(lowered(build, IDS))
    text = graph_text(before)
    prepare, lookup = split_prepare(before)
    assert graph_text(before) == text
    check_stage(prepare, "prepare", {})
    check_stage(lookup, "lookup", {})
    assert graph_text(prepare).splitlines() == [
        "inputs: ids",
        "keep = keep(ids)",
        f"unique_keys = unique_keys{KEYS}",
        "add = keep.add(1)",
        "unique_keys_1 = unique_keys(add, None, 2, int64, None)",
        "prefetch = prefetch(a.store, unique_keys)",
        "prefetch_1 = prefetch(b.store, unique_keys_1)",
        "prefetch_2 = prefetch(a.store, unique_keys)",
        "return [ids, keep, unique_keys, add, unique_keys_1, prefetch, prefetch_1, prefetch_2]",
    ]
    made = [
        "Planned('a', Lookup(keep), reserved=reserve, origin=ids)",
        "Planned('b', Lookup(add), reserved=reserve_1)",
        "Planned('a', Lookup(keep), reserved=reserve_2, origin=ids)",
    ]
    assert graph_text(lookup).splitlines() == [
        "inputs: ids, keep, unique_keys, add, unique_keys_1, prefetch, prefetch_1, prefetch_2",
        "reserve = reserve(a.store, unique_keys, prefetched=prefetch)",
        "reserve_1 = reserve(b.store, unique_keys_1, prefetched=prefetch_1)",
        "reserve_2 = reserve(a.store, unique_keys, prefetched=prefetch_2)",
        f"return ({', '.join(made)})",
    ]


def test_split_keys():
    def build(self, ids):
        return self.a(ids).sum() + self.b(ids + 1).sum() + self.a(ids).sum()

    prepare, _ = split_prepare(share_unique(lowered(build, IDS)))
    text = graph_text(prepare)
    keys, rows = split_keys(prepare)
    assert graph_text(prepare) == text
    assert graph_text(keys).splitlines() == [
        "inputs: ids",
        "keep = keep(ids)",
        f"unique_keys = unique_keys{KEYS}",
        "add = keep.add(1)",
        "unique_keys_1 = unique_keys(add, None, 2, int64, None)",
        "return [ids, keep, unique_keys, add, unique_keys_1]",
    ]
    assert graph_text(rows).splitlines() == [
        "inputs: ids, keep, unique_keys, add, unique_keys_1",
        "prefetch = prefetch(a.store, unique_keys)",
        "prefetch_1 = prefetch(b.store, unique_keys_1)",
        "prefetch_2 = prefetch(a.store, unique_keys)",
        "return [ids, keep, unique_keys, add, unique_keys_1, prefetch, prefetch_1, prefetch_2]",
    ]


def test_split_prepare_checks_pooling_ahead_and_prefetches_merged_rows_once():
    prepare, lookup = split_prepare(merge_embeddings(lowered(bags, IDS, OFFSETS, SCALES), MEMBERS))
    check_stage(prepare, "prepare", {})
    check_stage(lookup, "lookup", {})
    assert graph_text(prepare).splitlines()[-3:] == [
        "check_merged_pooling(unique_merged_keys, ((0, keep_2, 'sum'),))",
        "prefetch = prefetch(merged_0, unique_merged_keys)",
        "return [keep_1, keep_2, reshape, remainder, unique_merged_keys, prefetch]",
    ]
    assert "reserve_3 = reserve(merged_0, unique_merged_keys, prefetched=prefetch)" in graph_text(lookup)


@pytest.mark.parametrize("change", [lambda graph: graph.a.eval(), lambda graph: graph.a.eval().requires_grad_(False)])
def test_split_prepare_reads_no_rows_ahead(change):
    prepare, lookup = split_prepare(lowered(simple, IDS, change=change))
    check_stage(prepare, "prepare", {})
    check_stage(lookup, "lookup", {})
    assert graph_text(prepare).splitlines()[-1] == "return [ids, keep, unique_keys]"
    assert "(a.store, unique_keys)" in graph_text(lookup)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_the_check_of_stages_refuses_what_is_wrong():
    recorded, embeddings = record(simple, IDS)
    with pytest.raises(AssertionError, match="a call at lowered"):
        check_stage(recorded, "lowered", embeddings)
    with pytest.raises(AssertionError, match="a call at recorded"):
        check_stage(recorded, "recorded", {})
    low = lower_embeddings(recorded, embeddings)
    for stage, op in (("recorded", "keep"), ("prepare", "reserve"), ("lookup", "keep")):
        with pytest.raises(AssertionError, match=f"{op}.*not legal at stage {stage}"):
            check_stage(low, stage, {})
    wrong = fx.Graph()
    x = wrong.call_function(torch.ones, (2,))
    wrong.call_function(ops.gather, (x,))
    wrong.output(None)
    with pytest.raises(AssertionError, match="ones is no lease"):
        check_stage(wrong, "lookup", {})
    wrong = fx.Graph()
    x = wrong.placeholder("keys")
    wrong.call_function(ops.reserve, (x, x))
    wrong.output(None)
    with pytest.raises(AssertionError, match="reserve"):
        check_stage(wrong, "lookup", {})


def test_a_graph_shows_itself():
    graph = make_graph({"a": make_embedding("a")}, simple, sgd)
    assert "nothing is compiled yet" in str(graph)
    with pytest.warns(UserWarning, match="computed no gradient"):
        graph(IDS)
    assert "prepare:" in str(graph) and "prefetch(a.store, unique_keys)" in str(graph)
    assert "reserve(a.store, unique_keys, prefetched=prefetch)" in str(graph)
    assert graph.compiled().code.count("reserve(") == 1
    (planned,) = graph.compiled()(IDS)  # It runs, too.
    assert planned.embedding == "a" and torch.equal(planned.lookup.ids, IDS)
    planned.reserved.drop()


def test_every_kind_of_argument_reads_as_python():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.cat, ([x, x],), {"dim": 0})
    z = graph.call_method("to", (y, torch.float16), {"device": torch.device("cpu")})
    n = graph.call_method("size", (z, 0))
    some = graph.call_function(operator.getitem, (z, (Ellipsis, slice(None, n), slice(1, None, 2), (0,), None)))
    column = graph.call_function(getattr, (some, "T"))
    graph.output({"z": (column,), "n": None})
    assert graph_text(graph).splitlines() == [
        "inputs: x",
        "cat = cat([x, x], dim=0)",
        "to = cat.to(float16, device=cpu)",
        "size = to.size(0)",
        "getitem = to[..., :size, 1::2, (0,), None]",
        "getattr_1 = getitem.T",
        "return {'z': (getattr_1,), 'n': None}",
    ]


def test_drawing_shows_every_pass(tmp_path):
    pytest.importorskip("matplotlib")
    graph = make_graph({"a": make_embedding(), "mlp": oneemb.nn.FusedMLP(8, [4], 1)}, _mlp_build, adam)
    with pytest.raises(RuntimeError, match="nothing is compiled"):
        graph.draw(str(tmp_path / "early.svg"), passes=True)
    graph(torch.tensor([[1, 2]]))
    graph.draw(str(tmp_path / "graph.svg"), passes=True)
    picture = (tmp_path / "graph.svg").read_text()
    assert len(picture) > 10_000 and all(color in picture for color in ("#f9d9b4", "#cfe3f7", "#d9ead3"))


def _mlp_build(self, ids):
    loss = self.mlp(self.a(ids % 7).flatten(1)).sum()
    loss.backward()
    return loss
