"""Sharded collections on ranks give what TorchRec's own give, sharded and not."""

import copy
import gc
import itertools
import os
import re
import threading
import time
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import oneemb.torchrec
from oneemb.torchrec import EmbeddingBagCollectionSharder, get_default_sharders
from tests.support.rank_jobs import RankJob

pytestmark = pytest.mark.filterwarnings("ignore:.*what the plan says")

SLOW = pytest.mark.slow
KINDS_ON_RANKS = [
    ("bags", 2), ("ids", 1), pytest.param("bags", 1, marks=SLOW), pytest.param("ids", 2, marks=SLOW),
]  # fmt: skip

ROWS, DIM, BATCH = 40, 8, 6
FEATURES = ["f", "g", "h"]


def configs(cls, rows=ROWS, **more):
    bags = {"pooling": PoolingType.MEAN} if cls is EmbeddingBagConfig else {}
    return [
        cls(num_embeddings=rows, embedding_dim=DIM, name="one", feature_names=["f", "g"], **more),
        cls(num_embeddings=rows, embedding_dim=DIM, name="two", feature_names=["h", "f"], **bags, **more),
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
    def __init__(self, module, rows=ROWS, **arguments):
        super().__init__()
        torch.manual_seed(3)
        self.sparse = module(configs(EmbeddingBagConfig, rows), **arguments)
        self.dense = torch.nn.Linear(4 * DIM, 1)

    def forward(self, features):
        return self.dense(self.sparse(features).values()).squeeze(1)


class Ids(torch.nn.Module):
    def __init__(self, module, rows=ROWS, **arguments):
        super().__init__()
        torch.manual_seed(3)
        self.sparse = module(configs(EmbeddingConfig, rows), **arguments)
        self.dense = torch.nn.Linear(4 * DIM, 1)

    def forward(self, features):
        found = self.sparse(features)
        of_each = [found[name] for name in ["f@one", "g", "h", "f@two"]]
        sums = [torch.segment_reduce(its.values(), "sum", lengths=its.lengths()) for its in of_each]
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
            weights = torch.rand(ROWS, its.shape[1], generator=generator) - 0.5
            if isinstance(its, ShardedTensor):
                for shard in its.local_shards():
                    begin, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                    shard.tensor.detach().copy_(weights[begin : begin + size])
            else:
                its.detach().copy_(weights)


def train(model, group, steps, dense=None, weighted=False, begin=0):
    losses = []
    dense = dense or torch.optim.SGD([p for n, p in model.named_parameters() if "dense" in n], lr=0.1)
    for step in range(begin, steps):
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
    job = RankJob(size, runs, function, args, timeout_s=60)
    ended = job.end(120)
    assert all(code == 0 for code, _ in ended), job.texts()
    return [reports[0] for _, reports in ended]


STOCK = {"bags": torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder,
         "ids": torchrec.distributed.embedding.EmbeddingCollectionSharder}  # fmt: skip


def of_each(group, function, calls):
    """What a function gives for each of several arguments: processes that have TorchRec take their time to begin."""
    return [function(group, *its) for its in calls]


def stock(kind, **arguments):
    """TorchRec's sharder, and a plan that it can follow on a CPU."""
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in ("one", "two")}
    return [STOCK[kind](**arguments)], constraints


def rows_of(model):
    """The weights of all tables, where a state dict has them on this rank."""
    rows = {}
    for key, its in model.state_dict().items():
        for tensor in [shard.tensor for shard in its.local_shards()] if isinstance(its, ShardedTensor) else [its]:
            rows[key] = tensor.numpy().copy()
    return rows


