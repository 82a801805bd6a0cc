"""Torch's default dtype and device, which users and trainers set, change nothing of an embedding."""

from contextlib import contextmanager

import pytest
import torch

import oneemb
from tests.support.models import make_embedding, zipf_ids

DEFAULTS = [torch.bfloat16, torch.float16, torch.float64, "meta"]
BATCHES = zipf_ids(16, 2, 4)


@contextmanager
def default(what):
    dtype = torch.get_default_dtype()
    if isinstance(what, torch.dtype):
        torch.set_default_dtype(what)
    else:
        torch.set_default_device(what)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)


class Model(oneemb.TrainGraph):
    def __init__(self, folder, store, **more):
        super().__init__()
        self.embedding = make_embedding(folder / "rows", store=store, tables=2, **more)
        self.top = torch.nn.Linear(8, 1, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            self.top.weight.fill_(0.5)
            self.top.bias.fill_(0.25)
        self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.1), clip_grad_norm=1.0)

    def build(self, ids):
        bags = self.embedding(ids.reshape(-1), offsets=torch.arange(ids.numel() + 1, device="cpu"), pooling="mean")
        loss = self.top((self.embedding(ids) + bags).flatten(1).float()).square().mean()
        loss.backward()
        return loss


def train_graph(folder, store):
    model = Model(folder, store)
    losses = [loss.item() for loss in model.run((ids,) for ids in BATCHES)]
    model.save(folder / "checkpoint")
    model.load(folder / "checkpoint")
    return [*losses, model(BATCHES[0]).item()]


def eager(folder, store, **more):
    embedding = make_embedding(folder / "rows", store=store, tables=2, **more)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    averaged = oneemb.AveragedEmbedding(embedding, folder / "averages")
    losses = []
    for ids in BATCHES:
        loss = embedding(ids).float().square().sum() + embedding(
            ids.reshape(-1), offsets=torch.arange(0, ids.numel() + 1, 2, device="cpu"), pooling="max",
            table_ids=torch.zeros(1, dtype=torch.int64, device="cpu"),
        ).float().sum()  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(embedding.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_rows()
        losses.append(loss.item())
    embedding.eval()
    return [*losses, *embedding(BATCHES[0]).flatten().tolist(), *averaged(BATCHES[0]).flatten().tolist()]


def half(folder, store):
    return eager(folder, store, dtype=torch.float16)


JOBS = {"graph": train_graph, "eager": eager, "half": half}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return {name: job(tmp_path_factory.mktemp(name), "device") for name, job in JOBS.items()}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("what", DEFAULTS, ids=str)
def test_training_gives_the_same_bits_whatever_the_defaults_are(tmp_path, expected, name, what):
    with default(what):
        got = JOBS[name](tmp_path, "ssd" if name == "eager" else "device")
    assert got == expected[name]


@pytest.mark.parametrize("what", DEFAULTS, ids=str)
def test_an_embedding_made_where_other_defaults_hold_trains_where_they_do_not(tmp_path, what):
    with default(what):
        embedding = make_embedding(tmp_path)
    assert embedding.weight.dtype == torch.float32 and embedding.weight.device.type == "cpu"
    embedding(BATCHES[0][:, :1]).sum().backward()
    torch.optim.SGD(embedding.parameters(), lr=1.0).step()
    assert embedding.stats()["step"] == 1


@pytest.mark.slow
def test_an_exported_program_gives_the_same_numbers_whatever_the_default_device_was(tmp_path):
    model, ids = Model(tmp_path, "device"), BATCHES[0]
    model(ids)
    model.eval()
    model.export(tmp_path / "plain.pt2", ids)
    with default("meta"):
        model.export(tmp_path / "program.pt2", ids)
    plain, program = (torch.export.load(tmp_path / name).module() for name in ("plain.pt2", "program.pt2"))
    assert torch.equal(plain(ids), program(ids))


def torchrec_job(folder):
    torchrec = pytest.importorskip("torchrec")
    from oneemb.torchrec import EmbeddingBagCollection

    torch.manual_seed(0)

    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{t}", embedding_dim=4, num_embeddings=50, feature_names=[f"f{t}"])
        for t in range(2)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"), seed=3)
    optimizer = torch.optim.Adam(collection.parameters(), lr=0.1)
    found = []
    for ids in BATCHES[:2]:
        features = torchrec.KeyedJaggedTensor(
            ["f0", "f1"], ids.abs().T.reshape(-1) % 50, lengths=torch.ones(32, dtype=torch.int64, device="cpu")
        )
        pooled = collection(features).values()
        pooled.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(pooled.detach())
    return [*found, *(value for _, value in sorted(collection.state_dict().items()))]


@pytest.mark.parametrize("what", DEFAULTS, ids=str)
def test_a_collection_of_torchrec_gives_the_same_bits_whatever_the_defaults_are(tmp_path, what):
    plain = torchrec_job(tmp_path)
    with default(what):
        got = torchrec_job(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
