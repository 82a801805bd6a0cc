"""What `build` may say: it is ordinary Python at every call. What a graph does itself is refused, with its line."""

import asyncio
import contextvars
import gc
import itertools
import math
import re
import threading
import traceback
import warnings
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import library
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.flop_counter import FlopCounterMode

import oneemb
from oneemb.embeddings.embedding import embeddings_of
from oneemb.training.plan_cache import PLANS_MAX, RECORDED_MAX
from tests.support.graph_models import adam, make_eager, make_embedding, make_graph, rows_of, sgd, weights_of
from tests.support.inside import known_of, merged_stores_of, train_state_of
from tests.support.pairwise import diagonal

IDS = torch.tensor([[1, 2], [3, 4], [1, 4]])
LABEL = torch.tensor([0.0, 1.0, 1.0])


def modules_of(**kwargs):
    torch.manual_seed(0)
    return {
        "embedding": make_embedding(**kwargs),
        "mlp": oneemb.nn.FusedMLP(8, [8], 1, skip_final_activation=True),
    }


def loss_of(self, ids, label, scale=1.0):
    logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(logit.float(), label) * scale


def traceback_of(error):
    return "".join(traceback.format_exception(error))


def check_equals_eager(build, optimizers=adam, steps=4, args=(IDS, LABEL)):
    graph_modules, eager_modules = modules_of(), modules_of()
    graph = make_graph(graph_modules, build, optimizers)
    eager = make_eager(eager_modules, build, optimizers)
    for _ in range(steps):
        a, b = graph(*args), eager(*args)
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    for c in graph.run([args] * steps):
        assert torch.equal(torch.as_tensor(c), torch.as_tensor(eager(*args)))
    assert rows_of(graph_modules["embedding"]) == rows_of(eager_modules["embedding"])
    for a, b in zip(weights_of(graph_modules["mlp"]), weights_of(eager_modules["mlp"]), strict=True):
        assert torch.equal(a, b)
    return graph


# ---- at every call ------------------------------------------------------------------------------------------------


def test_autocast_is_a_part_of_the_graph():
    seen = []

    class See(torch.nn.Module):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return x

    def build(self, ids, label):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.see(self.embedding(ids).flatten(1))
            logit = self.mlp(x).squeeze(1)
        loss = torch.nn.functional.mse_loss(self.see(logit).float(), label)
        loss.backward()
        return loss, logit

    graph = make_graph({**modules_of(), "see": See()}, build, adam)
    assert graph(IDS, LABEL)[1].dtype == torch.bfloat16
    assert seen == [True, False]
    check_equals_eager(_autocast_build)


def _autocast_build(self, ids, label):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(self, ids, label)
    loss.backward()
    return loss


def test_nested_grad_modes_hold_at_run_time():
    def build(self, ids, label):
        with torch.no_grad():
            a = self.mlp.layers[0].weight * 2
            with torch.enable_grad():
                b = self.mlp.layers[0].weight * 2
            c = self.mlp.layers[0].weight * 2
            with torch.set_grad_enabled(True):
                d = self.mlp.layers[0].weight * 2
        e = self.mlp.layers[0].weight * 2
        loss = loss_of(self, ids, label)
        loss.backward()
        return [x.requires_grad for x in (a, b, c, d, e)]

    assert make_graph(modules_of(), build, sgd)(IDS, LABEL) == [False, True, False, True, True]


def test_an_error_inside_a_block_leaves_it():
    class Fails(torch.nn.Module):
        def forward(self, x):
            raise KeyError("inside")

    def build(self, ids, label):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            self.fails(self.embedding(ids))

    graph = make_graph({**modules_of(), "fails": Fails()}, build, lambda owner: [])
    with pytest.raises(KeyError) as caught:
        graph(IDS, LABEL)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert "self.fails(self.embedding(ids))" in traceback_of(caught.value)
    assert graph.embedding.stats()["device"]["pinned"] == 0


