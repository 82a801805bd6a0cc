"""Loss scales, accumulation over micro-batches, several optimizers: against torch and against the eager loop."""

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import oneemb
from oneemb.training.scaling import Scaling, standing_in
from tests.support.graph_models import adam, make_eager, make_embedding, make_graph, rows_of, sgd, weights_of
from tests.support.inside import train_state_of
from tests.support.tracing_threads import KINDS, another_thread

IDS = torch.tensor([[1, 2], [3, 4], [1, 4]])
LABEL = torch.tensor([0.0, 1.0, 1.0])


def modules_of(store="device"):
    torch.manual_seed(0)
    return {
        "embedding": make_embedding(store=store),
        "mlp": oneemb.nn.FusedMLP(8, [8], 1, skip_final_activation=True),
    }


def build(self, ids, label, factor=1.0):
    logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
    loss = torch.nn.functional.mse_loss(logit, label) * factor
    loss.backward()
    return loss.detach()


def scaler_of(**kwargs):
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3, **kwargs})


def state_of(graph):
    return rows_of(graph.embedding), [w.tolist() for w in weights_of(graph.mlp)], graph.embedding.stats()["step"]


def test_a_power_of_two_scale_changes_no_number():
    plain, scaled = (make_graph(modules_of(), build, adam) for _ in "ab")
    scaler = scaler_of()
    scaled.set_grad_scaler(scaler)
    for _ in range(7):
        assert torch.equal(plain(IDS, LABEL), scaled(IDS, LABEL))
    assert state_of(plain) == state_of(scaled)
    assert scaler.get_scale() == 2.0**12  # It grew twice.


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_beside_a_thread_that_exports_or_compiles_changes_no_number(kind):
    plain, scaled = (make_graph(modules_of(), build, sgd) for _ in "ab")
    scaled.set_grad_scaler(scaler_of())
    wanted = [plain(IDS, LABEL) for _ in range(2)]
    with another_thread(kind):
        assert all(torch.equal(scaled(IDS, LABEL), want) for want in wanted)
    assert state_of(plain) == state_of(scaled)


def test_an_overflow_skips_the_whole_update_and_shrinks_the_scale():
    graph = make_graph(modules_of(), build, lambda owner: [_with_scheduler(owner)])
    scaler = scaler_of()
    graph.set_grad_scaler(scaler)
    graph(IDS, LABEL)
    before, rate = state_of(graph), graph.optimizers[0].param_groups[0]["lr"]
    graph(IDS, LABEL, float("inf"))
    assert state_of(graph) == before and graph.optimizers[0].param_groups[0]["lr"] == rate
    assert scaler.get_scale() == 2.0**9 and graph.optimizers[0].skipped == 1
    graph(IDS, LABEL)
    assert state_of(graph) != before and graph.optimizers[0].param_groups[0]["lr"] < rate


def _with_scheduler(owner):
    optimizer = torch.optim.Adam(owner.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("where", ["rows", "dense"])
def test_an_overflow_of_either_kind_skips_both(where):
    class Blow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float("inf")

    class Module(torch.nn.Module):
        def forward(self, x):
            return Blow.apply(x)

    def build(self, ids, label):
        rows = self.embedding(ids).flatten(1)
        rows = self.blow(rows) if where == "rows" else rows
        loss = (self.mlp(rows.detach()).sum() if where == "rows" else self.blow(self.mlp(rows.detach())).sum()) + (
            rows.sum()
        )
        loss.backward()
        return loss.detach()

    graph = make_graph({**modules_of(), "blow": Module()}, build, adam)
    graph.set_grad_scaler(scaler_of())
    graph(IDS, LABEL)
    before = weights_of(graph.mlp)
    graph(IDS, LABEL)
    assert graph.embedding.stats()["step"] == 0 and graph.optimizers[0].skipped == 2
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(graph.mlp), strict=True))
    assert train_state_of(graph).scaler.get_scale() == 2.0**8


def test_scaling_in_build_clipping_and_autocast_go_together():
    def build(self, ids, label):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.mse_loss(logit.float(), label)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizers[0].optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        return norm

    def unscaled(self, ids, label):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.mse_loss(logit.float(), label)
        loss.backward()
        return torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    a, b = make_graph(modules_of(), build, sgd), make_graph(modules_of(), unscaled, sgd)
    a.scaler = scaler_of()
    for _ in range(4):
        # Bfloat16 has float32's range: a power of two moves no bit.
        assert torch.equal(a(IDS, LABEL), b(IDS, LABEL))
    assert state_of(a) == state_of(b)


