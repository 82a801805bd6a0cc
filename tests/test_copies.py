"""Copies of embeddings, with rows of their own at a path of their own; what cannot be copied; what is dropped."""

import copy
import gc
import io
import pickle
import signal
import weakref

import pytest
import torch

import oneemb
from oneemb.embeddings.embedding import copied
from tests.support.models import STORES, make_embedding, rows_of
from tests.support.pairwise import covering

IDS, DIM = 12, 4


def trained(path, make=torch.optim.Adam, steps=3, **options):
    embedding = make_embedding(path, dim=DIM, **options)
    optimizer = make(embedding.parameters(), lr=0.1)
    for _ in range(steps):
        step(embedding, optimizer)
    return embedding, optimizer


def step(embedding, optimizer, ids=range(IDS - 2)):
    optimizer.zero_grad()
    embedding(torch.tensor(ids).view(-1, 1).expand(-1, embedding.num_tables)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_trains_on_alone_with_the_bits_of_the_original(tmp_path, store, dtype):
    embedding, optimizer = trained(tmp_path / "rows", store=store, dtype=dtype, tables=2, padding_idx=3, seed=5)
    before = [rows_of(embedding, range(IDS), table) for table in (0, 1)]
    other = embedding.copy_to(tmp_path / "copy")
    assert isinstance(other, oneemb.MultiTableEmbedding) and other.store_options != embedding.store_options
    assert [torch.equal(rows_of(other, range(IDS), table), before[table]) for table in (0, 1)] == [True, True]
    assert other.stats()["step"] == 3 and other.stats()["rows"] == embedding.stats()["rows"] == 2 * (IDS - 3)
    assert other.store.format == embedding.store.format and other.optimizer is None
    step(embedding, optimizer)
    assert torch.equal(rows_of(other, range(IDS)), before[0])  # It has rows of its own.
    step(other, torch.optim.Adam(other.parameters(), lr=0.1), range(IDS - 2))
    assert torch.equal(rows_of(other, range(IDS)), rows_of(embedding, range(IDS)))
    assert other.stats()["step"] == 4 and not torch.equal(rows_of(other, range(IDS)), before[0])
    other.save_snapshot("s")
    assert other.snapshots() == ["s"] and embedding.snapshots() == []


def test_a_copy_of_weights_alone_takes_any_optimizer(tmp_path):
    embedding, _ = trained(tmp_path / "rows")
    other = embedding.copy_to(tmp_path / "copy", weights_only=True)
    assert torch.equal(rows_of(other, range(IDS)), rows_of(embedding, range(IDS)))
    assert other.store.format.state_width == 0 and other.stats()["step"] == 0
    step(other, torch.optim.Adagrad(other.parameters(), lr=0.1))
    assert other.store.format.optimizer == "adagrad" and other.stats()["step"] == 1


def test_a_copy_of_an_embedding_without_rows_has_none(tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=[2, 3], tables=2).eval()
    embedding.weight.requires_grad_(False)
    other = embedding.copy_to(str(tmp_path / "copy"))
    assert isinstance(other, oneemb.MultiTableMultiColumnEmbedding) and other.embedding_dim == 5
    assert not other.training and not other.weight.requires_grad and other.stats()["rows"] == 0
    assert torch.equal(rows_of(other, range(IDS)), rows_of(embedding, range(IDS)))


def test_a_copy_names_the_snapshot_that_it_saves_itself(tmp_path):
    embedding, _ = trained(tmp_path / "rows")
    embedding.save_snapshot("s")
    other = embedding.copy_to(tmp_path / "copy")
    state = other.state_dict()
    assert other.snapshots() == [oneemb.snapshot_name(state["_extra_state"])] != ["s"]


def test_a_copy_needs_a_path_of_its_own(tmp_path):
    embedding, _ = trained(tmp_path / "rows")
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    for path in ("rows", "link"):
        with pytest.raises(ValueError, match="needs a path of its own"):
            embedding.copy_to(tmp_path / path)
    other = embedding.copy_to(tmp_path / "copy")
    with pytest.raises(oneemb.StorageError, match="copy is held by embedding 'items"):
        embedding.copy_to(tmp_path / "copy")
    other.close()
    again = embedding.copy_to(tmp_path / "copy")
    assert torch.equal(rows_of(again, range(IDS)), rows_of(embedding, range(IDS)))


def test_a_copy_in_the_middle_of_a_step_is_refused(tmp_path):
    embedding, optimizer = trained(
        tmp_path / "rows", lambda parameters, lr: oneemb.Optimizer(torch.optim.SGD(parameters, lr))
    )
    optimizer.optimizer.register_step_pre_hook(lambda *_: embedding.copy_to(tmp_path / "copy"))
    with pytest.raises(RuntimeError, match="copy_to was called in the middle of a step"):
        step(embedding, optimizer)
    assert embedding.copy_to(tmp_path / "copy").stats()["rows"] == IDS - 2


@pytest.mark.parametrize(
    "use",
    [copy.deepcopy, torch.optim.swa_utils.AveragedModel, lambda model: copy.deepcopy(model[0])],
    ids=["deepcopy of a model", "AveragedModel", "deepcopy"],
)
def test_what_would_share_rows_says_how_to_copy_them(tmp_path, use):
    model = torch.nn.Sequential(make_embedding(tmp_path / "rows", dim=DIM), torch.nn.Linear(DIM, 1))
    with pytest.raises(TypeError, match=r"a copy needs another path; call embedding\.copy_to\(path\).*AveragedModel"):
        use(model)


def test_an_interrupted_copy_leaves_the_original_and_gives_the_path_back(tmp_path):
    embedding, optimizer = trained(tmp_path / "rows")
    rows = rows_of(embedding, range(IDS))
    with pytest.raises(KeyboardInterrupt):
        copied(embedding, tmp_path / "copy", weights_only=False, change=lambda *_: signal.raise_signal(signal.SIGINT))
    assert torch.equal(rows_of(embedding.copy_to(tmp_path / "copy"), range(IDS)), rows)
    step(embedding, optimizer)
    assert embedding.stats()["step"] == 4


# ---- other processes, and what is dropped ---------------------------------------------------------------------------


def not_run(rank, model):
    raise AssertionError("the model was pickled")


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (
            lambda model, optimizer: torch.save(model, io.BytesIO()),
            "cannot be pickled, by torch.save of a model or for",
        ),
        (lambda model, optimizer: torch.multiprocessing.spawn(not_run, (model,)), "load it into a new embedding"),
        (lambda model, optimizer: pickle.dumps(model[0].weight), r"save state_dict\(\) of the model"),
        (lambda model, optimizer: torch.save(optimizer.optimizer, io.BytesIO()), r"save state_dict\(\) of the model"),
        (lambda model, optimizer: copy.deepcopy(optimizer), "cannot be copied or pickled, since it trains the rows"),
        (lambda model, optimizer: torch.save(optimizer, io.BytesIO()), r"save its state_dict\(\)"),
        (lambda model, optimizer: pickle.dumps(model[0].weight.grad), r"pickle grad\.row_keys\(\)"),
    ],
    ids=[
        "torch.save",
        "spawn",
        "weight",
        "torch's optimizer",
        "deepcopy of oneemb.Optimizer",
        "its pickle",
        "gradient",
    ],
)
def test_what_cannot_be_pickled_says_what_to_save(tmp_path, use, match):
    model = torch.nn.Sequential(make_embedding(tmp_path / "rows", dim=DIM), torch.nn.Linear(DIM, 1))
    optimizer = oneemb.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.arange(3)).sum().backward()
    with pytest.raises(TypeError, match=match):
        use(model, optimizer)


