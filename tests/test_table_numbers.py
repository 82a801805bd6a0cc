"""`table_ids` of a number is the table of all ids: in every kind of lookup, in graphs, averages, servers, programs."""

import enum

import numpy as np
import pytest
import torch

import oneemb
from tests.support.graph_models import make_graph
from tests.support.models import make_embedding


class Table(enum.IntEnum):
    USER = 0
    ITEM = 1


IDS = torch.tensor([3, -5, 3, 8])
OFFSETS = torch.tensor([0, 1, 4])

LOOKUPS = {
    "ids": (IDS, {}),
    "ids of two dimensions": (IDS.view(2, 2), {}),
    "no ids": (IDS[:0], {}),
    "bags by offsets": (IDS, {"offsets": OFFSETS}),
    "bags without the last offset": (IDS, {"offsets": OFFSETS[:-1], "include_last_offset": False}),
    "bags in the last dimension": (IDS.view(2, 2), {"pooling": "mean"}),
    "largest of bags": (IDS, {"offsets": OFFSETS, "pooling": "max"}),
    "weighted bags": (IDS, {"offsets": OFFSETS, "per_sample_weights": torch.tensor([0.5, 1.0, -2.0, 0.25])}),
}


@pytest.fixture
def embedding(tmp_path):
    embedding = make_embedding(tmp_path / "rows", tables=2)
    embedding(torch.stack([IDS, IDS], 1))
    yield embedding
    embedding.close()


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("mode", ["train", "eval", "averaged", "served"])
def test_a_number_names_the_table_of_all_ids(tmp_path, embedding, name, mode):
    ids, more = LOOKUPS[name]
    if mode == "averaged":
        look_up = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", decay=0.5)
    elif mode == "served":
        embedding.save_snapshot("first")
        look_up = oneemb.InferenceEmbedding.open(tmp_path / "rows")
    else:
        look_up = embedding.train(mode == "train")
    for table in (0, 1, Table.ITEM, np.int32(1)):
        found = look_up(ids, table, **more)
        assert torch.equal(found, look_up(ids, torch.tensor(int(table)), **more)), table
    if ids.numel():
        assert not torch.equal(look_up(ids, 0, **more), look_up(ids, table_ids=1, **more))


def test_other_calls_take_such_numbers_too(embedding):
    table_1 = embedding.read(IDS, torch.ones_like(IDS))
    for table in (1, Table.ITEM, np.int64(1)):
        assert torch.equal(embedding.read(IDS, table), table_1)
        assert embedding.ids(table).tolist() == [-5, 3, 8] and embedding.contains(IDS, table).all()
    with torch.inference_mode():
        inferred = embedding.read(IDS, 0)
    embedding(IDS, 0).sum().backward()  # a lookup in inference mode leaves nothing that others cannot use
    assert torch.equal(embedding.read(IDS, 0), inferred) and not inferred.equal(table_1)


@pytest.mark.parametrize("wrong, error, said", [
    (2, ValueError, "table_ids must be from 0 to 1, got 2"),
    (-1, ValueError, "table_ids must be from 0 to 1, got -1"),
    (2**70, ValueError, "table_ids must be from 0 to 1, got 1180591620717411303424"),
    (True, TypeError, "table_ids must be a tensor of integers, or one int for all ids, got bool"),
    ("user", TypeError, "table_ids must be a tensor of integers, or one int for all ids, got str"),
    ([0, 1], TypeError, r"got list; pass the number of a table, or torch.tensor\(numbers\)"),
    (torch.tensor([0.0]), TypeError, r"got torch.float32; call table_ids.long\(\)"),
])  # fmt: skip
def test_a_wrong_number_is_told(tmp_path, embedding, wrong, error, said):
    embedding.save_snapshot("first")
    for look_up in (embedding, embedding.read, oneemb.InferenceEmbedding.open(tmp_path / "rows")):
        with pytest.raises(error, match=said):
            look_up(IDS, wrong)


def test_a_graph_looks_tables_of_numbers_up_ahead(tmp_path):
    def optimizer(owner):
        return [(torch.optim.SGD(owner.parameters(), lr=0.1), None)]

    def build(self, ids):
        loss = self.embedding(ids, Table.USER).sum() + self.embedding(ids + 1, 1).square().sum()
        loss.backward()
        return loss.detach()

    graph = make_graph({"embedding": make_embedding(tmp_path / "graph", tables=2)}, build, optimizer)
    eager = make_embedding(tmp_path / "eager", tables=2)
    sgd = torch.optim.SGD(eager.parameters(), lr=0.1)
    for step in range(4):
        ids = IDS + step
        loss = eager(ids, torch.tensor(0)).sum() + eager(ids + 1, torch.tensor(1)).square().sum()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        assert torch.equal(graph(ids), loss.detach())
    assert str(graph).endswith("0 lookups of ids that are not known before")


def test_a_program_takes_a_number(tmp_path, embedding):
    class Graph(oneemb.EvalGraph):
        def __init__(self):
            super().__init__()
            self.embedding = embedding

        def build(self, ids):
            return self.embedding(ids, 1)

    embedding.save_snapshot("first")
    graph = Graph()
    graph.export(tmp_path / "program.pt2", IDS)
    program = torch.export.load(tmp_path / "program.pt2").module()
    assert torch.equal(program(IDS), embedding.read(IDS, 1))


def test_offsets_in_the_place_of_table_ids_are_told_to_be_named(embedding):
    for offsets in (torch.tensor([0, 1]), torch.tensor([0, 1, 4]), torch.tensor([0, 1, 2, 3])):
        with pytest.raises(ValueError, match=r"pass offsets of bags by name: embedding\(ids, offsets=offsets\)"):
            embedding(IDS, offsets)
    with pytest.raises(ValueError, match=r"or \[N\] with offsets=offsets; got no offsets"):
        embedding(IDS, OFFSETS, pooling="sum")
