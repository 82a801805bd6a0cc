"""A loop over `run` reads ahead; the graph, and its checkpoint, know where the loader is for what has been trained."""

import threading
import time

import pytest
import torch

import oneemb
from tests.support.graph_models import make_embedding, rows_of

BATCHES = 9


class Loader:
    """Gives its own state, which it goes on changing, as loaders may."""

    def __init__(self, batches=BATCHES, more=None):
        self.state, self.batches = {"at": 0, "seen": [], "epoch": 0, **(more or {})}, batches

    def __iter__(self):
        while self.state["at"] < self.batches:
            at = self.state["at"]
            self.state["at"] += 1
            self.state["seen"].append(at)
            yield torch.tensor([[at, at + 1], [7, at % 3]])
        self.state.update(at=0, epoch=self.state["epoch"] + 1)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = {**state, "seen": list(state["seen"])}


class Graph(oneemb.TrainGraph):
    def __init__(self, embedding=None, accumulation_steps=1):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dense = embedding or make_embedding(), torch.nn.Linear(8, 1)
        self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.1))
        self.config.accumulation_steps = accumulation_steps
        self.fails_at = None

    def build(self, ids):
        if self.fails_at is not None and int(ids[0, 0]) == self.fails_at:
            raise RuntimeError("no more")
        loss = self.dense(self.embedding(ids).flatten(1)).square().sum()
        loss.backward()
        return loss.detach()


def wait_until(holds):
    end = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_state_is_that_of_the_batch_trained_last_at_any_depth(depth):
    graph, loader = Graph(), Loader()
    assert graph.loader_state is None and graph.batches_ahead == 0
    for trained, _ in enumerate(graph.run(loader, prefetch_depth=depth), 1):
        assert graph.loader_state == {"at": trained, "seen": list(range(trained)), "epoch": 0}
        wait_until(lambda: graph.batches_ahead == min(depth, BATCHES - trained))  # noqa: B023  # called at once
        if trained + depth < BATCHES:
            assert loader.state["at"] - graph.batches_ahead == trained
    assert graph.loader_state == loader.state and loader.state["epoch"] == 1 and graph.batches_ahead == 0


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("way", ["file", "state"])
def test_a_loop_goes_on_with_the_next_batch_after_a_load(tmp_path, way, depth):
    whole = Graph()
    expected = [float(loss) for loss in whole.run(Loader())]
    graph, loader, losses = Graph(), Loader(), []
    for loss in graph.run(loader, prefetch_depth=depth):
        losses.append(float(loss))
        if len(losses) == 4:
            wait_until(lambda: graph.batches_ahead == depth)
            state = graph.state().state_dict() if way == "state" else graph.save(tmp_path / "checkpoint")
            break
    again, loader = graph, Loader()
    again.at_loader_state(None)
    if way == "state":
        again.state().load_state_dict(state)
    else:
        again.load(tmp_path / "checkpoint")
    loader.load_state_dict(again.loader_state)
    losses += [float(loss) for loss in again.run(loader, prefetch_depth=depth)]
    assert losses == expected and rows_of(again.embedding) == rows_of(whole.embedding)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_that_raises_and_micro_batches_without_an_update_do_not_count(depth):
    graph, loader = Graph(accumulation_steps=2), Loader()
    graph.fails_at = 5
    with pytest.raises(RuntimeError, match="no more"):
        for _ in graph.run(loader, prefetch_depth=depth):
            pass
    assert graph.loader_state["at"] == 4, "the fifth batch was in no update"
    graph.fails_at = None
    loader.load_state_dict(graph.loader_state)
    seen = [graph.loader_state["at"] for _ in graph.run(loader, prefetch_depth=depth)]
    assert seen == [4, 6, 6, 8, 8] and graph.steps == 4
    assert graph.loader_state["at"] == 8 and graph.batches_ahead == 1, "the last batch was in no update"


