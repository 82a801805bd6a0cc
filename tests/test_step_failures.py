"""What a step that fails half way has done, by what failed: the error says so, and counts are of what was done."""

import pytest
import torch

import oneemb
from oneemb.graph.row_optimizers import RowOptimizer
from oneemb.storage.errors import BrokenStoreError
from tests.support.graph_models import make_eager, make_embedding, make_graph, rows_of, weights_of
from tests.support.inside import train_state_of

IDS = torch.tensor([[1, 2], [3, 1]])


class FailsOnce:
    """Raises at its call of this number."""

    def __init__(self, at):
        self.calls, self.at = 0, at

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("mine")


def modules_of():
    torch.manual_seed(0)
    return {"embedding": make_embedding(), "mlp": torch.nn.Linear(4, 1)}


def build(self, ids):
    loss = self.mlp(self.embedding(ids)).square().sum()
    loss.backward()
    return loss.detach()


def state_of(modules):
    stats = modules["embedding"].stats()
    return rows_of(modules["embedding"]), [one.tolist() for one in weights_of(modules["mlp"])], stats["step"]


def pinned(modules):
    return modules["embedding"].stats()["device"]["pinned"]


def adam(owner):
    return torch.optim.Adam(owner.parameters(), lr=0.01)


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer, at):
        self.fails = FailsOnce(at)
        super().__init__(optimizer, lambda step: 0.5**step)

    def step(self, *args):
        super().step(*args)
        self.fails()


@pytest.mark.parametrize("merged", [False, True])
def test_a_scheduler_that_fails_leaves_a_step_that_is_made_and_counted(merged):
    """The graph whose scheduler fails goes on as one whose scheduler does not."""
    graphs, all_modules = [], []
    for at in (3, 0):  # its constructor steps once
        modules = modules_of()
        if merged:
            modules["other"] = make_embedding("other", seed=1)

        def with_scheduler(owner, at=at):
            optimizer = adam(owner)
            return [(optimizer, Scheduler(optimizer, at))]

        graphs.append(make_graph(modules, build, with_scheduler))
        all_modules.append(modules)
    fails, works = graphs
    for step in range(4):
        loss = works(IDS)
        if step != 1:
            assert torch.equal(fails(IDS), loss)
            continue
        with pytest.raises(KeyError, match="mine") as caught:
            fails(IDS)
        (note,) = [note for note in caught.value.__notes__ if "Scheduler" in note]
        assert "rows and dense parameters are updated" in note
        assert pinned(all_modules[0]) == 0
        assert all(parameter.grad is None for parameter in fails.parameters())
    assert state_of(all_modules[0]) == state_of(all_modules[1])
    assert fails.steps == works.steps == all_modules[0]["embedding"].stats()["step"] == 4


def test_an_option_that_a_hook_changes_and_rows_cannot_follow_leaves_the_rows_in_order():
    embedding = make_embedding()
    dense = torch.optim.SGD([embedding.weight], lr=0.1)
    optimizer = oneemb.Optimizer(dense, [embedding])

    def change(optimizer, *_):
        optimizer.param_groups[0]["momentum"] = 0.9

    handle, before = dense.register_step_pre_hook(change), embedding(IDS).detach()
    embedding(IDS).sum().backward()
    with pytest.raises(ValueError, match="momentum must stay off"):
        optimizer.step()
    assert torch.equal(embedding(IDS), before) and embedding.stats()["step"] == 0
    handle.remove()
    dense.param_groups[0]["momentum"] = 0
    optimizer.step()
    assert not torch.equal(embedding(IDS), before) and embedding.stats()["step"] == 1


def test_an_option_that_a_hook_changes_for_the_last_embedding_leaves_the_rows_of_all():
    """Both in groups of their own, so that their rows are updated one after the other."""
    embeddings = [make_embedding(), make_embedding()]
    dense = torch.optim.SGD([{"params": [embedding.weight]} for embedding in embeddings], lr=0.1)
    optimizer = oneemb.Optimizer(dense, embeddings)
    before = [embedding(IDS).detach() for embedding in embeddings]
    for step in (optimizer.step, dense.step):

        def change(optimizer, *_):
            optimizer.param_groups[1]["momentum"] = 0.9

        handle = dense.register_step_pre_hook(change)
        sum(embedding(IDS).sum() for embedding in embeddings).backward()
        with pytest.raises(ValueError, match="momentum must stay off"):
            step()
        handle.remove()
        optimizer.zero_grad()
        dense.param_groups[1]["momentum"] = 0
        for embedding, rows in zip(embeddings, before, strict=True):
            assert torch.equal(embedding(IDS), rows) and embedding.stats()["step"] == 0