def both(group, kind, optimizer, options, steps):
    """Losses and rows of ours and theirs."""
    found = []
    for ours in (True, False):
        make, theirs, own = MODELS[kind]
        model = make(own if ours else theirs)
        apply_optimizer_in_backward(optimizer, model.sparse.parameters(), dict(options))
        sharders, constraints = (get_default_sharders(), None) if ours else stock(kind)
        model = shard(model, group, sharders, constraints)
        set_rows(model)
        found.append((train(model, group, steps), rows_of(model)))
    return found


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torchrec.optim.Adagrad, {"lr": 0.1, "eps": 1e-6}),
    "row-wise adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torchrec.optim.Adam, {"lr": 0.1}),
    "partial row-wise adam": (torchrec.optim.PartialRowWiseAdam, {"lr": 0.1, "betas": (0.8, 0.9)}),
}
STOCK_ON_CPU = ["sgd", "adagrad", "row-wise adagrad"]


@pytest.mark.parametrize("kind, ranks", KINDS_ON_RANKS)
def test_fifty_steps_of_torchrecs_sharded_modules(kind, ranks):
    # Fifty of each take ten seconds: fewer of those with simpler rules.
    calls = [(kind, *OPTIMIZERS[name], 50 if name == "row-wise adagrad" else 10) for name in STOCK_ON_CPU]
    for name, its in itertools.product(range(len(calls)), on_ranks(ranks, of_each, both, calls)):
        (losses, rows), (their_losses, their_rows) = its[name]
        assert losses == pytest.approx(their_losses, rel=0, abs=1e-6 * max(their_losses)), STOCK_ON_CPU[name]
        for key, weights in their_rows.items():
            np.testing.assert_allclose(rows[key], weights, rtol=0, atol=2e-6, err_msg=STOCK_ON_CPU[name])


def of_a_stock_state_dict(group):
    """Rows of stock, and of ours after it has loaded stock's state dict; and what ours says of a part of it."""
    make, theirs, own = MODELS["bags"]
    their_model = shard(make(theirs), group, *stock("bags"))
    set_rows(their_model)
    model = shard(make(own, device=torch.device("meta")), group, get_default_sharders())
    state = their_model.state_dict()
    model.load_state_dict(state)
    wrong = dict(state)
    key = "sparse.embedding_bags.one.weight"
    for rows in (ROWS + 1, ROWS - 1):
        wrong[key] = torch.zeros(rows, DIM)
        with pytest.raises(RuntimeError, match=f"num_embeddings, {ROWS}, got {rows}"):
            model.load_state_dict(wrong)
    return rows_of(their_model), rows_of(model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sharded_tensors_of_stock_are_loaded(ranks):
    found = on_ranks(ranks, of_a_stock_state_dict)
    for key, whole in found[0][1].items():
        if "sparse" in key:
            assert sum(len(theirs.get(key, ())) for theirs, _ in found) == ROWS == len(whole)
            parts = np.concatenate([theirs[key] for theirs, _ in found if key in theirs])
            for _, ours in found:
                np.testing.assert_array_equal(ours[key], parts)


def by_fused_params(group, fused_params):
    found = []
    for ours in (True, False):
        make, theirs, _ = MODELS["bags"]
        model = make(theirs)
        sharder = EmbeddingBagCollectionSharder(dict(fused_params), module_type=theirs)
        sharders, constraints = ([sharder], None) if ours else stock("bags", fused_params=dict(fused_params))
        model = shard(model, group, sharders, constraints)
        set_rows(model)
        losses = train(model, group, 5)
        for param_group in model.fused_optimizer.param_groups:
            param_group["lr"] = 0.02
        model.fused_optimizer.zero_grad()  # where TorchRec's reads its rate
        found.append(losses + train(model, group, 5))
    return found


FUSED_PARAMS = [
    {},
    {"learning_rate": 0.2},
    {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-3},
    {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "cache_load_factor": 0.5},
]


def test_an_unchanged_model_is_trained_as_fused_params_say():
    for of_rank in on_ranks(2, of_each, by_fused_params, [(its,) for its in FUSED_PARAMS]):
        for (ours, theirs), fused_params in zip(of_rank, FUSED_PARAMS, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6), fused_params


@pytest.mark.parametrize(
    "fused_params, match",
    [
        ({"optimizer": EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD}, "must be one of .* got 'ensemble_row_wise_adagrad'"),
        ({"weight_decay": 0.1}, "weight_decay has no effect on optimizer 'exact_sgd', in FBGEMM"),
        ({"gradient_clipping": True}, "gradient_clipping=True is not supported"),
        ({"momentum": 0.5}, "momentum has no effect on optimizer 'exact_sgd', in FBGEMM"),
        ({"optimizer": EmbOptimType.ADAM, "eta": 0.1}, "eta has no effect on optimizer 'adam', in FBGEMM"),
        ({"learning_rat": 0.1}, r"unknown options \['learning_rat'\]"),
        (
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.1,
             "weight_decay_mode": WeightDecayMode.DECOUPLE},
            "weight_decay_mode DECOUPLE is not supported",
        ),
    ],
)  # fmt: skip
def test_fused_params_that_rows_cannot_follow(fused_params, match):
    with pytest.raises(ValueError, match=match):
        EmbeddingBagCollectionSharder(fused_params)


