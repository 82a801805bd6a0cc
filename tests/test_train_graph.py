"""TrainGraph: for each kind of model a compiled step gives what the eager loop gives, bit for bit; what cannot be
trained is refused; a step that fails leaves nothing behind."""

import copy
import gc
import math
import traceback
import weakref

import pytest
import torch

import oneemb
from tests.support.inside import known_of
from tests.support.models import make_embedding, rows_of, zipf_ids
from tests.support.optimizers import OPTIMIZERS
from tests.support.pairwise import diagonal

BCE = torch.nn.functional.binary_cross_entropy_with_logits
STEPS = 6
IDS = torch.arange(60) * 7919 - 60  # those of the batches, as zipf_ids draws them


@pytest.fixture
def made(tmp_path):
    every = []

    def make(path="rows", **options):
        while (tmp_path / path).exists():
            path += "-again"
        every.append(make_embedding(tmp_path / path, **{"tables": 2, "dim": 4, **options}))
        return every[-1]

    yield make
    for embedding in every:
        embedding.close()


def batches(steps=STEPS, sizes=(8, 3, 1, 8, 5, 16)):
    """Batches of several sizes: a graph is compiled for all of them."""
    generator = torch.Generator().manual_seed(4)
    ids = zipf_ids(max(sizes), 2, steps, ids=60)
    for step in range(steps):
        size = sizes[step % len(sizes)]
        yield ids[step, :size], torch.rand(size, generator=generator)


def mlp(width=8):
    return oneemb.nn.FusedMLP(width, [6], 1, skip_final_activation=True)


def adam(owner):
    return [torch.optim.Adam(owner.parameters(), lr=0.05)]


class Model:
    """The same modules, made twice with the same seed: as a TrainGraph, and for an eager loop around its `build`.

    modules(made) -> {name: module};  optimizers(owner) -> optimizers, or (optimizer, scheduler) pairs.
    """

    def __init__(self, made, modules, build, optimizers=adam, **options):
        self.build = build
        graph_modules, eager_modules = self._make(made, modules), self._make(made, modules)

        class Graph(oneemb.TrainGraph):
            def __init__(self):
                super().__init__()
                for name, module in graph_modules.items():
                    setattr(self, name, module)
                for one in self.pairs(optimizers):
                    self.add_optimizer(*one, **options)

            @staticmethod
            def pairs(optimizers):
                return []

        Graph.pairs = lambda self, optimizers: [one if isinstance(one, tuple) else (one,) for one in optimizers(self)]
        Graph.build = build
        self.graph, self.eager = Graph(), torch.nn.Module()
        for name, module in eager_modules.items():
            setattr(self.eager, name, module)
        self.joined = []
        for one in optimizers(self.eager):
            optimizer, scheduler = one if isinstance(one, tuple) else (one, None)
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            mine = [one for one in self.embeddings(self.eager) if id(one.weight) in held]
            self.joined.append((oneemb.Optimizer(optimizer, mine, **options), scheduler))

    @staticmethod
    def _make(made, modules):
        torch.manual_seed(1)
        return modules(made)

    @staticmethod
    def embeddings(owner):
        return [one for one in owner.modules() if isinstance(one, oneemb.MultiTableEmbedding)]

    def run_eager(self, *args, **kwargs):
        if not self.eager.training:
            with torch.no_grad():
                return self.build(self.eager, *args, **kwargs)
        result = self.build(self.eager, *args, **kwargs)
        for optimizer, scheduler in self.joined:
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        for optimizer, _ in self.joined:
            optimizer.zero_grad()
        return result

    def step(self, *args, **kwargs):
        """A step of both; returns the result of the graph, which has to be that of the eager loop."""
        torch.manual_seed(2)
        expected = self.run_eager(*args, **kwargs)
        torch.manual_seed(2)
        found = self.graph(*args, **kwargs)
        assert_same(found, expected)
        return found

    def check_state(self):
        for (name, one), two in zip(self.graph.named_parameters(), self.eager.parameters(), strict=True):
            assert torch.equal(one, two), name
            assert one.grad is None
        for one, two in zip(self.embeddings(self.graph), self.embeddings(self.eager), strict=True):
            assert known_rows(one) == known_rows(two) and known_rows(one)
            assert one.stats()["step"] == two.stats()["step"]
            assert one.stats()["device"]["pinned"] == two.stats()["device"]["pinned"] == 0

    def check(self, give=lambda ids, label: ((ids, label), {})):
        for ids, label in batches():
            args, kwargs = give(ids, label)
            self.step(*args, **kwargs)
        self.check_state()


