"""Embeddings whose rows are alike are looked up and updated at once: the same numbers, errors, pins and steps."""

import dataclasses
import gc
import traceback
import tracemalloc

import pytest
import torch

import oneemb
from oneemb.graph import plan as plans
from oneemb.storage.errors import StoreFullError
from tests.support.graph_models import adam, make_eager, make_embedding, make_graph, rows_of, sgd, weights_of
from tests.support.keys import limit_rows
from tests.support.pairwise import diagonal

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
            one.store.pins.prefetched for one in embeddings
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


def name_of(value):
    return getattr(value, "__name__", str(value))


BUILDS = [simple, pooled, maxima, maxima_of_some, learned_scales, again, unused, chained, losses, in_place]


@pytest.mark.parametrize(("build", "store"), diagonal(BUILDS, ["device", "ssd"]), ids=name_of)
def test_merged_equals_eager(build, store):
    eager = results(make_eager, build, adam, CALLS, store=store)
    for ways in (CALLS, AHEAD):
        seen = []

        def run(step, ways=ways, seen=seen):
            got = ways(step)
            seen.append(str(step))
            return got

        same(results(make_graph, build, adam, run, store=store), eager)
        assert "reserve(merged_0, unique_merged_keys" in seen[0]


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
    monkeypatch.setattr(plans, "_members", lambda *args: ({}, {}))
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
    graph(*next(batches_of()))
    lookups = "MergedLookup(0, 1, getitem), MergedLookup(1, 1, getitem_1)"
    assert f"unique_merged_keys(({lookups}), int64, None)" in str(graph)
    assert "reserve(b.store, unique_keys" in str(graph)
    same(results(make_graph, simple, groups, CALLS), results(make_eager, simple, groups, CALLS))


@pytest.mark.parametrize("kwargs", [dict(dims=(4, 3, 8), width=15), dict(dims=(4, 4, 8), width=16)])
def test_rows_of_other_widths_are_not_merged(kwargs):
    seen = []

    def run(step):
        got = CALLS(step)
        seen.append(str(step))
        return got

    same(results(make_graph, simple, sgd, run, **kwargs), results(make_eager, simple, sgd, CALLS, **kwargs))
    assert ("merged_0" in seen[0]) == (kwargs["dims"][1] == 4) and "reserve(c.store" in seen[0]


def first(x, y):
    return x[:, :1]


def second(x, y):
    return x[:, 1:]


def shifted(x, y):
    return x[:, :1] + y[:, :1]


def growing(count=8, every=(True, False, True)):
    """Batches in which the ids of some columns are new in some batches, and all known in the others."""
    for i, (x, y, offsets, scales) in enumerate(batches_of(count)):
        new = torch.tensor([every[(i + shift) % 3] for shift in (0, 1)])
        yield x + 1000 * i * new, y + 1000 * i * every[(i + 2) % 3], offsets, scales


@pytest.mark.parametrize(
    ("build", "store"), diagonal([simple, pooled, maxima, again, losses], ["device", "ssd"]), ids=name_of
)
def test_new_ids_in_some_lookups_and_none_in_others(build, store):
    eager = results(make_eager, build, adam, lambda step: [step(*batch) for batch in growing()], store=store)
    same(results(make_graph, build, adam, lambda step: [step(*batch) for batch in growing()], store=store), eager)
    same(results(make_graph, build, adam, lambda step: list(step.run(list(growing()), 2)), store=store), eager)


def test_gradients_of_three_lookups_are_summed_in_the_order_of_build():
    """Float sums of three depend on the order: lookups with new ids are acquired last, and build makes lookups in
    another order than it used to."""
    forward = [("a", first), ("b", first), ("a", second), ("b", second), ("a", shifted), ("b", shifted)]
    backward = [forward[i] for i in (4, 1, 2, 5, 0, 3)]

    def build(self, x, y, offsets, scales):
        loss, calls = 0, forward if scales[0] < 0.5 else backward
        for name, ids in calls:
            weight = {first: 1.0, second: 0.3, shifted: 1.7}[ids]
            rows = getattr(self, name)(ids(x, y))
            loss = loss + (rows * weight * scales[:6].reshape(-1, 1, 1)).square().sum()
        loss.backward()
        return loss.detach()

    def batches():
        for i, (x, y, offsets, scales) in enumerate(batches_of(12)):
            scales[0] = i % 4 == 3
            # One id in all three lookups, in one of which there are new ones beside it.
            x, y = x % 3, y % 2
            x[0, 0] = 1000 + i if i % 2 else 1
            yield x, y, offsets, scales

    def calls(step):
        return [step(*batch) for batch in batches()]

    def ahead(step):
        return list(step.run(list(batches()), 2))

    kwargs = dict(tables=(1, 1, 1))
    eager = results(make_eager, build, sgd, calls, **kwargs)
    same(results(make_graph, build, sgd, calls, **kwargs), eager)
    same(results(make_graph, build, sgd, ahead, **kwargs), eager)