@dataclass
class Pair(Pipelineable):
    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return self

    def record_stream(self, stream):
        pass

    def pin_memory(self):
        return self


class WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        output = self.model(batch.features)
        return torch.nn.functional.mse_loss(output, batch.labels), output.detach()


def pipelined(group, kind, pipeline):
    found = []
    for make_pipeline in (None, pipeline):
        make, _, own = MODELS[kind]
        model = make(own)
        apply_optimizer_in_backward(torch.optim.Adam, model.sparse.parameters(), {"lr": 0.1})
        model = shard(WithLoss(model), group, get_default_sharders())
        set_rows(model)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())), lambda its: torch.optim.SGD(its, lr=0.1)
        )
        batches = [Pair(*batch_of(step, group.rank(), group.size())) for step in range(20)]
        losses = []
        if make_pipeline is None:
            for batch in batches:
                dense.zero_grad()
                loss, output = model(batch)
                loss.backward()
                dense.step()
                losses.append(output.sum().item())
        else:
            its, steps = make_pipeline(model, dense, torch.device("cpu")), iter(batches)
            losses = [its.progress(steps).sum().item() for _ in batches]
            with pytest.raises(StopIteration):
                its.progress(steps)
        found.append((losses, rows_of(model)))
    return found


@pytest.mark.parametrize(
    "pipeline, kind",
    [(TrainPipelineSparseDist, "bags"), (TrainPipelineBase, "ids")]
    + [pytest.param(*one, marks=SLOW) for one in [(TrainPipelineSparseDist, "ids"), (TrainPipelineBase, "bags")]],
)
def test_pipelines_are_exact(pipeline, kind):
    for (losses, rows), (piped_losses, piped_rows) in on_ranks(2, pipelined, kind, pipeline):
        assert losses == piped_losses
        for key, weights in rows.items():
            assert np.array_equal(weights, piped_rows[key])


def endless(group, of_torchrec):
    """Tables of 2^40 rows, on meta, under sharding types that a plan may say."""
    found = []
    make, theirs, own = MODELS["bags"]
    for kind in ["table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", None]:
        model = make(theirs if of_torchrec else own, device=torch.device("meta"), rows=2**40)
        constraints = {name: ParameterConstraints(sharding_types=[kind]) for name in ("one", "two")} if kind else None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = shard(model, group, get_default_sharders(), constraints)
        found.append(
            (kind, train(model, group, 3), [str(its.message) for its in said if "no effect" in str(its.message)])
        )
    return found


@pytest.mark.parametrize("of_torchrec", [True, False])
def test_a_plan_may_say_what_it_likes_of_tables_without_end(of_torchrec):
    first, _ = on_ranks(2, endless, of_torchrec)
    for kind, losses, warned in first:
        assert losses == first[0][1]
        if kind == "row_wise":
            assert not warned
        elif kind is not None:
            assert f"{kind} of 'one'" in warned[0]