def assert_same(found, expected):
    flat, structure = torch.utils._pytree.tree_flatten(expected)
    found_flat, found_structure = torch.utils._pytree.tree_flatten(found)
    assert structure == found_structure
    for one, two in zip(found_flat, flat, strict=True):
        assert torch.equal(one, two) if torch.is_tensor(two) else one == two


def known_rows(embedding):
    """{(table, id): bytes of weights and state}, read from a snapshot."""
    embedding.save_snapshot("look", overwrite=True)
    path = embedding.store_options.persistent_path
    with oneemb.make_persistent_table_reader(path, "look", torch.int64, torch.float32, with_tables=True) as reader:
        return {
            (int(t), int(i)): row.tobytes()
            for some in reader
            for t, i, row in zip(*some, strict=True)
        }  # fmt: skip


# ---- models that a graph and the eager loop train alike --------------------------------------------------------------


def plain(made):
    return {"embedding": made(), "mlp": mlp()}


def plain_build(self, ids, label):
    loss = BCE(self.mlp(self.embedding(ids).flatten(1)).squeeze(1), label)
    loss.backward()
    return loss


@pytest.mark.parametrize(("name", "store"), diagonal(sorted(OPTIMIZERS.keys() - {"sparse adam"}), ["device", "ssd"]))
def test_every_optimizer(made, name, store):
    modules = lambda made: {"embedding": made(store=store), "mlp": mlp()}  # noqa: E731
    Model(made, modules, plain_build, lambda owner: [OPTIMIZERS[name](owner.parameters())]).check()


