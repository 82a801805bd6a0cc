"""Quantized collections whose rows ranks own together give the bits of those that one process has."""

import re
from types import SimpleNamespace

import pytest
import torch

torchrec = pytest.importorskip("torchrec")

from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed.types import ShardingEnv  # noqa: E402
from torchrec.modules.embedding_configs import PoolingType  # noqa: E402

import oneemb.torchrec as ours  # noqa: E402
from oneemb.graph.ranks import RankError  # noqa: E402
from oneemb.kernels.owner import owner_of  # noqa: E402

ROWS = 30


class Model(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse

    def forward(self, features):
        return self.sparse(features)


def collection():
    torch.manual_seed(2)
    made = ours.EmbeddingBagCollection(
        [
            EmbeddingBagConfig(ROWS, 8, "t", feature_names=["f", "g"]),
            EmbeddingBagConfig(ROWS, 8, "u", feature_names=["g"]),
            EmbeddingBagConfig(ROWS, 16, "v", feature_names=["h"], pooling=PoolingType.MEAN),
        ]
    )
    made(KeyedJaggedTensor.from_lengths_sync(list("fgh"), torch.tensor([-1, 2**62, 77]), torch.ones(3).long()))
    return made.eval()


def sequences():
    torch.manual_seed(2)
    return ours.EmbeddingCollection([EmbeddingConfig(ROWS, 8, "t", feature_names=["f", "h"])], need_indices=True).eval()


def batch(rank, samples=5):
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 4, (3 * samples,), generator=generator)
    ids = torch.randint(-3, 2 * ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(list("hgf"), ids, lengths)


def numbers(output):
    if isinstance(output, dict):
        return {name: (its.values(), its.weights(), its.lengths()) for name, its in output.items()}
    return {key: output[key] for key in output.keys()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, its in expected.items():
        pairs = zip(found[name], its, strict=True) if isinstance(its, tuple) else [(found[name], its)]
        assert all(torch.equal(one, other) for one, other in pairs)


def shards_a_quantized_model(group, how, kind):
    make = collection if kind == "bags" else sequences
    whole = ours.quantize_embeddings(Model(make()), torch.int8, False)
    expected = [numbers(whole(batch(rank, samples=rank * 3))) for rank in range(group.size())]
    if how == "a group":
        sharded, plan = ours.shard_quant_model(whole, process_group=group)
        assert plan.plan == {}
    else:
        (sharder,) = [its for its in ours.DEFAULT_SHARDERS if its.module_type is type(whole.sparse)]
        sharded = Model(sharder.shard(whole.sparse, {}, env_of(group)))
    # Batches of other sizes on every rank, none on the first.
    same(numbers(sharded(batch(group.rank(), samples=group.rank() * 3))), expected[group.rank()])
    tables = sharded.sparse.embedding_bags if kind == "bags" else sharded.sparse.embeddings
    for table in tables.values():
        owner_S = owner_of(torch.full_like(table.ids, table.number, dtype=torch.int32).numpy(), table.ids.numpy(),
                           group.size())  # fmt: skip
        assert (owner_S == group.rank()).all()
    before = numbers(sharded(batch(group.rank())))
    sharded.load_state_dict(sharded.state_dict())
    same(numbers(sharded(batch(group.rank()))), before)
    return sum(len(table.ids) for table in tables.values())


@pytest.mark.parametrize("kind", ["bags", "ids"])
@pytest.mark.parametrize("how", ["a group", "an environment"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_give_the_bits_of_one_process(rank_pool, ranks, how, kind):
    rows = sum(rank_pool(ranks, shards_a_quantized_model, how, kind))
    assert rows == (3 * ROWS + 4 if kind == "bags" else ROWS)


def quantizes_a_sharded_model(group):
    torch.manual_seed(2)
    whole = Model(ours.EmbeddingBagCollection(collection().configs)).eval()  # all rows of which are sharded
    expected = numbers(ours.quantize_embeddings(whole, torch.quint4x2, False)(batch(group.rank())))
    params = dict.fromkeys("tuv", SimpleNamespace(sharding_type="row_wise"))
    sharder = ours.EmbeddingBagCollectionSharder()
    sharded = Model(sharder.shard(whole.sparse, params, env_of(group), torch.device("cpu"))).eval()
    quantized = ours.quantize_embeddings(sharded, torch.quint4x2, False)
    same(numbers(quantized(batch(group.rank()))), expected)
    return sum(len(table.ids) for table in quantized.sparse.embedding_bags.values())


def env_of(group):
    env = ShardingEnv(group.size(), group.rank())
    env.process_group = group
    return env


def test_a_trained_model_on_ranks_is_quantized_where_its_rows_are(rank_pool):
    own = rank_pool(2, quantizes_a_sharded_model)
    assert sum(own) == 3 * ROWS and min(own) > 0


def fails_on_one(group):
    sharded, _ = ours.shard_quant_model(ours.quantize_embeddings(Model(collection()), torch.int8, False),
                                        process_group=group)  # fmt: skip
    bad = KeyedJaggedTensor(list("fgh"), torch.tensor([1, 2]), lengths=torch.tensor([1, 1, 1]))
    try:
        sharded(bad if group.rank() == 1 else batch(group.rank()))
    except (ValueError, RankError) as error:
        failed = type(error).__name__, str(error)
    return failed, sharded(batch(0)).values().sum().item()


def test_a_malformed_batch_on_one_rank_is_an_error_on_all_and_they_go_on(rank_pool):
    results = rank_pool(2, fails_on_one)
    (first, said), _ = results[0]
    assert first == "RankError" and re.search("add up", said)
    assert results[1][0][0] == "ValueError" and results[0][1] == results[1][1]