def written_twice(group):
    """Rows after weights were written into a state dict, and another one was taken; and on the first rank alone."""
    make, _, own = MODELS["bags"]
    model = shard(make(own, device=torch.device("meta")), group, get_default_sharders())
    for value, own_rank in [(0.5, False), (0.75, True)]:
        state = model.state_dict()
        for key, its in state.items():
            if "sparse" in key and (group.rank() == 0 or not own_rank):
                its.fill_(value)
        model.state_dict()
        train(model, group, 1)
    return [np.unique(weights).tolist() for key, weights in rows_of(model).items() if "sparse" in key]


def test_state_dicts_may_be_written_and_taken_again():
    for found in on_ranks(2, written_twice):
        assert len(found) == 2


def of_another_optimizer(group):
    """What is said of the state of another optimizer."""
    models = []

    def make(optimizer, **options):
        make, _, own = MODELS["bags"]
        model = make(own, device=torch.device("meta"))
        apply_optimizer_in_backward(optimizer, model.sparse.parameters(), {"lr": 0.1, **options})
        model = shard(model, group, get_default_sharders())
        train(model, group, 1)
        models.append(model)
        return model.module.sparse.fused_optimizer

    adam, adagrad = make(torchrec.optim.Adam), make(torchrec.optim.Adagrad)
    decayed, damped = make(torch.optim.Adagrad, lr_decay=0.1), make(torch.optim.SGD, momentum=0.9, dampening=0.5)
    said = []
    for optimizer, state in [(adagrad, adam.state_dict()), (adagrad, make(oneemb.optim.RowWiseAdagrad).state_dict())]:
        with pytest.raises(
            ValueError, match="optimizer state of .* must have the shapes|Different|not found"
        ) as raised:
            optimizer.load_state_dict(state)
        said.append(str(raised.value))
    names = [sorted(next(iter(its.state_dict()["state"].values()))) for its in (decayed, damped)]
    return said, names


def test_the_state_of_another_optimizer_is_refused_and_steps_are_kept_where_they_count():
    for said, names in on_ranks(2, of_another_optimizer):
        assert all("(40, 8)" in its for its in said) and "(40,)" in said[1]
        assert names == [["one.momentum1", "one.step"]] * 2


def of_two_steps(group):
    make, _, own = MODELS["ids"]
    model = make(own, device=torch.device("meta"))
    apply_optimizer_in_backward(torchrec.optim.Adam, model.sparse.parameters(), {"lr": 0.1})
    model = shard(model, group, get_default_sharders())
    train(model, group, 2)
    adam = model.module.sparse.fused_optimizer
    state = copy.deepcopy(adam.state_dict())
    next(iter(state["state"].values()))["one.step"].fill_(7)
    before = str(adam.state_dict())
    with pytest.raises(ValueError, match="one embedding must have one count of steps, got {'one': 7.0, 'two': 2.0}"):
        adam.load_state_dict(state)
    assert str(adam.state_dict()) == before
    state = copy.deepcopy(model.fused_optimizer.state_dict())  # TorchRec's, of all modules
    next(iter(state["state"].values()))["one.step"].fill_(7)
    with pytest.raises(ValueError, match="one embedding must have one count of steps, got {'one': 7.0, 'two': 2.0}"):
        model.fused_optimizer.load_state_dict(state)
    assert str(adam.state_dict()) == before
    return train(model, group, 1)


def test_tables_that_are_one_embedding_have_one_count_of_steps():
    on_ranks(2, of_two_steps)


def stepped_by_another(group):
    make, _, own = MODELS["bags"]
    model = shard(make(own, device=torch.device("meta")), group, get_default_sharders())
    apply_optimizer_in_backward(torch.optim.SGD, model.module.sparse.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="must be called before the module is sharded"):
        train(model, group, 1)


def test_an_optimizer_in_backward_comes_before_the_module_is_sharded():
    on_ranks(1, stepped_by_another)


