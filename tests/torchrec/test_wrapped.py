"""TorchRec's modules around oneemb's collections: feature processors, managed collisions, towers."""

import copy

import pytest
import torch
import torchrec
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders as sharders_of_torchrec
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import oneemb.torchrec
from oneemb.torchrec import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, get_default_sharders
from tests.support.rank_jobs import RankJob

pytestmark = pytest.mark.filterwarnings("ignore:.*what the plan says")

ROWS, DIM = 20, 4
FEATURES = ["f", "g", "h"]


def configs(kind=EmbeddingBagConfig):
    return [
        kind(num_embeddings=ROWS, embedding_dim=DIM, name="one", feature_names=["f", "g"]),
        kind(num_embeddings=ROWS, embedding_dim=DIM, name="two", feature_names=["h"]),
    ]


def batch_of(step, ids=ROWS, samples=4, rank=0, ranks=1):
    """The part of a step's batch that a rank has."""
    draws = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURES), samples * ranks), generator=draws)
    parts = [torch.randint(ids, (int(length),), generator=draws) for length in lengths.flatten()]
    own = slice(rank * samples, (rank + 1) * samples)
    mine = [part for f in range(len(FEATURES)) for part in parts[f * samples * ranks :][own]]
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, torch.cat(mine), lengths[:, own].flatten())


class Model(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse
        torch.manual_seed(4)
        self.dense = torch.nn.Linear(3 * DIM, 1)

    def forward(self, features):
        found = self.sparse(features)
        return self.dense(found.values()).squeeze(1) if not isinstance(found, tuple) else found[0]


def collection_of(module, **arguments):
    torch.manual_seed(3)
    return module.EmbeddingBagCollection(configs(), **arguments)


def with_processors(module, each=False):
    lengths = dict.fromkeys(FEATURES, 3)
    processors = {f: PositionWeightedModule(n) for f, n in lengths.items()}
    return FeatureProcessedEmbeddingBagCollection(
        collection_of(module, is_weighted=True), processors if each else PositionWeightedModuleCollection(lengths)
    )


def with_managed_collisions(module, kind="bags"):
    its = configs(EmbeddingBagConfig if kind == "bags" else EmbeddingConfig)
    torch.manual_seed(3)
    collection = (module.EmbeddingBagCollection if kind == "bags" else module.EmbeddingCollection)(its)
    managed = {
        config.name: MCHManagedCollisionModule(
            zch_size=ROWS, device=torch.device("cpu"), input_hash_size=2**60, eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        ) for config in its
    }  # fmt: skip
    around = ManagedCollisionEmbeddingBagCollection if kind == "bags" else ManagedCollisionEmbeddingCollection
    return around(collection, ManagedCollisionCollection(managed, its), return_remapped_features=True)


def outputs_of(module, kind):
    """What six steps of training give, and the ids that were looked up."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = []
    for step in range(6):
        features = batch_of(step, ids=2**50)
        out, remapped = module(features)
        values = out.values() if kind == "bags" else torch.cat([its.values() for its in out.values()])
        found += [values.detach().clone(), remapped.values().clone()]
        optimizer.zero_grad()
        values.square().sum().backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("kind", ["bags", "ids"])
def test_managed_collisions_around_a_collection_give_what_they_give_around_torchrecs(kind):
    ours, theirs = (outputs_of(with_managed_collisions(module, kind), kind) for module in (oneemb.torchrec, torchrec))
    assert max(its.max() for its in ours[1::2]) < ROWS
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(ours, theirs, strict=True))


def trained(model, group=None):
    """The losses of a rank, or without a group of the whole batch, and the weights of positions after them."""
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "embedding_bags" not in n], lr=0.1)
    if group is None:  # Sharded, rows are stepped in the backward pass, at this rate.
        optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "bags." in n], "lr": 0.01})
    losses = []
    for step in range(5):
        loss = model(batch_of(step, rank=rank, ranks=ranks, samples=8 // ranks)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.tolist() for n, p in model.named_parameters() if "position" in n]


def parallel(group, sparse, sharders):
    return DistributedModelParallel(Model(sparse), sharders=sharders, device=torch.device("cpu"))


def said(group, sparse, sharders):
    """What a rank says of a model, when it is sharded or trained."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        parallel(group, sparse, sharders)(batch_of(0)).square().mean().backward()
    return str(raised.value)


def processed(group):
    models = (with_processors(oneemb.torchrec, each) for each in (False, True))
    return [trained(parallel(group, model, get_default_sharders()), group) for model in models]


def refused(group):
    own = EmbeddingBagCollectionSharder()
    ours = oneemb.torchrec
    tower = EmbeddingTower(collection_of(ours), torch.nn.Identity())
    return [
        said(group, with_processors(ours), sharders_of_torchrec()),
        said(group, with_processors(ours), [*get_default_sharders(), FeatureProcessedEmbeddingBagCollectionSharder()]),
        said(group, with_processors(ours), [FeatureProcessedEmbeddingBagCollectionSharder(own)]),
        said(group, with_managed_collisions(ours), [ManagedCollisionEmbeddingBagCollectionSharder(own)]),
        said(group, with_managed_collisions(ours, "ids"), sharders_of_torchrec()),
        said(group, tower, [EmbeddingTowerSharder()]),
        said(group, with_managed_collisions(ours), [own]),
        said(group, with_managed_collisions(ours, "ids"), [EmbeddingCollectionSharder()]),
        said(group, with_managed_collisions(ours), get_default_sharders()),
        said(group, with_managed_collisions(torchrec, "ids"), get_default_sharders()),
    ]


def runs(group, report, functions):
    report([function(group) for function in functions])


def on_ranks(size, *functions):
    job = RankJob(size, runs, functions, timeout_s=30)
    ended = job.end(90)
    assert all(code == 0 for code, _ in ended), job.texts()
    return [reports[0] for _, reports in ended]


def test_on_two_ranks_processors_train_as_unsharded_and_other_sharders_are_refused_on_both():
    (first, messages), (second, others) = on_ranks(2, processed, refused)
    whole = trained(Model(with_processors(torchrec)))
    for one, other in zip(first, second, strict=True):
        assert [sum(its) / 2 for its in zip(one[0], other[0], strict=True)] == pytest.approx(whole[0], rel=1e-4)
        for positions in (one[1], other[1]):
            assert sum(positions, []) == pytest.approx(sum(whole[1], []), rel=1e-4)
    assert messages == others
    assert all("oneemb.torchrec.get_default_sharders()" in message for message in messages)
    assert all("sharders must have one for module 'sparse', a Managed" in message for message in messages[-4:-2])
    assert all("cannot be sharded over 2 ranks" in message for message in messages[-2:])


def one_rank(group):
    sparse = with_managed_collisions(oneemb.torchrec)
    alone = copy.deepcopy(sparse)
    model = parallel(group, sparse, get_default_sharders())
    its = [model(batch_of(step, ids=2**50)).values() for step in range(4)]
    return [torch.equal(one, alone(batch_of(step, ids=2**50))[0].values()) for step, one in enumerate(its)]


def test_managed_collisions_are_sharded_on_one_rank():
    assert on_ranks(1, one_rank) == [[[True] * 4]]