def clipped_like_torch(clip, steps=5):
    """The graph against torch itself, with dense tables of the same initial values."""
    modules = modules_of(tables=1)
    ids = torch.tensor([1, 2, 1, 5, 2, 9])

    def build(self, ids):
        loss = 30 * self.mlp(self.embedding(ids).repeat(1, 2)).square().sum()
        loss.backward()
        norm = clip(self.parameters())
        return loss if norm is None else norm

    graph = make_graph(modules, build, sgd)
    modules["embedding"].eval()
    start = modules["embedding"](torch.arange(10))
    modules["embedding"].train()
    table = torch.nn.Embedding(10, 4)
    table.weight.data.copy_(start)
    mlp = modules_of(tables=1)["mlp"]
    dense = [*table.parameters(), *mlp.parameters()]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    for _ in range(steps):
        got = graph(ids)
        optimizer.zero_grad()
        loss = 30 * mlp(table(ids).repeat(1, 2)).square().sum()
        loss.backward()
        norm = clip(dense)
        torch.testing.assert_close(got, loss if norm is None else norm, rtol=1e-5, atol=1e-6)
        optimizer.step()
    modules["embedding"].eval()
    torch.testing.assert_close(modules["embedding"](torch.arange(10)), table.weight.detach(), rtol=1e-5, atol=1e-6)
    for a, b in zip(weights_of(mlp), weights_of(modules["mlp"]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_clip_grad_norm_covers_rows_and_dense_parameters_as_torch_does(norm_type):
    clipped_like_torch(lambda parameters: clip_grad_norm_(parameters, 0.5, norm_type))


def test_clip_grad_norm_by_its_full_name():
    clipped_like_torch(lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5))


def test_clip_grad_value_clamps_rows_after_they_are_summed():
    clipped_like_torch(lambda parameters: clip_grad_value_(parameters, 0.3))


def test_clip_grad_norm_of_add_optimizer_equals_clipping_in_build():
    def plain(self, ids, label):
        loss = loss_of(self, ids, label, 40.0)
        loss.backward()
        return loss

    def clips(self, ids, label):
        loss = loss_of(self, ids, label, 40.0)
        loss.backward()
        clip_grad_norm_(self.parameters(), 0.1)
        return loss

    a = make_graph(modules_of(), plain, sgd, clip_grad_norm=0.1)
    b, c = (make_graph(modules_of(), build, sgd) for build in (clips, plain))
    for _ in range(4):
        x, y, z = (graph(IDS, LABEL) for graph in (a, b, c))
        assert torch.equal(x, y)
    assert not torch.equal(x, z)
    assert rows_of(a.embedding) == rows_of(b.embedding) != rows_of(c.embedding)


def test_a_norm_that_is_not_finite_changes_nothing():
    def build(self, ids, label):
        loss = loss_of(self, ids, label, float("nan"))
        loss.backward()
        clip_grad_norm_(self.parameters(), 1.0)
        return loss

    graph = make_graph(modules_of(), build, sgd)
    before = weights_of(graph.mlp)
    with pytest.raises(oneemb.NonFiniteGradientError):
        graph(IDS, LABEL)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(graph.mlp), strict=True))
    assert all(parameter.grad is None for parameter in graph.parameters())
    assert graph.embedding.stats()["step"] == 0 and graph.embedding.stats()["device"]["pinned"] == 0


def test_backward_twice_with_retain_graph_detach_and_zero_grad():
    def build(self, ids, label):
        self.zero_grad()
        loss = loss_of(self, ids, label)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
        return loss.detach()

    check_equals_eager(build)


def test_torch_autograd_backward_on_several_losses():
    def build(self, ids, label):
        rows = self.embedding(ids)
        losses = [rows.sum(), rows.square().sum()]
        torch.autograd.backward(losses)
        return losses[0] + losses[1]

    check_equals_eager(build)


def test_random_functions_draw_anew_at_every_call():
    def build(self, ids, label):
        loss = loss_of(self, ids, label) + torch.rand(()) * self.embedding(ids).sum()
        loss.backward()
        return loss

    graph = make_graph(modules_of(), build, lambda owner: [torch.optim.SGD(owner.parameters(), lr=0.0)])
    assert not torch.equal(graph(IDS, LABEL), graph(IDS, LABEL))


def test_print_prints_at_every_call_with_the_values(capsys):
    def build(self, ids, label):
        loss = loss_of(self, ids, label)
        print("loss", loss.detach(), flush=True)
        print("step")
        loss.backward()
        return loss

    graph = make_graph(modules_of(), build, sgd)
    losses = [graph(IDS, LABEL) for _ in range(2)]
    assert capsys.readouterr().out == "".join(f"loss {loss.detach()!s}\nstep\n" for loss in losses)


def test_asserts_hold_at_every_call():
    def build(self, ids, label):
        assert label.max() <= 1, "labels are probabilities"
        loss = loss_of(self, ids, label)
        loss.backward()
        return loss

    graph = make_graph(modules_of(), build, sgd)
    graph(IDS, LABEL)
    with pytest.raises(AssertionError, match="labels are probabilities"):
        graph(IDS, LABEL * 2)


def test_nested_and_keyword_arguments_and_results():
    def build(self, batch, *more, flag=None, mode="sum", scale=1.0, **named):
        rows = self.embedding(batch["ids"][0])
        if flag:
            rows = rows * 2
        for one in more:
            rows = rows + one
        for name in named:
            rows = rows + named[name].mean()
        loss = getattr(rows, mode)() * scale
        loss.backward()
        return {"loss": loss, "parts": (rows, [len(more)])}

    graph = make_graph(modules_of(), build, lambda owner: [torch.optim.SGD(owner.parameters(), lr=0.0)])
    batch = {"ids": (IDS, None), "label": LABEL}
    plain = graph(batch)
    assert isinstance(plain, dict) and type(plain["parts"][1]) is list
    assert torch.equal(graph(batch, flag=True)["loss"], plain["loss"] * 2)
    assert torch.equal(graph(batch, scale=3.0)["loss"], plain["loss"] * 3)
    assert torch.equal(graph(batch, torch.ones(4), torch.ones(4))["parts"][0], plain["parts"][0] + 1 + 1)
    assert graph(batch, mode="mean", x=torch.ones(3))["loss"].numel() == 1
    known = len(known_of(graph))
    graph({"ids": (IDS[:1], None), "label": LABEL[:1]}, scale=7)
    assert len(known_of(graph)) == known
    with pytest.raises(TypeError, match="batch"):
        graph()


