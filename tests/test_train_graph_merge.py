"""Embeddings whose rows are alike are looked up and updated at once: the same numbers, errors, pins and steps."""

import gc
import tracemalloc

import pytest
import torch

import oneemb
from oneemb.graph import pipeline
from oneemb.storage.row_store import StorageError, StoreFullError
from tests.support.graph_models import adam, make_eager, make_embedding, make_graph, rows_of, sgd, weights_of
from tests.support.keys import limit_rows

NAMES = ("a", "b", "c")


def modules_of(store="device", tables=(1, 2, 1), dims=(4, 4, 4), width=12, **kwargs):
    torch.manual_seed(0)
    modules = {
        name: make_embedding(name, dim, count, store, seed=i, **kwargs)
        for i, (name, count, dim) in enumerate(zip(NAMES, tables, dims, strict=True))
    }
    return modules | {"mlp": torch.nn.Linear(width, 1)}


def batches_of(count=5, size=6):
    make = torch.Generator().manual_seed(1)
    for _ in range(count):
        x, y = (torch.randint(-9, 9, (size, 2), generator=make) for _ in "xy")
        cuts = torch.randint(0, 2 * size + 1, (size - 1,), generator=make).sort().values
        offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([2 * size])])
        yield x, y, offsets, torch.rand(2 * size, generator=make)


def simple(self, x, y, offsets, scales):
    rows = torch.cat([self.a(x[:, 0]), self.b(y).sum(1), self.c(x[:, 1])], 1)
    loss = self.mlp(rows).square().mean()
    loss.backward()
    return loss.detach()


def pooled(self, x, y, offsets, scales):
    a = self.a(x.reshape(-1), None, offsets, scales)
    b = self.b(x.reshape(-1), torch.arange(6) % 2, offsets, pooling="mean")
    c = self.c(y.sum(1))
    loss = self.mlp(torch.cat([a, b, c], 1)).square().mean()
    loss.backward()
    return loss.detach()


def maxima(self, x, y, offsets, scales):
    """b has no gradient in one pass, and its bags lie beside those of a."""
    a = self.a(x.reshape(-1), None, offsets, pooling="max")
    b = self.b(y.reshape(-1), offsets[1:] % 2, offsets, pooling="max")
    c = self.c(x.reshape(-1), None, offsets, scales)
    loss = self.mlp(torch.cat([a, b, c], 1)).square().mean()
    loss.backward(retain_graph=True)
    second = (a.mean() - c.mean()) ** 2
    second.backward()
    return loss.detach() + second.detach()


def maxima_of_some(self, x, y, offsets, scales):
    """a has no gradient, b is in no bags."""
    a = self.a(x.reshape(-1), None, offsets, pooling="max")
    b = self.b(y).sum(1)
    c = self.c(x.reshape(-1), None, offsets, pooling="max")
    loss = self.mlp(torch.cat([a.detach(), b, c], 1)).square().mean()
    loss.backward()
    return loss.detach()


def learned_scales(self, x, y, offsets, scales):
    a = self.a(x.reshape(-1), None, offsets, self.mlp.scale * scales)
    b = self.b(y).sum(1)
    c = self.c(x.reshape(-1), None, offsets, scales * scales)
    loss = self.mlp(torch.cat([a, b, c], 1)).square().mean()
    loss.backward()
    return loss.detach()


def again(self, x, y, offsets, scales):
    rows = torch.cat([self.a(x[:, 0]) + self.a(y[:, 0]), self.b(y).sum(1), self.c(x[:, 1]) * self.c(y[:, 1])], 1)
    loss = self.mlp(rows).square().mean()
    loss.backward()
    return loss.detach()


def unused(self, x, y, offsets, scales):
    """c has no gradient, b none for batches of one kind."""
    self.c(x[:, 1])
    b = self.b(y).sum(1)
    loss = self.mlp(torch.cat([self.a(x[:, 0]), b, b.detach()], 1)).square().mean()
    loss.backward()
    return loss.detach()


def chained(self, x, y, offsets, scales):
    a = self.a(x[:, 0])
    b = self.b(y + (a.detach().abs() * 1e4).long()[:, :2]).sum(1)
    loss = self.mlp(torch.cat([a, b, self.c(x[:, 1])], 1)).square().mean()
    loss.backward()
    return loss.detach()


def losses(self, x, y, offsets, scales):
    a, b, c = self.a(x[:, 0]), self.b(y).sum(1), self.c(x[:, 1])
    first = self.mlp(torch.cat([a, b, c], 1)).square().mean()
    first.backward(retain_graph=True)
    second = (a.mean() - c.mean()) ** 2
    second.backward()
    with torch.no_grad():
        extra = self.b(x).sum()
    return first.detach() + second.detach() + extra


