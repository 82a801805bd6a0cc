"""Every field of TorchRec's configs, and every option of FBGEMM's operator, is followed, refused or without effect.

A field that is followed changes what a module is or gives, one without effect changes nothing and is in the docs, and
one that is refused is named by the error. A field that another version of TorchRec or FBGEMM adds fails the first test.
"""

import copy
import dataclasses
import functools
import inspect
import pathlib

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    BoundsCheckMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules import embedding_configs
from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
    VirtualTableEvictionPolicy,
)
from torchrec.types import DataType

import oneemb
from oneemb.policies import RowPolicy
from oneemb.torchrec import EmbeddingBagCollection, EmbeddingCollection
from oneemb.torchrec.configs import policy_of
from oneemb.torchrec.optimizers import from_fused_params

DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "torchrec.md").read_text()

# ---- configs of tables -----------------------------------------------------------------------------------------------

FOLLOWED = {
    "num_embeddings": 9, "embedding_dim": 8, "name": "u", "data_type": DataType.FP16, "feature_names": ["f"],
    "weight_init_max": 0.9, "weight_init_min": -0.9, "pooling": PoolingType.MEAN, "use_virtual_table": True,
    "init_fn": functools.partial(torch.nn.init.constant_, val=2.0),
}  # fmt: skip
REFUSED = {
    "num_embeddings_post_pruning": 5, "need_pos": True, "enable_embedding_update": True,
    "virtual_table_eviction_policy": CountBasedEvictionPolicy(),
}  # fmt: skip
"""Of the policies some are refused, which is told below."""
NO_EFFECT = {"input_dim": 5, "total_num_buckets": 4, "stash_weights": True}

POLICY = {
    "training_id_eviction_trigger_count": "followed", "eviction_ttl_mins": "followed", "eviction_threshold": "followed",
    "enable_eviction": "followed", "decay_rate": "refused", "training_id_keep_count": "refused",
    "feature_score_mapping": "refused", "feature_score_default_value": "refused",
    "enable_auto_feature_score_collection": "refused",
    "inference_eviction_threshold": "no effect", "inference_eviction_ttl_mins": "no effect",
    "max_inference_id_num_per_rank": "no effect", "inference_eviction_feature_score_threshold": "no effect",
    "meta_header_len": "no effect", "embedding_dim": "no effect", "initialized": "no effect",
}  # fmt: skip
"""Fields of policies; those that are refused are of policies that are."""


def config(kind=EmbeddingBagConfig, **changes):
    return kind(**{"num_embeddings": 12, "embedding_dim": 4, "name": "t", **changes})


def given(kind, **changes):
    """All that a module gives of its tables, and what they hold."""
    torch.manual_seed(1)
    module = (EmbeddingBagCollection if kind is EmbeddingBagConfig else EmbeddingCollection)([config(kind, **changes)])
    kjt = KeyedJaggedTensor.from_lengths_sync(["t", "f", "u"], torch.tensor([1, 2, 8] * 3), torch.tensor([3] * 3))
    found = module(kjt)
    rows = found.to_dict() if kind is EmbeddingBagConfig else {name: its.values() for name, its in found.items()}
    rows |= module.state_dict()
    return {name: (its.dtype, its.shape, its.tolist()) for name, its in rows.items()}