def test_batch_sizes_compile_once():
    graph = make_graph(modules_of(), _autocast_build, sgd)
    for size in (1, 3, 2, 1):
        graph(IDS[:size], LABEL[:size])
    (known,) = known_of(graph)
    assert known.recorded == 1 and known.plan is not None


def test_strings_in_a_batch_are_data():
    class Joins(torch.nn.Module):
        def forward(self, names):
            return "+".join(names)

    def build(self, batch):
        loss = self.embedding(batch["ids"]).sum()
        loss.backward()
        return batch["session"], self.joins(batch["names"])

    graph = make_graph({**modules_of(), "joins": Joins()}, build, sgd)
    batches = [{"ids": IDS, "session": f"s{i}", "names": ["x"] * (i + 1)} for i in range(5)]
    assert [graph(batch) for batch in batches] == [(f"s{i}", "+".join("x" * (i + 1))) for i in range(5)]
    assert list(graph.run(batches)) == [(f"s{i}", "+".join("x" * (i + 1))) for i in range(5)]
    assert len(known_of(graph)) == 1


def test_plans_of_ever_new_structures_are_bounded_and_a_warning_says_what_changes():
    def build(self, ids, weights):
        loss = self.embedding(ids).sum() * sum(weights)
        loss.backward()
        return loss

    graph, kept = make_graph(modules_of(), build, sgd), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(40):
            graph(IDS, [1.0] * (i + 1))
            graph(IDS, [1.0])  # used at every turn, so it is kept
            kept = kept or next(reversed(known_of(graph)))
    assert len(known_of(graph)) == PLANS_MAX == 16
    (said,) = [str(one.message) for one in caught]
    assert "weights: a list of" in said and "16" in said
    assert "without what 24 plans have done" in graph.explain()
    assert kept in known_of(graph), "the plan that every turn used was never dropped"


def test_eval_mode_runs_no_update_and_an_eval_graph_any_time():
    def build(self, ids, label):
        loss = loss_of(self, ids, label)
        loss.backward()
        norm = clip_grad_norm_(self.parameters(), 1.0)
        return loss, norm

    graph = make_graph({**modules_of(), "dropout": torch.nn.Dropout()}, build, sgd)
    graph(IDS, LABEL)

    class Score(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.embedding, self.mlp, self.dropout = graph.embedding, graph.mlp, graph.dropout

        def build(self, ids, label):
            return loss_of(self, ids, self.dropout(label))

    score = Score()
    before = graph.embedding.stats()["rows"], weights_of(graph.mlp)
    loss = score(IDS + 100, LABEL)
    assert graph.training and graph.embedding.training and not loss.requires_grad
    graph.eval()
    assert torch.equal(graph(IDS + 100, LABEL)[0], loss) and graph(IDS, LABEL)[1] == 0
    assert torch.equal(next(score.run([(IDS + 100, LABEL)])), loss)
    assert graph.embedding.stats()["rows"] == before[0]
    assert all(torch.equal(a, b) for a, b in zip(before[1], weights_of(graph.mlp), strict=True))


def test_an_evaluation_follows_an_embedding_that_is_exchanged(tmp_path):
    def embedding_of(name, padding_idx):
        return oneemb.MultiTableEmbedding(
            name, 4, torch.float32, torch.int64, [oneemb.make_table()],
            oneemb.make_device_mem_store_options(str(tmp_path / name)), padding_idx=padding_idx,
        )  # fmt: skip

    class Score(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.embedding = embedding_of("a", None)

        def build(self, ids):
            return self.embedding(ids)

    score = Score()
    assert score(torch.tensor([7])).abs().sum() > 0
    score.embedding = embedding_of("b", 7)
    assert score(torch.tensor([7])).abs().sum() == 0
    score.embedding.padding_idx = None
    assert score(torch.tensor([7])).abs().sum() > 0


def test_constants_are_read_as_they_are_at_each_call():
    weights, array, generator = torch.ones(3), np.ones(3, np.float32), torch.Generator().manual_seed(3)

    def build(self, ids, label):
        loss = loss_of(self, ids, label * weights + torch.from_numpy(array) * np.float32(0.5))
        loss = loss + (torch.rand(3, generator=generator) * weights.data).sum() + self.constants[0].sum()
        loss.backward()
        return loss

    graph = make_graph(modules_of(), build, lambda owner: [torch.optim.SGD(owner.parameters(), lr=0.0)])
    graph.constants = [torch.tensor([4.0])]

    def check():
        state = generator.get_state()
        with torch.no_grad():
            target = LABEL * weights + torch.from_numpy(array) * 0.5
            expected = loss_of(graph, IDS, target) + (torch.rand(3, generator=generator) * weights).sum() + 4.0
        generator.set_state(state)
        assert torch.equal(graph(IDS, LABEL), expected)

    check()
    weights.mul_(2.0)
    array[1] = 5.0
    check()
    assert graph.constants[0].item() == 4.0 and "constant_0" not in dict(graph.named_buffers())


def test_tensors_of_numbers_are_made_at_each_call():
    def build(self, ids, label, scale=1.5):
        made = torch.tensor([1.0, 2.0, 3.0])
        made += torch.as_tensor([0.5] * 3)
        made.mul_(scale)
        size = torch.tensor([ids.shape[0], 1])
        loss = loss_of(self, ids, label) * made.sum() * torch.as_tensor(2.0)
        loss = loss + torch.from_numpy(np.array([1.0, 2.0])).sum() + torch.as_tensor(label).sum()
        loss.backward()
        return loss, made, size, math.sqrt(ids.shape[0])

    optimizers = lambda owner: [torch.optim.SGD(owner.parameters(), lr=0.0)]  # noqa: E731
    graph, eager = make_graph(modules_of(), build, optimizers), make_eager(modules_of(), build, optimizers)
    for size, scale in ((3, 1.5), (2, 3.0), (3, 1.5)):
        a, b = (step(IDS[:size], torch.ones(3)[:size], scale) for step in (graph, eager))
        assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True)) and a[3] == b[3] == math.sqrt(size)