def by_arguments_of_sharders(group, path):
    """Where the rows of TorchRec's own module are, and what travels between ranks."""
    make, theirs, _ = MODELS["bags"]
    options = oneemb.make_cached_ssd_store_options(cache_budget_mb=1, persistent_path=path)
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16))
    model = oneemb.torchrec.DistributedModelParallel(
        make(theirs, device=torch.device("meta"), rows=2**40), ShardingEnv.from_process_group(group),
        torch.device("cpu"), None, get_default_sharders(None, registry, store_options=options, seed=5),
    )  # fmt: skip
    losses = train(model, group, 2)
    its = model.module.sparse.rows[0]
    state = model.state_dict()  # names a snapshot
    return losses, its.seed, its.ranks.comm_dtype, its.stats()["rows"], sorted(os.listdir(path)), len(state)


def test_store_options_seed_and_codecs_of_sharders_are_those_of_the_rows(tmp_path):
    (losses, seed, dtype, rows, folders, _), (_, _, _, others, *_) = on_ranks(
        2, by_arguments_of_sharders, str(tmp_path)
    )
    assert np.isfinite(losses).all() and seed != 5 and dtype == torch.float16
    assert folders == ["sparse"] and 0 < rows < rows + others <= 2 * ROWS


def by_default(group):
    """The losses of unchanged scripts: no sharders by name, by place, or by word."""
    found = []
    for given in [(), (None,)]:
        make, _, own = MODELS["bags"]
        model = oneemb.torchrec.DistributedModelParallel(
            make(own), ShardingEnv.from_process_group(group), torch.device("cpu"), None, *given
        )
        assert type(model.module.sparse).__name__ == "ShardedEmbeddingBagCollection"
        found.append(train(model, group, 2))
    with pytest.raises(TypeError):
        oneemb.torchrec.DistributedModelParallel(
            make(own), ShardingEnv.from_process_group(group), torch.device("cpu"), None, [], sharders=[]
        )
    return found


def test_our_model_parallel_needs_no_sharders():
    for first, second in on_ranks(2, by_default):
        assert first == second


def closed(group):
    make, _, own = MODELS["bags"]
    model = shard(make(own, device=torch.device("meta")), group, get_default_sharders())
    train(model, group, 1)
    model.module.sparse.close()
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(oneemb.StorageError, match="is closed"):
            model(batch_of(0, group.rank(), group.size())[0])
    return time.monotonic() - begin


def test_a_lookup_after_closing_waits_for_nobody():
    assert max(on_ranks(2, closed)) < 30, "as long as others may take to begin, of the 60 s of the group"


def thrown_on_the_thread(group):
    """What is dropped and fails ends no thread: keys are sent afterwards."""
    make, _, own = MODELS["bags"]
    model = shard(make(own, device=torch.device("meta")), group, get_default_sharders())
    sender = model.module.sparse._sender

    def fail():
        raise RuntimeError("no room for it")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sender.later(fail)
        losses = train(model, group, 2)
    return losses, [str(its.message) for its in said if "dropped" in str(its.message)]


def test_the_thread_of_keys_lives_on():
    for losses, said in on_ranks(2, thrown_on_the_thread):
        assert len(losses) == 2 and said == ["a lookup that was dropped: no room for it"]


