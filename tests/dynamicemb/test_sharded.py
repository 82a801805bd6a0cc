"""Collections of which some tables are dynamic, on ranks: with the numbers of oneemb.torchrec, and of TorchRec."""

import copy
import functools

import numpy as np
import pytest
import torch
import torchrec
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv

import oneemb.torchrec
from oneemb.dynamicemb import (
    DynamicEmbInitializerArgs as Begin,
    DynamicEmbInitializerMode as Mode,
    DynamicEmbScoreStrategy as Score,
    DynamicEmbTableOptions as Options,
    EmbOptimType,
    FrequencyAdmissionStrategy,
)
from oneemb.dynamicemb.dump_load import find_sharded_modules, get_dynamic_emb_module
from oneemb.dynamicemb.get_planner import get_planner
from oneemb.dynamicemb.incremental_dump import get_score, incremental_dump, is_valid_score_threshold, set_score
from oneemb.dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from oneemb.dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from tests.torchrec.test_sharding import of_each, on_ranks

ROWS, DIM, SAMPLES = 60, 4, 12
FEATURES = ["f", "g", "h"]
TABLES = {"one": ["f", "g"], "two": ["h"], "three": ["f"]}
FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}


def collection(kind, rows=ROWS, **more):
    config = EmbeddingBagConfig if kind == "bags" else EmbeddingConfig
    configs = [
        config(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=list(features), **more)
        for name, features in TABLES.items()
    ]
    module = torchrec.EmbeddingBagCollection if kind == "bags" else torchrec.EmbeddingCollection
    return module(tables=configs, device=torch.device("meta"))


def batch_of(step, group, high=ROWS):
    """A rank's part of a step's batch."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 4, (len(FEATURES), SAMPLES))
    ids = [rng.integers(0, high, lengths[f].sum()) for f in range(len(FEATURES))]
    each = SAMPLES // group.size()
    own = slice(group.rank() * each, (group.rank() + 1) * each)
    begins = [np.concatenate([[0], np.cumsum(its)]) for its in lengths]
    parts = [its[begin[own.start] : begin[own.stop]] for its, begin in zip(ids, begins, strict=True)]
    values, counts = torch.from_numpy(np.concatenate(parts)), torch.from_numpy(lengths[:, own].reshape(-1).copy())
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, values, counts)


def sharder_of(kind, **more):
    cls = DynamicEmbeddingBagCollectionSharder if kind == "bags" else DynamicEmbeddingCollectionSharder
    return cls(FUSED | more, num_threads=1)


def topology_of(group):
    return Topology(world_size=group.size(), compute_device="cpu", local_world_size=group.size())


def planner_of(configs, options, group):
    topology = topology_of(group)
    constraints = {
        config.name: DynamicEmbParameterConstraints(
            sharding_types=["row_wise"],
            use_dynamicemb=config.name in options,
            dynamicemb_options=options.get(config.name, Options()),
        )  # fmt: skip
        for config in configs
    }
    enumerator = DynamicEmbeddingEnumerator(topology, constraints=constraints)
    return DynamicEmbeddingShardingPlanner(configs, topology, enumerator=enumerator, constraints=constraints)


def configs_of(module):
    return module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()


def shard(module, options, group, sharder):
    plan = planner_of(configs_of(module), options, group).collective_plan(module, [sharder], group)
    return DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(group), plan=plan, sharders=[sharder], device=torch.device("cpu")
    )


def values_of(output):
    if hasattr(output, "to_dict"):  # a KeyedTensor
        return [output.keys(), output.values()]
    return [list(output.keys()), torch.cat([its.values() for its in output.values()])]


def train(model, steps, group, high=ROWS):
    found = []
    for step in range(steps):
        names, rows = values_of(model(batch_of(step, group, high)))
        (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum().backward()
        found.append((names, rows.detach().clone()))
    return found


# ---- the numbers -----------------------------------------------------------------------------------------------------


def constant(value):
    return Options(initializer_args=Begin(Mode.CONSTANT, value=value), score_strategy=Score.STEP)


def train_beside_own(group, kind):
    """What dynamic tables give, and those of oneemb.torchrec whose rows begin alike."""
    begins = functools.partial(torch.nn.init.uniform_, a=-0.25, b=0.25)
    dynamic, plain = collection(kind), collection(kind, init_fn=begins)
    options = {name: Options(initializer_args=Begin(Mode.UNIFORM, lower=-0.25, upper=0.25)) for name in TABLES}
    own_class = (
        oneemb.torchrec.EmbeddingBagCollectionSharder if kind == "bags" else oneemb.torchrec.EmbeddingCollectionSharder
    )
    own = own_class(FUSED, module_type=type(plain), num_threads=1)
    plan = EmbeddingShardingPlanner(topology=topology_of(group)).collective_plan(plain, [own], group)
    env = ShardingEnv.from_process_group(group)
    beside = DistributedModelParallel(plain, env=env, plan=plan, sharders=[own], device=torch.device("cpu"))
    model = shard(dynamic, options, group, sharder_of(kind))
    found, expected = train(model, 8, group, 2**62), train(beside, 8, group, 2**62)
    equal = [
        one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in zip(found, expected, strict=True)
    ]  # fmt: skip
    return equal, [float(rows.abs().sum()) for _, rows in found]


@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamic_tables_give_the_bits_of_this_librarys_collections(ranks):
    for of_kinds in on_ranks(ranks, of_each, train_beside_own, [("bags",), ("ids",)]):
        for equal, sums in of_kinds:
            assert all(equal) and min(sums) > 0


def train_beside_stock(group, kind, dynamic):
    """Dynamic tables of these names, beside TorchRec's own static ones for all."""
    options = {name: constant(0.5) for name in dynamic}
    model = shard(collection(kind, init_fn=half), options, group, sharder_of(kind))
    static = shard(collection(kind, init_fn=half), {}, group, sharder_of(kind))
    names = [type(its).__name__ for its in (model.module, static.module)]
    found, expected = train(model, 12, group), train(static, 12, group)
    differ = [
        float((one[1] - two[1]).abs().max()) if one[0] == two[0] else 1e9
        for one, two in zip(found, expected, strict=True)
    ]
    keys = [sorted(its.state_dict()) for its in (model, static)]
    optimizer = [sorted(its.fused_optimizer.params) for its in (model, static)]
    return max(differ), names, keys, optimizer