def graph_of_two(merged, optimizers):
    """A graph with the embeddings "embedding" and "other", whose lookups are merged or not, and its modules."""
    modules = modules_of()
    modules["other"] = make_embedding("other", dim=4 if merged else 8, seed=1)

    def build(self, ids):
        loss = self.mlp(self.embedding(ids)).square().sum() + self.other(ids).square().sum()
        loss.backward()
        return loss.detach()

    return make_graph(modules, build, optimizers), modules


@pytest.mark.parametrize("merged", [False, True])
def test_what_nobody_can_hold_back_in_an_update_breaks_every_embedding_of_the_step(merged):
    """Such as an exception that another thread puts there: it may have come between the rows of two embeddings."""
    graph, modules = graph_of_two(merged, lambda owner: [adam(owner)])
    graph(IDS)

    def stop(*_):
        raise SystemExit("now")

    graph.optimizers[0].optimizer.register_step_pre_hook(stop)
    with pytest.raises(SystemExit, match="now"):
        graph(IDS)
    for name in ("embedding", "other"):
        with pytest.raises(BrokenStoreError, match="SystemExit: now"):
            modules[name](IDS)


class FailsHalfWay(torch.optim.SGD):
    """Changes one row in the second step, and raises."""

    def row_optimizer(self, group):
        def run(weight_SX, row_SW, slot_U, grads, *, state_begin, group, step, backend):
            if step == 2:
                row_SW[slot_U[0], 0] = 7
                raise ValueError("mine")

        return RowOptimizer("half_way", (), (), run)


@pytest.mark.parametrize("merged", [False, True])
def test_an_update_that_fails_half_way_breaks_every_embedding_whose_rows_it_changes(merged):
    graph, modules = graph_of_two(merged, lambda owner: [FailsHalfWay(owner.parameters(), lr=0.1)])
    graph(IDS)
    with pytest.raises(ValueError, match="mine"):
        graph(IDS)
    with pytest.raises(BrokenStoreError, match="ValueError: mine"):
        modules["embedding"](IDS)
    if merged:
        with pytest.raises(BrokenStoreError, match="ValueError: mine"):
            modules["other"](IDS)
    else:
        modules["other"](IDS)


def test_one_scheduler_that_fails_keeps_no_other_from_its_step():
    modules = modules_of()

    def optimizers(owner):
        one = torch.optim.SGD(owner.embedding.parameters(), lr=0.1)
        two = torch.optim.SGD(owner.mlp.parameters(), lr=0.1)
        return [(one, Scheduler(one, 2)), (two, Scheduler(two, 0))]

    graph = make_graph(modules, build, optimizers)
    with pytest.raises(KeyError):
        graph(IDS)
    assert [one.param_groups[0]["lr"] for one in graph.optimizers] == [0.05, 0.05]


def test_a_scaler_goes_on_after_a_scheduler_that_failed():
    modules = modules_of()

    def with_scheduler(owner):
        optimizer = adam(owner)
        return [(optimizer, Scheduler(optimizer, 2))]

    graph = make_graph(modules, build, with_scheduler)
    graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1))
    with pytest.raises(KeyError):
        graph(IDS)
    graph(IDS)
    assert graph.steps == 2 and train_state_of(graph).scaler.get_scale() == 16.0


@pytest.mark.parametrize("make", [make_graph, make_eager])
def test_an_optimizer_hook_that_fails_before_the_step_leaves_everything_as_it_was(make):
    """Rows and dense parameters; and the step, made again, is that of an optimizer without the hook."""
    results = []
    for at in (2, 0):
        modules, made = modules_of(), []
        step = make(modules, build, lambda owner, made=made: made.append(adam(owner)) or made)
        made[0].register_step_pre_hook(FailsOnce(at))
        step(IDS)
        before = state_of(modules)
        if at:
            with pytest.raises(KeyError, match="mine") as caught:
                step(IDS)
            assert any("no row was updated" in note for note in caught.value.__notes__)
            assert state_of(modules) == before
            if make is make_graph:
                assert pinned(modules) == 0 and step.steps == 1
            else:  # what a user does who catches it
                modules["embedding"].weight.grad = None
                made[0].zero_grad()
        step(IDS)
        results.append(state_of(modules))
    assert results[0] == results[1]


