"""Every option of every optimizer does to rows what it does to a table of torch, by whatever door it comes in.

A door is a way to say what steps rows: `optimizer.step()`, `apply_optimizer_in_backward`, a sharder after that, the
`fused_params` of a sharder of oneemb.torchrec or of oneemb.dynamicemb, the arguments of BatchedDynamicEmbeddingTables.
The table that rows are compared with is a parameter that the class steps by itself.
"""

import functools
import inspect

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv

import oneemb.optim
from oneemb.dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode, DynamicEmbTableOptions
from oneemb.dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from oneemb.torchrec import EmbeddingBagCollection, get_default_sharders
from tests.dynamicemb.test_sharded import shard as shard_dynamic
from tests.support.pairwise import diagonal
from tests.torchrec.test_sharding import on_ranks

ROWS, DIM, STEPS, BEGIN = 12, 4, 7, 0.5

CLASSES = [
    torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.RMSprop,
    oneemb.optim.Ftrl, oneemb.optim.Lamb, oneemb.optim.Lars, oneemb.optim.PartialRowWiseAdam,
    oneemb.optim.RowWiseAdagrad, oneemb.optim.SmartDecayAdam,
]  # fmt: skip

OTHER = {
    "lr": 0.05, "momentum": 0.7, "dampening": 0.3, "weight_decay": 0.1, "nesterov": True, "maximize": True,
    "lr_decay": 0.5, "initial_accumulator_value": 0.5, "eps": 0.05, "betas": (0.6, 0.8), "amsgrad": True,
    "decoupled_weight_decay": True, "momentum_decay": 0.3, "rho": 0.5, "alpha": 0.5, "centered": True,
    "lr_power": -0.3, "lambda1": 0.05, "lambda2": 0.5, "beta": 0.5, "eta": 0.1,
}  # fmt: skip
"""Values that no class has by itself."""

EXCLUDE = ("nesterov", "dampening")
SAME_STEP = {"foreach", "fused", "capturable"}
REFUSED = {"differentiable"}

FUSED = {
    EmbOptimType.EXACT_SGD: torch.optim.SGD, EmbOptimType.EXACT_ADAGRAD: torch.optim.Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: oneemb.optim.RowWiseAdagrad, EmbOptimType.ADAM: torch.optim.AdamW,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: oneemb.optim.PartialRowWiseAdam, EmbOptimType.LAMB: oneemb.optim.Lamb,
    EmbOptimType.LARS_SGD: oneemb.optim.Lars,
}  # fmt: skip
"""What FBGEMM's names mean; its own defaults are written out below."""

FUSED_OPTIONS = {
    "learning_rate": ("lr", 0.05, 0.05), "eps": ("eps", 0.05, 0.05), "beta1": ("betas", 0.6, (0.6, 0.8)),
    "beta2": ("betas", 0.8, (0.6, 0.8)), "weight_decay": ("weight_decay", 0.1, 0.1),
    "momentum": ("momentum", 0.7, 0.7), "eta": ("eta", 0.1, 0.1),
    "initial_accumulator_value": ("initial_accumulator_value", 0.5, 0.5),
}  # fmt: skip
"""FBGEMM's options: the option of the class, FBGEMM's value, the class's."""

NOT_OF_FUSED = {torch.optim.SGD: {"weight_decay", "momentum"}, torch.optim.Adagrad: {"weight_decay"}}
"""Options of torch's classes that FBGEMM's do not have."""


def options_of(cls):
    return [name for name in inspect.signature(cls).parameters if name != "params"]


def cases_of(cls):
    """Options of a class with other values than its own: all at once, but of those that exclude each other."""
    options = {name: OTHER[name] for name in options_of(cls) if name not in SAME_STEP | REFUSED}
    cases = [{name: value for name, value in options.items() if name != other} for other in EXCLUDE]
    return cases if set(EXCLUDE) <= set(options) else [options]


