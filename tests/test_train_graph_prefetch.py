"""Batches prepared ahead: nothing of it can be seen in any number, and nothing is left behind."""

import gc
import threading
import time
import traceback

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import oneemb
from tests.support.graph_models import adam, make_embedding, make_graph, rows_of, weights_of
from tests.support.inside import known_of
from tests.support.pairwise import diagonal


def build(self, ids, label):
    logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
    loss = torch.nn.functional.mse_loss(logit, label)
    loss.backward()
    return loss.detach()


def graph_of(store="device", dim=8, dropout=0.0, build=build, **kwargs):
    torch.manual_seed(0)
    modules = {
        "embedding": make_embedding("items", dim, 2, store, **kwargs),
        "mlp": oneemb.nn.FusedMLP(2 * dim, [8], 1, hidden_dropout_rates=dropout, skip_final_activation=True),
    }
    return make_graph(modules, build, adam)


def batches_of(count, size, ids, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (torch.from_numpy(rng.integers(0, ids, (size, 2))), torch.from_numpy(rng.random(size, np.float32)))
        for _ in range(count)
    ]


def pinned(graph):
    return graph.embedding.stats()["device"]["pinned"]


def threads():
    return [one for one in threading.enumerate() if one.name.startswith("oneemb-prefetch")]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert threads() == []


def check_same(graphs, losses):
    for a in losses[1:]:
        assert len(a) == len(losses[0]) and all(torch.equal(x, y) for x, y in zip(a, losses[0], strict=True))
    for graph in graphs[1:]:
        assert rows_of(graph.embedding) == rows_of(graphs[0].embedding)
        assert all(torch.equal(x, y) for x, y in zip(weights_of(graph.mlp), weights_of(graphs[0].mlp), strict=True))
        assert graph.embedding.store.changes == graphs[0].embedding.store.changes
    assert all(pinned(graph) == 0 for graph in graphs)


@pytest.mark.parametrize("share", [0.4, 0.48, 0.6, 0.95])
def test_caches_barely_larger_than_batches_change_no_number(share):
    """Unique rows of a batch as a share of the cache: two batches fit, barely fit, or do not fit."""
    graphs, losses = [], []
    slots = 1 + graph_of("ssd", 64).embedding.store.plan.cache_bytes // (3 * 64 * 4 + 40)
    batches = batches_of(12, int(slots * share / 2), 3 * slots)
    for depth in (0, 1, 3):
        graphs.append(graph_of("ssd", 64, dropout=0.2))
        torch.manual_seed(1)
        losses.append(list(graphs[-1].run(batches, prefetch_depth=depth)))
    check_same(graphs, losses)
    assert graphs[0].embedding.stats()["device"]["evicted"] > 0


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
def test_every_store_and_depth_gives_the_same(store):
    batches = batches_of(10, 200, 500)
    graphs = [graph_of(store, dropout=0.2) for _ in range(4)]
    losses = []
    for depth, graph in enumerate(graphs):
        torch.manual_seed(1)
        losses.append(list(graph.run(batches, prefetch_depth=depth)))
    check_same(graphs, losses)


def test_rows_prepared_ahead_were_prepared():
    """The branch under test is taken: batches are prefetched once the first one's lookups are recorded."""
    graph = graph_of("ssd")
    list(graph.run(batches_of(6, 50, 100)))
    (plan,) = [known.plan for known in known_of(graph)]
    calls = {label.partition("(")[0]: stats.calls for label, stats in [*plan.keys.stats(), *plan.rows.stats()]}
    assert calls["prefetch"] >= 4
    assert sum(stats.calls for label, stats in plan.lookup.stats() if label.startswith("reserve")) >= 4


def test_a_row_staged_before_its_update_is_read_after_it():
    """Every batch has the same ids, so each batch prepared ahead holds rows that the step before it updates."""
    ids, label = torch.arange(200).reshape(100, 2), torch.ones(100)
    graphs = [graph_of("ssd") for _ in range(2)]
    losses = [list(graph.run([(ids, label)] * 20, prefetch_depth=depth)) for depth, graph in enumerate(graphs)]
    check_same(graphs, losses)
    assert losses[0][0] > losses[0][-1]