@pytest.mark.parametrize(("seed", "store"), diagonal(range(4), ["device", "ssd"]))
def test_any_lookups_in_any_order_equal_eager(seed, store):
    """Lookups are expected that build makes, makes in another order, or does not make."""
    sources = [first, second, shifted]

    def build(self, x, y, chosen):
        loss = 0
        for k, choice in enumerate(chosen.tolist()):
            rows = getattr(self, NAMES[choice % 3])(sources[choice // 3 % 3](x, y))
            if choice >= 18:
                rows = rows.detach()
            loss = loss + (rows * (1.0 + 10.0**-k)).square().sum()
        if choice % 5 and loss.requires_grad:
            loss.backward(retain_graph=choice % 2 == 0)
            if choice % 2 == 0:
                (loss * 0.5).backward()
        return loss.detach()

    make = torch.Generator().manual_seed(seed)

    def draw(high, *size):
        return torch.randint(high, size, generator=make)

    batches, chosen = [], draw(27, 6)
    for i in range(20):
        if draw(3) == 0:
            chosen = chosen[torch.randperm(6, generator=make)]
        elif draw(3) == 0:
            chosen = draw(27, 6)
        x, y = draw(6, 5, 2), draw(4, 5, 2)
        batches.append((x + 100 * i * draw(2, 2), y, chosen))

    def calls(step):
        return [step(*batch) for batch in batches]

    kwargs = dict(store=store, tables=(1, 1, 1))
    eager = results(make_eager, build, sgd, calls, **kwargs)
    same(results(make_graph, build, sgd, calls, **kwargs), eager)
    same(results(make_graph, build, sgd, lambda step: list(step.run(batches, 2)), **kwargs), eager)


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_rows_that_a_tiny_cache_evicts_between_steps(store):
    def build(self, x, y, offsets, scales):
        rows = torch.cat([self.a(x[:, 0]), self.b(y).sum(1), self.c(x[:, 1]), self.a(y[:, 0])], 1)
        loss = (rows * scales[: len(rows), None]).square().sum()
        loss.backward()
        return loss.detach()

    def batches():
        make = torch.Generator().manual_seed(3)
        for _ in range(8):
            x, y = (torch.randint(5000, (300, 2), generator=make) for _ in "xy")
            yield x, y, None, torch.rand(300, generator=make)

    evicted = []

    def run(ahead):
        def way(step):
            got = list(step.run(list(batches()), 2)) if ahead else [step(*batch) for batch in batches()]
            if isinstance(step, oneemb.TrainGraph):
                evicted.append([getattr(step, name).stats()["device"]["evicted"] for name in NAMES])
            return got

        return way

    kwargs = dict(store=store, dims=(64, 64, 64), width=256)  # 768 bytes a row in 1 MiB
    eager = results(make_eager, build, adam, run(False), **kwargs)
    same(results(make_graph, build, adam, run(False), **kwargs), eager)
    same(results(make_graph, build, adam, run(True), **kwargs), eager)
    assert all(min(counts) > 0 for counts in evicted)


def test_rows_of_lookups_in_vain_give_way_where_the_cache_is_full():
    """Eager mode pins what build looks up alone; a graph pins the known rows of merged lookups that it expects."""

    def build(self, x, y, flag):
        ids = x if flag else y
        loss = self.a(ids).square().sum() + self.c(ids).square().sum()
        loss.backward()
        return loss.detach()

    y = torch.arange(1000)[:, None]  # There is room for 1365 rows of 768 bytes.
    batches = [(y + 5000, y, torch.tensor(0)), (y + 5000, y, torch.tensor(0)), (y + 5000, y, torch.tensor(1))]

    def calls(step):
        return [step(*batch) for batch in batches]

    kwargs = dict(store="ssd", dims=(64, 64, 64), tables=(1, 1, 1))
    eager = results(make_eager, build, adam, calls, **kwargs)
    same(results(make_graph, build, adam, calls, **kwargs), eager)
    same(results(make_graph, build, adam, lambda step: list(step.run(batches)), **kwargs), eager)


def test_an_error_in_build_leaves_nothing_and_the_next_step_is_made():
    def build(self, x, y, offsets, scales, fails):
        a, b = self.a(x[:, 0]), self.b(y).sum(1)
        if fails.item() == 1:
            raise KeyError("between lookups")
        loss = self.mlp(torch.cat([a, b, self.c(x[:, 1])], 1)).square().mean()
        loss.backward()
        if fails.item() == 2:
            raise KeyError("after backward")
        return loss.detach()

    batches = [(*batch, torch.tensor(i % 3)) for i, batch in enumerate(batches_of(9))]

    def calls(step):
        got = []
        for batch in batches:
            if batch[-1]:
                with pytest.raises(KeyError):
                    step(*batch)
                if isinstance(step, oneemb.TrainGraph):
                    assert [getattr(step, name).stats()["device"]["pinned"] for name in NAMES] == [0, 0, 0]
                    assert all(parameter.grad is None for parameter in step.parameters())
            else:
                got.append(step(*batch))
        return got

    def make_forgiving(modules, *args, **kwargs):
        step = make_eager(modules, *args, **kwargs)

        def run(*batch):
            try:
                return step(*batch)
            except KeyError:
                for module in modules.values():
                    module.zero_grad()
                raise

        return run

    same(results(make_graph, build, adam, calls), results(make_forgiving, build, adam, calls))


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


def raised_in(error):
    """The line of this file in which an error was raised."""
    return [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__][-1]


def test_a_full_store_raises_in_its_line_and_nothing_stays_pinned():
    modules = modules_of()
    graph = make_graph(modules, simple, adam)
    for batch in batches_of(2):
        graph(*batch)
    assert "merged_0" in str(graph)
    limit_rows(modules["c"].store, modules["c"].stats()["rows"])
    before = [one.stats()["step"] for one in map(modules.get, NAMES)]
    for run in (lambda batches: [graph(*batch) for batch in batches], lambda batches: list(graph.run(batches))):
        batches = [(x + 100, y, offsets, scales) for x, y, offsets, scales in batches_of()]
        with pytest.raises(StoreFullError) as caught:
            run(batches)
        assert "self.c(x[:, 1])" in raised_in(caught.value)
        assert [modules[name].stats()["device"]["pinned"] for name in NAMES] == [0, 0, 0]
    assert [one.stats()["step"] for one in map(modules.get, NAMES)] == before


@pytest.mark.parametrize("accumulation_steps", [1, 100])
def test_a_full_cache_says_how_many_merged_lookups_wait_for_zero_grad(accumulation_steps):
    def build(self, few, many):
        loss = self.a(few).sum() + self.c(many).sum()
        loss.backward()
        return loss.detach()

    graph = make_graph(modules_of("host", tables=(1, 1, 1), dims=(256,) * 3), build, sgd)  # 985 rows fit
    graph.config = dataclasses.replace(graph.config, accumulation_steps=accumulation_steps)
    few, many = torch.arange(3), torch.arange(100)
    for i in range(9):
        graph(few, many + 100 * i)
    assert "merged_0" in str(graph)
    if accumulation_steps == 1:
        graph(few, many + 1000)
        with pytest.raises(StoreFullError, match="or use fewer ids a step") as caught:
            graph(few, torch.arange(1000))
        assert "zero_grad" not in str(caught.value)
    else:
        with pytest.raises(StoreFullError, match="^9 lookups wait for zero_grad.*or use fewer ids a step"):
            graph(few, many + 1000)


def test_merged_lookups_get_the_room_of_those_whose_backward_pass_has_raised():
    def build(self, few, many, fails):
        loss = self.a(few).sum() + self.c(many).sum()
        scale = torch.ones((), requires_grad=True)
        if fails.item():
            scale.register_hook(lambda grad: 1 / 0)
        (loss * scale).backward()
        return loss.detach()

    graph = make_graph(modules_of("host", tables=(1, 1, 1), dims=(256,) * 3), build, sgd)  # 985 rows fit
    few = torch.arange(3)
    for i in range(4):
        graph(few, torch.arange(900) + 1000 * i, torch.tensor(0))
        with pytest.raises(ZeroDivisionError):
            graph(few, torch.arange(900) + 1000 * i + 100_000, torch.tensor(1))
    graph(few, torch.arange(900) + 1_000_000, torch.tensor(0))
    assert graph.c.stats()["device"]["pinned"] == 0


def test_errors_are_those_of_the_lookup_they_are_of():
    def build(self, x, y, offsets, scales):
        a = self.a(x[:, 0])
        b = self.b(y).sum(1)
        c = self.c(x.reshape(-1), None, offsets, scales)
        loss = torch.cat([a, b, c], 1).sum()
        loss.backward()
        return loss

    modules = modules_of()
    graph = make_graph(modules, build, sgd)
    x, y, offsets, scales = next(batches_of())
    for _ in range(2):
        graph(x, y, offsets, scales)
    for name in NAMES:
        modules[name].clear()
    for batch, said in (
        ((x, y.int(), offsets, scales), "ids must be torch.int64"),
        ((x, y[:, :1], offsets, scales), "one column a table"),
        ((x, y, offsets.flip(0), scales), "offsets must begin with 0"),
        ((x, y, offsets, scales.double()), "per_sample_weights must be float32"),
        ((x, y, offsets, scales[1:]), "one for each of 12 ids"),
    ):
        line = "self.b(" if "ids must" in said or "column" in said else "self.c("
        for run in (lambda: graph(*batch), lambda: list(graph.run([batch]))):  # noqa: B023  # called at once
            with pytest.raises((TypeError, ValueError), match=said) as caught:
                run()
            assert line in raised_in(caught.value)
            traceback.clear_frames(caught.value.__traceback__)  # which hold what was looked up
            assert [modules[name].stats()["device"]["pinned"] for name in NAMES] == [0, 0, 0]


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


def test_rows_replaced_between_micro_batches_lose_their_gradient_as_in_eager_mode():
    def graph_way(step):
        step.config.accumulation_steps = 2
        one, other = batches_of(2)
        got = [step(*one), step(*other), step(*one)]
        step.b.save_snapshot("s")
        step.b.load_snapshot("s")
        return [*got, step(*other)]

    def eager_way(step):
        one, other = batches_of(2)
        got = [step(*one, last=False), step(*other), step(*one, last=False)]
        step.owner.b.save_snapshot("s")
        step.owner.b.load_snapshot("s")
        return [*got, step(*other)]

    same(results(make_graph, simple, adam, graph_way), results(make_accumulating, simple, adam, eager_way))


def make_accumulating(modules, build, optimizers):
    """Eager steps that update where they are told to."""
    owner = torch.nn.ModuleDict(modules)
    for name, module in modules.items():
        setattr(owner, name, module)
    optimizer = oneemb.Optimizer(*optimizers(owner))

    def step(*batch, last=True):
        loss = build(owner, *batch)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step.owner = owner
    return step


@pytest.mark.parametrize("build", [simple, again, unused, maxima], ids=lambda build: build.__name__)
def test_accumulation_equals_eager(build):
    def eager_way(step):
        return [step(*batch, last=i % 3 == 2) for i, batch in enumerate(growing(9))]

    def graph_way(step):
        step.config.accumulation_steps = 3
        return list(step.run(list(growing(9)), 2))

    same(results(make_graph, build, adam, graph_way), results(make_accumulating, build, adam, eager_way))


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


def test_backward_after_the_step_of_a_merged_lookup_leaves_a_gradient_for_the_next_one():
    def build(self, ids):
        loss = (self.a(ids) + self.c(ids)).square().sum()
        loss.backward(retain_graph=True)
        return loss

    def way(step):
        for _ in range(3):
            loss = step(torch.arange(5))
        before = loss.detach().clone()
        loss.backward()
        return [before, step(torch.arange(2, 9)).detach()]

    same(results(make_graph, build, sgd, way), results(make_accumulating, build, sgd, way))


def test_backward_for_the_second_time_through_a_merged_lookup_says_what_to_do():
    def build(self, ids):
        rows = self.a(ids) + self.c(ids)
        rows.sum().backward()
        with pytest.raises(RuntimeError, match="pass retain_graph=True"):
            rows.sum().backward()
        return rows.detach()

    graph = make_graph(modules_of(), build, sgd)
    for _ in range(3):
        graph(torch.arange(5))
    assert "merged_0" in str(graph)