class Tower(torch.nn.Module):
    """A module that holds an embedding is traced through; those inside it that hold none may be any Python."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.norm, self.branch = embedding, torch.nn.LayerNorm(4), Branch()

    def forward(self, ids, scale=1.0):
        return self.branch(self.norm(self.embedding(ids)) * scale).flatten(1)


class Branch(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] > 4 and float(x.detach().sum()) > 0:
            return x * 2
        return torch.stack([row + n for n, row in enumerate(x)])


def test_embeddings_inside_nested_modules(made):
    def modules(made):
        return {
            "towers": torch.nn.ModuleList([Tower(made("one")), Tower(made("two"))]),
            "head": torch.nn.Sequential(torch.nn.Dropout(0.3), mlp(16)),
        }

    def build(self, ids, label):
        x = torch.cat([tower(ids, scale=n + 0.5) for n, tower in enumerate(self.towers)], dim=1)
        loss = BCE(self.head(x)[:, 0], label)
        loss.backward()
        return loss, x

    Model(made, modules, build).check()


@pytest.mark.parametrize("lookups", [2, 3, 4])
def test_an_embedding_that_is_looked_up_several_times(made, lookups):
    # Three or more sums of floats depend on their order: it is that of the lookups, not that of the gradients.
    def build(self, ids, label):
        x = sum(self.embedding(ids.roll(n, 0) + 5 * (n == 2)) * (0.7 + n) for n in range(lookups))
        loss = BCE(self.mlp(x.flatten(1)).squeeze(1), label) + x.square().mean()
        loss.backward()
        return loss

    Model(made, plain, build).check()


def test_an_embedding_that_two_modules_share(made):
    def modules(made):
        shared = made()
        return {"one": Tower(shared), "two": Tower(shared), "mlp": mlp(16)}

    def build(self, ids, label):
        loss = BCE(self.mlp(torch.cat([self.one(ids), self.two(ids)], 1)).squeeze(1), label)
        loss.backward()
        return loss

    Model(made, modules, build).check()


def test_tables_named_by_table_ids(made):
    def build(self, ids, label, table_ids):
        rows = self.embedding(ids[:, 0], table_ids) + self.embedding(ids[:, 1:], table_ids=1).squeeze(1)
        loss = BCE(rows.sum(1), label)
        loss.backward()
        return loss

    def with_tensor(self, ids, label, table_ids):
        loss = BCE(self.embedding(ids, table_ids).sum((1, 2)), label)
        loss.backward()
        return loss

    Model(made, plain, build).check(lambda ids, label: ((ids, label), {"table_ids": torch.tensor(0)}))
    Model(made, plain, with_tensor).check(lambda ids, label: ((ids, label), {"table_ids": torch.tensor([1, 0])}))


@pytest.mark.parametrize(
    "give",
    [
        lambda ids, label: ((), {"batch": {"ids": [ids[:, :1], ids[:, 1:]], "label": label}}),
        lambda ids, label: (({"ids": (ids[:, :1], ids[:, 1:]), "label": label},), {}),
        lambda ids, label: (({"ids": [ids, ids[:, :0]], "label": label}, 2.0), {}),
        lambda ids, label: (({"ids": [ids, ids[:, :0]], "label": label},), {"weight": torch.tensor(0.5)}),
        lambda ids, label: (({"label": label, "ids": [ids]}, None, True), {}),
    ],
    ids=["keyword, list", "tuple", "number", "tensor", "none and flag"],
)
def test_inputs_of_any_nesting(made, give):
    def build(self, batch, weight=None, *flags):
        rows = self.embedding(torch.cat(list(batch["ids"]), dim=1))
        loss = BCE(self.mlp(rows.flatten(1)).squeeze(1), batch["label"])
        if weight is not None:
            loss = loss * weight
        if flags and flags[0]:
            loss = loss + 1
        loss.backward()
        return {"loss": loss, "rows": [rows.detach(), None]}

    Model(made, plain, build).check(give)


def test_a_number_that_changes_from_call_to_call(made):
    def build(self, ids, label, temperature):
        loss = BCE(self.mlp(self.embedding(ids).flatten(1)).squeeze(1) / temperature, label)
        loss.backward()
        return loss

    model = Model(made, plain, build)
    for n, (ids, label) in enumerate(batches()):
        model.step(ids, label, 1.0 + n)
    model.check_state()


def test_two_optimizers_with_schedulers_of_their_own(made):
    def optimizers(owner):
        rows = torch.optim.Adagrad(owner.embedding.parameters(), lr=0.2)
        dense = torch.optim.SGD(owner.mlp.parameters(), lr=0.1, momentum=0.9)
        return [
            (rows, torch.optim.lr_scheduler.StepLR(rows, 2, 0.5)),
            (dense, torch.optim.lr_scheduler.OneCycleLR(dense, 0.3, total_steps=10)),
        ]

    model = Model(made, plain, plain_build, optimizers)
    rates = []
    for ids, label in batches():
        rates.append([one.param_groups[0]["lr"] for one in model.graph.optimizers])
        model.step(ids, label)
    model.check_state()
    assert [rate for rate, _ in rates] == [0.2, 0.2, 0.1, 0.1, 0.05, 0.05] and len({rate for _, rate in rates}) == STEPS


def test_embeddings_of_several_kinds_and_optimizers(made):
    def modules(made):
        return {
            "one": made("one", dim=3, tables=1, padding_idx=7919 - 60),
            "two": made("two", dtype=torch.bfloat16, store="host"),
            "frozen": made("frozen").requires_grad_(False),
            "mlp": mlp(3 + 8 + 8),
        }

    def optimizers(owner):
        dense = [*owner.mlp.parameters(), owner.one.weight]
        return [torch.optim.Adam(dense), torch.optim.SGD([owner.two.weight, owner.frozen.weight], lr=0.5)]

    def build(self, ids, label):
        x = torch.cat([self.one(ids[:, 0]), self.two(ids).flatten(1).float(), self.frozen(ids).flatten(1)], dim=1)
        loss = BCE(self.mlp(x).squeeze(1), label)
        loss.backward()
        return loss

    model = Model(made, modules, build, optimizers)
    before = rows_of(model.graph.frozen, IDS)
    model.check()
    assert torch.equal(rows_of(model.graph.frozen, IDS), before)
    assert model.graph.frozen.stats()["step"] == 0


def test_parameters_and_buffers_that_build_uses_itself(made):
    class Shift(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([0.3]))
            self.register_buffer("offset", torch.tensor([0.2]))

    def modules(made):
        return {**plain(made), "shift": Shift()}

    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        logit = self.mlp(x).squeeze(1) * self.shift.weight + self.shift.offset
        penalty = sum(parameter.square().sum() for parameter in self.mlp.parameters())
        tied = x[:, :6] @ self.mlp.layers[0].weight.T[:6, :1]
        loss = BCE(logit + tied.squeeze(1), label) + 0.01 * penalty + self.shift.weight.abs().sum()
        loss.backward()
        return loss

    model = Model(made, modules, build)
    model.check()
    model.graph.shift.offset.fill_(3.0)  # A buffer is read anew at every step.
    model.eager.shift.offset.fill_(3.0)
    model.check()


def test_several_losses_and_a_graph_that_is_kept(made):
    def build(self, ids, label):
        rows = self.embedding(ids)
        first = BCE(self.mlp(rows.flatten(1)).squeeze(1), label)
        second = rows.square().mean()
        first.backward(retain_graph=True)
        (second * 0.5).backward()
        return first, second.detach()

    Model(made, plain, build).check()


def test_random_numbers_are_drawn_anew_at_every_step(made):
    def build(self, ids, label):
        rows = self.embedding(ids)
        noise = torch.randn(rows.shape[0], 2, 4) * 0.1 + torch.rand(4) * torch.randperm(4)
        loss = BCE(self.mlp((rows + noise + torch.rand_like(rows)).flatten(1)).squeeze(1), label)
        loss.backward()
        return noise

    model = Model(made, plain, build)
    model.check()
    ids, label = next(batches())
    assert not torch.equal(model.graph(ids, label), model.graph(ids, label))


def test_tensors_as_large_as_the_batch_may_be_made(made):
    def build(self, ids, label):
        size = ids.shape[0]
        weight = torch.ones(size) + torch.zeros((size,)) + torch.full((size, 1), 0.5)[:, 0] + torch.arange(size) * 0.1
        flat = torch.cat([self.embedding(ids).flatten(1), torch.empty(size, 0)], dim=1)
        loss = BCE(self.mlp(flat).squeeze(1), label, weight=weight + torch.eye(size)[0])
        loss.backward()
        return loss, weight, torch.tensor([1.0, 2.0])

    Model(made, plain, build).check()


def test_blocks_without_gradients_are_part_of_the_graph(made):
    def build(self, ids, label):
        with torch.no_grad():
            target = self.embedding(ids).square()
            with torch.enable_grad():
                inner = self.mlp(target.flatten(1))
            outer = self.mlp(target.flatten(1))
        flags = inner.requires_grad, outer.requires_grad
        with torch.set_grad_enabled(False):
            weight = self.mlp(self.embedding(ids).flatten(1)).sigmoid().squeeze(1)
        rows = self.embedding(ids)
        loss = (BCE(self.mlp(rows.flatten(1)).squeeze(1), label, reduction="none") * weight).mean()
        (loss + (rows - target).square().mean()).backward()
        return loss, flags

    model = Model(made, plain, build)
    model.check()
    assert model.step(*next(batches()))[1] == (True, False)


def test_autocast_is_part_of_the_graph(made):
    def build(self, ids, label):
        with torch.autocast("cpu", torch.bfloat16):
            logit = self.mlp(self.embedding(ids).flatten(1))
        loss = BCE(logit.squeeze(1).float(), label)
        loss.backward()
        return loss, logit

    model = Model(made, plain, build)
    model.check()
    assert model.step(*next(batches()))[1].dtype == torch.bfloat16


def test_clipping_of_dense_gradients_is_part_of_the_graph(made):
    def build(self, ids, label):
        loss = BCE(self.mlp(self.embedding(ids).flatten(1)).squeeze(1), label)
        loss.backward()
        return torch.nn.utils.clip_grad_norm_(self.mlp.parameters(), 0.01)

    model = Model(made, plain, build)
    model.check()
    assert model.step(*next(batches())) > 0.01


def test_a_comparison_that_would_notice_one_step_too_many(made):
    model = Model(made, plain, plain_build)
    ids, label = next(batches())
    model.step(ids, label)
    model.graph(ids, label)
    with pytest.raises(AssertionError):
        model.check()


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_eval_runs_forward_inserts_nothing_and_training_goes_on(made):
    def modules(made):
        return {"embedding": made(), "head": torch.nn.Sequential(torch.nn.Dropout(0.5), mlp())}

    def build(self, ids, label):
        logit = self.head(self.embedding(ids).flatten(1)).squeeze(1)
        loss = BCE(logit, label)
        loss.backward()
        return loss, logit

    model = Model(made, modules, build)
    for owner in (model.graph, model.eager):
        model.check()
        rows = model.graph.embedding.stats()["rows"]
        model.graph.eval()
        ids, label = torch.tensor([[10**9, 3], [0, 10**9]]), torch.ones(2)
        loss, logit = model.graph(ids, label)
        assert not loss.requires_grad and not logit.requires_grad
        model.eager.eval()
        with torch.no_grad():
            expected = model.eager.head(model.eager.embedding(ids).flatten(1)).squeeze(1)
        assert torch.equal(logit, expected) and owner is not None
        assert model.graph.embedding.stats()["rows"] == rows
        model.graph.train()
        model.eager.train()


def test_a_graph_is_compiled_anew_for_another_mode_and_once_for_each(made):
    graph = Model(made, plain, plain_build).graph
    ids, label = next(batches())
    graph(ids, label)
    trained = graph.compiled().code
    for ids, label in batches():
        graph(ids, label)
        assert graph.compiled().code == trained
    seen = {trained}
    for mode in (graph.eval, graph.embedding.eval):
        graph.train()
        mode()
        graph(ids, label)
        seen.add(graph.compiled().code)
    assert len(seen) == 3
    graph.train()
    graph.embedding.requires_grad_(True)
    graph(ids, label)
    assert graph.compiled().code == trained and all(known.recorded == 1 for known in known_of(graph))


def test_freezing_between_steps_freezes(made):
    model = Model(made, plain, plain_build)
    for frozen in (False, True, False):
        for owner in (model.graph, model.eager):
            owner.embedding.requires_grad_(not frozen)
        before = rows_of(model.graph.embedding, IDS)
        for ids, label in batches():
            model.step(ids, label)
        assert torch.equal(rows_of(model.graph.embedding, IDS), before) == frozen
    model.check_state()


@pytest.mark.parametrize("frozen", [False, True])
def test_an_embedding_in_eval_mode_is_trained_unless_it_is_frozen(made, frozen):
    model = Model(made, plain, plain_build)
    model.step(*next(batches()))
    rows = model.graph.embedding.stats()["rows"], known_rows(model.graph.embedding)
    for owner in (model.graph, model.eager):
        owner.embedding.eval().requires_grad_(not frozen)
    for ids, label in batches():
        model.step(ids, label)
    assert frozen == (rows == (model.graph.embedding.stats()["rows"], known_rows(model.graph.embedding)))
    model.check_state()


def test_a_graph_without_an_optimizer_runs_forward(made):
    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.embedding = made()

        def build(self, ids):
            return self.embedding(ids)

    graph = Graph()
    ids = torch.tensor([[1, 2]])
    assert torch.equal(graph(ids), rows_of(graph.embedding, [1]).new_tensor(graph.embedding(ids).tolist()))
    assert graph.embedding.stats()["rows"] == 2
    graph._plans.latest = None
    graph.embedding(ids)
    assert graph.embedding.stats()["device"]["pinned"] <= 2


def test_a_state_dict_of_a_graph_brings_rows_and_weights_back(made):
    model = Model(made, plain, plain_build)
    data = list(batches())
    for ids, label in data[:3]:
        model.graph(ids, label)
    state = copy.deepcopy(model.graph.state_dict())
    optimizer = copy.deepcopy(model.graph.optimizers[0].state_dict())
    losses = [model.graph(ids, label) for ids, label in data[3:]]
    model.graph.load_state_dict(state)
    model.graph.optimizers[0].load_state_dict(optimizer)
    assert_same([model.graph(ids, label) for ids, label in data[3:]], losses)


def test_a_snapshot_may_be_loaded_between_steps(made):
    model = Model(made, plain, plain_build, lambda owner: [torch.optim.SGD(owner.parameters(), lr=0.1)])
    data = list(batches())
    for owner in (model.graph, model.eager):
        owner.embedding(data[0][0])
        owner.embedding.save_snapshot("s")
    for ids, label in data:
        model.step(ids, label)
        for owner in (model.graph, model.eager):
            owner.embedding.load_snapshot("s")
    assert model.graph.embedding.stats()["step"] == 0


# ---- steps that fail -------------------------------------------------------------------------------------------------


def state_of(model):
    owner = model.graph
    parameters = [parameter.detach().clone() for parameter in owner.parameters()]
    optimizer = copy.deepcopy(owner.optimizers[0].state_dict())
    return parameters, known_rows(owner.embedding), owner.embedding.stats()["step"], str(optimizer)


def assert_as_before(model, before, new_ids=()):
    parameters, rows, step, optimizer = state_of(model)
    assert_same(parameters, before[0])
    known = {key: row for key, row in rows.items() if key[1] not in new_ids}
    assert known == before[1] and step == before[2] and optimizer == before[3]
    assert model.graph.embedding.stats()["device"]["pinned"] == 0
    assert all(parameter.grad is None for parameter in model.graph.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("skip", [False, True], ids=["raise", "skip"])
@pytest.mark.parametrize("where", ["rows", "dense"])
def test_a_step_that_is_not_finite_leaves_nothing_behind(made, value, skip, where):
    def build(self, ids, label, scale, offset):
        rows = self.embedding(ids) * scale
        loss = BCE(self.mlp(rows.flatten(1)).squeeze(1), label) + (self.mlp.layers[0].weight * offset).sum()
        loss.backward()
        return loss

    model = Model(made, plain, build, skip_nonfinite=skip)
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    bad = (torch.tensor(value), zero) if where == "rows" else (one, torch.tensor(value))
    for ids, label in batches():
        model.step(ids, label, one, zero)
        before = state_of(model)
        if skip:
            model.graph(ids, label, *bad)
        else:
            with pytest.raises(oneemb.NonFiniteGradientError, match="not finite.*nothing was updated"):
                model.graph(ids, label, *bad)
        assert_as_before(model, before)
    model.check_state()
    assert model.graph.optimizers[0].skipped == (STEPS if skip else 0)


def test_a_step_that_does_not_fit_leaves_nothing_behind(made):
    modules = lambda made: {"embedding": made(store="ssd", dim=64), "mlp": mlp(128)}  # noqa: E731
    model = Model(made, modules, plain_build)
    for ids, label in batches():
        model.step(ids, label)
        before = state_of(model)
        with pytest.raises(oneemb.StoreFullError, match="give the tier at least 5 MiB"):
            model.graph(torch.arange(6000).reshape(-1, 2), torch.ones(3000))
        assert_as_before(model, before)
    model.check_state()


def test_an_error_in_the_users_module_leaves_nothing_behind(made):
    class Picky(torch.nn.Module):
        def forward(self, x):
            if len(x) == 2:
                raise KeyError("two rows")
            return x

    def build(self, ids, label):
        rows = self.embedding(ids)
        first = BCE(self.mlp(rows.flatten(1)).squeeze(1), label)
        first.backward(retain_graph=True)
        second = self.picky(rows).square().mean()
        second.backward()
        return first + second

    model = Model(made, lambda made: {**plain(made), "picky": Picky()}, build)
    for ids, label in batches():
        model.step(ids, label)
        before = state_of(model)
        with pytest.raises(KeyError, match="two rows") as error:
            model.graph(torch.tensor([[10**9, 10**9], [1, 2]]), torch.ones(2))
        assert "self.picky(rows)" in "".join(traceback.format_exception(error.value))
        assert_as_before(model, before, new_ids={10**9, 1, 2} - {key[1] for key in before[1]})
        with torch.no_grad():
            model.eager.embedding(torch.tensor([[10**9, 10**9], [1, 2]]))
    model.check_state()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_first_step_without_a_gradient_is_warned_of(made):
    def build(self, ids, label):
        return BCE(self.mlp(self.embedding(ids).flatten(1)).squeeze(1), label)

    model = Model(made, plain, build)
    model.graph.eval()
    model.graph(*next(batches()))
    model.graph.train()
    with pytest.warns(UserWarning, match=r"build has computed no gradient.* call loss.backward\(\) in build"):
        model.graph(*next(batches()))
    model.graph(*next(batches()))


def test_an_embedding_without_an_optimizer_is_refused_by_name(made):
    modules = lambda made: {"embedding": made(name="forgotten"), "mlp": mlp()}  # noqa: E731
    model = Model(made, modules, plain_build, lambda owner: [torch.optim.SGD(owner.mlp.parameters(), lr=0.1)])
    ids, label = next(batches())
    message = "build gives embedding 'forgotten' a gradient, but no optimizer of the graph trains it; pass"
    with pytest.raises(oneemb.BuildError, match=message):
        model.graph(ids, label)
    model.graph.embedding.requires_grad_(False)
    model.graph(ids, label)


def test_a_graph_without_build_says_so(made):
    class Graph(oneemb.TrainGraph):
        pass

    with pytest.raises(NotImplementedError, match=r"Graph must define build\(self, ...\)"):
        Graph()(torch.tensor([1]))


@pytest.mark.parametrize(
    ("add", "match"),
    [
        (
            lambda graph: graph.add_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)),
            "SGD must hold parameters of this graph",
        ),
        (
            lambda graph: graph.add_optimizer(
                one := torch.optim.SGD(graph.parameters(), lr=0.1), torch.optim.lr_scheduler.ReduceLROnPlateau(one)
            ),
            "ReduceLROnPlateau needs a metric",
        ),
        (
            lambda graph: graph.add_optimizer(
                torch.optim.SGD(graph.parameters(), lr=0.1),
                torch.optim.lr_scheduler.StepLR(torch.optim.SGD(graph.parameters(), lr=0.1), 1),
            ),
            "lr_scheduler must be made on the optimizer that it is added with",
        ),
        (
            lambda graph: graph.add_optimizer(torch.optim.Adam(graph.parameters(), differentiable=True)),
            "differentiable=True.* is not supported",
        ),
        (
            lambda graph: [graph.add_optimizer(torch.optim.SGD(graph.parameters(), lr=0.1)) for _ in range(2)],
            "has an optimizer already",
        ),
        (
            lambda graph: [graph.add_optimizer(one) for one in 2 * [torch.optim.SGD(graph.parameters(), lr=0.1)]],
            "this SGD was added before",
        ),
    ],
    ids=["foreign", "plateau", "scheduler", "option", "second", "again"],
)
def test_optimizers_that_do_not_fit_are_refused(made, add, match):
    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.embedding = made()

    with pytest.raises(ValueError, match=match):
        add(Graph())


def test_wrong_arguments_are_pythons_type_error(made):
    model = Model(made, plain, plain_build)
    for args in ((), (torch.zeros(1, 2, dtype=torch.int64),), (1, 2, 3)):
        with pytest.raises(TypeError, match="argument"):
            model.graph(*args)


def test_bad_ids_are_named_as_in_eager_mode(made):
    model = Model(made, plain, plain_build)
    with pytest.raises(TypeError, match=r"ids must be torch.int64 of shape \[B, 2\], got torch.int32 \[1, 2\]"):
        model.graph(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1))
    model.check()


def test_states_of_dense_parameters_move_with_the_graph():
    graph = oneemb.TrainGraph()
    graph.linear = torch.nn.Linear(2, 1, device="meta")  # A device that every machine has.
    adam = torch.optim.Adam(graph.parameters(), lr=0.1)
    graph.add_optimizer(adam)
    for parameter in graph.parameters():
        adam.state[parameter] = {"step": torch.ones(()), "exp_avg": torch.zeros(parameter.shape)}
    graph.float()
    for parameter in graph.parameters():
        state = adam.state[parameter]
        assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", "cpu")
    adam.param_groups[0]["capturable"] = True
    graph.float()
    assert all(adam.state[parameter]["step"].is_meta for parameter in graph.parameters())


class Dropped(oneemb.TrainGraph):
    def __init__(self):
        super().__init__()
        self.a, self.b = make_embedding("a"), make_embedding("b")
        self.register_buffer("shift", torch.ones(1, dtype=torch.int64))
        self.add_optimizer(torch.optim.Adam(self.parameters()))

    def build(self, ids):
        loss = self.a(ids + self.shift).sum() + self.b(ids).square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("run", [False, True])
def test_a_graph_that_is_dropped_frees_its_rows_without_the_collector(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where its embeddings have their paths
    batches = [torch.randint(0, 9, (4, 2)) for _ in range(4)]
    list(Dropped().run(batches))  # what torch does once in a process keeps frames
    gc.collect()
    gc.disable()
    try:
        graph = Dropped()
        _ = list(graph.run(batches)) if run else [graph(ids) for ids in batches]
        left = [weakref.ref(graph), weakref.ref(graph.a), weakref.ref(graph.a.store)]
        del graph
        assert [reference() for reference in left] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [oneemb.TrainGraph, oneemb.EvalGraph])
def test_a_graph_with_forward_in_place_of_build_is_an_error(kind):
    with pytest.raises(TypeError, match="Mine defines forward, .* name it build"):

        class Mine(kind):
            def forward(self, ids):
                return ids

    class Model(torch.nn.Module):
        def forward(self, ids):
            return ids

    with pytest.raises(TypeError, match="Both defines forward in its base Model, .* list this base after the graph"):

        class Both(Model, kind):
            def build(self, ids):
                return self.forward(ids)

    class Fine(kind, Model):  # whose call is the graph's
        def build(self, ids):
            return ids


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_calls_a_forward_around_the_step_which_may_leave_a_batch_out(made, depth):
    class Graph(oneemb.TrainGraph):
        def __init__(self, embedding):
            super().__init__()
            self.embedding = embedding
            self.add_optimizer(torch.optim.SGD(self.parameters(), lr=1.0))

        def build(self, ids):
            loss = self.embedding(ids).sum()
            loss.backward()
            return loss

        def forward(self, ids):
            return super().forward(ids) if len(ids) else None

    class Loader(list):
        def __iter__(self):
            for self.at, ids in enumerate(super().__iter__(), 1):
                yield ids

        def state_dict(self):
            return self.at

    graph, seen = Graph(made()), []
    for loss in graph.run(Loader(torch.arange(4).view(2, 2)[:rows] for rows in (1, 0, 2)), depth):
        seen.append((loss is None, graph.loader_state, graph.batches_ahead, graph.steps))
    assert seen == [(False, 1, 0, 1), (True, 1, 1, 1), (False, 3, 0, 2)]


def test_a_forward_around_the_step_is_no_error(made):
    class Counts(torch.nn.Module):
        calls = 0

        def forward(self, *args):
            self.calls += 1
            return super().forward(*args)

    class Graph(Counts, oneemb.TrainGraph):
        def __init__(self, embedding):
            super().__init__()
            self.embedding = embedding
            self.add_optimizer(torch.optim.SGD(self.parameters(), lr=1.0))

        def build(self, ids):
            loss = self.embedding(ids).sum()
            loss.backward()
            return loss

        def forward(self, ids):
            return {"loss": super().forward(ids.long())}

    graph = Graph(made())
    before = graph(torch.tensor([[1, 2]], dtype=torch.int32))["loss"]
    assert graph(torch.tensor([[1, 2]]))["loss"] < before and graph.calls == graph.steps == 2