def test_every_field_of_a_config_and_of_a_policy_is_known():
    for kind in (EmbeddingBagConfig, EmbeddingConfig):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields - {*FOLLOWED, *REFUSED, *NO_EFFECT} == set(), kind
    policies = [
        kind for kind in vars(embedding_configs).values()
        if inspect.isclass(kind) and issubclass(kind, VirtualTableEvictionPolicy)
    ]  # fmt: skip
    assert {kind.__name__ for kind in policies} == {kind.__name__ for kind in [VirtualTableEvictionPolicy, *KINDS]}
    assert {field.name for kind in policies for field in dataclasses.fields(kind)} == set(POLICY)


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_a_field_that_is_followed_changes_the_module_and_one_without_effect_does_not(kind):
    fields = {field.name for field in dataclasses.fields(kind)}
    plain = given(kind)
    for name in fields & set(FOLLOWED):
        assert given(kind, **{name: FOLLOWED[name]}) != plain, name
    for name in fields & set(NO_EFFECT):
        assert given(kind, **{name: NO_EFFECT[name]}) == plain, name
        assert f"`{name}`" in DOCS, name


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_refused_is_named(kind, name):
    with pytest.raises(ValueError, match=rf"table 't': .*{name}"):
        given(kind, use_virtual_table=True, **{name: REFUSED[name]})
    assert f"`{name}`" in DOCS


# ---- policies of virtual tables --------------------------------------------------------------------------------------

KINDS = [
    CountBasedEvictionPolicy, CountTimestampMixedEvictionPolicy, FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy, NoEvictionPolicy, TimestampBasedEvictionPolicy,
]  # fmt: skip

OF_POLICIES = [
    (NoEvictionPolicy(), None),
    (TimestampBasedEvictionPolicy(), RowPolicy(expire_after_seconds=24 * 60 * 60)),
    (TimestampBasedEvictionPolicy(eviction_ttl_mins=0), None),
    (
        TimestampBasedEvictionPolicy(eviction_ttl_mins=5, training_id_eviction_trigger_count=7),
        RowPolicy(expire_after_seconds=300, sweep_above=7),
    ),
    (FeatureL2NormBasedEvictionPolicy(), None),
    (
        FeatureL2NormBasedEvictionPolicy(eviction_threshold=0.5, training_id_eviction_trigger_count=7),
        RowPolicy(expire_below_norm=0.5, sweep_weights=True, sweep_above=7),
    ),
    (FeatureScoreBasedEvictionPolicy(eviction_ttl_mins=5), RowPolicy(expire_after_seconds=300)),
    (FeatureScoreBasedEvictionPolicy(eviction_ttl_mins=5, enable_eviction=False), None),
    (CountBasedEvictionPolicy(eviction_threshold=0), None),
    (CountTimestampMixedEvictionPolicy(eviction_threshold=0, eviction_ttl_mins=0), None),
]


@pytest.mark.parametrize("policy, expected", OF_POLICIES)
def test_a_policy_of_a_virtual_table_says_which_rows_leave(policy, expected):
    assert policy_of(config(use_virtual_table=True, virtual_table_eviction_policy=policy)) == expected
    assert policy_of(config(virtual_table_eviction_policy=policy)) is None, "TorchRec reads it of virtual tables alone"
    for field in dataclasses.fields(policy):
        if POLICY[field.name] == "no effect":
            other = dataclasses.replace(policy, **{field.name: 3})
            assert policy_of(config(use_virtual_table=True, virtual_table_eviction_policy=other)) == expected
            assert f"`{field.name}`" in DOCS


@pytest.mark.parametrize(
    "policy",
    [
        VirtualTableEvictionPolicy(), CountBasedEvictionPolicy(), CountTimestampMixedEvictionPolicy(),
        CountTimestampMixedEvictionPolicy(eviction_threshold=0), CountTimestampMixedEvictionPolicy(eviction_ttl_mins=0),
        FeatureScoreBasedEvictionPolicy(),
    ],
)  # fmt: skip
def test_policies_by_which_rows_cannot_leave_are_refused(policy):
    with pytest.raises(ValueError, match=f"virtual_table_eviction_policy must be .*got {type(policy).__name__}"):
        EmbeddingBagCollection([config(use_virtual_table=True, virtual_table_eviction_policy=policy)])


