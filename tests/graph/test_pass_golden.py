"""Each pass: the graph before and after it as text, its input as it was, and the rules of its stage."""

import pytest
import torch
from torch import fx

import oneemb
from oneemb.graph import ops
from oneemb.graph.modules import embeddings_in
from oneemb.graph.passes.drop_training import drop_training
from oneemb.graph.passes.fuse_lookup import fuse_lookup
from oneemb.graph.passes.hold_lookups import hold_lookups
from oneemb.graph.passes.insert_updates import insert_updates
from oneemb.graph.passes.lower_embeddings import lower_embeddings
from oneemb.graph.passes.merge_embeddings import Member, merge_embeddings
from oneemb.graph.passes.remove_dead import remove_dead
from oneemb.graph.passes.scale_losses import scale_losses
from oneemb.graph.passes.share_unique import share_unique
from oneemb.graph.passes.split_prepare import split_prepare
from oneemb.graph.spec import check_stage
from oneemb.graph.text import graph_text
from oneemb.graph.tracer import trace
from tests.support.graph_models import adam, make_embedding, make_graph, sgd

KEYS = "(ids, None, 2, int64, None)"


def lowered(graph, **kwargs):
    return lower_embeddings(trace(graph).graph, embeddings_in(graph), **kwargs)


def check_pass(run, before, stage, expected, embeddings=None):
    """The text after a pass is as expected, the input is untouched and the output is legal."""
    text = graph_text(before)
    after = run(before)
    assert graph_text(before) == text
    check_stage(after, stage, embeddings or {})
    assert graph_text(after) == expected.strip()
    return after


def simple(clip=False):
    def build(self, ids):
        loss = self.a(ids).sum()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 2.0)
        return loss

    return make_graph({"a": make_embedding(), "mlp": torch.nn.Linear(1, 1)}, build, sgd)


def twice(inplace=False, same=True):
    def build(self, ids):
        a = self.a(ids)
        if inplace:
            ids.add_(1)
        b = self.b(ids if same else ids + 1)
        loss = a.sum() + b.sum()
        loss.backward()
        return loss

    return make_graph({"a": make_embedding("a"), "b": make_embedding("b", 8)}, build, sgd)


def test_lower_embeddings():
    graph = simple()
    embeddings = embeddings_in(graph)
    check_pass(
        lambda g: lower_embeddings(g, embeddings),
        trace(graph).graph,
        "lowered",
        f"""
inputs: ids
unique_keys = unique_keys{KEYS}
acquire = acquire(a.store, unique_keys)
gather = gather(acquire, a.weight)
sum_1 = gather.sum()
sum_1.backward()
return sum_1""",
        embeddings,
    )
    assert "peek(a.store, unique_keys)" in graph_text(lower_embeddings(trace(graph).graph, embeddings, inserts=False))


def test_share_unique():
    check_pass(
        share_unique,
        lowered(twice()),
        "lowered",
        f"""
inputs: ids
unique_keys = unique_keys{KEYS}
acquire = acquire(a.store, unique_keys)
gather = gather(acquire, a.weight)
acquire_1 = acquire(b.store, unique_keys)
gather_1 = gather(acquire_1, b.weight)
sum_1 = gather.sum()
sum_2 = gather_1.sum()
add = sum_1 + sum_2
add.backward()
return add""",
    )


def bags(change=None):
    """Two lookups of bags; `change` makes the second one differ."""

    def build(self, ids, offsets, scales):
        a = self.a(ids, None, offsets, scales)
        given = {"ids": ids, "offsets": offsets, "table_ids": None, **({} if change is None else change(ids, offsets))}
        b = self.b(given["ids"], given["table_ids"], given["offsets"], pooling="mean")
        return a.sum() + b.sum()

    return make_graph({"a": make_embedding("a"), "b": make_embedding("b", 8), "mlp": torch.nn.Linear(1, 1)}, build, sgd)