def checkpointed(group, kind, optimizer, options, folder, calls=("model", "optimizer")):
    """State after 6 steps, against state after 3 that go on, from a checkpoint, in another model.

    Args:
        calls: whose load_state_dict is called after the checkpoint has been read into the tensors of state dicts.
    """

    def make():
        make, _, own = MODELS[kind]
        model = make(own, device=torch.device("meta"))
        apply_optimizer_in_backward(optimizer, model.sparse.parameters(), dict(options))
        return shard(model, group, get_default_sharders())

    model = make()
    set_rows(model)
    train(model, group, 6)
    straight = rows_of(model)
    first = make()
    set_rows(first)
    train(first, group, 3)
    state = {"model": first.state_dict(), "optimizer": first.fused_optimizer.state_dict()}
    names = sorted(state["optimizer"]["state"]["sparse." + HOLDERS[kind] + ".one.weight"])
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    second = make()
    state = {"model": second.state_dict(), "optimizer": second.fused_optimizer.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    if "model" in calls:
        second.load_state_dict(state["model"])
    if "optimizer" in calls:
        second.fused_optimizer.load_state_dict(state["optimizer"])
    train(second, group, 6, begin=3)
    return names, straight, rows_of(second)


HOLDERS = {"bags": "embedding_bags", "ids": "embeddings"}


def test_what_is_read_into_the_tensors_of_state_dicts_is_there(tmp_path):
    ways = [*itertools.product(["row-wise adagrad", "adam"], [(), ("model",), ("optimizer",)])]
    arguments = [("bags", *OPTIMIZERS[name], str(tmp_path / f"{name} {calls}"), calls) for name, calls in ways]
    for of_rank in on_ranks(2, of_each, checkpointed, arguments):
        for (_, straight, resumed), way in zip(of_rank, ways, strict=True):
            for key, weights in straight.items():
                if "sparse" in key:
                    np.testing.assert_array_equal(resumed[key], weights, err_msg=str(way))


STATE_OF = {
    "sgd": [],
    "adagrad": ["one.momentum1"],
    "row-wise adagrad": ["one.momentum1"],
    "adam": ["one.exp_avg_sq", "one.momentum1", "one.step"],
    "partial row-wise adam": ["one.exp_avg_sq", "one.momentum1", "one.step"],
}


@pytest.mark.parametrize("kind, ranks", KINDS_ON_RANKS)
def test_a_checkpoint_of_torch_distributed_goes_on_as_if_nothing_had_happened(kind, ranks, tmp_path):
    arguments = [(kind, *OPTIMIZERS[name], str(tmp_path / name)) for name in STATE_OF]
    for of_rank in on_ranks(ranks, of_each, checkpointed, arguments):
        for (found, straight, resumed), (name, names) in zip(of_rank, STATE_OF.items(), strict=True):
            assert found == names
            for key, weights in straight.items():
                np.testing.assert_array_equal(resumed[key], weights, err_msg=name)


def in_a_path(group, kind, path, steps, begin):
    make, _, own = MODELS[kind]
    options = oneemb.make_cached_ssd_store_options(cache_budget_mb=1, persistent_path=path)
    model = make(own, device=torch.device("meta"), store_options=options)
    apply_optimizer_in_backward(torch.optim.Adam, model.sparse.parameters(), {"lr": 0.1})
    model = shard(model, group, get_default_sharders())
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if "dense" in n], lr=0.1)
    checkpoint = f"{path}/dense.pt"
    if begin:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        dense.load_state_dict(state["dense"])
    losses = train(model, group, begin + steps, dense, begin=begin)
    state = {"model": model.state_dict(), "dense": dense.state_dict()}
    if group.rank() == 0:
        torch.save(state, checkpoint)
    found = model.fused_optimizer.state_dict()["state"]
    torch.distributed.barrier()
    return losses, sorted(found), [len(its) for its in found.values()]


@pytest.mark.parametrize("kind", ["bags", pytest.param("ids", marks=SLOW)])
def test_with_a_path_a_state_dict_names_a_snapshot_that_any_number_of_ranks_loads(kind, tmp_path):
    straight = on_ranks(1, in_a_path, kind, str(tmp_path / "a"), 6, 0)[0][0]
    ours = [
        on_ranks(2, in_a_path, kind, str(tmp_path / "b"), 3, 0),
        on_ranks(1, in_a_path, kind, str(tmp_path / "b"), 3, 3),
    ]
    (first, keys, parts), (second, _, _) = ours[0][0], ours[1][0]
    mean = [sum(its) / 2 for its in zip(first, ours[0][1][0], strict=True)]
    assert [*mean, *second] == pytest.approx(straight, rel=2e-5)
    assert keys == [f"sparse.{HOLDERS[kind]}.{table}.weight" for table in ("one", "two")]
    assert parts == [0, 0]  # snapshots hold it