def test_rows_of_a_small_norm_leave_a_virtual_table_of_any_size_and_its_neighbours_stay():
    policy = FeatureL2NormBasedEvictionPolicy(eviction_threshold=1.0, training_id_eviction_trigger_count=20)
    virtual = {"use_virtual_table": True, "num_embeddings": 2**50}
    module = EmbeddingBagCollection([
        config(virtual_table_eviction_policy=policy, **virtual), config(**{**virtual, "name": "u"}), config(name="v"),
    ])  # fmt: skip
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    rows = {group.name: group for group in module.rows}
    assert [group.stats()["rows"] for group in module.rows] == [0, 0, 12]
    most = 0
    for step in range(400):
        ids = 2**49 + torch.arange(30) % (10 if step < 100 or step % 2 else 30)
        kjt = KeyedJaggedTensor.from_lengths_sync(["t", "u", "v"], ids.repeat(3), torch.tensor([30, 30, 30]))
        module(kjt).values().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        most = max(most, rows["t"].stats()["rows"])
        if step == 99:
            assert rows["t"].stats()["rows"] == 10, "none leaves while there are so few"
    assert most == 30 and rows["t"].stats()["policy"]["left"]
    assert rows["u"].stats()["rows"] == 30 and rows["v"].stats()["rows"] >= 12


def test_a_virtual_table_in_memory_takes_an_optimizer_and_a_copy_and_is_not_sharded_with_rows():
    module = EmbeddingBagCollection([config(num_embeddings=2**50, use_virtual_table=True)])
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    kjt = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([2**49, 3]), torch.tensor([1, 1]))
    before = module(kjt).values().detach().clone()
    module(kjt).values().sum().backward()
    assert torch.equal(module(kjt).values(), before - 1.0) and module.rows[0].stats()["rows"] == 2
    assert torch.equal(copy.deepcopy(module)(kjt).values(), before - 1.0)
    with pytest.raises(RuntimeError, match="tables t must have no rows before they are sharded"):
        module.rows_to_shard()
    module.reset_parameters()
    assert module.rows[0].stats()["rows"] == 0


def test_an_init_fn_that_fills_a_whole_table_is_refused_where_rows_begin_as_they_are_met():
    with pytest.raises(ValueError, match="table 't': init_fn must be one of torch.nn.init's"):
        EmbeddingBagCollection([config(use_virtual_table=True, init_fn=lambda weights: weights)])


# ---- first values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_type, bound", [
    (DataType.FP32, 4e9**-0.5), (DataType.FP16, 0.001), (DataType.BF16, 0.001),
])  # fmt: skip
@pytest.mark.parametrize("size", [2**40, 2**50])
def test_new_rows_of_a_table_without_end_are_not_zeros(tmp_path, data_type, bound, size):
    stored = oneemb.make_device_mem_store_options(str(tmp_path))
    module = EmbeddingBagCollection([config(num_embeddings=size, data_type=data_type)], store_options=stored)
    ids = torch.arange(1000)
    found = module(KeyedJaggedTensor.from_lengths_sync(["t"], ids, torch.ones_like(ids))).values().double()
    assert 0.95 * bound < found.abs().max() <= bound * 1.01 and found.std() > 0.5 * bound
    assert len(found.unique()) > 100


def test_only_bounds_that_nobody_gave_are_those_of_a_table_without_end(tmp_path):
    huge = {"num_embeddings": 2**40}
    own = functools.partial(torch.nn.init.uniform_, a=-1e-6, b=1e-6)
    tables = [
        config(**huge, name="a", weight_init_max=1.0), config(**huge, name="b", init_fn=own),
        config(name="c", num_embeddings=4_000_000_000),
    ]  # fmt: skip
    stored = oneemb.make_device_mem_store_options(str(tmp_path))
    module = EmbeddingBagCollection(tables, store_options=stored)
    ids = torch.arange(3000)
    found = module(KeyedJaggedTensor.from_lengths_sync(["a", "b", "c"], ids, torch.ones_like(ids))).to_dict()
    assert -(4e9**-0.5) <= found["a"].min() and 0.9 < found["a"].max() <= 1.0
    assert 9e-7 < found["b"].abs().max() <= 1e-6
    assert found["c"].abs().max() <= 4e9**-0.5