def in_place(self, x, y, offsets, scales):
    a, b = self.a(x[:, 0]), self.b(y).sum(1)
    a.mul_(2.0)
    b.add_(1.0)
    loss = self.mlp(torch.cat([a, b, self.c(x[:, 1])], 1)).square().mean()
    loss.backward()
    return loss.detach()


def results(make, build, optimizers, ways, options=None, **kwargs):
    """What a way of training gives: losses, rows, dense weights, steps, and pins that are left."""
    modules = modules_of(**kwargs)
    modules["mlp"].scale = torch.nn.Parameter(torch.rand(12))
    step = make(modules, build, optimizers, **(options or {}))
    got = ways(step)
    embeddings = [modules[name] for name in NAMES]
    stats = [one.stats() for one in embeddings]
    if make is make_graph:
        assert not any(one["device"]["pinned"] for one in stats) and not any(
            one.store._prefetched for one in embeddings
        )
    found = got, [rows_of(one) for one in embeddings], weights_of(modules["mlp"]), [one["step"] for one in stats]
    for one in embeddings:
        one.close()
    return found


def same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1] == other[1] and one[3] == other[3]
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


CALLS = lambda step: [step(*batch) for batch in batches_of()]  # noqa: E731
AHEAD = lambda step: list(step.run(list(batches_of()), 2))  # noqa: E731


@pytest.mark.parametrize("store", ["device", "ssd"])
@pytest.mark.parametrize(
    "build",
    [simple, pooled, maxima, maxima_of_some, learned_scales, again, unused, chained, losses, in_place],
    ids=lambda build: build.__name__,
)
def test_merged_equals_eager(build, store):
    eager = results(make_eager, build, adam, CALLS, store=store)
    for ways in (CALLS, AHEAD):
        seen = []

        def run(step, ways=ways, seen=seen):
            got = ways(step)
            seen.append(str(step))
            return got

        same(results(make_graph, build, adam, run, store=store), eager)
        assert "acquire(merged_0, unique_merged_keys" in seen[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_other_dtypes_and_padding(dtype, padding_idx):
    def build(self, x, y, offsets, scales):
        rows = torch.cat([self.a(x[:, 0]), self.b(y).sum(1), self.c(x.reshape(-1), None, offsets, scales)], 1)
        loss = self.mlp(rows.float()).square().mean()
        loss.backward()
        return loss.detach()

    options = dict(dtype=dtype, padding_idx=padding_idx)
    same(results(make_graph, build, adam, CALLS, **options), results(make_eager, build, adam, CALLS, **options))


def test_one_table_for_all_ids_of_a_batch_that_may_be_empty():
    def build(self, x, y, offsets, scales):
        ids = x[:, 0]
        a, b = self.a(ids, torch.tensor(0)), self.b(ids, torch.tensor(1))
        c = self.c(ids, torch.tensor(0), torch.arange(ids.shape[0] + 1))
        loss = torch.cat([a, b, c], 1).square().sum()
        loss.backward()
        return loss.detach()

    def ways(step):
        batches = list(batches_of())
        return [step(*batch) for x, *rest in batches for batch in ((x, *rest), (x[:0], *rest))]

    same(results(make_graph, build, adam, ways), results(make_eager, build, adam, ways))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_several_backward_passes_of_half_width_rows(dtype):
    """a and c are in two of them, b is in one."""

    def build(self, x, y, offsets, scales):
        a, b, c = self.a(x[:, 0]), self.b(y).sum(1), self.c(x[:, 1])
        first = self.mlp(torch.cat([a, b, c], 1).float()).square().mean()
        first.backward(retain_graph=True)
        second = (a.mean() - c.mean()) ** 2
        second.backward()
        return first.detach() + second.detach()

    eager = results(make_eager, build, adam, CALLS, dtype=dtype)
    for ways in (CALLS, AHEAD):
        same(results(make_graph, build, adam, ways, dtype=dtype), eager)


def clips(self, x, y, offsets, scales):
    rows = torch.cat([self.a(x[:, 0]), self.b(y).sum(1), self.c(x[:, 1])], 1)
    loss = self.mlp(rows).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([self.a.weight, self.b.weight, self.c.weight, *self.mlp.parameters()], 0.01)
    return loss.detach()


def clips_some(self, x, y, offsets, scales):
    rows = torch.cat([self.a(x[:, 0]), self.b(y).sum(1), self.c(x[:, 1])], 1)
    loss = self.mlp(rows).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_value_([self.a.weight, self.c.weight], 1e-4)
    return loss.detach()


def accumulate(step):
    step.config.accumulation_steps = 2
    return list(step.run(list(batches_of(6)), 2))


def overflow(step):
    step.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0**120))
    return CALLS(step)