def test_record_function_is_a_block_of_each_call():
    def build(self, ids, label):
        with torch.profiler.record_function("my block"):
            loss = loss_of(self, ids, label)
        loss.backward()
        return loss

    graph = check_equals_eager(build)
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            graph(IDS, LABEL)
        assert [event.count for event in profile.key_averages() if event.key == "my block"] == [1]


def test_values_made_of_constants_may_be_changed_in_place():
    outside = torch.ones(3)

    def build(self, ids, label):
        made = outside * 2
        made.add_(1.0)
        loss = loss_of(self, ids, label * made)
        loss.backward()
        return loss

    check_equals_eager(build)
    assert torch.equal(outside, torch.ones(3))


# ---- refused ------------------------------------------------------------------------------------------------------


class Block(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "block",
    [
        lambda device=torch.device("cpu"): device,  # noqa: B008
        lambda: torch.random.fork_rng(),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.detect_anomaly(),
        lambda: FlopCounterMode(display=False),
        Block,
    ],
)
def test_blocks_hold_in_each_call(block, monkeypatch):
    for hooks in ("_global_forward_pre_hooks", "_global_forward_hooks"):  # where FlopCounterMode leaves its own
        monkeypatch.setattr(torch.nn.modules.module, hooks, OrderedDict())

    def build(self, ids, label):
        with block():
            loss = loss_of(self, ids, label) + torch.rand(()) * 0
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection")
        check_equals_eager(build)
    assert torch.zeros(1).device.type == "cpu" and not torch.is_anomaly_enabled()


def test_a_training_graph_may_be_called_in_a_build():
    inner, alone = (make_graph(modules_of(), _autocast_build, sgd) for _ in "ab")

    def build(self, ids, label):
        return self.inner(ids, label) + 1

    outer = make_graph({"inner": inner}, build, lambda owner: [])
    for _ in range(3):
        assert torch.equal(outer(IDS, LABEL), alone(IDS, LABEL) + 1)
    for got in outer.run([(IDS, LABEL)] * 3):
        assert torch.equal(got, alone(IDS, LABEL) + 1)
    assert rows_of(inner.embedding) == rows_of(alone.embedding)
    assert inner.steps == alone.steps == 6


def test_an_embedding_that_is_no_part_of_the_graph_is_refused_unless_it_is_frozen():
    outside = make_embedding("outside")

    class Tower(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fields = {"user": [outside]}

        def forward(self, ids):
            return self.fields["user"][0](ids)

    def by_closure(self, ids, label):
        return outside(ids).sum()

    def in_a_list(self, ids, label):
        return self.kept[0](ids).sum()

    def in_a_tower(self, ids, label):
        return self.tower(ids).sum()

    line = {by_closure: "outside(ids)", in_a_list: "self.kept[0](ids)", in_a_tower: 'self.fields["user"][0](ids)'}
    for build, text in line.items():
        outside.requires_grad_(True)
        graph = make_graph(modules_of(), build, sgd)
        graph.kept, graph.tower = [outside], Tower()
        for call in (lambda graph=graph: graph(IDS, LABEL), lambda graph=graph: list(graph.run([(IDS, LABEL)]))):
            with pytest.raises(oneemb.BuildError, match="'outside', looked up at .*ModuleList") as caught:
                call()
            assert re.search(rf"test_train_graph_build.py:\d+: return .*{re.escape(text)}", str(caught.value))
        assert not outside.store.built
        outside.requires_grad_(False)
        with pytest.warns(UserWarning, match="has computed no gradient"):
            assert torch.equal(graph(IDS, LABEL), outside(IDS).sum())
        outside.clear()
        outside.close()
        outside = make_embedding("outside")


@pytest.mark.parametrize("in_a_list", [False, True])
def test_add_optimizer_refuses_the_weight_of_an_embedding_that_the_graph_does_not_know(in_a_list):
    outside = make_embedding("outside")

    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.embedding = make_embedding()
            if in_a_list:
                self.kept = [outside]
            self.add_optimizer(torch.optim.SGD([*self.parameters(), *outside.parameters()], lr=0.1))

    with pytest.raises(ValueError, match="'outside' is no part of Graph.*ModuleList" if not in_a_list else "kept.0"):
        Graph()
    assert outside.row_optimizer is None


@pytest.mark.parametrize("whose_step", ["the class's", "one of the user's"])
@pytest.mark.parametrize("what", ["optimizer", "joined", "scheduler"])
def test_a_refused_step_has_changed_nothing(what, whose_step):
    def build(self, ids, label, steps=False):
        loss = loss_of(self, ids, label)
        loss.backward()
        if steps:
            stepper.step()
        return loss

    def with_scheduler(owner):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
        return [(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))]

    graph, plain = (make_graph(modules_of(), build, with_scheduler) for _ in "ab")
    (joined,), (scheduler,) = graph.optimizers, train_state_of(graph).lr_schedulers
    if whose_step != "the class's":
        scheduler.step = own = lambda step=scheduler.step: step()
    stepper = {"optimizer": joined.optimizer, "joined": joined, "scheduler": scheduler}[what]
    for _ in range(3):
        with pytest.raises(oneemb.BuildError, match=r"build steps \w+ at .*: stepper.step\(\), which the graph does"):
            graph(IDS, LABEL, steps=True)
        with pytest.raises(oneemb.BuildError, match="leave it out"):
            list(graph.run([(IDS, LABEL, True)]))
        assert torch.equal(graph(IDS, LABEL), plain(IDS, LABEL))
        assert vars(scheduler).get("step") is (None if whose_step == "the class's" else own)
    assert joined.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert rows_of(graph.embedding) == rows_of(plain.embedding)
    stepper.step()