def test_a_scaler_with_rows_only():
    def build(self, ids):
        loss = self.embedding(ids).square().sum()
        loss.backward()
        return loss.detach()

    graph = make_graph({"embedding": make_embedding()}, build, sgd)
    graph.set_grad_scaler(scaler_of())
    losses = [graph(IDS) for _ in range(4)]
    assert losses[-1] < losses[0] and train_state_of(graph).scaler.get_scale() == 2.0**11


def test_a_disabled_scaler_does_nothing():
    a, b = (make_graph(modules_of(), build, sgd) for _ in "ab")
    b.set_grad_scaler(torch.amp.GradScaler("cpu", enabled=False))
    assert [a(IDS, LABEL) for _ in range(3)] == [b(IDS, LABEL) for _ in range(3)]
    assert state_of(a) == state_of(b)


# ---- accumulation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["device", "ssd"])
@pytest.mark.parametrize("run", ["calls", "prefetched"])
def test_one_update_of_k_micro_batches_equals_eager(store, run):
    batches = [(IDS + i % 4, LABEL) for i in range(12)]
    graph = make_graph(modules_of(store), build, adam, clip_grad_norm=None)
    graph.config.accumulation_steps = 3
    losses = list(graph.run(batches, 2)) if run == "prefetched" else [graph(*batch) for batch in batches]
    modules = modules_of(store)
    optimizer = oneemb.Optimizer(
        torch.optim.Adam([p for m in modules.values() for p in m.parameters()], lr=0.01), [modules["embedding"]]
    )
    owner = torch.nn.ModuleDict(modules)
    owner.embedding, owner.mlp = modules["embedding"], modules["mlp"]
    for i, (ids, label) in enumerate(batches):
        assert torch.equal(build(owner, ids, label), losses[i])
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert rows_of(graph.embedding) == rows_of(modules["embedding"])
    assert graph.embedding.stats()["step"] == 4 == graph.steps
    assert graph.embedding.stats()["device"]["pinned"] == 0
    for a, b in zip(weights_of(graph.mlp), weights_of(modules["mlp"]), strict=True):
        assert torch.equal(a, b)