@pytest.mark.parametrize("changes", ["never", "in the loop", "in build"])
def test_a_buffer_that_ids_depend_on_is_read_as_it_is_at_the_step(changes):
    class Shifted(torch.nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.embedding = embedding
            self.register_buffer("shift", torch.tensor([[1, 2]]))

        def forward(self, ids):
            return self.embedding(ids + self.shift)

    def shifted(self, ids, label):
        loss = torch.nn.functional.mse_loss(self.lookup(ids).sum((1, 2)), label)
        loss.backward()
        if changes == "in build":
            self.lookup.shift.add_(1)
        return loss.detach()

    rows = []
    for depth in (0, 1, 2):
        lookup = Shifted(make_embedding("items", 8, 2, "ssd"))
        graph = make_graph({"lookup": lookup}, shifted, adam)
        for _ in graph.run(batches_of(8, 50, 100), prefetch_depth=depth):
            time.sleep(0.002)
            if changes == "in the loop":
                lookup.shift += 7
        rows.append(rows_of(lookup.embedding))
        calls = {
            stats.calls
            for known in known_of(graph)
            for _, stats in [*known.plan.keys.stats(), *known.plan.rows.stats()]
        }
        assert depth == 0 or max(calls) >= 5
    assert rows[0] == rows[1] == rows[2]


def test_saving_and_evaluating_inside_the_loop_see_only_the_steps_so_far():
    states = []
    for depth in (0, 1, 3):
        graph = graph_of("ssd")
        seen = []
        for loss in graph.run(batches_of(8, 100, 5000), prefetch_depth=depth):
            time.sleep(0.005)  # Let the thread get ahead.
            graph.eval()
            seen.append((loss, graph(*batches_of(1, 50, 9000, seed=9)[0]), graph.embedding.stats()["rows"]))
            graph.train()
            graph.embedding.save_snapshot(f"s{len(seen)}")
            if len(seen) == 5:
                graph.embedding.load_snapshot("s3")
        states.append((seen, rows_of(graph.embedding)))
    for seen, rows in states[1:]:
        assert [[float(x) for x in one] for one in seen] == [[float(x) for x in one] for one in states[0][0]]
        assert rows == states[0][1]


def test_leaving_the_loop_early_inserts_nothing_more():
    rows = []
    for depth in (0, 2):
        graph = graph_of("ssd")
        batches = batches_of(10, 50, 10**6)
        graph(*batches[0])
        for t, _ in enumerate(graph.run(batches[1:], prefetch_depth=depth)):
            if t == 3:
                time.sleep(0.01)
                break
        assert threads() == [] and pinned(graph) == 0
        rows.append(rows_of(graph.embedding))
    assert rows[0] == rows[1]


def test_an_exception_in_the_loop_ends_the_thread_and_unpins():
    graph = graph_of()
    with pytest.raises(KeyError):
        for _ in graph.run(batches_of(10, 50, 100)):
            raise KeyError("loop")
    gc.collect()
    assert threads() == [] and pinned(graph) == 0
    assert len(list(graph.run(batches_of(3, 50, 100)))) == 3


def test_a_forgotten_loop_ends_with_its_last_reference():
    graph = graph_of()
    loop = graph.run(batches_of(10, 50, 100))
    next(loop)
    next(loop)
    del loop
    gc.collect()
    assert threads() == [] and pinned(graph) == 0


def test_two_loops_in_turn_train_as_plain_calls_do():
    a, b = graph_of("ssd"), graph_of("ssd")
    first, second = batches_of(6, 300, 900, seed=1), batches_of(6, 300, 900, seed=2)
    losses = [[], []]
    for x, y in zip(a.run(first), a.run(second), strict=True):
        losses[0] += [x, y]
    for x, y in zip(first, second, strict=True):
        losses[1] += [b(*x), b(*y)]
    check_same([a, b], losses)


def test_an_error_of_the_loader_comes_at_its_batch_with_its_traceback():
    def loader():
        yield from batches_of(3, 50, 100)
        raise OSError("disk gone")

    graph, seen = graph_of(), []
    with pytest.raises(OSError, match="disk gone") as caught:
        for loss in graph.run(loader()):
            seen.append(loss)
    assert len(seen) == 3
    assert any(frame.name == "loader" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert threads() == [] and pinned(graph) == 0


def test_an_error_of_a_preparation_comes_at_its_batch():
    batches = batches_of(5, 50, 100)
    batches[3] = (batches[3][0].int(), batches[3][1])
    graph, seen = graph_of(), []
    with pytest.raises(TypeError, match="int64") as caught:
        for loss in graph.run(batches):
            seen.append(loss)
    assert len(seen) == 3 and graph.embedding.stats()["step"] == 3
    assert any(frame.name == "build" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert threads() == [] and pinned(graph) == 0


def test_an_error_of_a_step_leaves_nothing():
    batches = batches_of(5, 50, 100)
    batches[2] = (batches[2][0], torch.full((50,), float("nan")))
    graph = graph_of("ssd")
    with pytest.raises(oneemb.NonFiniteGradientError):
        list(graph.run(batches, prefetch_depth=2))
    gc.collect()
    assert threads() == [] and pinned(graph) == 0 and graph.embedding.stats()["step"] == 2


def test_a_step_that_can_never_fit_says_so():
    graph = graph_of("ssd", 64)
    slots = graph.embedding.store.plan.cache_bytes // (3 * 64 * 4 + 40)
    with pytest.raises(oneemb.StoreFullError, match="slots"):
        list(graph.run(batches_of(3, slots, 10**9)))
    gc.collect()
    assert pinned(graph) == 0


@pytest.mark.parametrize("form", ["tuples", "lists", "dicts", "nested", "one tensor", "generator"])
def test_batches_of_every_form(form):
    def nested(self, batch):
        loss = self.embedding(batch["ids"][0]).sum() * batch["label"].mean()
        loss.backward()
        return loss.detach()

    def one(self, ids):
        loss = self.embedding(ids).sum()
        loss.backward()
        return loss.detach()

    batches = batches_of(4, 20, 50)
    made, loader = {
        "tuples": (build, batches),
        "lists": (build, [list(batch) for batch in batches]),
        "dicts": (build, [{"label": label, "ids": ids} for ids, label in batches]),
        "nested": (nested, [{"label": label, "ids": (ids,)} for ids, label in batches]),
        "one tensor": (one, [ids for ids, _ in batches]),
        "generator": (build, (batch for batch in batches)),
    }[form]
    graph = graph_of(build=made)
    assert len(list(graph.run(loader))) == 4 and graph.embedding.stats()["step"] == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_gives_what_a_plain_loop_over_it_gives(workers):
    ids, label = (torch.cat(part) for part in zip(*batches_of(10, 30, 100), strict=True))

    def loader():
        torch.manual_seed(3)
        return DataLoader(TensorDataset(ids, label), batch_size=32, shuffle=True, num_workers=workers)

    a, b = graph_of(dropout=0.3), graph_of(dropout=0.3)
    losses = [[a(*batch) for batch in loader()], list(b.run(loader()))]
    check_same([a, b], losses)


def test_no_more_batches_are_loaded_than_the_depth_allows():
    loaded = []

    def loader():
        for t, batch in enumerate(batches_of(8, 20, 50)):
            loaded.append(t)
            yield batch

    graph = graph_of()
    graph(*batches_of(1, 20, 50)[0])
    for t, _ in enumerate(graph.run(loader(), prefetch_depth=2)):
        time.sleep(0.01)
        assert max(loaded) <= t + 2


def test_depths_are_checked():
    graph = graph_of()
    for depth in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="prefetch_depth"):
            graph.run([], prefetch_depth=depth)


def test_profile_shows_prepare_and_compute_as_rows(tmp_path):
    import json

    graph = graph_of("ssd")
    profile = graph.profile(4)
    list(graph.run(batches_of(8, 50, 100)))
    assert profile.done and profile.step == 4
    profile.save(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(names.values()) == {"prepare", "compute"}
    assert {names[event["tid"]] for event in events if event["ph"] == "X"} == {"prepare", "compute"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_profile_prints_as_a_table():
    graph = graph_of("ssd")
    profile = graph.profile(4)
    assert str(profile).startswith("0 of 4 steps noted: call the graph")
    list(graph.run(batches_of(8, 50, 100)))
    first, head, *lines = str(profile).splitlines()
    assert first == "4 of 4 steps noted" and head.split()[:3] == ["half", "op", "calls"]
    (update,) = [line for line in lines if " update(" in line]
    assert update.startswith("compute") and " 4 " in update and update.endswith("%")
    assert any(line.startswith("prepare") and "prefetch(" in line for line in lines)
    assert abs(sum(float(line.split()[-1].rstrip("%")) for line in lines) - 100) < 2
    assert repr(profile) == "Profile(steps=4, step=4)"


def test_explain_counts_calls_rows_and_bytes():
    graph = graph_of("ssd")
    list(graph.run(batches_of(8, 50, 100)))
    table = graph.explain()
    (line,) = [line for line in table.splitlines() if line.startswith("prepare") and "prefetch(" in line]
    assert int(line.split()[-6]) >= 5
    for op in "reduce_grads", "update(":
        (line,) = [line for line in table.splitlines() if line.startswith("compute") and f" {op}" in line]
        calls, rows = (int(cell.replace(",", "")) for cell in line.split()[2:4])
        assert calls == 8 and rows > 8
    assert "hit rate" in table and "GB/s" in table


def shares_of(graph):
    """Milliseconds a step and share of each part that `explain` shows."""
    lines = [line.split() for line in graph.explain().split("\n\n")[0].splitlines()]
    assert lines[0] == ["part", "ms", "a", "step", "share"]
    return {name: (float(ms), float(share.rstrip("%"))) for name, ms, share in lines[1:]}


class SlowLoader:
    def __init__(self, pause):
        self.pause = pause

    def __iter__(self):
        for batch in batches_of(6, 50, 100):
            time.sleep(self.pause)
            yield batch


@pytest.mark.parametrize("slow", ["wait", "dense"])
def test_explain_says_which_part_of_a_step_takes_long(slow):
    list(graph_of("ssd").run(batches_of(2, 50, 100)))  # Loops are compiled here, not in the measured steps.
    other = {"wait": "dense", "dense": "wait"}[slow]
    for pause in 0.02 * 2 ** np.arange(8):  # On a busy machine any part may take long, but not as long as the last.
        graph = graph_of("ssd")
        if slow == "dense":
            graph.build = lambda *args, build=graph.build, pause=pause: (time.sleep(pause), build(*args))[1]
        list(graph.run(SlowLoader(pause) if slow == "wait" else batches_of(6, 50, 100), lookahead=0))
        shares = shares_of(graph)
        assert list(shares) == ["lookup", "dense", "update", "wait"]
        assert abs(sum(share for _, share in shares.values()) - 100) < 0.5
        if shares[slow][0] >= 25 and shares[slow][0] > shares[other][0]:
            return
    raise AssertionError(f"{slow} must take longest: {shares}")


class Lengthless:
    """Batches whose loader cannot say how many there are."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        raise TypeError("this loader has no length")


class Falsy(Lengthless):
    def __len__(self):
        return 0


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


LOADERS = {
    "no length": Lengthless,
    "falsy": Falsy,
    "a generator": lambda batches: (batch for batch in batches),
    "an iterator": iter,
    "an iterable dataset": lambda batches: DataLoader(Stream(batches), batch_size=None),
}


@pytest.mark.parametrize(("kind", "depth"), diagonal([*LOADERS], [0, 1, 3]))
def test_a_loader_need_not_know_its_length(kind, depth):
    loader = LOADERS[kind]
    batches = batches_of(4, 8, 50)
    one, two = graph_of(), graph_of()
    losses = list(one.run(loader(batches), prefetch_depth=depth))
    check_same([one, two], [losses, [two(*batch) for batch in batches]])