def malformed(group, way):
    make, _, own = MODELS["bags"]
    model = shard(make(own, device=torch.device("meta")), group, get_default_sharders())
    sparse = model.module.sparse
    train(model, group, 1)
    rows = sparse.rows[0].stats()["rows"]
    kjt, _ = batch_of(1, group.rank(), group.size())
    error = None
    if group.rank() == 1:
        kjt = {
            "negative": KeyedJaggedTensor(FEATURES, kjt.values(), lengths=-kjt.lengths()),
            "feature": KeyedJaggedTensor(["f", "g", "x"], kjt.values(), lengths=kjt.lengths()),
            "type": "no jagged tensor",
        }[way]
    try:
        sparse(kjt)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    assert sparse.rows[0].stats()["rows"] == rows
    return error, train(model, group, 2)


@pytest.mark.parametrize(
    "way, match",
    [("negative", "ValueError: lengths must"), ("feature", r"ValueError: .*lacks the features \['h'\]"),
     ("type", "TypeError: features must be a KeyedJaggedTensor")],
)  # fmt: skip
def test_a_batch_that_is_malformed_on_one_rank_is_an_error_on_all_and_they_go_on(way, match):
    (other, losses), (own, _) = on_ranks(2, malformed, way)
    assert re.match(match, own)
    assert other.startswith("RankError: rank 1 has failed (")
    assert len(losses) == 2


def divided(group, divides):
    torchrec.distributed.comm_ops.set_gradient_division(divides)
    found = []
    for ours in (True, False):
        make, theirs, own = MODELS["bags"]
        model = make(own if ours else theirs)
        sharders, constraints = (get_default_sharders(), None) if ours else stock("bags")
        model = shard(model, group, sharders, constraints)
        set_rows(model)
        found.append(train(model, group, 10))
    return found


@pytest.mark.parametrize("divides", [True, False])
def test_gradients_are_divided_by_the_ranks_as_torchrecs_are(divides):
    for ours, theirs in on_ranks(2, divided, divides):
        assert ours == pytest.approx(theirs, rel=1e-6)


class Weighted(Bags):
    def __init__(self, module, **arguments):
        super().__init__(module)
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="one", feature_names=["f", "g"]),
            EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=2 * DIM, name="two", feature_names=["h"]),
        ]
        self.sparse = module(tables, is_weighted=True, **arguments)

    def forward(self, features):
        found = self.sparse(features)  # TorchRec's sharded module gives them in an order of its own.
        return self.dense(torch.cat([found[name] for name in FEATURES], dim=1)).squeeze(1)


def weighted(group):
    found = []
    for ours in (True, False):
        _, theirs, own = MODELS["bags"]
        model = Weighted(own if ours else theirs)
        sharders, constraints = (get_default_sharders(), None) if ours else stock("bags")
        model = shard(model, group, sharders, constraints)
        set_rows(model)
        found.append(train(model, group, 10, weighted=True))
    return found


def test_weighted_bags_and_tables_of_two_widths():
    for ours, theirs in on_ranks(2, weighted):
        assert ours == pytest.approx(theirs, rel=1e-6)


def frozen(group):
    make, _, own = MODELS["bags"]
    model = make(own)
    model.sparse.embedding_bags["two"].weight.requires_grad_(False)
    model = shard(model, group, get_default_sharders())
    set_rows(model)
    found = [rows_of(model)]
    for trains in (["one"], ["two"]):
        for name, table in model.module.sparse.embedding_bags.items():
            table.weight.requires_grad_(name in trains)
        train(model, group, 2)
        found.append(rows_of(model))
    return [
        {key.split(".")[-2] for key in after if "sparse" in key and not np.array_equal(before[key], after[key])}
        for before, after in itertools.pairwise(found)
    ]


def test_tables_are_frozen_before_and_after_they_are_sharded():
    for changed in on_ranks(2, frozen):
        assert changed == [{"one"}, {"two"}]