def test_what_needs_to_be_between_two_steps_is_refused_in_build(tmp_path):
    def build(self, ids, label, then=None):
        loss = loss_of(self, ids, label)
        loss.backward()
        if then is not None:
            then()
        return loss

    graph, plain = (make_graph(modules_of(), build, sgd) for _ in "ab")
    path = str(tmp_path / "checkpoint")
    graph.save(path)
    for then in (
        lambda: graph.save(path),
        lambda: graph.load(path),
        lambda: graph.add_optimizer(torch.optim.SGD(graph.mlp.parameters(), lr=0.1)),
        lambda: graph.embedding.clear(),
    ):
        with pytest.raises(RuntimeError, match="step"):
            graph(IDS, LABEL, then)
        assert torch.equal(graph(IDS, LABEL), plain(IDS, LABEL))
    assert rows_of(graph.embedding) == rows_of(plain.embedding)


@pytest.mark.parametrize("seen", [False, True])
def test_errors_of_a_lookup_have_the_line_of_build(seen):
    graph = make_graph(modules_of(), _autocast_build, sgd)
    if seen:
        graph(IDS, LABEL)
    for call in (lambda: graph(IDS.int(), LABEL), lambda: list(graph.run([(IDS.int(), LABEL)] * 2))):
        with pytest.raises(TypeError, match="int64") as caught:
            call()
        assert "self.mlp(self.embedding(ids).flatten(1))" in traceback_of(caught.value)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_a_full_store_is_an_error_in_the_line_of_build(seen, merged):
    def build(self, ids, label):
        loss = self.embedding(ids).sum() + (self.other(ids % 7).sum() if merged else 0)
        loss.backward()
        return loss

    modules = {"embedding": make_embedding(dim=64, store="ssd"), "other": make_embedding("other", 64, store="ssd")}
    graph = make_graph(modules, build, sgd)
    if seen:
        graph(IDS, LABEL)
    rows, many = graph.embedding.stats()["rows"], torch.arange(12000).view(-1, 2)
    for call in (lambda: graph(many, LABEL), lambda: list(graph.run([(many, LABEL)] * 2))):
        with pytest.raises(oneemb.StoreFullError, match="MiB") as caught:
            call()
        assert "self.embedding(ids).sum()" in traceback_of(caught.value)
    assert graph.embedding.stats()["rows"] == rows and graph.embedding.stats()["device"]["pinned"] == 0
    graph(IDS, LABEL)


def _either(self, ids, other):
    """What is expected is not what is asked for."""
    return sum(embedding(other if self.steps % 3 else ids).sum() for embedding in self.embeddings)


def _without_gradient_first(self, ids, other):
    with torch.no_grad():
        shown = sum(embedding(ids).sum() for embedding in self.embeddings)
    return shown + sum(embedding(other).sum() for embedding in self.embeddings)


@pytest.mark.parametrize(("take", "count"), diagonal([_either, _without_gradient_first], [1, 3]))
def test_a_lookup_has_the_room_that_it_has_in_eager_mode(take, count):
    """The cache holds either lookup, and not both."""

    def build(self, ids, other):
        loss = take(self, ids, other)
        loss.backward()
        return loss.detach()

    def modules():
        fields = [make_embedding(f"field {i}", 64, tables=1, store="ssd", seed=i) for i in range(count)]
        return {"embeddings": torch.nn.ModuleList(fields)}

    batch = torch.arange(2500), torch.arange(2500) + 10_000
    for run in (False, True):
        graph, owner = make_graph(modules(), build, sgd), torch.nn.ModuleDict(modules())
        owner.embeddings = owner["embeddings"]
        optimizer = oneemb.Optimizer(torch.optim.SGD(owner.parameters(), lr=0.1))
        steps = graph.run([batch] * 8) if run else (graph(*batch) for _ in range(8))
        for step, loss in enumerate(steps):
            owner.steps = step
            assert torch.equal(loss, build(owner, *batch))
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(graph.embeddings, owner.embeddings, strict=True):
            assert rows_of(a) == rows_of(b)
            assert a.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_scales_that_do_not_fit_are_refused_before_any_id_is_inserted(ahead):
    def build(self, ids, offsets, scales):
        loss = self.embedding(ids, None, offsets, scales).sum()
        loss.backward()
        return loss

    graph = make_graph({"embedding": make_embedding(tables=1)}, build, sgd)
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 6])
    run = (lambda *batch: list(graph.run([batch, batch]))) if ahead else graph
    run(ids[:0], torch.zeros(3, dtype=torch.int64), torch.ones(0))
    for scales in (torch.ones(5), torch.ones(6).double(), torch.ones(3, 2)):
        with pytest.raises(TypeError, match="per_sample_weights must be float32"):
            run(ids, offsets, scales)
    assert graph.embedding.stats()["rows"] == 0


