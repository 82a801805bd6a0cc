"""A module that torch.utils.checkpoint runs once more in the backward pass makes no lookup twice: whatever policies
count, rows, gradients and losses are those without checkpointing, to the last bit."""

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import oneemb
from oneemb.policies import LFU, LRU, AdmitAfter, AdmitChance, RowPolicy
from tests.support.models import make_embedding
from tests.support.pairwise import covering, diagonal
from tests.test_policies import everything

POLICIES = {
    "admitted by sightings": RowPolicy(admit=AdmitAfter(3), refused="zeros"),
    "admitted by chance": RowPolicy(admit=AdmitChance(0.5, 1), refused="zeros"),
    "lfu": RowPolicy(LFU(), 40),
    "full": RowPolicy(LRU(), 12, when_full="refuse"),
    "sketch, lru": RowPolicy(LRU(), 40, admit=AdmitAfter(2, sketch_width=1 << 12)),
}
WAYS = {
    "plain": lambda function, *args: function(*args),
    "recorded": lambda function, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False),
    "reentrant": lambda function, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True),
    "selective": lambda function, *args: torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_saves_products
    ),
    "selective, all": lambda function, *args: torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_saves_all
    ),
}


def _saves_products():
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _saves_all():
    policy = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(lambda *_, **__: policy)


class Model(torch.nn.Module):
    def __init__(self, path, policy, way, store="device", group=None, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = make_embedding(
            str(path), store=store, policy=policy, process_group=group, options={"physical_block_size": 512}
        )
        self.embedding.requires_grad_(not frozen)
        self.dense, self.way = torch.nn.Linear(4, 1), WAYS[way]

    def block(self, ids, offsets, one):
        # The rows are read again: the gradient of the dense module is made of them. One lookup is of bags.
        return self.dense(self.embedding(ids)).mul(one).sum() + self.dense(self.embedding(ids, None, offsets)).sum()

    def loss(self, ids):
        one = torch.ones(1, requires_grad=True)  # Without it a reentrant checkpoint gives no gradient.
        return self.way(self.block, ids, torch.tensor([0, 2, 5, len(ids)]), one).square()


class Graph(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.1))

    def build(self, ids):
        loss = self.model.loss(ids)
        loss.backward()
        return loss


def batches(rank=0):
    rng = np.random.default_rng(rank)
    return [torch.from_numpy((rng.random(9) ** 2 * 30).astype(np.int64) + 3 * step) for step in range(8)]


def train(model, compiled, rank=0):
    if compiled:
        losses = [float(loss) for loss in Graph(model).run(batches(rank))]
    else:
        losses, optimizer = [], torch.optim.Adam(model.parameters(), lr=0.1)
        for ids in batches(rank):
            loss = model.loss(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    stats = model.embedding.stats()
    counted = {key: value for key, value in stats["policy"].items() if key != "bytes"}
    assert stats["device"]["pinned"] == 0
    return losses, everything(model.embedding), [p.tolist() for p in model.dense.parameters()], counted


@pytest.mark.parametrize(("policy", "store", "compiled"), covering([*POLICIES], ["device", "ssd"], [False, True]))
def test_what_is_recomputed_is_the_same_lookup(tmp_path, policy, store, compiled):
    expected = train(Model(tmp_path / "plain", POLICIES[policy], "plain", store), compiled)
    recorded = train(Model(tmp_path / "recorded", POLICIES[policy], "recorded", store), compiled)
    assert recorded == expected


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("policy", ["admitted by sightings", "lfu"])
def test_selective_checkpoints_count_no_op_of_a_lookup(tmp_path, policy, compiled):
    plain, *others = (
        train(Model(tmp_path / way, POLICIES[policy], way), compiled)
        for way in ("plain", "selective", "selective, all")
    )
    assert others == [plain, plain]


class OneLookup(Model):
    def block(self, ids, offsets, one):
        return self.dense(self.embedding(ids)).mul(one).sum()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_reentrant_checkpoint_makes_one_lookup_too(tmp_path, policy, frozen, compiled):
    made = [OneLookup(tmp_path / way, POLICIES[policy], way, frozen=frozen) for way in ("plain", "reentrant")]
    plain, reentrant = (train(model, compiled) for model in made)
    assert reentrant == plain


def test_a_graph_does_not_expect_what_is_recomputed(tmp_path):
    graph = Graph(OneLookup(tmp_path / "rows", None, "recorded"))
    for ids in batches():
        graph(ids)
    code = graph.compiled().code
    assert code.count("oneemb_graph_ops_reserve_reserve(") == 1, code


def on_ranks(group, path, policy, way, compiled, kind):
    model = kind(f"{path}/{way}", policy, way, group=group)
    losses, rows, dense, counted = train(model, compiled, group.rank())
    model.embedding.close()
    return losses, rows, dense, counted


@pytest.mark.parametrize(("policy", "compiled"), diagonal(["admitted by sightings", "lfu"], [False, True]))
def test_on_ranks_too(tmp_path, rank_pool, policy, compiled):
    for way, kind in (("recorded", Model), ("reentrant", OneLookup)):
        path = tmp_path / kind.__name__
        plain = rank_pool(2, on_ranks, str(path), POLICIES[policy], "plain", compiled, kind)
        assert rank_pool(2, on_ranks, str(path), POLICIES[policy], way, compiled, kind) == plain