def test_a_hook_that_fails_after_the_dense_step_has_changed_no_row():
    modules, made = modules_of(), []
    graph = make_graph(modules, build, lambda owner: made.append(adam(owner)) or made)
    made[0].register_step_post_hook(FailsOnce(1))
    with pytest.raises(KeyError) as caught:
        graph(IDS)
    assert any("no row was updated, but some dense parameters" in note for note in caught.value.__notes__)
    assert modules["embedding"].stats()["step"] == 0 and graph.steps == 0 and pinned(modules) == 0


@pytest.mark.parametrize("make", [make_graph, make_eager])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_rows_take_the_rate_that_the_optimizer_steps_with(make, tensor_lr):
    """As dense parameters do: hooks before the step count, hooks after it do not."""
    modules, made = modules_of(), []
    lr = torch.tensor(1.0) if tensor_lr else 1.0

    def optimizers(owner):
        # A dense parameter whose gradient is 1 shows the rate of each step.
        made.append(torch.optim.SGD([*owner.embedding.parameters(), owner.mlp.bias], lr=lr))
        return made

    def sum_build(self, ids):
        loss = self.embedding(ids).sum() + self.mlp.bias.sum()
        loss.backward()
        return loss.detach()

    step = make(modules, sum_build, optimizers)

    def set_lr(rate):
        if tensor_lr:
            made[0].param_groups[0]["lr"].fill_(rate)
        else:
            made[0].param_groups[0]["lr"] = rate

    made[0].register_step_pre_hook(lambda *_: set_lr(0.25))
    made[0].register_step_post_hook(lambda *_: set_lr(8.0))
    ids = torch.tensor([[7, 8]])
    modules["embedding"].eval()
    before, bias = modules["embedding"](ids).detach(), modules["mlp"].bias.detach().clone()
    modules["embedding"].train()
    for _ in range(2):
        step(ids)
    assert torch.equal(modules["mlp"].bias.detach(), bias - 0.5)
    torch.testing.assert_close(modules["embedding"](ids).detach(), before - 0.5)


def test_a_hook_in_the_backward_pass_that_fails_has_changed_nothing_but_new_ids():
    modules = modules_of()
    fails = FailsOnce(2)
    modules["mlp"].register_full_backward_hook(lambda *_: fails())
    graph = make_graph(modules, build, lambda owner: [adam(owner)])
    graph(IDS)
    before = state_of(modules)
    with pytest.raises(KeyError):
        graph(IDS + 1)
    rows, dense, step = state_of(modules)
    assert before == ({key: row for key, row in rows.items() if key in before[0]}, dense, step)
    assert {id for _, id in rows.keys() - before[0].keys()} == {2, 3, 4}
    assert pinned(modules) == 0 and all(parameter.grad is None for parameter in graph.parameters())


def test_ids_that_a_refused_step_has_looked_up_stay_with_their_initial_values():
    modules = modules_of()

    def nan(self, ids):
        loss = self.embedding(ids).sum() * float("nan")
        loss.backward()
        return loss

    graph = make_graph(modules, nan, lambda owner: [torch.optim.SGD(owner.parameters(), lr=0.1)])
    modules["embedding"].eval()
    initial = modules["embedding"](IDS).detach()
    modules["embedding"].train()
    with pytest.raises(oneemb.NonFiniteGradientError, match="nothing was updated"):
        graph(IDS)
    stats = modules["embedding"].stats()
    assert stats["rows"] == 4 and stats["step"] == graph.steps == 0
    modules["embedding"].eval()
    assert torch.equal(modules["embedding"](IDS), initial)


def test_a_lookup_by_a_closure_is_made_and_trained_like_any_other():
    rows = []
    for by_closure in (False, True):
        modules = modules_of()

        class Hidden(torch.nn.Module):
            def forward(self, ids, modules=modules):
                return modules["embedding"](ids).sum()

        def build(self, ids, by_closure=by_closure):
            again = self.hidden(ids) if by_closure else self.embedding(ids).sum()
            loss = self.embedding(ids).square().sum() + again
            loss.backward()
            return loss.detach()

        graph = make_graph({**modules, "hidden": Hidden()}, build, lambda owner: [adam(owner)])
        losses = [graph(IDS) for _ in range(3)]
        assert pinned(modules) == 0 and modules["embedding"].weight.grad is None
        rows.append((losses, rows_of(modules["embedding"])))
    assert rows[0] == rows[1]
