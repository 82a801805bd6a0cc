"""Training with the hot tier on a GPU: losses equal to the CPU's, on every kind of store, compiled and eager.

In the simulator dense layers stay on the CPU, so losses differ only by what the loops of CUDA compute otherwise: sums
of more than 64 gradients of one key, and sums of squares over a row, as row-wise Adagrad needs. Without those they are
the same bits.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels import launch
from tests.cuda.conftest import SIMULATED
from tests.support.models import make_embedding, zipf_ids
from tests.support.optimizers import OPTIMIZERS

TABLES, DIM, STEPS, BATCH = 2, 4, 6, 16

# One of each kind of loop.
NAMES = ("sgd", "adagrad", "adam", "nadam", "rmsprop", "row-wise adagrad", "lamb", "smart decay adam")


# Shares of the loss.
APART = 1e-5 if not SIMULATED else 0.0
APART_OF = {"row-wise adagrad": 1e-5, "lamb": 1e-5}


def move_to(store, gpu):
    """Move a store's rows to the GPU, that of the simulator too."""
    launch.simulated_gpu, before = gpu if SIMULATED else None, launch.simulated_gpu
    try:
        store.form.move_to(torch.device("cuda") if SIMULATED else gpu.device)
    finally:
        launch.simulated_gpu = before


@contextlib.contextmanager
def on_gpu(gpu, *modules):
    """The modules and their batches on the GPU; in the simulator the embedding's rows alone are."""
    if not SIMULATED:
        for module in modules:
            module.to(gpu.device)
        yield
        return
    for module in modules:
        for one in module.modules():
            if hasattr(one, "store"):
                move_to(one.store, gpu)
    launch.simulated_gpu = gpu
    try:
        yield
    finally:
        launch.simulated_gpu = None