def test_micro_batches_equal_one_large_batch():
    ids = torch.arange(24).reshape(12, 2) % 7
    label = torch.linspace(0, 1, 12)
    whole, parts = (make_graph(modules_of(), build, sgd, clip_grad_norm=0.05) for _ in "ab")
    parts.config.accumulation_steps = 4
    for _ in range(3):
        whole(ids, label)
        for i in range(0, 12, 3):
            parts(ids[i : i + 3], label[i : i + 3], 0.25)
    for a, b in zip(weights_of(whole.mlp), weights_of(parts.mlp), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rows_of_micro_batches_stay_pinned_until_their_update():
    graph = make_graph(modules_of("ssd"), build, sgd)
    graph.config.accumulation_steps = 2
    graph(IDS, LABEL)
    assert graph.embedding.stats()["device"]["pinned"] == 4 and graph.embedding.stats()["step"] == 0
    graph(IDS + 10, LABEL)
    assert graph.embedding.stats()["device"]["pinned"] == 0 and graph.embedding.stats()["step"] == 1


@pytest.mark.parametrize("scaled", [False, True])
def test_a_micro_batch_without_a_backward_pass_adds_nothing(scaled):
    def sometimes(self, ids, label, passes):
        return build(self, ids, label) if passes else None

    graph, plain = (make_graph(modules_of(), sometimes, sgd) for _ in "ab")
    graph.config.accumulation_steps = 2
    if scaled:
        graph.set_grad_scaler(scaler_of())
    for _ in range(3):
        graph(IDS, LABEL, True)
        graph(IDS, LABEL, False)
        plain(IDS, LABEL, True)
    assert state_of(graph) == state_of(plain)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_fewer_accumulation_steps_than_there_were_micro_batches_update_at_the_next_call(steps):
    graph = make_graph(modules_of(), build, sgd)
    graph.config.accumulation_steps = 5
    for _ in range(4):
        graph(IDS, LABEL)
    graph.config.accumulation_steps = steps
    graph(IDS, LABEL)
    assert graph.steps == graph.embedding.stats()["step"] == 1
    for _ in range(steps):
        graph(IDS, LABEL)
    assert graph.steps == graph.embedding.stats()["step"] == 2


def test_an_error_begins_the_accumulation_anew():
    graph, plain = (make_graph(modules_of(), build, sgd) for _ in "ab")
    graph.config.accumulation_steps = plain.config.accumulation_steps = 2
    graph(IDS, LABEL)
    with pytest.raises(TypeError):
        graph(IDS.int(), LABEL)
    assert graph.embedding.stats()["device"]["pinned"] == 0
    for one in (graph, plain):
        one(IDS, LABEL)
        one(IDS, LABEL)
    assert state_of(graph) == state_of(plain)


def test_clipping_in_build_while_accumulating_clips_what_there_is_so_far():
    def clips(self, ids, label):
        loss = build(self, ids, label, 30.0)
        return loss, torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    batches = [(IDS + i % 4, LABEL) for i in range(12)]
    graph, modules = make_graph(modules_of(), clips, sgd), modules_of()
    graph.config.accumulation_steps = 3
    owner = torch.nn.ModuleDict(modules)
    owner.embedding, owner.mlp = modules["embedding"], modules["mlp"]
    optimizer = oneemb.Optimizer(torch.optim.SGD(owner.parameters(), lr=0.1))
    for i, (ids, label) in enumerate(batches):
        got, expected = graph(ids, label), clips(owner, ids, label)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert rows_of(graph.embedding) == rows_of(modules["embedding"])


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_accumulation_steps_are_checked(steps):
    graph = make_graph(modules_of(), build, sgd)
    graph.config.accumulation_steps = steps
    with pytest.raises(ValueError, match="accumulation_steps"):
        graph(IDS, LABEL)


def test_several_embeddings_optimizers_and_losses_equal_eager():
    def two(self, ids, label):
        a, b = self.a(ids).flatten(1), self.b(ids).flatten(1)
        first = torch.nn.functional.mse_loss(self.mlp(a).squeeze(1), label)
        second = torch.nn.functional.mse_loss(self.other(b).squeeze(1), label)
        first.backward()
        second.backward()
        return first.detach() + second.detach()

    def optimizers(owner):
        return [
            torch.optim.Adagrad([*owner.a.parameters(), *owner.mlp.parameters()], lr=0.1),
            torch.optim.SGD([*owner.b.parameters(), *owner.other.parameters()], lr=0.1, momentum=0.9),
        ]

    def modules():
        torch.manual_seed(0)
        return {
            "a": make_embedding("a"),
            "b": make_embedding("b", seed=1),
            "mlp": oneemb.nn.FusedMLP(8, [4], 1),
            "other": oneemb.nn.FusedMLP(8, [4], 1),
        }

    left, right = modules(), modules()
    graph, eager = make_graph(left, two, optimizers), make_eager(right, two, optimizers)
    for _ in range(5):
        assert torch.equal(graph(IDS, LABEL), eager(IDS, LABEL))
    assert rows_of(left["a"]) == rows_of(right["a"]) and rows_of(left["b"]) == rows_of(right["b"])


def test_the_learning_rate_steps_once_an_update():
    graph = make_graph(modules_of(), build, lambda owner: [_with_scheduler(owner)])
    graph.config.accumulation_steps = 2
    for _ in range(4):
        graph(IDS, LABEL)
    assert graph.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.81)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        make_graph(modules_of(), build, lambda o: [(s := torch.optim.SGD(o.parameters(), lr=0.1), plateau(s))])


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_clip_grad_norm_is_checked(norm):
    with pytest.raises(ValueError, match="clip_grad_norm"):
        make_graph(modules_of(), build, sgd, clip_grad_norm=norm)


SCALER = scaler_of()


def test_a_global_scaler_is_known_to_a_build_that_is_decorated():
    @torch.autocast("cpu", enabled=False)
    def scaled(self, ids, label):
        loss = torch.nn.functional.mse_loss(self.mlp(self.embedding(ids).flatten(1)).squeeze(1), label)
        SCALER.scale(loss).backward()

    def plain(self, ids, label):
        torch.nn.functional.mse_loss(self.mlp(self.embedding(ids).flatten(1)).squeeze(1), label).backward()

    a, b = make_graph(modules_of(), scaled, sgd), make_graph(modules_of(), plain, sgd)
    for _ in range(3):
        a(IDS, LABEL)
        b(IDS, LABEL)
    assert state_of(a) == state_of(b)


def _backward_of_scaled(loss):
    SCALER.scale(loss).backward()