def test_a_gradient_that_is_copied_is_another_of_the_same_rows(tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    embedding(torch.tensor([1, 2])).sum().backward()
    grad = copy.deepcopy(embedding.weight.grad)
    embedding.weight.grad *= 2
    assert torch.equal(grad.row_values(), torch.ones(2, DIM)) and embedding.weight.grad.row_values().eq(2).all()


def backward(embedding, optimizer):
    embedding(torch.arange(3)).square().sum().backward()


def stepped(embedding, optimizer):
    backward(embedding, optimizer)
    optimizer.step()


@pytest.mark.parametrize(
    ("store", "fused", "use"),
    covering([*STORES], (None, False, True), (lambda *_: None, backward, stepped)),  # fused None = torch's own
)
def test_an_embedding_that_is_dropped_gives_its_path_back_without_the_collector(tmp_path, store, fused, use):
    gc.collect()
    gc.disable()
    try:
        embedding = make_embedding(tmp_path / "rows", dim=DIM, store=store)
        averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.9)
        optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
        if fused is not None:
            optimizer = oneemb.Optimizer(optimizer, [embedding], fused=fused)
        averaged.update_rows()
        use(embedding, optimizer)
        rows = averaged(torch.arange(3)), embedding.eval()(torch.arange(3)).detach()
        alive = [weakref.ref(one) for one in (embedding, embedding.weight, embedding.store, averaged, optimizer)]
        del embedding, averaged, optimizer, rows
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()
    make_embedding(tmp_path / "rows", dim=DIM, store=store)(torch.arange(3))


def test_a_fused_optimizer_that_is_gone_warns(tmp_path):
    embedding = make_embedding(tmp_path / "rows", dim=DIM)
    oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding], fused=True)
    with pytest.warns(UserWarning, match="keep a reference to it while you train"):
        backward(embedding, None)
    assert embedding.stats()["step"] == 0