class Graph(oneemb.TrainGraph):
    def __init__(self, path, store, optimizer, **options):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = make_embedding(path, store=store, tables=TABLES, dim=DIM, seed=7, **options)
        self.mlp = oneemb.nn.FusedMLP(TABLES * DIM, [8], 1, skip_final_activation=True)
        self.add_optimizer(OPTIMIZERS[optimizer](self.parameters()))

    def build(self, ids, label):
        logit = self.mlp(self.embedding(ids).float().flatten(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss


def batches(gpu=None):
    ids = zipf_ids(BATCH, TABLES, STEPS, ids=300)
    label = torch.randint(0, 2, ids.shape[:2], generator=torch.Generator().manual_seed(5)).float()
    return [(i.to(gpu.device), l.to(gpu.device)) if gpu else (i, l) for i, l in zip(ids, label, strict=True)]


def rows_in(graph):
    graph.embedding.save_snapshot("rows", overwrite=True)
    path = graph.embedding.store_options.persistent_path
    with oneemb.make_persistent_table_reader(path, "rows", torch.int64, torch.float32, with_tables=True) as reader:
        return {
            (int(t), int(i)): row.copy()
            for table_N, id_N, row_NW in reader
            for t, i, row in zip(table_N, id_N, row_NW, strict=True)
        }


def train(path, store, optimizer, gpu=None, **options):
    graph = Graph(path, store, optimizer, **options)
    try:
        with on_gpu(gpu, graph) if gpu else contextlib.nullcontext():
            losses = [graph(ids, label).item() for ids, label in batches(gpu)]
            graph.eval()
            losses.append(graph.embedding(batches(gpu)[0][0]).float().sum().item())
            stats = graph.embedding.stats()
            return losses, rows_in(graph), stats
    finally:
        graph.embedding.close()


@pytest.mark.parametrize(
    "store, optimizer",
    [
        *(("device", optimizer) for optimizer in NAMES),
        ("host", "adam"), ("ssd", "adam"), ("ssd, host cache", "adagrad"),
    ],
)  # fmt: skip
def test_losses_and_rows_are_those_of_the_cpu(gpu, store, optimizer, tmp_path):
    expected, expected_rows, _ = train(tmp_path / "cpu", store, optimizer)
    found, rows, stats = train(tmp_path / "gpu", store, optimizer, gpu)
    apart = APART_OF.get(optimizer, APART)
    np.testing.assert_allclose(found, expected, rtol=apart, atol=apart)
    assert rows.keys() == expected_rows.keys() and stats["step"] == STEPS
    for key, row in expected_rows.items():
        np.testing.assert_allclose(rows[key], row, rtol=max(apart, 1e-5) if apart else 0, atol=apart)
    assert stats["device"]["rows"] > 0 and stats["device"]["pinned"] == 0


def test_the_cache_evicts_and_the_losses_do_not_change(gpu, tmp_path, monkeypatch):
    from oneemb.storage.tiers import device_tier

    expected, expected_rows, _ = train(tmp_path / "cpu", "host", "adam")
    monkeypatch.setattr(device_tier, "SLOT_OVERHEAD_BYTES", 2**20 // 40 - 64)  # so that 40 slots fit in a MiB
    found, rows, stats = train(tmp_path / "gpu", "host", "adam", gpu)
    assert stats["device"]["slots"] < 50 and stats["device"]["evicted"] > 20 and stats["device"]["written_down"] > 20
    np.testing.assert_allclose(found, expected, rtol=APART, atol=APART)
    assert rows.keys() == expected_rows.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_weights_train_as_on_the_cpu(gpu, dtype, tmp_path):
    expected, _, _ = train(tmp_path / "cpu", "device", "adagrad", dtype=dtype)
    found, _, _ = train(tmp_path / "gpu", "device", "adagrad", gpu, dtype=dtype)
    np.testing.assert_allclose(found, expected, rtol=0 if SIMULATED else 1e-2)


def test_rows_that_are_there_move_along_and_back(gpu, tmp_path):
    graph = Graph(tmp_path / "rows", "device", "adam")
    other = Graph(tmp_path / "other", "device", "adam")
    expected = [other(*batch).item() for batch in batches()]
    losses = [graph(*batch).item() for batch in batches()[:2]]
    with on_gpu(gpu, graph):
        losses += [graph(*batch).item() for batch in batches(gpu)[2:4]]
    if SIMULATED:
        graph.embedding.store.form.move_to(torch.device("cpu"))
    else:
        graph.to("cpu")
    losses += [graph(*batch).item() for batch in batches()[4:]]
    np.testing.assert_allclose(losses, expected, rtol=APART, atol=APART)
    assert graph.embedding.stats()["step"] == STEPS and graph.embedding.snapshots() == []
    graph.embedding.close()
    other.embedding.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_prepared_ahead_change_no_loss(gpu, depth, tmp_path):
    expected, _, _ = train(tmp_path / "cpu", "host", "adam")
    graph = Graph(tmp_path / "gpu", "host", "adam")
    with on_gpu(gpu, graph):
        found = [loss.item() for loss in graph.run(batches(gpu), prefetch_depth=depth)]
    np.testing.assert_allclose(found, expected[:STEPS], rtol=APART, atol=APART)
    assert graph.embedding.stats()["device"]["pinned"] == 0
    graph.embedding.close()


def test_a_gradient_that_was_summed_before_its_rows_were_acquired_goes_to_its_rows(gpu, tmp_path):
    results = []
    for where in (None, gpu):
        embedding = make_embedding(tmp_path / str(where is None), store="device", dim=3, seed=7)
        optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding])
        with on_gpu(where, embedding) if where else contextlib.nullcontext():
            device = where.device if where else "cpu"
            embedding.eval()
            for ids in ([1, 2, 1, 3, 1], [3, 4, 3]):
                rows = embedding(torch.tensor(ids, device=device))
                grad = torch.arange(rows.numel(), device=device).view(rows.shape).float()
                rows.backward(grad)  # `grad` is held here, so it is summed at once
            embedding.train()
            optimizer.step()
            results.append(embedding.read(torch.arange(5, device=device)).cpu())
        embedding.close()
    assert torch.equal(*results)


FIRST_CALLS = {
    "lookup": lambda embedding, ids: embedding(ids),
    "load": lambda embedding, ids: embedding.load_snapshot("new rows"),
}


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("call", FIRST_CALLS)
def test_a_first_call_in_inference_mode_leaves_arrays_that_later_calls_can_change(gpu, store, call, tmp_path):
    expected, expected_rows, _ = train(tmp_path / "cpu", store, "adam")
    graph = Graph(tmp_path / "gpu", store, "adam")
    graph.embedding(batches()[0][0])
    graph.embedding.save_snapshot("new rows")
    graph.embedding.clear()
    with on_gpu(gpu, graph):
        with ThreadPoolExecutor(1) as thread:  # which has no buffers of the GPU yet
            thread.submit(in_inference_mode, FIRST_CALLS[call], graph.embedding, batches(gpu)[0][0]).result()
            found = thread.submit(lambda: [graph(*batch).item() for batch in batches(gpu)]).result()
        np.testing.assert_allclose(found, expected[:STEPS], rtol=APART, atol=APART)
        assert rows_in(graph).keys() == expected_rows.keys()
    graph.embedding.close()


def in_inference_mode(call, *args):
    with torch.inference_mode():
        return call(*args)


class Clipped(Graph):
    def build(self, ids, label):
        logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)
        return loss


def test_clipped_gradients_train_as_on_the_cpu(gpu, tmp_path):
    losses = []
    for where in (None, gpu):
        graph = Clipped(tmp_path / str(where is None), "device", "sgd")
        with on_gpu(gpu, graph) if where else contextlib.nullcontext():
            losses.append([graph(*batch).item() for batch in batches(where)])
        graph.embedding.close()
    np.testing.assert_allclose(*losses, rtol=1e-6)  # the norm is summed in another order


