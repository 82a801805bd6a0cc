"""Arguments of a graph's calls: wrong ones are told by name, with what to give; states that fit in part are loaded."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

import oneemb
from tests.support.graph_models import make_graph
from tests.support.models import make_embedding

IDS = torch.tensor([[1], [2], [3]])


def build(self, ids):
    loss = self.dense(self.embedding(ids).flatten(1)).square().mean()
    loss.backward()
    return loss.detach()


def graph_of(folder, width=1):
    modules = {"embedding": make_embedding(folder), "dense": torch.nn.Linear(4, width)}
    return make_graph(modules, build, lambda owner: [(torch.optim.SGD(owner.parameters(), lr=0.1), None)])


@pytest.fixture
def graph(tmp_path):
    graph = graph_of(tmp_path / "rows")
    graph(IDS)
    graph(IDS)
    return graph


def calls_with_a_path(graph):
    return {
        "save": graph.save, "load": graph.load, "draw": graph.draw, "export": lambda path: graph.export(path, IDS),
        "profile": graph.profile(1).save,
    }  # fmt: skip


@pytest.mark.parametrize("call", ["save", "load", "draw", "export", "profile"])
def test_a_path_that_names_no_file_is_told_with_what_to_give(graph, call):
    call = calls_with_a_path(graph)[call]
    for path in (3, None, True, 1.5, ["file"], io.BytesIO()):
        with pytest.raises(TypeError, match=f"path must be a str, .* got {type(path).__name__} .*; give the path of "):
            call(path)
    for path in ("", b"", "a\0b"):
        with pytest.raises(ValueError, match="path must not be empty or have a null byte, got .*; give the path of "):
            call(path)


def test_a_batch_that_is_passed_as_a_whole_is_told_to_be_spread(tmp_path):
    def build(self, ids, label):
        loss = (self.dense(self.embedding(ids).flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss.detach()

    modules = {"embedding": make_embedding(tmp_path), "dense": torch.nn.Linear(4, 1)}
    graph = make_graph(modules, build, lambda owner: [(torch.optim.SGD(owner.parameters(), lr=0.1), None)])
    batch = IDS, torch.ones(3)
    for args in ((batch,), (IDS,), (*batch, 3)):
        with pytest.raises(TypeError, match=r"^build\(ids, label\) must be .*argument.*graph\(\*batch\)"):
            graph(*args)
    assert graph.steps == 0
    graph(*batch)
    graph(label=batch[1], ids=IDS)
    assert graph.steps == 2


WRONG = [3, "StepLR", torch.optim.lr_scheduler.StepLR, {"step": 1}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_scheduler_or_scaler_that_is_none_is_told_by_name(tmp_path, wrong):
    graph = graph_of(tmp_path)
    optimizer = torch.optim.SGD(graph.dense.parameters(), lr=0.1)
    got = type(wrong).__name__
    with pytest.raises(TypeError, match=rf"lr_scheduler must be .*, or None, got {got} .*StepLR\(optimizer, 1000\)"):
        graph.add_optimizer(optimizer, wrong)
    with pytest.raises(TypeError, match=f"scaler must be a torch.amp.GradScaler, or None to stop scaling, got {got} "):
        graph.set_grad_scaler(wrong)
    assert len(graph.optimizers) == 1
    graph.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10))
    graph.set_grad_scaler(torch.amp.GradScaler("cpu"))
    graph.set_grad_scaler(None)


@pytest.mark.parametrize("wrong", [3, None, 2.5, build])
def test_a_loader_that_yields_nothing_is_told(graph, wrong):
    with pytest.raises(
        TypeError, match=f"loader must yield batches, as a torch DataLoader .*got {type(wrong).__name__} "
    ):
        graph.run(wrong)


def test_a_loop_that_nobody_iterates_over_warns(graph, recwarn):
    steps = graph.steps
    for _ in graph.run([IDS]):
        pass
    list(graph.run([IDS]))
    assert len(graph.run([IDS, IDS])) == 2
    graph.run([IDS]).close()
    loop = graph.run([IDS, IDS])
    next(loop)
    del loop
    assert graph.steps == steps + 3 and not [one for one in recwarn if "graph.run" in str(one.message)]
    with pytest.warns(UserWarning, match="dropped before its first step, .* for loss in graph.run") as warned:
        graph.run([IDS])
    assert graph.steps == steps + 3 and [one.filename for one in warned] == [__file__]


@pytest.mark.parametrize("more, said", [
    ({"kwargs": 3}, "kwargs must be a dict of build's arguments by name, or None, got int 3"),
    ({"kwargs": ["ids"]}, "kwargs must be a dict .* got list"),
    ({"snapshot": 3}, "snapshot must be the name of a snapshot, or None, got int 3"),
])  # fmt: skip
def test_other_arguments_of_an_export_are_told_by_name(graph, tmp_path, more, said):
    with pytest.raises(TypeError, match=said):
        graph.export(tmp_path / "program.pt2", IDS, **more)


def test_an_export_to_a_folder_says_so(graph, tmp_path):
    with pytest.raises(IsADirectoryError, match="path must be a file, got the folder .*; give the path of the file"):
        graph.export(tmp_path, IDS)


def test_strict_is_true_or_false(graph, tmp_path):
    graph.save(tmp_path / "checkpoint")
    for strict in ("no", 0, None):
        with pytest.raises(TypeError, match="strict must be True or False, got "):
            graph.load(tmp_path / "checkpoint", strict=strict)
        with pytest.raises(TypeError, match="strict must be True or False, got "):
            graph.state(strict=strict)


def test_flags_of_checkpoints_are_true_or_false(graph, tmp_path):
    graph.save(tmp_path / "checkpoint")
    for wrong in (None, "yes", 1, [], torch.ones(2)):
        with pytest.raises(TypeError, match="keep_deltas must be True or False, got "):
            graph.save(tmp_path / "checkpoint", keep_deltas=wrong)
        with pytest.raises(TypeError, match="delete_newer must be True or False, got "):
            graph.load(tmp_path / "checkpoint", delete_newer=wrong)
    graph.load(tmp_path / "checkpoint", delete_newer=True)


@pytest.mark.parametrize("wrong", [None, "x", 3, [], torch.ones(2), torch.nn.Linear(2, 2)], ids=str)
def test_arguments_of_add_optimizer_are_told_by_name(wrong):
    graph = oneemb.TrainGraph()
    graph.dense = torch.nn.Linear(4, 1)
    with pytest.raises(TypeError, match=f"optimizer must be a torch.optim.Optimizer .*, got {type(wrong).__name__}"):
        graph.add_optimizer(wrong)
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="skip_nonfinite must be True or False, got "):
        graph.add_optimizer(optimizer, skip_nonfinite=wrong)
    if not isinstance(wrong, int | None):
        with pytest.raises(TypeError, match=f"clip_grad_norm must be a number above 0, .*, got {type(wrong).__name__}"):
            graph.add_optimizer(optimizer, clip_grad_norm=wrong)
    graph.add_optimizer(optimizer, clip_grad_norm=1)


def test_a_profile_is_of_a_number_of_steps(graph):
    for steps in ("3", 0, -1, True, 1.5):
        with pytest.raises(ValueError, match="steps must be an int of at least 1, got "):
            graph.profile(steps)


def test_a_state_that_is_none_is_told_with_what_to_give(graph):
    for state, said in [
        (3, "int"), (None, "NoneType"), ([1], "list"), ({}, "dict with nothing"),
        ({"oneemb_graph": 3}, "dict with 'oneemb_graph'"), ({"dense.bias": 1}, "dict with 'dense.bias'"),
    ]:  # fmt: skip
        with pytest.raises(
            TypeError, match=f"state_dict must be the result of .*state_dict.., a dict .* got {said}; pass such"
        ):
            graph.state().load_state_dict(state)


def test_a_state_in_memory_is_loaded_in_part_as_a_file_is(graph, tmp_path):
    class Wider(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 1)
            self.scale = torch.nn.Parameter(torch.ones(1))

    state, bias = graph.state().state_dict(), graph.dense.bias.tolist()
    graph.dense = Wider()
    graph.__dict__["_train_state"].optimizers.clear()
    with pytest.raises(ValueError, match="dense.scale is None there"):
        graph.state().load_state_dict(state)
    assert graph.dense.bias.tolist() != bias
    found = graph.state(strict=False)
    assert found.loaded is None
    keys = found.load_state_dict(state)
    assert keys == found.loaded and keys.missing_keys == ["dense.scale"]
    assert graph.dense.bias.tolist() == bias and keys.unexpected_keys == ["optimizers.0"]


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_is_loaded_in_part(graph, tmp_path):
    dcp.save({"graph": graph.state()}, checkpoint_id=tmp_path / "checkpoint")
    bias = graph.dense.bias.tolist()
    graph.dense.register_buffer("more", torch.ones(2))
    with torch.no_grad():
        graph.dense.bias.zero_()
    state = graph.state(strict=False)
    dcp.load({"graph": state}, checkpoint_id=tmp_path / "checkpoint")
    assert graph.dense.bias.tolist() == bias and state.loaded == (["dense.more"], [])
    graph(IDS)


@pytest.mark.parametrize("depth", [0, 1])
def test_hooks_of_a_graph_run_in_a_loop_at_any_depth(graph, depth):
    seen = []
    handles = [
        graph.register_forward_pre_hook(lambda graph, args: (args[0] + 1,)),
        graph.register_forward_hook(lambda graph, args, loss: seen.append(args[0].tolist()) or loss * 0),
    ]
    assert [loss.item() for loss in graph.run([(IDS,)] * 3, prefetch_depth=depth)] == [0.0] * 3
    assert seen == [(IDS + 1).tolist()] * 3
    for handle in handles:
        handle.remove()
    assert all(loss.item() for loss in graph.run([(IDS,)] * 3, prefetch_depth=depth)) and len(seen) == 3