# ---- FBGEMM's options ------------------------------------------------------------------------------------------------

ADAGRAD, ADAM = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM
FUSED_FOLLOWED = {
    "optimizer": {"optimizer": ADAM}, "learning_rate": {"learning_rate": 0.5}, "eps": {"optimizer": ADAM, "eps": 0.5},
    "weight_decay": {"optimizer": ADAM, "weight_decay": 0.5}, "beta1": {"optimizer": ADAM, "beta1": 0.5},
    "beta2": {"optimizer": ADAM, "beta2": 0.5}, "momentum": {"optimizer": EmbOptimType.LARS_SGD, "momentum": 0.5},
    "eta": {"optimizer": EmbOptimType.LARS_SGD, "eta": 0.5},
}  # fmt: skip
FUSED_REFUSED = {
    "gradient_clipping": True, "max_norm": 1.0, "global_weight_decay": object(),
    "counter_based_regularization": object(), "cowclip_regularization": object(), "ensemble_mode": object(),
    "emainplace_mode": object(), "extra_optimizer_config": object(), "optimizer_state_dtypes": {"momentum1": None},
    "enable_raw_embedding_streaming": True, "embedding_specs": [], "feature_table_map": [0], "pooling_mode": 1,
    "device": "cpu", "table_names": ["t"], "tbe_input_multiplexer_config": object(), "embedding_shard_info": [],
    "res_params": object(), "is_qr_tbe": True, "preallocated_host_buffers": object(),
}  # fmt: skip
FUSED_NO_EFFECT = {
    "max_gradient": 0.5, "bounds_check_mode": BoundsCheckMode.FATAL, "cache_algorithm": object(),
    "cache_load_factor": 0.5, "cache_precision": SparseType.FP16, "cache_reserved_memory": 1.0, "cache_sets": 5,
    "gather_uvm_cache_stats": True, "embedding_table_index_type": torch.int32,
    "embedding_table_offset_type": torch.int32, "enforce_hbm": True, "multipass_prefetch_config": object(),
    "output_dtype": SparseType.FP16, "prefetch_pipeline": True, "record_cache_metrics": object(),
    "stats_reporter_config": object(), "stochastic_rounding": True, "use_experimental_tbe": True,
    "uvm_host_mapped": True, "uvm_non_rowwise_momentum": True, "weights_precision": SparseType.FP16,
}  # fmt: skip


def stepper(fused_params):
    made = from_fused_params(fused_params)([torch.nn.Parameter(torch.zeros(1))])
    return type(made), made.defaults


def test_every_option_of_fbgemms_operator_is_known():
    known = {*FUSED_FOLLOWED, *FUSED_REFUSED, *FUSED_NO_EFFECT, "weight_decay_mode", "self"}
    assert set(inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters) - known == set()


def test_an_option_of_fbgemm_is_followed_refused_or_without_effect():
    for name, options in FUSED_FOLLOWED.items():
        assert stepper(options) != stepper({its: value for its, value in options.items() if its != name}), name
    for name, value in FUSED_NO_EFFECT.items():
        assert stepper({name: value}) == stepper({}), name
        assert f"`{name}`" in DOCS, name
    for name, value in FUSED_REFUSED.items():
        with pytest.raises(ValueError, match=name):
            from_fused_params({name: value})
    for mode in WeightDecayMode:
        asked = {"optimizer": ADAGRAD, "weight_decay": 0.5, "weight_decay_mode": mode}
        if mode in (WeightDecayMode.NONE, WeightDecayMode.L2):
            assert stepper(asked)[1]["weight_decay"] == 0.5
        else:
            with pytest.raises(ValueError, match=f"weight_decay_mode {mode.name} is not supported"):
                from_fused_params(asked)