@pytest.mark.parametrize(
    "case",
    [
        (clips, CALLS, {}),
        (clips_some, AHEAD, {}),
        (simple, CALLS, {"clip_grad_norm": 0.01}),
        (again, accumulate, {}),
        (unused, accumulate, {"clip_grad_norm": 0.01}),
        (simple, overflow, {}),
    ],
    ids=["clip in build", "clip some", "clip", "accumulate", "accumulate and clip", "overflow"],
)
def test_merged_equals_unmerged(case, monkeypatch):
    build, ways, options = case
    merged = results(make_graph, build, adam, ways, options)
    monkeypatch.setattr(pipeline, "_members", lambda *args: ({}, {}))
    same(merged, results(make_graph, build, adam, ways, options))


def test_only_what_one_group_of_one_optimizer_trains_is_merged():
    def groups(owner):
        return [
            torch.optim.Adam([{"params": [owner.a.weight, owner.c.weight]}, {"params": [owner.b.weight], "lr": 0.1}]),
            torch.optim.SGD(owner.mlp.parameters(), lr=0.1),
        ]

    modules = modules_of()
    graph = make_graph(modules, simple, groups)
    graph(*next(batches_of()))
    assert "(0, getitem, None, 1, None), (1, getitem_1, None, 1, None)" in str(graph)
    assert "acquire(b.store, unique_keys" in str(graph)
    same(results(make_graph, simple, groups, CALLS), results(make_eager, simple, groups, CALLS))


@pytest.mark.parametrize("kwargs", [dict(dims=(4, 3, 8), width=15), dict(dims=(4, 4, 8), width=16)])
def test_rows_of_other_widths_are_not_merged(kwargs):
    seen = []

    def run(step):
        got = CALLS(step)
        seen.append(str(step))
        return got

    same(results(make_graph, simple, sgd, run, **kwargs), results(make_eager, simple, sgd, CALLS, **kwargs))
    assert ("merged_0" in seen[0]) == (kwargs["dims"][1] == 4) and "acquire(c.store" in seen[0]


def test_stores_that_are_not_equally_far_take_steps_of_their_own():
    def build(self, x, y, offsets, scales, more):
        a, b = self.a(x[:, 0]), self.b(y).sum(1)
        rows = [a, b, self.c(x[:, 1])] if more else [a, a, a]
        loss = self.mlp(torch.cat(rows, 1)).square().mean()
        loss.backward()
        return loss.detach()

    def run(step):
        return [step(*batch, i % 3 > 0) for i, batch in enumerate(batches_of(7))]

    merged, eager = results(make_graph, build, adam, run), results(make_eager, build, adam, run)
    same(merged, eager)
    assert merged[3] == [7, 4, 4]


def test_a_module_in_the_place_of_another_is_compiled_anew():
    modules = modules_of()
    graph = make_graph(modules, simple, lambda owner: [torch.optim.SGD(owner.mlp.parameters(), lr=0.1)])
    for name in NAMES:
        getattr(graph, name).requires_grad_(False)
    batch = next(batches_of())
    graph(*batch)
    other = make_embedding("other", 4, 1).requires_grad_(False)
    before, graph.a = graph.a, other
    graph(*batch)
    assert other.stats()["rows"] == before.stats()["rows"] > 0


def test_a_full_store_is_named_with_its_line_and_nothing_stays_pinned():
    modules = modules_of()
    graph = make_graph(modules, simple, adam)
    graph(*next(batches_of()))
    limit_rows(modules["c"].store, modules["c"].stats()["rows"])
    before = [one.stats()["step"] for one in map(modules.get, NAMES)]
    for run in (lambda batches: [graph(*batch) for batch in batches], lambda batches: list(graph.run(batches))):
        batches = [(x + 100, y, offsets, scales) for x, y, offsets, scales in batches_of()]
        with pytest.raises(StoreFullError) as caught:
            run(batches)
        notes = " ".join(caught.value.__notes__)
        assert "in embedding 'c'" in notes and "self.c(x[:, 1])" in notes
        assert [modules[name].stats()["device"]["pinned"] for name in NAMES] == [0, 0, 0]
    assert [one.stats()["step"] for one in map(modules.get, NAMES)] == before