def fused_cases():
    """(fused_params, the class they mean, its options)"""
    for kind, cls in FUSED.items():
        own = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0}
        own = {name: value for name, value in own.items() if name in options_of(cls)}
        yield {"optimizer": kind}, cls, own
        taken = set(options_of(cls)) - NOT_OF_FUSED.get(cls, set())
        its = {name: value for name, value in FUSED_OPTIONS.items() if value[0] in taken}
        options = {option: value for option, _, value in its.values()}
        yield {"optimizer": kind, **{name: given for name, (_, given, _) in its.items()}}, cls, own | options


def loss_of(values_ND, step):
    coefficients = torch.linspace(-1, 2, ROWS * DIM).view(ROWS, DIM)
    return (values_ND * coefficients).sum() * [0.1, 3, 1, 0.1, 2, 1, 2][step] + values_ND.square().sum()


def expected_rows(cls, options):
    table = torch.nn.Embedding(ROWS, DIM, sparse=cls is torch.optim.SparseAdam)
    torch.nn.init.constant_(table.weight, BEGIN)
    optimizer = cls(table.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(table(torch.arange(ROWS)), step).backward()
        optimizer.step()
    return table.weight.detach()


def collection(module=EmbeddingBagCollection):
    begins = functools.partial(torch.nn.init.constant_, val=BEGIN)
    return module([EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", init_fn=begins)])


def features():
    return KeyedJaggedTensor.from_lengths_sync(["t"], torch.arange(ROWS), torch.ones(ROWS, dtype=torch.int64))


def trained_rows(lookup, optimizer=None):
    for step in range(STEPS):
        if optimizer is not None:
            optimizer.zero_grad()
        loss_of(lookup(), step).backward()
        if optimizer is not None:
            optimizer.step()
    return lookup().detach()


def by_step(cls, options):
    model = collection()
    return trained_rows(lambda: model(features()).values(), cls(model.parameters(), **options))


def in_backward(cls, options):
    model = collection()
    apply_optimizer_in_backward(cls, model.parameters(), options)
    return trained_rows(lambda: model(features()).values())


def sharded(group, model, sharders):
    planner = EmbeddingShardingPlanner(topology=Topology(group.size(), "cpu"))
    plan = planner.collective_plan(model, sharders, group)
    env = ShardingEnv.from_process_group(group)
    parallel = DistributedModelParallel(model, env=env, plan=plan, sharders=sharders, device=torch.device("cpu"))
    return trained_rows(lambda: parallel(features()).values())


def sharded_after_in_backward(group, cls, options):
    model = collection(torchrec.EmbeddingBagCollection)
    apply_optimizer_in_backward(cls, model.parameters(), options)
    return sharded(group, model, get_default_sharders())


def by_fused_params(group, fused_params):
    return sharded(group, collection(torchrec.EmbeddingBagCollection), get_default_sharders(fused_params))


def dynamic_options():
    begins = DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT, value=BEGIN)
    return DynamicEmbTableOptions(dim=DIM, embedding_dtype=torch.float32, initializer_args=begins)


def by_fused_params_of_dynamicemb(group, fused_params):
    sharder = oneemb.dynamicemb.shard.DynamicEmbeddingBagCollectionSharder(fused_params, num_threads=1)
    model = shard_dynamic(collection(torchrec.EmbeddingBagCollection), {"t": dynamic_options()}, group, sharder)
    return trained_rows(lambda: model(features()).values())


def by_arguments_of_dynamicemb(group, fused_params):
    tables = BatchedDynamicEmbeddingTablesV2([dynamic_options()], **fused_params)
    return trained_rows(lambda: tables(torch.arange(ROWS), torch.arange(ROWS + 1)))


def close(found, expected, case):
    # What Adam divides by may be small: there a rounding of the gradient is a larger part of the row.
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize(("cls", "door"), diagonal(list(CLASSES), [by_step, in_backward]))
def test_an_option_does_to_rows_what_it_does_to_a_table(cls, door):
    for options in cases_of(cls):
        expected = expected_rows(cls, options)
        close(door(cls, options), expected, options)


@pytest.mark.parametrize("cls", CLASSES)
def test_each_of_these_options_has_an_effect(cls):
    for options in cases_of(cls):
        expected = expected_rows(cls, options)
        for left_out in options:
            others = {name: value for name, value in options.items() if name != left_out}
            if left_out == "momentum" and "nesterov" in others:
                del others["nesterov"]  # which torch refuses without momentum
            assert not torch.equal(expected, expected_rows(cls, others)), left_out


@pytest.mark.parametrize(("cls", "door"), diagonal(list(CLASSES), [by_step, in_backward]))
def test_an_option_that_changes_no_step_is_taken_and_one_that_rows_cannot_follow_is_refused(cls, door):
    for name in sorted((SAME_STEP - {"capturable"}) & set(options_of(cls))):
        close(door(cls, {name: True}), expected_rows(cls, {}), name)
    for name in sorted(REFUSED & set(options_of(cls))):
        with pytest.raises(ValueError, match=rf"{name}=True\) is not supported on embedding rows"):
            door(cls, {name: True})


def of_all_doors(group):
    torch.set_num_threads(1)
    found = [
        (cls.__name__, options, sharded_after_in_backward(group, cls, options), expected_rows(cls, options))
        for cls in CLASSES
        for options in cases_of(cls)
    ]
    for fused_params, cls, options in fused_cases():
        expected = expected_rows(cls, options)
        found += [
            (door.__name__, str(fused_params), door(group, fused_params), expected)
            for door in (by_fused_params, by_fused_params_of_dynamicemb, by_arguments_of_dynamicemb)
        ]
    return [(*case, ours.numpy(), theirs.numpy()) for *case, ours, theirs in found]


def test_an_option_does_the_same_where_tables_are_sharded():
    (found,) = on_ranks(1, of_all_doors)
    assert len(found) == len(CLASSES) + 1 + 3 * 2 * len(FUSED)
    for *case, ours, theirs in found:
        close(torch.from_numpy(ours), torch.from_numpy(theirs), case)


@pytest.mark.parametrize("cls, options", [
    (torch.optim.NAdam, [{"betas": (0.6, 0.8)}, {"betas": (0.7, 0.9)}]),
    (torch.optim.NAdam, [{"momentum_decay": 0.3}, {"momentum_decay": 0.1}]),
    (torch.optim.RMSprop, [{"centered": True}, {"centered": False}]),
    (torch.optim.SGD, [{"momentum": 0.9}, {"momentum": 0.0}]),
    (torch.optim.Adam, [{"amsgrad": True}, {"amsgrad": False}]),
    (torch.optim.Adagrad, [{"initial_accumulator_value": 0.1}, {"initial_accumulator_value": 0.5}]),
    (torch.optim.Adagrad, [{"maximize": True}, {"lr_decay": 0.5}]),
])  # fmt: skip
def test_tables_that_one_class_steps_have_options_of_their_own(cls, options):
    begins = functools.partial(torch.nn.init.constant_, val=BEGIN)
    names = ["t", "u"]
    model = EmbeddingBagCollection([
        EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=name, init_fn=begins) for name in names
    ])  # fmt: skip
    for name, its in zip(names, options, strict=True):
        apply_optimizer_in_backward(cls, model.embedding_bags[name].parameters(), {"lr": 0.05, **its})
    both = KeyedJaggedTensor.from_lengths_sync(
        names, torch.arange(ROWS).repeat(2), torch.ones(2 * ROWS, dtype=torch.int64)
    )
    for step in range(STEPS):
        found = model(both)
        (loss_of(found["t"], step) + loss_of(found["u"], step)).backward()
    for name, its in zip(names, options, strict=True):
        close(model(both)[name].detach(), expected_rows(cls, {"lr": 0.05, **its}), (name, its))