def test_a_global_scaler_is_known_to_functions_of_its_module_and_when_it_is_another_one(monkeypatch):
    def loss_of(self, ids, label):
        return torch.nn.functional.mse_loss(self.mlp(self.embedding(ids).flatten(1)).squeeze(1), label)

    def scaled(self, ids, label):
        _backward_of_scaled(loss_of(self, ids, label))

    def plain(self, ids, label):
        loss_of(self, ids, label).backward()

    a, b = make_graph(modules_of(), scaled, sgd), make_graph(modules_of(), plain, sgd)
    for scaler in (SCALER, scaler_of(init_scale=2.0**3), scaler_of()):
        monkeypatch.setitem(globals(), "SCALER", scaler)
        a(IDS, LABEL)
        b(IDS, LABEL)
        assert state_of(a) == state_of(b)


def test_micro_batches_of_one_update_are_scaled_by_one_scaler():
    calls = []

    def scaled(self, ids, label):
        calls.append(None)
        loss = torch.nn.functional.mse_loss(self.mlp(self.embedding(ids).flatten(1)).squeeze(1), label)
        (self.first if len(calls) % 2 else self.second).scale(loss).backward()

    graph = make_graph(modules_of(), scaled, sgd)
    graph.first, graph.second = scaler_of(), scaler_of()
    graph.config.accumulation_steps = 2
    graph(IDS, LABEL)
    with pytest.raises(oneemb.BuildError, match="two GradScalers"):
        graph(IDS, LABEL)


def test_what_an_interrupt_leaves_on_a_scaler_or_scheduler_does_no_harm():
    """As if Ctrl-C had come at the very end of a step, before they were as before."""
    graph = make_graph(modules_of(), build, lambda owner: [(one := sgd(owner)[0], StepLR(one, 1))])
    graph.scaler = scaler_of()
    scheduler, scaling = train_state_of(graph).lr_schedulers[0], Scaling([graph.scaler], None)
    with standing_in([(scheduler, "step", lambda one: pytest.fail("no build runs")), *scaling.methods()]):
        left = scheduler.step, graph.scaler.scale
    scheduler.step, graph.scaler.scale = left
    rates = []
    for _ in range(3):
        graph(IDS, LABEL)
        rates += scheduler.get_last_lr()
    assert rates == pytest.approx([rates[0] * 0.1**i for i in range(3)])
    assert graph.scaler.scale(torch.ones(1)).item() == graph.scaler.get_scale() and scaling.scaler is None
    assert "step" not in vars(scheduler) and "scale" not in vars(graph.scaler)


@pytest.mark.parametrize("own", [False, True], ids=["set_grad_scaler", "of build"])
@pytest.mark.parametrize("fails_in", ["build", "hook"])
def test_a_step_that_raises_after_gradients_are_unscaled_leaves_the_scaler_as_it_was(own, fails_in):
    """The next steps are those of a graph without a scaler."""
    fails = []

    def scaled_build(self, ids, label):
        logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.mse_loss(logit, label)
        (self.scaler.scale(loss) if own and self.scaler is not None else loss).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizers[0])
        if fails_in == "build" and fails:
            raise ValueError("of build")
        return loss.detach()

    graphs = [make_graph(modules_of(), scaled_build, adam) for _ in "ab"]
    for graph, scaler in zip(graphs, (None, scaler_of()), strict=True):
        graph.scaler = scaler
        if scaler is not None and not own:
            graph.set_grad_scaler(scaler)

        def hook(*_):
            if fails_in == "hook" and fails:
                raise ValueError("of a hook")

        graph.optimizers[0].optimizer.register_step_pre_hook(hook)
        for fail in (False, True, False, False):
            fails[:] = [fail] if fail else []
            if fail:
                with pytest.raises(ValueError, match="of "):
                    graph(IDS, LABEL)
            else:
                graph(IDS, LABEL)
    assert state_of(graphs[0]) == state_of(graphs[1])


def test_an_update_of_the_scaler_in_build_is_refused_but_of_another_one_is_not():
    def updating_build(self, ids, label):
        logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.mse_loss(logit, label)
        self.scaler.scale(loss).backward()
        self.other.update(2.0)
        if self.updates:
            self.scaler.update()

    graph = make_graph(modules_of(), updating_build, adam)
    graph.scaler, graph.other, graph.updates = scaler_of(), scaler_of(), False
    graph.other.scale(torch.ones(1))
    graph(IDS, LABEL)
    graph.updates = True
    with pytest.raises(oneemb.BuildError, match=r"updates the GradScaler at .*self.scaler.update\(\), which the graph"):
        graph(IDS, LABEL)
    graph.updates = False
    graph(IDS, LABEL)
    assert graph.other.get_scale() == 2.0 and "update" not in vars(graph.scaler)