def test_errors_are_those_of_the_lookup_they_are_of():
    def build(self, x, y, offsets, scales):
        a = self.a(x[:, 0])
        b = self.b(
            y
        ).sum(1)  # fmt: skip
        c = self.c(x.reshape(-1), None, offsets, scales)
        loss = torch.cat([a, b, c], 1).sum()
        loss.backward()
        return loss

    modules = modules_of()
    graph = make_graph(modules, build, sgd)
    x, y, offsets, scales = next(batches_of())
    for batch, said in (
        ((x, y.int(), offsets, scales), "ids must be torch.int64"),
        ((x, y[:, :1], offsets, scales), "one column a table"),
        ((x, y, offsets.flip(0), scales), "offsets must begin with 0"),
        ((x, y, offsets, scales.double()), "per_sample_weights must be float32"),
        ((x, y, offsets, scales[1:]), "one for each of 12 ids"),
    ):
        with pytest.raises((TypeError, ValueError), match=said) as caught:
            graph(*batch)
        line = "self.c(" if "offsets" in said or "scales" in said or "per_sample" in said or "12" in said else "self.b("
        assert line in " ".join(caught.value.__notes__)
    assert [modules[name].stats()["rows"] for name in NAMES] == [0, 0, 0]


def test_a_gradient_that_is_not_finite_names_the_embedding_and_changes_nothing():
    def build(self, x, y, offsets, scales):
        loss = self.a(x[:, 0]).sum() + (self.b(y).sum(1) * scales[:6, None]).sum() + self.c(x[:, 1]).sum()
        loss.backward()
        return loss

    modules = modules_of()
    graph = make_graph(modules, build, sgd)
    x, y, offsets, scales = next(batches_of())
    graph(x, y, offsets, scales)
    before = [rows_of(modules[name]) for name in NAMES]
    scales[0] = float("nan")
    with pytest.raises(ArithmeticError, match=f"id {int(y[0, 0])} in table 0 of embedding 'b'"):
        graph(x, y, offsets, scales)
    assert [rows_of(modules[name]) for name in NAMES] == before


def test_rows_replaced_between_micro_batches_are_said_so():
    modules = modules_of()
    graph = make_graph(modules, simple, adam)
    graph.config.accumulation_steps = 2
    first, second = batches_of(2)
    graph(*first)
    graph(*second)
    modules["b"].save_snapshot("s")
    graph(*first)
    modules["b"].load_snapshot("s")
    with pytest.raises(StorageError, match="replaced"):
        graph(*second)
    assert [modules[name].stats()["device"]["pinned"] for name in NAMES] == [0, 0, 0]


def test_evaluation_beside_training_reads_what_was_trained():
    modules = modules_of("ssd")
    graph = make_graph(modules, simple, adam)

    class Score(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)

        def build(self, x, y):
            return self.mlp(torch.cat([self.a(x[:, 0]), self.b(y).sum(1), self.c(x[:, 1])], 1))

    score = Score()
    for x, y, offsets, scales in batches_of():
        graph(x, y, offsets, scales)
        with torch.no_grad():
            rows = torch.cat([modules["a"](x[:, 0]), modules["b"](y).sum(1), modules["c"](x[:, 1])], 1)
            assert torch.equal(score(x, y), modules["mlp"](rows))


def kept_mb(modules, build, steps, ids):
    """MiB that losses hold which are kept, beyond what the same steps hold without."""
    graph, sizes = make_graph(modules, build, sgd), []
    graph(ids)
    for keep in (False, True):
        losses = []
        gc.collect()
        tracemalloc.start()
        for _ in range(steps):
            loss = graph(ids)
            losses += [loss] if keep else []
        del loss
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0] / 2**20)
        tracemalloc.stop()
    return sizes[1] - sizes[0]


def test_losses_that_are_kept_hold_no_keys_of_merged_lookups():
    def build(self, ids):
        loss = (self.a(ids) + self.c(ids)).square().sum()
        loss.backward()
        return loss

    ids = torch.arange(20_000)
    # Keys and slots of a step are 20,000 ids * 2 lookups * 30 bytes and more: over 1 MiB.
    mib = kept_mb(modules_of(), build, 10, ids)
    assert mib < 0.5


def test_backward_after_the_step_of_a_merged_lookup_is_an_error():
    def build(self, ids):
        loss = (self.a(ids) + self.c(ids)).square().sum()
        loss.backward(retain_graph=True)
        return loss

    modules = modules_of()
    graph = make_graph(modules, build, sgd)
    loss = graph(torch.arange(5))
    before = rows_of(modules["a"])
    with pytest.raises(RuntimeError, match="after its step"):
        loss.backward()
    assert rows_of(modules["a"]) == before