def not_finite(group, kind):
    make, _, own = MODELS[kind]
    sparse = shard(make(own), group, get_default_sharders()).module.sparse
    kjt, _ = batch_of(0, group.rank(), group.size())

    def backward(factor):
        found = sparse(kjt)
        values = found["g"].values() if kind == "ids" else found.values()
        (values.sum() * factor).backward()

    before = rows_of(sparse)
    with pytest.raises(oneemb.NonFiniteGradientError):
        backward(float("nan") if group.rank() == group.size() - 1 else 1.0)
    assert all(np.array_equal(rows, before[key]) for key, rows in rows_of(sparse).items())
    backward(1.0)
    assert not all(np.array_equal(rows, before[key]) for key, rows in rows_of(sparse).items())


@pytest.mark.parametrize("kind, ranks", KINDS_ON_RANKS)
def test_a_gradient_that_is_not_finite_changes_nothing_and_training_goes_on(kind, ranks):
    on_ranks(ranks, not_finite, kind)


def full(group, path):
    make, _, own = MODELS["bags"]
    options = oneemb.make_device_mem_store_options(path, capacity=60)
    sparse = shard(make(own, device="meta", store_options=options), group, get_default_sharders()).module.sparse
    ids = torch.arange(200) if group.rank() else torch.arange(3)
    with pytest.raises((oneemb.StoreFullError, oneemb.RankError), match="capacity is 60 rows"):
        sparse(KeyedJaggedTensor(FEATURES, ids, lengths=torch.tensor([len(ids), 0, 0]))).values()
    sparse(KeyedJaggedTensor(FEATURES, ids[:1], lengths=torch.tensor([1, 0, 0]))).values().sum().backward()
    return sparse.rows[0].stats()["step"]


def test_a_full_store_is_an_error_and_training_goes_on(tmp_path):
    assert on_ranks(2, full, str(tmp_path)) == [1, 1]


class Several(torch.nn.Module):
    """Two collections of bags, one of them called twice, and one of ids, of which the loss leaves one out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        bags, ids = (its[2] for its in MODELS.values())
        self.sparse, self.unused = (bags(configs(EmbeddingBagConfig), device="meta") for _ in range(2))
        self.ids = ids(configs(EmbeddingConfig), device="meta")
        self.dense = torch.nn.Linear(4 * DIM, 1)

    def forward(self, features):
        pooled = self.sparse(features).values() + self.sparse(features).values()
        self.unused(features).wait()
        ids = self.ids(features)["g"]
        return self.dense(pooled).squeeze(1) + torch.segment_reduce(ids.values(), "sum", lengths=ids.lengths())[:, 0]


def several(group):
    model = shard(Several(), group, get_default_sharders())
    losses = train(model, group, 4)
    steps = [model.module.get_submodule(name).rows[0].stats()["step"] for name in ("sparse", "unused", "ids")]
    del model
    gc.collect()
    for thread in threading.enumerate():  # A thread that was told to end does so when it runs.
        if thread.name == "oneemb-keys":
            thread.join(600)
    return losses, steps, [thread.name for thread in threading.enumerate() if thread.name == "oneemb-keys"]


def test_several_collections_of_a_model_and_their_threads():
    (losses, *rest), (others, *other_rest) = on_ranks(2, several)
    ((together, _, _),) = on_ranks(1, several)
    assert [sum(its) / 2 for its in zip(losses, others, strict=True)] == pytest.approx(together, rel=1e-5)
    assert rest == other_rest == [[4, 0, 4], []]


def forked(group):
    make, _, own = MODELS["bags"]
    model = shard(make(own, device=torch.device("meta")), group, get_default_sharders())
    train(model, group, 1)
    said = said_by_child(lambda: model.module.sparse(batch_of(1)[0]))
    return said, train(model, group, 2)


def test_a_child_of_a_rank_is_told_that_it_is_none():
    for said, losses in on_ranks(2, forked):
        assert "is a forked child of rank" in said
        assert len(losses) == 2


def said_by_child(call):
    """What a child of fork says of the error that a call raises in it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(writing, b"nothing")
        except BaseException as error:
            os.write(writing, str(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        return said.read()