def test_scales_without_bags_are_refused_as_in_eager_mode():
    def build(self, ids, scales):
        loss = self.embedding(ids, None, None, scales).sum()
        loss.backward()
        return loss

    graph = make_graph({"embedding": make_embedding(tables=1)}, build, sgd)
    with pytest.raises(ValueError, match="pass offsets"):
        graph(torch.arange(6), torch.ones(6))
    assert graph.embedding.stats()["rows"] == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_batches_may_be_lists_of_tensors_and_of_dicts(depth):
    def build(self, batch):
        loss = sum(self.embedding(one["ids"]).sum() * one["weight"] for one in batch)
        loss.backward()
        return loss.detach()

    graph = make_graph(modules_of(), build, sgd)
    dicts = [[{"ids": IDS + i, "weight": 1.0 + i} for i in range(count)] for count in (2, 3, 2, 1)]
    eager = make_eager(modules_of(), build, sgd)
    # In a tuple of one a list is itself, even where it has as many elements as build has arguments.
    for batches in (dicts[:3], [(batch,) for batch in dicts]):
        for loss, batch in zip(graph.run(batches, prefetch_depth=depth), dicts, strict=False):
            assert torch.equal(loss, eager(batch))

    graph = make_graph(modules_of(), _autocast_build, sgd)
    eager = make_eager(modules_of(), _autocast_build, sgd)
    for loss in graph.run([[IDS, LABEL]] * 2, prefetch_depth=depth):
        assert torch.equal(loss, eager(IDS, LABEL))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], 5, "abc", None])
def test_ids_that_are_no_tensor_are_refused_with_the_line(ids, merged):
    def build(self, ids, label):
        loss = self.embedding(ids).sum() + (self.other(ids).sum() if merged else 0)
        loss.backward()
        return loss

    modules = {**modules_of(), **({"other": make_embedding("other")} if merged else {})}
    graph = make_graph(modules, build, sgd)
    for call in (lambda: graph(ids, LABEL), lambda: list(graph.run([(ids, LABEL)] * 2))):
        with pytest.raises(
            TypeError, match=r"ids must be a tensor of torch.int64 of shape \[B, 2\], got \w+"
        ) as caught:
            call()
        assert "self.embedding(ids).sum()" in traceback_of(caught.value)
    assert graph.embedding.stats()["rows"] == graph.embedding.stats()["device"]["pinned"] == 0


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], None, slice(2), {"ids": 1}, IDS.int()])
def test_a_lookup_whose_error_build_catches_is_not_expected(ids):
    def build(self, batch, label):
        with pytest.raises(TypeError):
            self.embedding(ids)
        with pytest.raises(TypeError):
            self.embedding(batch.int())
        loss = loss_of(self, batch, label)
        loss.backward()
        return loss.detach()

    graph = check_equals_eager(build)
    (known,) = known_of(graph)
    assert known.plan.others == 0 and known.recorded == 1


def test_calls_that_build_ends_with_an_error_keep_no_lookup_from_being_expected():
    def build(self, ids, label, good):
        loss = loss_of(self, ids, label)
        if not good:
            raise ArithmeticError
        loss.backward()

    graph = make_graph(modules_of(), build, sgd)
    for _ in range(RECORDED_MAX + 1):
        with pytest.raises(ArithmeticError):
            graph(IDS, LABEL, 0)
    graph(IDS, LABEL, 1)
    (known,) = known_of(graph)
    assert known.plan is not None and known.recorded == 1