def test_a_loader_without_state_is_known_by_the_batches_ahead(tmp_path):
    graph, taken = Graph(), []
    batches = iter(Loader(100))
    for _ in graph.run((taken.append(1), batch)[1] for batch in batches):
        if len(taken) > 5:
            wait_until(lambda: graph.batches_ahead == 1)
            break
    assert len(taken) - graph.batches_ahead == graph.steps and graph.loader_state is None
    graph.save(tmp_path / "checkpoint")
    graph.load(tmp_path / "checkpoint")
    assert graph.loader_state is None


def test_a_state_that_no_checkpoint_can_hold_is_left_out_with_a_warning(tmp_path):
    graph, loader = Graph(), Loader(more={"lock": Unpicklable()})
    next(graph.run(loader, prefetch_depth=0))
    assert graph.loader_state["at"] == 1
    with pytest.warns(UserWarning, match="save graph.loader_state yourself"):
        graph.save(tmp_path / "checkpoint")
    graph.load(tmp_path / "checkpoint")
    assert graph.loader_state is None and graph.steps == 1


class Unpicklable:
    """May be copied, as a loader's own objects."""

    def __deepcopy__(self, memo):
        return self

    def __init__(self):
        self.lock = threading.Lock()


def test_an_evaluation_has_a_position_too():
    class Score(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.embedding = make_embedding()

        def build(self, ids):
            return self.embedding(ids).sum()

    graph = Score()
    seen = [graph.loader_state["at"] for _ in graph.run(Loader(4), prefetch_depth=2)]
    assert seen == [1, 2, 3, 4] and graph.loader_state["epoch"] == 1


def on_ranks(group, path, loads):
    options = oneemb.make_device_mem_store_options(f"{path}/rows", capacity=10_000)
    tables = [oneemb.make_table(oneemb.make_uniform_initializer(-1, 1))] * 2
    graph = Graph(
        oneemb.MultiTableEmbedding("rows", 4, torch.float32, torch.int64, tables, options, process_group=group)
    )
    states = []
    if loads:
        graph.load(f"{path}/checkpoint")
        states.append(graph.loader_state)
    else:  # The loop of all ends with the shortest loader.
        loader = Loader(5 + 2 * group.rank())
        states += [graph.loader_state["at"] for _ in graph.run(loader, prefetch_depth=2)]
        states.append(graph.loader_state)
        graph.save(f"{path}/checkpoint")
    graph.embedding.close()
    return states


def test_each_rank_has_the_state_of_its_own_loader(tmp_path, rank_pool):
    first, second = rank_pool(2, on_ranks, str(tmp_path), False)
    assert first[:-1] == second[:-1] == [1, 2, 3, 4, 5]
    assert (first[-1]["epoch"], second[-1]["at"], second[-1]["epoch"]) == (1, 5, 0)
    assert rank_pool(2, on_ranks, str(tmp_path), True) == [[first[-1]], [second[-1]]]
    assert rank_pool(3, on_ranks, str(tmp_path), True) == [[None]] * 3


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("what", ["called", "copied"])
def test_a_loader_whose_state_cannot_be_had_is_run_with_a_warning(depth, what):
    class Wraps(Loader):
        """As loaders of other libraries do, which have the method whether or not what they wrap has it."""

        def state_dict(self):
            return threading.Lock() if what == "copied" else self.wrapped.state_dict()

    graph, loader = Graph(), Wraps()
    with pytest.warns(
        UserWarning, match="state_dict of Wraps cannot be called or copied .* loader_state is None"
    ) as warned:
        assert len(list(graph.run(loader, prefetch_depth=depth))) == BATCHES
    assert len(warned) == 1 and graph.loader_state is None


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_has_the_length_of_its_loader(depth):
    graph, batches = Graph(), [torch.tensor([[1, 2]])] * 5
    loop = graph.run(batches, depth)
    assert len(loop) == 5 and len(list(loop)) == 5
    assert list(loop) == []
    empty = graph.run([], depth)
    assert empty and len(empty) == 0 and list(empty) == []
    with pytest.raises(TypeError, match="has no len"):
        len(graph.run(iter(batches), depth))
    left = graph.run(batches, depth)
    next(left)
    left.close()
    assert list(left) == [] and not [one for one in threading.enumerate() if one.name.startswith("oneemb-prefetch")]