def train_adam(group, kind):
    """As `train_beside_stock`, by an optimizer that FBGEMM has on GPUs alone, beside dynamic tables alone."""
    adam = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01, "weight_decay": 0.01}
    options = {name: constant(0.5) for name in TABLES}
    found = [
        train(shard(collection(kind, init_fn=half), its, group, sharder_of(kind, **adam)), 6, group)
        for its in (options, {"two": options["two"]})
    ]
    return [one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in zip(*found, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tables_that_are_not_dynamic_begin_as_init_fn_fills_them(ranks):
    for of_kinds in on_ranks(ranks, of_each, train_adam, [("bags",), ("ids",)]):
        assert of_kinds == [[True] * 6] * 2


def half(weights):
    with torch.no_grad():
        weights.fill_(0.5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_ids_fit_the_numbers_are_torchrecs_beside_its_own_tables(ranks):
    calls = [
        (kind, dynamic) for kind in ("bags", "ids") for dynamic in [("one", "two", "three"), ("two",), ("three", "two")]
    ]
    for of_calls in on_ranks(ranks, of_each, train_beside_stock, calls):
        for differ, names, keys, optimizer in of_calls:
            assert differ < 1e-6
            assert names[0].startswith("ShardedDynamic") and not names[1].startswith("ShardedDynamic")
            assert keys[0] == keys[1] and optimizer[0] == optimizer[1]


# ---- scores and increments -------------------------------------------------------------------------------------------


def dump_increments(group, kind):
    strategies = {"one": Score.STEP, "two": Score.TIMESTAMP, "three": Score.CUSTOMIZED}
    options = {
        name: Options(score_strategy=its, initializer_args=Begin(Mode.DEBUG)) for name, its in strategies.items()
    }
    module = torch.nn.Sequential()
    module.add_module("sparse", collection(kind))
    model = shard_inner(module, options, group, sharder_of(kind))
    since = get_score(model)
    set_score(model, {"sparse": {"three": 1}})
    found = []
    for window in range(3):
        used = {name: set() for name in TABLES}
        for step in range(2):
            batches = [batch_of(10 * window + step, Part(r, group.size()), 2**60) for r in range(group.size())]
            with torch.no_grad():
                values_of(model(batches[group.rank()]))
            for batch in batches:
                for name, features in TABLES.items():
                    used[name] |= {n for feature in features for n in batch[feature].values().tolist()}
        rows, since = incremental_dump(model, since, group)
        set_score(model, {"model.sparse": {"three": window + 2}})
        its = rows["model.sparse"]
        expected = {name: set(keys.tolist()) for name, (keys, _) in its.items()}
        right = all((values == (keys % 100_000)[:, None]).all() for keys, values in its.values())
        found.append((expected == used, right, [len(keys) for keys, _ in its.values()]))
        since["model.sparse"]["three"] = window + 2
    own, _ = incremental_dump(model, 0)
    return found, [set(keys.tolist()) for keys, _ in own["model.sparse"].values()]


class Part:
    """A rank, as `batch_of` asks for it."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


def shard_inner(module, options, group, sharder):
    plan = planner_of(configs_of(module.sparse), options, group).collective_plan(module, [sharder], group)
    return DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(group), plan=plan, sharders=[sharder], device=torch.device("cpu")
    )


@pytest.mark.parametrize("kind, ranks", [("bags", 1), ("ids", 2)])
def test_rows_used_since_the_last_time_are_dumped(kind, ranks):
    results = on_ranks(ranks, dump_increments, kind)
    for found, _ in results:
        assert all(same and right and min(sizes) > 0 for same, right, sizes in found)
    for of_table in zip(*(own for _, own in results), strict=True):  # of no `pg` each rank has its own
        assert len(set.union(*of_table)) == sum(map(len, of_table))


def admit(group):
    options = {name: Options(score_strategy=Score.LFU, admit_strategy=FrequencyAdmissionStrategy(3)) for name in TABLES}
    model = shard(collection("ids"), options, group, sharder_of("ids"))
    seen = {name: {} for name in TABLES}
    for step in range(6):
        for r in range(group.size()):
            batch = batch_of(step, Part(r, group.size()), 40)
            for name, features in TABLES.items():
                for n in (n for feature in features for n in batch[feature].values().tolist()):
                    seen[name][n] = seen[name].get(n, 0) + 1
        values_of(model(batch_of(step, group, 40)))[1].sum().backward()
    found = {}
    for _, _, module in find_sharded_modules(model):
        for tables in get_dynamic_emb_module(module):
            for t, name in enumerate(tables.table_names):
                batches = list(tables.tables.export_keys_values(torch.device("cpu"), table_id=t))
                found[name] = [keys for batch in batches for keys in batch[0].tolist()]
    return seen, found


@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_of_all_ranks_are_counted_together(ranks):
    results = on_ranks(ranks, admit)
    for name, seen in results[0][0].items():
        kept = [n for _, found in results for n in found[name]]
        assert sorted(kept) == sorted(n for n, count in seen.items() if count >= 3)
        for rank, (_, found) in enumerate(results):
            assert all(n % ranks == rank for n in found[name])


def refuse(group):
    module = collection("ids")
    said = []
    for call in (
        lambda: planner_of(configs_of(module)[:2], {}, group) and DynamicEmbeddingShardingPlanner(
            configs_of(module), topology_of(group), constraints={}),
        lambda: shard(collection("ids"), {"one": Options()}, group, sharder_of("ids", optimizer="no such")),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    model = shard(module, {"one": constant(1.0)}, group, sharder_of("ids"))
    for call in (
        lambda: set_score(model, {"model": {"one": 3}}),
        lambda: incremental_dump(model, "3"),
        lambda: values_of(model(KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1])))),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        said.append(str(error.value))
    plan = planner_of(configs_of(collection("ids")), {"one": constant(1.0)}, group).collective_plan(
        collection("ids"), [sharder_of("ids")], group
    )
    its = plan.plan[""]["one"]
    assert isinstance(its, DynamicEmbParameterSharding) and its.dynamicemb_options.max_capacity == 128
    assert copy.deepcopy(its).dynamicemb_options.dim == DIM
    return said


def test_what_cannot_be_is_said():
    [said] = on_ranks(1, refuse)
    assert "constraints must be given for each table" in said[0]
    assert "got 'no such'" in said[1]
    assert "'one' has STEP" in said[2] and "score_threshold must be an int, or ints by" in said[3]
    assert "'g'" in said[4]


def plan_large(group):
    config = [EmbeddingConfig(name="huge", num_embeddings=2**40, embedding_dim=64, feature_names=["f"])]
    module = torchrec.EmbeddingCollection(tables=config, device=torch.device("meta"))
    planner = get_planner(config, set(), {"huge": Options()}, torch.device("cpu"), ddr_cap=1 << 30)
    model = DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(group), device=torch.device("cpu"),
        plan=planner.collective_plan(module, [sharder_of("ids")], group), sharders=[sharder_of("ids")],
    )  # fmt: skip
    ids = torch.tensor([-1, 2**63 - 1, -(2**63)])
    batch = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.ones(3, dtype=torch.int64))
    return values_of(model(batch))[1].shape


def test_a_table_of_any_size_is_planned():
    assert on_ranks(1, plan_large) == [(3, 64)]


def test_thresholds_are_dicts_of_dicts_of_ints():
    assert is_valid_score_threshold({"model": {"t": 3}})
    for other in ([], {"model": 3}, {1: {"t": 3}}, {"model": {"t": 2.0}}, {"model": {3: 3}}):
        assert not is_valid_score_threshold(other)