def test_a_graph_whose_build_cannot_be_guessed_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(oneemb.training.plan_cache, "RECORDED_MAX", 2)
    calls = itertools.count()

    def build(self, ids, label, guessable=None):
        ids = ids + (0 if guessable else next(calls))
        loss = loss_of(self, ids, label) + loss_of(self, ids + 1, label)
        loss.backward()
        return loss.detach()

    graph = make_graph(modules_of(), build, sgd)
    for _ in range(3):
        graph(IDS, LABEL)
        assert "reserve(embedding.store" in str(graph) and "other ids" not in graph.explain()
    for _ in range(2):
        graph(IDS, LABEL)
        said = "build has looked up other ids than expected after each of"
        assert said in str(graph) and "reserve(" not in str(graph)
        assert f"for 1 of 1 structures of inputs nothing is made ahead: {said}" in graph.explain()
        for look in (graph.compiled, lambda: graph.draw(passes=True)):
            with pytest.raises(RuntimeError, match=said):
                look()
    graph(IDS, LABEL, True)
    assert "reserve(embedding.store" in str(graph) and "for 1 of 2 structures" in graph.explain()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_iteration_of_build_is_not_the_end_of_a_loop(depth):
    numbers = iter(range(3))

    def build(self, ids, label):
        loss = loss_of(self, ids, label) * next(numbers)
        loss.backward()
        return loss.detach()

    graph, losses = make_graph(modules_of(), build, sgd), []
    with pytest.raises(
        RuntimeError, match=r"must not raise StopIteration.* was raised at .*: loss = .* \* next\(numbers\)"
    ) as caught:
        for loss in graph.run([(IDS, LABEL)] * 9, prefetch_depth=depth):
            losses.append(loss)
    assert len(losses) == graph.steps == 3 and isinstance(caught.value.__cause__, StopIteration)
    assert graph.embedding.stats()["device"]["pinned"] == 0
    with pytest.raises(StopIteration):
        graph(IDS, LABEL)


def test_a_buffer_that_ids_come_from_may_be_taken_away_within_a_run():
    def build(self, ids, label):
        table = getattr(self, "table", None)
        loss = loss_of(self, ids if table is None else table[ids], label)
        loss.backward()
        return loss.detach()

    graph, eager = make_graph(modules_of(), build, sgd), make_eager(modules_of(), build, sgd)
    owner = eager.__closure__[[*eager.__code__.co_freevars].index("owner")].cell_contents
    for one in (graph, owner):
        one.register_buffer("table", torch.arange(10).flip(0))
    for step, loss in enumerate(graph.run([(IDS, LABEL)] * 8)):
        assert torch.equal(loss, eager(IDS, LABEL))
        if step == 3:
            del graph.table, owner.table


def test_modules_that_build_puts_into_its_graph_while_a_batch_is_prepared_disturb_nobody(monkeypatch):
    def find(module):
        if threading.current_thread() is not threading.main_thread() and next(calls) % 2:
            raise RuntimeError("dictionary changed size during iteration")  # as `named_modules` does then
        return embeddings_of(module)

    calls = itertools.count()
    monkeypatch.setattr(oneemb.training.loader_loops, "embeddings_of", find)

    def build(self, ids, label):
        loss = loss_of(self, ids, label)
        loss.backward()
        return loss.detach()

    check_equals_eager(build, steps=6)
    assert next(calls) >= 6


def test_an_embedding_that_is_detached_goes_on_in_its_graph():
    def build(self, ids, label):
        loss = loss_of(self, ids, label) + self.other(ids).square().sum()
        loss.backward()
        return loss.detach()

    def modules():
        return {**modules_of(), "other": make_embedding("other", seed=1)}

    graph, eager_modules = make_graph(modules(), build, adam), modules()
    eager = make_eager(eager_modules, build, adam)
    for state in ("keep", "drop", "keep"):
        for args in ((IDS, LABEL), (IDS + 1, LABEL)):
            assert torch.equal(graph(*args), eager(*args))
        for embedding in (graph.embedding, eager_modules["embedding"]):
            embedding.detach_optimizer(state)
    for loss in graph.run([(IDS, LABEL)] * 3):
        assert torch.equal(loss, eager(IDS, LABEL))
    assert rows_of(graph.embedding) == rows_of(eager_modules["embedding"])


def test_a_lookup_that_comes_now_and_then_leaves_the_others_expected():
    calls = []

    def build(self, ids, label):
        calls.append(len(calls))
        loss = loss_of(self, ids, label)
        if calls[-1] % 2:
            loss = loss + self.embedding(torch.randint(0, 9, (3, 2))).square().sum()
        loss.backward()

    graph = make_graph(modules_of(), build, sgd)
    for _ in range(3 * RECORDED_MAX):
        graph(IDS, LABEL)
    (known,) = known_of(graph)
    assert known.plan is not None and not known.missed


def test_modules_may_be_exchanged_between_the_steps_of_a_run():
    def build(self, ids, label):
        loss = loss_of(self, ids, label)
        loss.backward()
        return loss.detach()

    graph = make_graph(modules_of(), build, sgd)
    losses = []
    for loss in graph.run([(IDS, LABEL)] * 6):
        losses.append(loss)
        if len(losses) == 3:
            graph.embedding = make_embedding()
            graph.add_optimizer(torch.optim.SGD(graph.embedding.parameters(), lr=0.1))
    assert len(losses) == 6 and graph.embedding.stats()["step"] == 3


def test_an_embedding_that_is_exchanged_frees_its_rows_and_its_path():
    def build(self, ids, label):
        return loss_of(self, ids, label) + self.other(ids).square().sum()

    modules = {**modules_of(), "other": make_embedding(seed=1)}
    graph = make_graph(modules, build, lambda owner: [])
    for _ in range(3):
        graph(IDS, LABEL)
    assert merged_stores_of(graph)
    gone = weakref.ref(graph.other.store)
    modules.clear()
    graph.other = torch.nn.Embedding(9, 4)
    graph(IDS, LABEL)
    gc.collect()
    assert gone() is None and not merged_stores_of(graph) and graph.compiled() is not None
    graph(IDS, LABEL)