def test_eager_steps_of_two_lookups_sum_their_gradients(gpu, tmp_path):
    results = []
    for where in (None, gpu):
        embedding = make_embedding(tmp_path / str(where is None), dim=3, seed=7)
        optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding])
        with on_gpu(where, embedding) if where else contextlib.nullcontext():
            device = where.device if where else "cpu"
            for _ in range(2):
                a = embedding(torch.tensor([1, 2, 1], device=device))
                b = embedding(torch.tensor([[2, 9]], device=device))
                (a.sum() + 2 * b.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            embedding.eval()
            results.append(embedding(torch.tensor([1, 2, 9, 77], device=device)).detach().cpu())
        assert embedding.stats()["device"]["pinned"] == 0
        embedding.close()
    assert torch.equal(*results) if SIMULATED else torch.allclose(*results)


class TwoEmbeddings(oneemb.TrainGraph):
    """Embeddings whose rows are alike, so that a CPU looks them up and updates them at once."""

    def __init__(self, path):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other = (
            make_embedding(path / name, tables=TABLES, dim=DIM, seed=seed) for seed, name in enumerate(("one", "other"))
        )
        self.mlp = oneemb.nn.FusedMLP(2 * TABLES * DIM, [8], 1, skip_final_activation=True)
        self.add_optimizer(OPTIMIZERS["adam"](self.parameters()))

    def build(self, ids, label):
        rows = torch.cat([self.one(ids), self.other(ids + 1)], 1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.mlp(rows.flatten(1)).squeeze(1), label)
        loss.backward()
        return loss


def test_embeddings_that_a_cpu_merges_train_to_the_same_losses(gpu, tmp_path):
    losses = []
    for where in (None, gpu):
        graph = TwoEmbeddings(tmp_path / str(where is None))
        with on_gpu(gpu, graph) if where else contextlib.nullcontext():
            losses.append([graph(*batch).item() for batch in batches(where)])
            losses[-1] += [loss.item() for loss in graph.run(batches(where))]
        if where is None:
            assert "merged" in str(graph.explain())
        assert [one.stats()["step"] for one in (graph.one, graph.other)] == [2 * STEPS] * 2
        graph.one.close()
        graph.other.close()
    np.testing.assert_allclose(*losses, rtol=APART, atol=APART)


def test_gradients_that_are_not_finite_stop_the_step_and_name_a_row(gpu, tmp_path):
    embedding = make_embedding(tmp_path, dim=3, seed=7)
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.5), [embedding], check_in_step=True)
    with on_gpu(gpu, embedding):
        ids = torch.tensor([5, -8, 5], device=gpu.device)
        before = embedding(ids).detach().clone()
        scale = torch.tensor([[1.0], [float("inf")], [1.0]], device=gpu.device)
        (embedding(ids) * scale).sum().backward()
        with pytest.raises(oneemb.NonFiniteGradientError, match="1 of 2 rows are not finite, .* id -8 in table 0"):
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(embedding(ids).detach(), before)
    embedding.close()


def test_ids_elsewhere_than_the_embedding_are_refused(gpu, tmp_path):
    embedding = make_embedding(tmp_path, dim=3)
    with on_gpu(gpu, embedding):
        launch.simulated_gpu = None
        if SIMULATED:  # ids that count as the CPU's
            with pytest.raises(ValueError, match="ids must be on the simulated GPU, .* got the CPU"):
                embedding(torch.tensor([1]))
        else:
            with pytest.raises(ValueError, match="ids must be on cuda:0, where the embedding is, got the CPU"):
                embedding(torch.tensor([1]))
    embedding.close()


def test_a_step_launches_no_more_loops_than_it_should(gpu, tmp_path):
    graph = Graph(tmp_path, "device", "adagrad")
    with on_gpu(gpu, graph):
        (batch,) = batches(gpu)[:1]
        graph(*batch)
        graph(*batch)
        at = graph.embedding.store.backend.gpu
        before = at.launches
        graph(*batch)
        assert at.launches - before <= 10
    graph.embedding.close()


@pytest.mark.parametrize(("store", "dtype"), [("device", torch.float32), ("host", torch.bfloat16)])
def test_averages_and_copies_are_those_of_the_cpu(gpu, store, dtype, tmp_path):
    found = []
    for name in ("cpu", "gpu"):
        embedding = make_embedding(tmp_path / name / "rows", store=store, tables=TABLES, dim=DIM, dtype=dtype)
        averaged = oneemb.AveragedEmbedding(embedding, tmp_path / name / "averages", 0.9)
        optimizer = OPTIMIZERS["adagrad"](embedding.parameters())
        with on_gpu(gpu, embedding, averaged) if name == "gpu" else contextlib.nullcontext():
            for ids, _ in batches(gpu if name == "gpu" else None):
                optimizer.zero_grad()
                embedding(ids).float().square().sum().backward()
                optimizer.step()
                averaged.update_rows()
            averages = averaged(ids).cpu()
            copies = [module.copy_to(tmp_path / name / path) for module, path in ((embedding, "a"), (averaged, "b"))]
            rows = embedding.eval()(ids).detach().cpu()
        for copy, expected in zip(copies, (rows, averages), strict=True):
            assert torch.equal(copy.eval()(ids).detach().cpu(), expected)
        found.append((rows.float(), averages.float()))
        assert averaged.rows.stats()["device"]["pinned"] == 0
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=APART, atol=APART)
    assert not torch.equal(found[0][0], found[0][1])