def test_share_unique_of_bags():
    check_pass(
        share_unique,
        lowered(bags()),
        "lowered",
        """
inputs: ids, offsets, scales
unique_keys = unique_keys(ids, None, 2, int64, None, offsets)
check_pooling(unique_keys, scales, 'sum')
acquire = acquire(a.store, unique_keys)
gather = gather(acquire, a.weight, scales, 'sum')
acquire_1 = acquire(b.store, unique_keys)
gather_1 = gather(acquire_1, b.weight, None, 'mean')
sum_1 = gather.sum()
sum_2 = gather_1.sum()
add = sum_1 + sum_2
return add""",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, offsets: {"offsets": offsets * 1},
        lambda ids, offsets: {"offsets": None, "ids": ids.reshape(-1, 2)},
        lambda ids, offsets: {"table_ids": offsets[1:] % 2},
    ],
    ids=["other offsets", "no offsets", "other tables"],
)
def test_keys_of_other_bags_are_not_shared(change):
    assert sum(node.target is ops.unique_keys for node in share_unique(lowered(bags(change))).nodes) == 2


def test_split_prepare_finds_the_keys_of_bags_ahead_and_checks_scales_in_the_step():
    prepare, compute = split_prepare(share_unique(lowered(bags())))
    assert graph_text(prepare).splitlines()[1:] == [
        "unique_keys = unique_keys(ids, None, 2, int64, None, offsets)",
        "prefetch = prefetch(a.store, unique_keys)",
        "prefetch_1 = prefetch(b.store, unique_keys)",
        "return [unique_keys, prefetch, prefetch_1]",
    ]
    assert graph_text(compute).splitlines()[1:4] == [
        "check_pooling(unique_keys, scales, 'sum')",
        "acquire = acquire(a.store, unique_keys, prefetched=prefetch)",
        "gather = gather(acquire, a.weight, scales, 'sum')",
    ]


MEMBERS = {"a.store": Member("merged_0", 0), "b.store": Member("merged_0", 2), "c.store": Member("merged_0", 4)}


def three(build):
    return lowered(
        make_graph({name: make_embedding(name) for name in "abc"} | {"mlp": torch.nn.Linear(1, 1)}, build, sgd)
    )


