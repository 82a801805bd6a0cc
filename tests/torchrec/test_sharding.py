"""Sharded collections on ranks give what TorchRec's own give, sharded and not."""


import pytest
import torch
import torchrec
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import PoolingType

import oneemb
from oneemb.torchrec import get_default_sharders
from tests.support.rank_jobs import RankJob

ROWS, DIM, BATCH = 40, 8, 6
FEATURES = ["f", "g", "h"]


def configs(cls, **more):
    bags = {"pooling": PoolingType.MEAN} if cls is EmbeddingBagConfig else {}
    return [
        cls(num_embeddings=ROWS, embedding_dim=DIM, name="one", feature_names=["f", "g"], **more),
        cls(num_embeddings=ROWS, embedding_dim=DIM, name="two", feature_names=["h", "f"], **bags, **more),
    ]


def batch_of(step, rank=0, ranks=1, weighted=False):
    """The part of a step's batch that a rank has."""
    generator = torch.Generator().manual_seed(step)
    samples = BATCH * 12
    lengths = torch.randint(0, 5, (3, samples), generator=generator)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    kjt = KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, lengths.view(-1), weights)
    own = [slice(r * samples // ranks, (r + 1) * samples // ranks) for r in [rank]][0]
    parts = [kjt[key] for key in FEATURES]
    begins = [part.offsets() for part in parts]
    pick = [slice(int(begin[own.start]), int(begin[own.stop])) for begin in begins]
    labels = torch.rand(samples, generator=generator)[own]
    return KeyedJaggedTensor.from_lengths_sync(
        FEATURES, torch.cat([part.values()[its] for part, its in zip(parts, pick, strict=True)]),
        torch.cat([part.lengths()[own] for part in parts]),
        torch.cat([part.weights()[its] for part, its in zip(parts, pick, strict=True)]) if weighted else None,
    ), labels  # fmt: skip


class Bags(torch.nn.Module):
    def __init__(self, module, **arguments):
        super().__init__()
        torch.manual_seed(3)
        self.sparse = module(configs(EmbeddingBagConfig), **arguments)
        self.dense = torch.nn.Linear(4 * DIM, 1)

    def forward(self, features):
        return self.dense(self.sparse(features).values()).squeeze(1)


class Ids(torch.nn.Module):
    def __init__(self, module, **arguments):
        super().__init__()
        torch.manual_seed(3)
        self.sparse = module(configs(EmbeddingConfig), **arguments)
        self.dense = torch.nn.Linear(4 * DIM, 1)

    def forward(self, features):
        found = self.sparse(features)
        sums = [torch.segment_reduce(its.values(), "sum", lengths=its.lengths()) for its in found.values()]
        return self.dense(torch.cat(sums, dim=1)).squeeze(1)


MODELS = {"bags": (Bags, torchrec.EmbeddingBagCollection, oneemb.torchrec.EmbeddingBagCollection),
          "ids": (Ids, torchrec.EmbeddingCollection, oneemb.torchrec.EmbeddingCollection)}  # fmt: skip


def shard(model, group, sharders, constraints=None):
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=group.size(), compute_device="cpu", local_world_size=group.size()),
        constraints=constraints,
    )
    plan = planner.collective_plan(model, sharders, group)
    return DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(group), plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def set_rows(model):
    """Write the same weights into the tensors of a state dict, as tools that load checkpoints do."""
    generator = torch.Generator().manual_seed(5)
    for key, its in sorted(model.state_dict().items()):
        if "sparse" in key:
            weights = torch.rand(ROWS, DIM, generator=generator) - 0.5
            if isinstance(its, ShardedTensor):
                for shard in its.local_shards():
                    begin, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                    shard.tensor.detach().copy_(weights[begin : begin + size])
            else:
                its.detach().copy_(weights)


def train(model, group, steps, dense=None, weighted=False):
    losses = []
    dense = dense or torch.optim.SGD([p for n, p in model.named_parameters() if "dense" in n], lr=0.1)
    for step in range(steps):
        kjt, labels = batch_of(step, group.rank(), group.size(), weighted)
        dense.zero_grad()
        loss = torch.nn.functional.mse_loss(model(kjt), labels)
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses


def runs(group, report, function, args):
    report(function(group, *args))


def on_ranks(size, function, *args):
    """What `function(group, *args)` gives on each of so many processes of their own: TorchRec makes groups of all."""
    job = RankJob(size, runs, function, args, timeout_s=60, preload=["tests.torchrec.test_sharding"])
    ended = job.end(120)
    assert all(code == 0 for code, _ in ended), job.texts()
    return [reports[0] for _, reports in ended]


def both(group, kind, optimizer, options, steps):
    """Losses of ours and theirs."""
    found = []
    for ours in (True, False):
        make, theirs, own = MODELS[kind]
        model = make(own if ours else theirs)
        apply_optimizer_in_backward(optimizer, model.sparse.parameters(), options)
        sharders = get_default_sharders() if ours else [
            torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder(),
            torchrec.distributed.embedding.EmbeddingCollectionSharder(),
        ]  # fmt: skip
        constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in ("one", "two")}
        model = shard(model, group, sharders, constraints)
        set_rows(model)
        found.append(train(model, group, steps))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["bags", "ids"])
@pytest.mark.filterwarnings("ignore:.*what the plan says of them")
def test_fifty_steps_of_torchrecs_sharded_modules(kind, ranks):
    for ours, theirs in on_ranks(ranks, both, kind, torch.optim.SGD, {"lr": 0.1}, 50):
        assert ours == pytest.approx(theirs, rel=1e-6)
