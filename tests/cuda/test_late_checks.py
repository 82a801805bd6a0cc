"""Gradients that a GPU checks for itself: no step waits, nothing of a step that is not finite is written, and the error
comes later, with all counts as before that step."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import oneemb
from oneemb.graph.ops import LateCheck
from oneemb.graph.row_optimizers import RowOptimizer
from tests.cuda.conftest import SIMULATED
from tests.cuda.test_launches import Noted
from tests.cuda.test_train import on_gpu
from tests.support.models import make_embedding
from tests.support.optimizers import OPTIMIZERS

DIM = 4


class Trained:
    """An embedding, and perhaps dense parameters, with one optimizer."""

    def __init__(self, gpu, path, *, dense=False, bags=False, optimizer="adam", **options):
        torch.manual_seed(4)
        self.embedding = make_embedding(path, tables=2, dim=DIM, seed=3)
        self.dense = torch.nn.Linear(DIM, 1).to(gpu.device) if dense else None
        self.on = on_gpu(gpu, self.embedding)
        self.on.__enter__()
        parameters = [*self.embedding.parameters(), *(self.dense.parameters() if dense else ())]
        if dense == "momentum":
            inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
        else:
            inner = torch.optim.Adam(parameters, lr=0.1, fused=True) if dense else OPTIMIZERS[optimizer](parameters)
        self.inner = inner
        self.optimizer = oneemb.Optimizer(inner, [self.embedding], **{"check_in_step": False, **options})
        self.ids = (torch.arange(12, device=gpu.device) % 5).reshape(-1, 2)
        if bags:
            self.ids = (torch.arange(24, device=gpu.device) % 5).reshape(-1, 2, 3)
        self.bags = {"pooling": "sum"} if bags else {}
        self.gpu = self.embedding.store.backend.gpu

    def step(self, factor=1.0):
        rows = self.embedding(self.ids, **self.bags)
        (rows if self.dense is None else self.dense(rows)).sum().mul(factor).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        row_SW = self.embedding.store.row_SW[: len(self.ids.unique()) * 2].clone()
        dense = [] if self.dense is None else [*self.dense.parameters()]
        steps = [state["step"] for state in self.inner.state.values() if "step" in state]
        return [row_SW, *(tensor.detach().clone() for tensor in [*dense, *steps])]

    def close(self):
        self.on.__exit__(None, None, None)
        self.embedding.close()


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def train(gpu, tmp_path):
    made = []

    def train(**options):
        made.append(Trained(gpu, tmp_path / str(len(made)), **options))
        return made[-1]

    yield train
    for one in made:
        one.close()


@pytest.mark.parametrize("options", [dict(), dict(dense=True), dict(optimizer="lamb"), dict(bags=True)], ids=str)
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e38])
def test_a_step_that_is_not_finite_writes_nothing_and_is_heard_of_later(train, late, options, factor):
    trained = train(**options)
    for _ in range(2):
        trained.step()
    before, steps, late.now = trained.state(), trained.embedding.stats()["step"], True
    factor = 3e38 if factor == 1e38 else factor  # each finite, their sum is not
    trained.step(factor)
    assert same(trained.state(), before)
    trained.step()  # launched before the host has heard of it
    assert same(trained.state(), before)
    late.now = False
    with pytest.raises(oneemb.NonFiniteGradientError, match="was not made, nor were the 1 after it"):
        trained.step()
    assert same(trained.state(), before) and trained.embedding.stats()["step"] == steps
    assert not hasattr(trained.inner, "found_inf")
    trained.optimizer.zero_grad()
    trained.step()
    assert not same(trained.state(), before) and trained.embedding.stats()["step"] == steps + 1


def test_steps_and_rows_are_those_of_steps_that_wait(train, late):
    late.now = True
    for options in (dict(), dict(dense=True), dict(optimizer="adagrad"), dict(optimizer="lamb"), dict(bags=True)):
        one, other = train(**options), train(check_in_step=True, **options)
        # Some that have to be looked at more closely. A fused step of torch makes NaN where squares overflow.
        for factor in (1.0, 1e15, 1e-20, 1e18) if options.get("dense") else (1.0, 1e20, 1e-30, 2e37):
            one.step(factor)
            other.step(factor)
        assert same(one.state(), other.state())


@pytest.mark.parametrize("dense", [False, True])
def test_a_step_of_known_rows_waits_for_nothing(train, late, dense):
    trained = train(dense=dense)
    for _ in range(3):
        trained.step()
    late.now, waits = True, trained.gpu.waits
    with Noted() as noted:
        trained.step()
    assert trained.gpu.waits == waits
    if SIMULATED:
        assert noted.waits == []


@pytest.mark.skipif(SIMULATED, reason="a GPU tells which calls waited")
@pytest.mark.parametrize("dense", [False, True])
def test_no_call_of_torch_waits_in_a_step_of_known_rows(train, dense):
    trained = train(dense=dense)
    for _ in range(3):
        trained.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_error_comes_in_its_own_step_on_request(train, late):
    trained = train(check_in_step=True)
    trained.step()
    late.now, before = True, trained.state()
    with pytest.raises(oneemb.NonFiniteGradientError, match="rows are not finite, the first of them"):
        trained.step(float("nan"))
    assert same(trained.state(), before)


@pytest.mark.parametrize("plain", [False, True])
def test_by_default_an_error_comes_in_its_own_step(gpu, late, plain, tmp_path):
    embedding = make_embedding(tmp_path, tables=2, dim=DIM)
    optimizer = torch.optim.Adam(embedding.parameters())
    optimizer = optimizer if plain else oneemb.Optimizer(optimizer, [embedding])
    ids = torch.arange(12, device=gpu.device).reshape(-1, 2)
    late.now = True
    with on_gpu(gpu, embedding):
        embedding(ids).sum().mul(float("nan")).backward()
        with pytest.raises(oneemb.NonFiniteGradientError, match="rows are not finite"):
            optimizer.step()
    embedding.close()


def test_a_first_step_that_would_leave_a_state_without_values_waits(train, late):
    trained = train(dense="momentum")
    late.now, before = True, [parameter.detach().clone() for parameter in trained.dense.parameters()]
    with pytest.raises(oneemb.NonFiniteGradientError, match="nothing was updated"):
        trained.step(float("nan"))
    trained.optimizer.zero_grad()
    assert same([*trained.dense.parameters()], before)
    trained.step()
    before = trained.state()
    trained.step(float("nan"))  # now the buffers are there
    assert same(trained.state(), before)
    late.now = False
    with pytest.raises(oneemb.NonFiniteGradientError, match="that step was not made"):
        trained.step()
    trained.optimizer.zero_grad()
    trained.step()
    assert all(parameter.isfinite().all() for parameter in trained.dense.parameters())


def test_a_gradient_without_elements_is_finite(train, late):
    trained = train(dense=True)
    empty = torch.nn.Parameter(torch.zeros(0, 3, device=trained.gpu.device))
    trained.inner.add_param_group({"params": [empty]})
    for _ in range(2):
        empty.grad = torch.zeros(0, 3, device=trained.gpu.device)
        trained.step()


def test_a_large_float64_gradient_is_finite(train, late):
    trained = train(dense=True)
    wide = torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=trained.gpu.device))
    trained.inner.add_param_group({"params": [wide]})
    for value in (1.0, 1e300, 1.0):
        wide.grad = torch.full_like(wide, value)
        trained.step()
    wide.grad = torch.full_like(wide, float("inf"))
    trained.step()
    with pytest.raises(oneemb.NonFiniteGradientError, match="that step was not made"):
        trained.embedding.save_snapshot("rows")


def test_an_embedding_closes_and_warns_of_a_step_that_was_left_out(gpu, late):
    embedding = oneemb.MultiTableEmbedding(
        "items", DIM, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options()
    )
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding], check_in_step=False)
    folder = embedding.store.plan.persistent_path
    late.now = True
    with on_gpu(gpu, embedding), pytest.warns(UserWarning, match="that step was not made"):
        with pytest.raises(ZeroDivisionError, match="the user's"), embedding:
            embedding(torch.arange(3, device=gpu.device)).sum().mul(float("nan")).backward()
            optimizer.step()
            raise ZeroDivisionError("the user's")
    assert not Path(folder).exists()
    with pytest.raises(oneemb.StorageError, match="closed"):
        len(embedding)


def test_a_graph_sets_its_count_of_steps_back(gpu, late, tmp_path):
    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.embedding = embedding
            self.add_optimizer(torch.optim.Adam(embedding.parameters()))

        def build(self, ids, factor):
            loss = self.embedding(ids).sum().mul(factor)
            loss.backward()
            return loss.detach()

    embedding = make_embedding(tmp_path, tables=2, dim=DIM)
    ids = torch.arange(12, device=gpu.device).reshape(-1, 2)
    with on_gpu(gpu, embedding):
        graph = Graph()
        graph.config.check_in_step = False
        graph(ids, 1.0)
        late.now = True
        graph(ids, float("nan"))
        graph(ids, 1.0)
        late.now = False
        with pytest.raises(oneemb.NonFiniteGradientError, match="nor were the 1 after it"):
            graph(ids, 1.0)
        assert graph.steps == embedding.stats()["step"] == 1
    embedding.close()


def test_a_count_that_another_thread_restores_in_a_step_is_restored_to_the_same_number_later(train, late, monkeypatch):
    trained, begin = train(), LateCheck.begin
    trained.step()

    def begin_later(check, *args):
        with pytest.raises(oneemb.NonFiniteGradientError):  # as in the other thread
            check.resolve()
        begin(check, *args)

    late.now = True
    trained.step(float("nan"))
    with monkeypatch.context() as patch:
        patch.setattr(LateCheck, "begin", begin_later)
        trained.step(float("nan"))
    late.now = False
    with pytest.raises(oneemb.NonFiniteGradientError):
        trained.step()
    assert trained.embedding.stats()["step"] == 1


def test_steps_that_are_to_be_left_out_are_counted_at_once(train, late):
    trained = train(skip_nonfinite=True)
    trained.step()
    late.now = True
    trained.step(float("nan"))
    assert trained.optimizer.skipped == 1 and trained.embedding.stats()["step"] == 1


def test_an_optimizer_that_does_not_look_at_the_device_waits(train, late):
    trained = train(dense=True)
    trained.step()
    trained.inner._step_supports_amp_scaling = False
    late.now, before = True, trained.state()
    with pytest.raises(oneemb.NonFiniteGradientError, match="not finite"):
        trained.step(float("nan"))
    assert same(trained.state(), before)


@pytest.mark.parametrize("call", ["save_snapshot", "clear"])
def test_a_call_on_all_rows_raises_first(train, late, call):
    trained = train()
    trained.step()
    late.now, before = True, trained.state()
    trained.step(float("nan"))
    arguments = ["rows"] if call == "save_snapshot" else []
    with pytest.raises(oneemb.NonFiniteGradientError, match="that step was not made; no weight"):
        getattr(trained.embedding, call)(*arguments)
    assert same(trained.state(), before)
    getattr(trained.embedding, call)(*arguments)


def test_clipped_gradients_are_checked_late_too(train, late):
    trained = train()
    trained.step()

    def clipped_step(factor):
        trained.embedding(trained.ids).sum().mul(factor).backward()
        torch.nn.utils.clip_grad_norm_(trained.embedding.parameters(), 1.0)
        late.now = True
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    first = trained.state()
    clipped_step(1.0)
    before = trained.state()
    assert not same(before, first)
    clipped_step(float("nan"))
    assert same(trained.state(), before)
    with pytest.raises(oneemb.NonFiniteGradientError):
        trained.embedding.save_snapshot("rows")


def test_scaled_gradients_of_bags_are_checked_with_their_scales(gpu, train, late):
    trained = train(optimizer="sgd")
    offsets, late.now = torch.arange(0, 13, 2, device=gpu.device), True

    def step(scale):
        scales = torch.full((12,), scale, device=gpu.device)
        trained.embedding(trained.ids.reshape(-1), offsets=offsets, per_sample_weights=scales).sum().backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    step(1.0)
    step(1e10)  # looked at more closely
    before = trained.state()
    step(float("inf"))
    assert same(trained.state(), before)
    with pytest.raises(oneemb.NonFiniteGradientError):
        trained.embedding.save_snapshot("rows")


@pytest.mark.parametrize("wrong", [0, 1])
def test_sums_of_each_embedding_that_were_made_before_the_step_are_checked(gpu, late, tmp_path, wrong):
    embeddings = [make_embedding(tmp_path / str(i), tables=2, dim=DIM) for i in range(2)]
    parameters = [parameter for embedding in embeddings for parameter in embedding.parameters()]
    optimizer = oneemb.Optimizer(torch.optim.SGD(parameters, lr=0.1), embeddings, check_in_step=False)
    ids, late.now = torch.arange(12, device=gpu.device).reshape(-1, 2), True
    with on_gpu(gpu, *embeddings):
        for factor in (1.0, float("nan")):
            # Who holds a gradient may change it later, so its sums are made at once.
            grads = [torch.full((6, 2, DIM), factor if i == wrong else 1.0, device=gpu.device) for i in range(2)]
            before = [embedding.store.row_SW.clone() for embedding in embeddings]
            for embedding, grad in zip(embeddings, grads, strict=True):
                embedding(ids).backward(grad)
            optimizer.step()
            optimizer.zero_grad()
        assert same([embedding.store.row_SW for embedding in embeddings], before)
        for embedding in embeddings:
            with pytest.raises(oneemb.NonFiniteGradientError) if embedding is embeddings[0] else nullcontext():
                embedding.save_snapshot("rows")
    for embedding in embeddings:
        embedding.close()


def test_a_step_of_embeddings_that_were_stepped_apart_raises_first(gpu, late, tmp_path):
    embeddings = [make_embedding(tmp_path / str(i), tables=2, dim=DIM) for i in range(2)]
    parameters = [parameter for embedding in embeddings for parameter in embedding.parameters()]
    optimizer = oneemb.Optimizer(torch.optim.SGD(parameters, lr=0.1), embeddings, check_in_step=False)
    ids, late.now = torch.arange(12, device=gpu.device).reshape(-1, 2), True

    def step(*factors):
        optimizer.zero_grad()
        for embedding, factor in zip(embeddings, factors, strict=True):
            if factor:
                embedding(ids).sum().mul(factor).backward()
        optimizer.step()

    with on_gpu(gpu, *embeddings):
        for apart in ((1, 0), (0, 1), (0, float("nan"))):
            step(*apart)
        before = [embedding.store.row_SW.clone() for embedding in embeddings]
        with pytest.raises(oneemb.NonFiniteGradientError):
            step(1, 1)
        assert same([embedding.store.row_SW for embedding in embeddings], before)
        step(1, 1)
    for embedding in embeddings:
        embedding.close()


def test_a_step_that_averages_follow_waits_for_its_check(train, late, tmp_path):
    trained = train()
    trained.step()
    averaged = oneemb.AveragedEmbedding(trained.embedding, tmp_path / "averages", 0.9)
    averaged.update_rows()
    late.now, before = True, trained.state()
    with pytest.raises(oneemb.NonFiniteGradientError):
        trained.step(float("nan"))
    assert same(trained.state(), before)
    averaged.close()
    trained.optimizer.zero_grad()
    trained.step(float("nan"))
    with pytest.raises(oneemb.NonFiniteGradientError):
        trained.embedding.save_snapshot("rows")


class OwnUpdate(torch.optim.SGD):
    """An optimizer of a user's, whose update of rows asks nobody whether to write."""

    def row_optimizer(self, group):
        def run(weight_SX, row_SW, slot_U, grads, *, state_begin, group, step, backend):
            row_SW[slot_U[0], 0] += 1

        return RowOptimizer("own", (), (), run)


def test_an_update_of_a_users_own_waits_for_its_check_and_its_rows_are_marked_dirty(gpu, late, tmp_path):
    embedding = make_embedding(tmp_path / "rows", tables=2, dim=DIM)
    optimizer = oneemb.Optimizer(OwnUpdate(embedding.parameters(), lr=0.1), [embedding], check_in_step=False)
    ids, late.now = torch.arange(12, device=gpu.device).reshape(-1, 2), True

    def step(factor):
        optimizer.zero_grad()
        embedding(ids).sum().mul(factor).backward()
        optimizer.step()

    with on_gpu(gpu, embedding):
        step(1)
        embedding.save_snapshot("rows")
        before = embedding.store.row_SW.clone()
        with pytest.raises(oneemb.NonFiniteGradientError):
            step(float("nan"))
        assert torch.equal(embedding.store.row_SW, before) and embedding.stats()["device"]["dirty"] == 0
        step(1)
        assert not torch.equal(embedding.store.row_SW, before) and embedding.stats()["device"]["dirty"] == 12
    embedding.close()