def lookups(graph):
    """The embeddings of each merged lookup, and those looked up alone."""
    merged = merge_embeddings(graph, MEMBERS)
    check_stage(merged, "lowered", {})
    found = []
    for node in merged.nodes:
        if node.target is ops.unique_merged_keys:
            found.append("".join("abc"[lookup[0] // 2] for lookup in node.args[0]))
        elif node.target is ops.acquire and node.args[0].target != "merged_0":
            found.append(node.args[0].target)
    return found


def test_merge_embeddings():
    def build(self, ids, offsets, scales):
        c = self.c(ids)
        a = self.a((ids + 1).reshape(-1), None, offsets, scales)
        loss = c.sum() + a.sum() + self.b(ids).sum()
        loss.backward()
        return loss

    check_pass(
        lambda graph: merge_embeddings(graph, {name: MEMBERS[name] for name in ("a.store", "c.store")}),
        three(build),
        "lowered",
        f"""
inputs: ids, offsets, scales
add = ids + 1
reshape = add.reshape(-1)
unique_merged_keys = unique_merged_keys(((0, reshape, None, 2, offsets), (4, ids, None, 2, None)), int64, None)
check_merged_pooling(unique_merged_keys, ((0, scales, 'sum'),))
acquire_3 = acquire(merged_0, unique_merged_keys)
gather_merged = gather_merged(acquire_3, ((0, a.weight, scales, 'sum'), (1, c.weight, None, 'sum')))
getitem = gather_merged[0]
getitem_1 = gather_merged[1]
sum_1 = getitem_1.sum()
sum_2 = getitem.sum()
add_1 = sum_1 + sum_2
unique_keys_2 = unique_keys{KEYS}
acquire_2 = acquire(b.store, unique_keys_2)
gather_2 = gather(acquire_2, b.weight)
sum_3 = gather_2.sum()
add_2 = add_1 + sum_3
add_2.backward()
return add_2""",
    )


def test_a_merged_lookup_is_prepared_ahead():
    def build(self, ids):
        return self.a(ids).sum() + self.b(ids + 1).sum()

    prepare, _ = split_prepare(merge_embeddings(three(build), MEMBERS))
    check_stage(prepare, "prepare", {})
    assert graph_text(prepare).splitlines()[-2:] == [
        "prefetch = prefetch(merged_0, unique_merged_keys)",
        "return [unique_merged_keys, prefetch]",
    ]


def test_lookups_are_merged_only_where_the_first_is():
    def of_rows(self, ids):
        a = self.a(ids)
        b = self.b(ids + a.sum().long())
        return b.sum() + self.c(ids).sum()

    def of_dense(self, ids, x):
        a = self.a(ids)
        return a.sum() + self.b(ids + self.mlp(x).long()).sum() + self.c(ids).sum()

    def across_backward(self, ids):
        loss = self.a(ids).sum()
        loss.backward()
        return self.b(ids).sum() + self.c(ids).sum()

    def across_a_context(self, ids):
        a = self.a(ids)
        with torch.no_grad():
            b = self.b(ids)
        return a.sum() + b.sum() + self.c(ids).sum()

    def across_a_change(self, ids):
        a = self.a(ids)
        ids.add_(1)
        return a.sum() + self.b(ids).sum() + self.c(ids).sum()

    def twice_of_one(self, ids):
        return self.a(ids).sum() + self.a(ids + 1).sum() + self.b(ids).sum() + self.b(ids * 2).sum() + self.c(ids).sum()

    def scaled_by_rows(self, ids, offsets):
        a = self.a(ids)
        return self.b(ids.reshape(-1), None, offsets, a.reshape(-1)).sum() + self.c(ids).sum()

    def alone(self, ids):
        return self.a(self.a(ids).long()[..., 0]).sum()

    assert lookups(three(of_rows)) == ["ac", "b"]
    assert lookups(three(of_dense)) == ["ac", "b"]
    assert lookups(three(across_backward)) == ["a", "bc"]
    assert lookups(three(across_a_context)) == ["a.store", "b.store", "c.store"]
    assert lookups(three(across_a_change)) == ["a", "bc"]
    assert lookups(three(twice_of_one)) == ["abc", "ab"]
    assert lookups(three(scaled_by_rows)) == ["ac", "b"]
    assert lookups(three(alone)) == ["a.store", "a.store"]
    every = merge_embeddings(three(alone), MEMBERS, every=True)
    assert sum(node.target is ops.unique_merged_keys for node in every.nodes) == 2


@pytest.mark.parametrize("graph", [twice(inplace=True), twice(same=False)], ids=["changed in place", "other ids"])
def test_unique_keys_of_ids_that_may_differ_are_not_shared(graph):
    assert graph_text(share_unique(lowered(graph))).count("unique_keys(") == 2


def test_fuse_lookup_leaves_shared_keys():
    assert graph_text(fuse_lookup(share_unique(lowered(twice())))).count("lookup(") == 0
    check_pass(
        fuse_lookup,
        lowered(simple()),
        "lowered",
        """
inputs: ids
lookup = lookup(a.store, ids, None, 2, int64, None)
gather = gather(lookup, a.weight)
sum_1 = gather.sum()
sum_1.backward()
return sum_1""",
    )


def test_insert_updates():
    check_pass(
        lambda g: insert_updates(g, [("optimizer_0", None)], trains={"a.store": "optimizer_0"}),
        lowered(simple()),
        "trained",
        f"""
inputs: ids
unique_keys = unique_keys{KEYS}
acquire = acquire(a.store, unique_keys)
gather = gather(acquire, a.weight)
sum_1 = gather.sum()
sum_1.backward()
reduce_grads = reduce_grads([acquire])
check_finite = check_finite([optimizer_0], [reduce_grads])
step = step(optimizer_0, check_finite)
update(optimizer_0, reduce_grads, check_finite, step)
release([acquire])
advance([optimizer_0], [None], check_finite)
return sum_1""",
    )


def test_insert_updates_sums_the_gradients_of_rows_before_build_clips():
    check_pass(
        lambda g: insert_updates(g, [("optimizer_0", "lr_scheduler_0")]),
        lowered(simple(clip=True)),
        "trained",
        f"""
inputs: ids
unique_keys = unique_keys{KEYS}
acquire = acquire(a.store, unique_keys)
gather = gather(acquire, a.weight)
sum_1 = gather.sum()
sum_1.backward()
reduce_grads = reduce_grads([acquire])
clip_grad_norm = clip_grad_norm([mlp.weight, mlp.bias], [reduce_grads], 2.0)
getitem = clip_grad_norm[0]
getitem_1 = getitem[0]
check_finite = check_finite([optimizer_0], [getitem_1])
step = step(optimizer_0, check_finite)
update(optimizer_0, getitem_1, check_finite, step)
release([acquire])
advance([optimizer_0], [lr_scheduler_0], check_finite)
return sum_1""",
    )


def test_insert_updates_with_all_there_is():
    text = graph_text(
        insert_updates(
            scale_losses(lowered(simple()), "grad_scaler"),
            [("optimizer_0", None)],
            trains={"a.store": "optimizer_0"},
            max_norms={"optimizer_0": 3.0},
            held="held",
        )
    )
    assert text.splitlines()[4:] == [
        "sum_1 = gather.sum()",
        "scale_loss = scale_loss(grad_scaler, sum_1)",
        "scale_loss.backward()",
        "take = take(held, a.store, [acquire])",
        "reduce_grads = reduce_grads(take)",
        "unscale = unscale(grad_scaler, [optimizer_0], [reduce_grads])",
        "getitem = unscale[0]",
        "clip_grad_norm = clip_grad_norm(optimizer_0, [getitem], 3.0)",
        "getitem_1 = clip_grad_norm[0]",
        "getitem_2 = getitem_1[0]",
        "check_finite = check_finite([optimizer_0], [getitem_2], grad_scaler)",
        "step = step(optimizer_0, check_finite)",
        "update(optimizer_0, getitem_2, check_finite, step)",
        "update_scale(grad_scaler, check_finite)",
        "drop(held)",
        "advance([optimizer_0], [None], check_finite)",
        "return sum_1",
    ]


def test_hold_lookups():
    after = check_pass(
        lambda g: hold_lookups(g, "held"),
        lowered(simple()),
        "trained",
        f"""
inputs: ids
unique_keys = unique_keys{KEYS}
acquire = acquire(a.store, unique_keys)
gather = gather(acquire, a.weight)
sum_1 = gather.sum()
sum_1.backward()
hold(held, [acquire])
return sum_1""",
    )
    assert after is not None


def test_drop_training_leaves_out_losses_scales_and_clips():
    graph = simple(clip=True)
    before = scale_losses(lowered(graph, inserts=False), "grad_scaler")
    check_pass(
        drop_training,
        before,
        "compute",
        f"""
inputs: ids
unique_keys = unique_keys{KEYS}
peek = peek(a.store, unique_keys)
sum_1 = peek.sum()
return sum_1""",
    )


def test_remove_dead_keeps_updates_acquisitions_random_numbers_and_what_it_does_not_know():
    def build(self, ids, x):
        self.a(ids)
        x.float()
        torch.rand(3)
        self.dropout(x)
        x.add_(1)
        unused = (x + 1).reshape(-1)  # noqa: F841
        loss = self.mlp(x).sum()
        loss.backward()
        return loss

    graph = make_graph({"a": make_embedding(), "mlp": torch.nn.Linear(1, 1), "dropout": torch.nn.Dropout()}, build, sgd)
    before = insert_updates(lowered(graph), [("optimizer_0", None)])
    check_pass(
        remove_dead,
        before,
        "trained",
        f"""
inputs: ids, x
unique_keys = unique_keys{KEYS}
acquire = acquire(a.store, unique_keys)
rand(3)
dropout(x)
x.add_(1)
mlp = mlp(x)
sum_1 = mlp.sum()
sum_1.backward()
reduce_grads = reduce_grads([acquire])
check_finite = check_finite([optimizer_0], [reduce_grads])
step = step(optimizer_0, check_finite)
update(optimizer_0, reduce_grads, check_finite, step)
release([acquire])
advance([optimizer_0], [None], check_finite)
return sum_1""",
    )
    # Saboteur: torch's own removal takes the update out.
    before = insert_updates(lowered(simple()), [("optimizer_0", None)])
    assert "update(" in graph_text(remove_dead(before))
    before.eliminate_dead_code()
    assert "update(" not in graph_text(before)


def test_split_prepare():
    prepare, compute = split_prepare(insert_updates(lowered(twice(same=False)), [("optimizer_0", None)]))
    check_stage(prepare, "prepare", {})
    check_stage(compute, "compute", {})
    assert graph_text(prepare) == "\n".join(
        [
            "inputs: ids",
            f"unique_keys = unique_keys{KEYS}",
            "add = ids + 1",
            "unique_keys_1 = unique_keys(add, None, 2, int64, None)",
            "prefetch = prefetch(a.store, unique_keys)",
            "prefetch_1 = prefetch(b.store, unique_keys_1)",
            "return [unique_keys, unique_keys_1, prefetch, prefetch_1]",
        ]
    )
    assert graph_text(compute).splitlines()[:5] == [
        "inputs: ids, unique_keys, unique_keys_1, prefetch, prefetch_1",
        "acquire = acquire(a.store, unique_keys, prefetched=prefetch)",
        "gather = gather(acquire, a.weight)",
        "acquire_1 = acquire(b.store, unique_keys_1, prefetched=prefetch_1)",
        "gather_1 = gather(acquire_1, b.weight)",
    ]


def test_split_prepare_leaves_ids_that_the_step_computes_or_may_have_changed():
    def build(self, ids, x):
        chosen = self.mlp(x).argmax(1, keepdim=True).expand(-1, 2)
        ids.add_(1)
        return self.a(chosen).sum() + self.a(ids).sum() + self.a(torch.randint(5, (2, 2))).sum()

    graph = make_graph({"a": make_embedding(), "mlp": torch.nn.Linear(1, 1)}, build, sgd)
    prepare, compute = split_prepare(lowered(graph))
    assert graph_text(prepare) == "inputs: ids, x\nreturn []"
    assert graph_text(compute).count("unique_keys(") == 3


def test_the_check_of_stages_refuses_what_is_wrong():
    graph = insert_updates(lowered(simple()), [("optimizer_0", None)])
    with pytest.raises(AssertionError, match="not legal at stage lowered"):
        check_stage(graph, "lowered", {})
    release = next(node for node in graph.nodes if node.target is ops.release)
    graph.erase_node(release)
    with pytest.raises(AssertionError, match="released 0 times"):
        check_stage(graph, "trained", {})
    with pytest.raises(AssertionError, match="not lowered"):
        check_stage(trace(simple()).graph, "lowered", embeddings_in(simple()))
    wrong = fx.Graph()
    x = wrong.call_function(torch.rand, (2,))
    wrong.call_function(ops.exit_context, (x,))
    wrong.call_function(ops.gather, (x, x))
    wrong.output(None)
    with pytest.raises(AssertionError, match="is no lease"):
        check_stage(wrong, "compute", {})


def test_a_graph_shows_itself():
    graph = simple()
    assert "not compiled yet" in str(graph)
    graph(torch.tensor([[1, 2]]))
    assert "prepare:" in str(graph) and "prefetch(a.store, unique_keys)" in str(graph)
    assert "update(optimizer_0, reduce_grads, check_finite, step)" in str(graph)
    assert graph.compiled().code.count("update_update(") == 1


def test_every_kind_of_argument_reads_as_python():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.cat, ([x, x],), {"dim": 0})
    z = graph.call_method("to", (y, torch.float16), {"device": torch.device("cpu")})
    graph.output({"z": (z,), "n": None})
    assert graph_text(graph).splitlines() == [
        "inputs: x",
        "cat = cat([x, x], dim=0)",
        "to = cat.to(float16, device=cpu)",
        "return {'z': (to,), 'n': None}",
    ]


def test_drawing_shows_every_pass(tmp_path):
    pytest.importorskip("matplotlib")
    graph = make_graph({"a": make_embedding(), "mlp": oneemb.nn.FusedMLP(8, [4], 1)}, _mlp_build, adam)
    with pytest.raises(RuntimeError, match="not compiled"):
        graph.draw(str(tmp_path / "early.svg"))
    graph(torch.tensor([[1, 2]]))
    graph.draw(str(tmp_path / "graph.svg"))
    assert (tmp_path / "graph.svg").stat().st_size > 10_000


def _mlp_build(self, ids):
    loss = self.mlp(self.a(ids).flatten(1)).sum()
    loss.backward()
    return loss
