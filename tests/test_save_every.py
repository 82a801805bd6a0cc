"""Saves that recur: by steps, by time, by the times of the data, in a loop and in `graph.run`, on ranks together."""

import threading
import types

import pytest
import torch

import oneemb
from oneemb.training import save_every
from tests.support.thread_ranks import run_ranks
from tests.test_checkpoint_chains import Job, few
from tests.test_loader_position import Graph, Loader

pytestmark = pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")


class Clock:
    """Time that a test moves; each thread has its own."""

    def __init__(self, patch):
        self._now = threading.local()
        patch.setattr(save_every, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    @property
    def now(self):
        return getattr(self._now, "seconds", 0.0)

    def move(self, seconds):
        self._now.seconds = self.now + seconds


def saves_of(graph, monkeypatch):
    """The steps at which the graph is saved, with the arguments of each save."""
    found, save = [], graph.save

    def noted(path, **how):
        found.append((graph.steps, how))
        save(path, **how)

    monkeypatch.setattr(graph, "save", noted)
    return found


def batches(count):
    return [torch.tensor([[n, n + 1]]) for n in range(count)]


def test_a_resumed_job_saves_at_the_steps_of_one_that_was_not_killed(tmp_path, monkeypatch):
    path, at = tmp_path / "c", []
    for stops in (7, 12, 16):  # each job ends after so many steps, of which the last ones are lost
        options = oneemb.make_device_mem_store_options(str(tmp_path / "rows"))
        tables = [oneemb.make_table()] * 2
        graph = Graph(oneemb.MultiTableEmbedding("rows", 4, torch.float32, torch.int64, tables, options))
        if path.exists():
            graph.load(path)
        save, saved = oneemb.SaveEvery(graph, path, steps=5), saves_of(graph, monkeypatch)
        while graph.steps < stops:
            graph(torch.tensor([[1, 2]]))
            assert save() == (graph.steps % 5 == 0)
        at += [step for step, _ in saved]
        graph.embedding.close()
        assert all(how == {"delta": True, "keep": 2, "keep_deltas": True} for _, how in saved)
    assert at == [5, 10, 15]


def test_a_save_is_due_by_seconds_since_the_end_of_the_last_one(tmp_path, monkeypatch):
    clock, graph = Clock(monkeypatch), Graph()
    save, saved = oneemb.SaveEvery(graph, tmp_path / "c", seconds=10, steps=8), saves_of(graph, monkeypatch)
    real = graph.save
    monkeypatch.setattr(graph, "save", lambda path, **how: (real(path, **how), clock.move(100)))
    for seconds in (4, 5, 2, 9, 1, 3, 3, 3, 3, 3, 3):
        graph(torch.tensor([[1, 2]]))
        clock.move(seconds)
        save()
    # 4 + 5 + 2 are above 10; 9 + 1 are 10; then 3 steps until the eighth.
    assert [step for step, _ in saved] == [3, 5, 8]


def test_a_save_is_due_by_the_newest_time_of_the_data(tmp_path, monkeypatch):
    graph = Graph()
    graph.build = types.MethodType(lambda graph, ids: {"time": ids.max() * 1.0, "loss": Graph.build(graph, ids)}, graph)
    save = oneemb.SaveEvery(graph, tmp_path / "c", event_seconds=60, event_time=lambda result: result["time"])
    saved, times = saves_of(graph, monkeypatch), [1000, 1050, 1020, 1059, 1060, 1040, 1119, 1120, 2000, 2059]
    loader = [torch.tensor([[at, 1]]) for at in times]
    for _ in graph.run(loader, save=save):
        pass
    assert [step for step, _ in saved] == [5, 8, 9, 10]  # the last one is that of the loader's end
    save = oneemb.SaveEvery(graph, tmp_path / "c", event_seconds=60)
    assert not save(1.0) and not save(torch.tensor(60.0)) and save(61.0)
    with pytest.raises(ValueError, match="finite number of seconds, got nan"):
        save(float("nan"))
    save = oneemb.SaveEvery(graph, tmp_path / "c", event_seconds=60, steps=1)
    assert not save(100.0)
    graph(loader[0])
    assert save(90.0), "a step was made"
    assert not save(155.0) and save(160.0), "the last save had data of time 100"


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_saves_after_its_body_and_at_the_end_of_the_loader(tmp_path, monkeypatch, depth):
    graph, loader = Graph(), Loader()
    save, saved, bodies = oneemb.SaveEvery(graph, tmp_path / "c", steps=4), saves_of(graph, monkeypatch), []
    for _ in graph.run(loader, prefetch_depth=depth, save=save):
        bodies.append(([step for step, _ in saved], graph.loader_state["at"]))
    assert bodies == [([], at) for at in range(1, 5)] + [([4], at) for at in range(5, 9)] + [([4, 8], 9)]
    assert [step for step, _ in saved] == [4, 8, 9] and not save.finish()
    graph.load(tmp_path / "c")
    assert graph.loader_state["epoch"] == 1 and graph.loader_state["at"] == 0


def test_a_loader_that_ends_right_after_a_save_is_saved_at_its_end(tmp_path, monkeypatch):
    graph = Graph()
    save, saved = oneemb.SaveEvery(graph, tmp_path / "c", steps=3), saves_of(graph, monkeypatch)
    assert len(list(graph.run(Loader(6), save=save))) == 6
    assert [step for step, _ in saved] == [3, 6, 6]
    graph.load(tmp_path / "c")
    assert graph.loader_state["epoch"] == 1


def test_a_loader_that_has_nothing_new_is_not_saved(tmp_path, monkeypatch):
    graph, loader = Graph(), Live()
    save, saved = oneemb.SaveEvery(graph, tmp_path / "c", steps=10), saves_of(graph, monkeypatch)
    for there, steps in ((2, [2]), (2, [2]), (3, [2, 3]), (3, [2, 3])):
        loader.there = there
        for _ in graph.run(loader, save=save):
            pass
        assert [step for step, _ in saved] == steps


class Live:
    """A loader of a stream, which ends where nothing more is there."""

    def __init__(self):
        self.at = self.there = 0

    def __iter__(self):
        while self.at < self.there:
            self.at += 1
            yield torch.tensor([[self.at, 1]])

    def state_dict(self):
        return {"at": self.at}


def test_a_loop_that_is_left_or_fails_saves_nothing_more(tmp_path, monkeypatch):
    graph = Graph()
    save, saved = oneemb.SaveEvery(graph, tmp_path / "c", steps=2), saves_of(graph, monkeypatch)
    for _ in graph.run(Loader(), save=save):
        if graph.steps == 4:
            break  # before the save after the body
    graph.fails_at = 3
    with pytest.raises(RuntimeError, match="no more"):
        for _ in graph.run(Loader(), save=save):
            pass
    assert graph.steps == 7 and [step for step, _ in saved] == [2, 5, 6]
    assert not [one for one in threading.enumerate() if one.name.startswith("oneemb-prefetch")]


def test_micro_batches_that_wait_are_not_saved(tmp_path, monkeypatch):
    graph = Graph(accumulation_steps=3)
    save, saved = oneemb.SaveEvery(graph, tmp_path / "c", seconds=1e-9), saves_of(graph, monkeypatch)
    waiting = [graph.waiting_batches for _ in graph.run(Loader(8), save=save)]
    assert waiting == [1, 2, 0, 1, 2, 0, 1, 2] and [step for step, _ in saved] == [1, 2] and not save.finish()
    graph.load(tmp_path / "c")
    assert graph.loader_state["at"] == 6


def test_an_older_checkpoint_that_is_loaded_is_gone_on_from(tmp_path, monkeypatch):
    graph = Graph()
    save, saved = oneemb.SaveEvery(graph, tmp_path / "c", steps=4, keep=None), saves_of(graph, monkeypatch)
    for _ in graph.run(Loader(), save=save):
        if graph.steps == 3:
            graph.save(tmp_path / "early")
    graph.load(tmp_path / "early")
    for _ in graph.run(batches(3), save=save):
        pass
    assert [step for step, _ in saved] == [3, 4, 8, 9, 4, 6]


@pytest.mark.parametrize("limits", [{"steps": 6}, {"seconds": 60}, {"event_seconds": 60}], ids=str)
def test_ranks_save_at_the_same_steps_and_seldom_ask_each_other(tmp_path, monkeypatch, limits):
    clock, exchanges = Clock(monkeypatch), []

    def saved_at(ranks):
        job, at, seconds = Job(ranks, f"{tmp_path}/rows"), [], 0
        gather = ranks.all_gather
        monkeypatch.setattr(ranks, "all_gather", lambda what, make: exchanges.append(what) or gather(what, make))
        save = oneemb.SaveEvery(job, f"{tmp_path}/c", **limits)
        for step in range(1, 200):
            job.change(step, *few(step))
            clock.move(1.0 + 0.1 * ranks.rank)
            seconds += 1.0 + 0.1 * ranks.rank
            if save(seconds):
                at.append(step)
        assert save.finish() and not save.finish()
        job.embedding.close()
        return at

    first, second = run_ranks(2, saved_at, patch=monkeypatch)
    assert first == second
    if "steps" in limits:
        assert first == list(range(6, 200, 6))
        assert sum("is due" in what for what in exchanges) == 2 * 2
    else:  # 55 steps of the second rank take more than a minute; a save may come late by as much as a look.
        gaps = [late - early for early, late in zip([0, *first], first, strict=False)]
        assert len(gaps) == 3 and all(55 <= gap <= 56 for gap in gaps)
        assert sum("is due" in what for what in exchanges) < 2 * 4 * 15


def test_an_error_of_one_rank_is_an_error_on_all(tmp_path, monkeypatch):
    def fails(ranks):
        job = Job(ranks, f"{tmp_path}/rows").change(1, *few(1))
        save = oneemb.SaveEvery(job, f"{tmp_path}/c", event_seconds=60, event_time=lambda at: 1 / at)
        try:
            save(ranks.rank)
        except Exception as error:
            return type(error)
        finally:
            job.embedding.close()

    assert run_ranks(2, fails, patch=monkeypatch) == [ZeroDivisionError, oneemb.RankError]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({}, ValueError, "must have a limit, got none; give steps, seconds or event_seconds"),
        ({"steps": 0}, ValueError, "steps must be above 0 and finite"),
        ({"steps": 2.5}, TypeError, "steps must be an int above 0, or None, got float 2.5"),
        ({"seconds": True}, TypeError, "seconds must be a number above 0, or None, got bool"),
        ({"seconds": float("nan")}, ValueError, "seconds must be above 0 and finite, or None, got nan"),
        ({"steps": 1, "event_time": len}, ValueError, "event_time must come with event_seconds"),
        ({"event_seconds": 1, "event_time": 3}, TypeError, "event_time must be a function .*got int 3"),
        ({"steps": 1, "delta": 1}, TypeError, "delta must be True or False"),
        ({"steps": 1, "keep": 0}, ValueError, "keep must be an int of at least 1"),
        ({"steps": 1, "path": 3}, TypeError, "path must be"),
        ({"steps": 1, "graph": torch.nn.Linear(1, 1)}, TypeError, "graph must be a TrainGraph, got Linear"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(tmp_path, wrong, error, message):
    arguments = {"graph": Graph(), "path": tmp_path / "c", **wrong}
    with pytest.raises(error, match=message):
        oneemb.SaveEvery(arguments.pop("graph"), arguments.pop("path"), **arguments)


def test_a_loop_takes_only_saves_of_its_graph(tmp_path):
    graph, other = Graph(), Graph()
    for wrong in (oneemb.SaveEvery(other, tmp_path / "c", steps=1), str(tmp_path)):
        with pytest.raises(ValueError, match="save must be an oneemb.SaveEvery of this graph, got"):
            graph.run(Loader(), save=wrong)