# ---- what a graph expects of `build`, where `build` does not do it ---------------------------------------------------


def both(build, batches, modules, optimizers=sgd):
    """(losses, rows of every embedding, step counts) in eager mode, of a graph, and of one that is run."""
    found = []
    for how in ("eager", "call", "run"):
        made = modules()
        step = (make_eager if how == "eager" else make_graph)(made, build, optimizers)
        losses = list(step.run([(ids,) for ids in batches])) if how == "run" else [step(ids) for ids in batches]
        found.append((losses, *([(rows_of(one), one.store.step) for one in made.values()])))
    return found


def two(**kwargs):
    return lambda: {"a": make_embedding("a", 4, 1, **kwargs), "b": make_embedding("b", 4, 1, seed=1, **kwargs)}


def test_modules_that_build_exchanges_keep_their_rows():
    def build(self, ids):
        self.a, self.b = self.b, self.a
        loss = self.a(ids).sum() + self.b(ids + 7).square().sum()
        loss.backward()
        return loss.item()

    eager, called, ran = both(build, [torch.arange(i, i + 5) for i in range(8)], two())
    assert eager == called == ran


def test_what_build_drops_makes_room_for_its_next_lookup():
    """253 rows fit: 150 and 150 with a gradient that nobody takes do not, at a time."""

    def build(self, ids):
        seen = self.a(ids).sum().item() + self.a(ids + 1000).sum().item()
        loss = self.a(ids[:20]).sum()
        loss.backward()
        return loss.item() + seen

    def one():
        return {"a": make_embedding("a", 1024, 1, store="ssd")}

    eager, called, ran = both(build, [torch.arange(150)] * 4, one)
    assert eager == called == ran


def test_code_that_torch_does_not_define_runs_once_a_step():
    @library.custom_op("oneemb_tests::shifted", mutates_args=())
    def shifted(ids: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return ids + torch.randint(0, 50, ids.shape)

    @torch.overrides.wrap_torch_function(lambda ids: (ids,))
    def counted(ids):
        calls.append(1)
        return ids + len(calls)

    for function in (shifted, counted):

        def build(self, ids, function=function):
            loss = self.a(function(ids)).sum()
            loss.backward()
            return loss.item()

        found = []
        for how in ("eager", "call", "run"):
            calls = []
            torch.manual_seed(0)
            made = {"a": make_embedding("a", 4, 1)}
            step = (make_eager if how == "eager" else make_graph)(made, build, sgd)
            batches = [torch.arange(5)] * 6
            losses = list(step.run(batches)) if how == "run" else [step(ids) for ids in batches]
            found.append((losses, rows_of(made["a"]), len(calls), torch.get_rng_state().tolist()))
        assert found[0] == found[1] == found[2]


def test_threads_that_build_starts_look_up_as_in_eager_mode():
    async def several(self, ids):
        return await asyncio.gather(*[asyncio.to_thread(self.a, ids) for _ in range(4)])

    def build(self, ids):
        loss = torch.stack(asyncio.run(several(self, ids))).sum()
        loss.backward()
        return loss.item()

    eager, called, _ = both(build, [torch.arange(5)] * 4, two())
    assert eager == called


def test_variables_of_the_context_that_build_sets_stay_set():
    variable = contextvars.ContextVar("variable", default=0)

    def build(self, ids):
        variable.set(variable.get() + 1)
        loss = self.a(ids + variable.get()).sum()
        loss.backward()
        if variable.get() == 5:
            raise KeyError("also then")
        return loss.item()

    graph = make_graph(two()(), build, sgd)
    for _ in range(4):
        graph(torch.arange(5))
    assert variable.get() == 4
    with pytest.raises(KeyError):
        graph(torch.arange(5))
    assert variable.get() == 5


def test_odd_batches_and_builds_are_followed_as_far_as_they_go():
    if False:
        unbound = None

    def build(self, batch):
        def never():
            return unbound  # a cell that is empty

        loss = self.a(batch["user id"]).sum() + (batch["nested"].numel() if "nested" in batch else 0)
        loss.backward()
        return loss.detach()

    graph = make_graph(two()(), build, sgd)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for batch in ({"nested": nested, "user id": torch.arange(5)}, {"user id": torch.arange(5)}):
        for _ in range(3):
            graph(batch)
    assert "user_id" in graph.compiled().code and graph.a.store.step == 6


@pytest.mark.parametrize("how", ["raises", "has no backward pass"])
def test_a_kept_error_or_result_keeps_no_row_of_a_called_graph_pinned(how):
    def build(self, ids, label, bad):
        loss = loss_of(self, ids, label)
        if bad and how == "raises":
            raise ArithmeticError
        if not bad:
            loss.backward()
        return loss

    graph, kept = make_graph(modules_of(), build, sgd), []
    for bad in (False, False, True):
        try:
            kept.append(graph(IDS, LABEL, int(bad)))
        except ArithmeticError as error:
            kept.append(error)
    assert len(kept) == 3 and graph.embedding.stats()["device"]["pinned"] == 0
