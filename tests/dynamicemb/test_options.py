"""Every option of dynamicemb is followed, refused or without effect; the docs say which are the last.

What a table is made of shows the first: `made` tells tables apart that keep, begin, read or step rows differently.
"""

import dataclasses
import inspect
import pathlib

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import BoundsCheckMode, WeightDecayMode

import oneemb.dynamicemb
from oneemb.dynamicemb import (
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs as Begin,
    DynamicEmbInitializerMode as Mode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy as Score,
    DynamicEmbTableOptions as Options,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from oneemb.dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2 as Tables
from oneemb.dynamicemb.dynamicemb_config import DynamicEmbEvictStrategy
from tests.dynamicemb.test_sharded import collection, constant, shard, sharder_of
from tests.torchrec.test_sharding import on_ranks

DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "dynamicemb.md").read_text()

PLAIN = {
    "dim": 4, "embedding_dtype": torch.float32, "max_capacity": 64, "admit_strategy": FrequencyAdmissionStrategy(2),
    "initializer_args": Begin(Mode.CONSTANT, value=1.0), "eval_initializer_args": Begin(Mode.CONSTANT, value=2.0),
}  # fmt: skip

FOLLOWED = {
    "embedding_dtype": torch.float16, "dim": 8, "max_capacity": 16, "training": False,
    "initializer_args": Begin(Mode.CONSTANT, value=3.0), "eval_initializer_args": Begin(Mode.CONSTANT, value=5.0),
    "score_strategy": Score.LFU, "safe_check_mode": DynamicEmbCheckMode.ERROR, "external_storage": "a store",
    "admit_strategy": FrequencyAdmissionStrategy(3), "admission_counter": KVCounter(100), "dist_type": "continuous",
}  # fmt: skip
ON_GPUS = {"caching": True, "local_hbm_for_values": 1 << 20, "global_hbm_for_values": 1 << 20}
"""Without effect where lookups run on a CPU, as the docs say."""
NO_EFFECT = {
    "evict_strategy": DynamicEmbEvictStrategy.LFU, "device_id": 0, "init_capacity": 16, "max_load_factor": 0.9,
    "bucket_capacity": 256, "index_type": torch.int32, "score_type": torch.int64, "block_size": 64,
    "io_block_size": 512, "io_by_cpu": True, "use_constant_memory": True, "reserved_key_start_bit": 1,
    "num_of_buckets_per_alloc": 2,
}  # fmt: skip

ARGUMENTS_FOLLOWED = {
    "table_names": ["u"], "feature_table_map": [0, 0], "pooling_mode": DynamicEmbPoolingMode.MEAN,
    "output_dtype": torch.float16, "optimizer": EmbOptimType.ADAM, "learning_rate": 0.5,
}  # fmt: skip
ARGUMENTS_OF_OPTIMIZERS = {
    "eps": (EmbOptimType.ADAM, 0.5), "beta1": (EmbOptimType.ADAM, 0.5), "beta2": (EmbOptimType.ADAM, 0.5),
    "weight_decay": (EmbOptimType.ADAM, 0.5), "momentum": (EmbOptimType.LARS_SGD, 0.5),
    "eta": (EmbOptimType.LARS_SGD, 0.5), "initial_accumulator_value": (EmbOptimType.EXACT_ADAGRAD, 0.5),
}  # fmt: skip
ARGUMENTS_REFUSED = {
    "gradient_clipping": True, "max_norm": 1.0, "counter_based_regularization": object(),
    "cowclip_regularization": object(), "weight_decay_mode": WeightDecayMode.COUNTER,
}  # fmt: skip
ARGUMENTS_NO_EFFECT = {
    "use_index_dedup": True, "prefetch_pipeline": True, "enforce_hbm": True, "max_gradient": 0.5,
    "bounds_check_mode": BoundsCheckMode.FATAL, "stochastic_rounding": False, "device": torch.device("cpu"),
}  # fmt: skip

INITIALIZERS = {
    "mean": Mode.NORMAL, "std_dev": Mode.NORMAL, "lower": Mode.UNIFORM, "upper": Mode.UNIFORM, "value": Mode.CONSTANT,
}  # fmt: skip
"""The mode that reads each option."""


def made(arguments=(), **changes):
    """What there is to tell of a table of these options."""
    tables = Tables([Options(**PLAIN | changes)], **dict(arguments))
    rows = tables.rows
    stepper = rows.optimizer
    ids, offsets = torch.tensor([1, 1, 2]), torch.tensor([0, 2, 3])
    found = tables.eval()(ids, offsets)
    return (
        tables.table_names, tables.feature_table_map, rows.embedding_dim, rows.dtype, rows.policies,
        type(rows.store_options), rows.description()["tables"], type(stepper), stepper and stepper.defaults,
        found.dtype, found.tolist(), tables.dynamic.tables[0].options.dist_type,
    )  # fmt: skip


def test_every_option_is_known():
    assert {field.name for field in dataclasses.fields(Options)} == {*FOLLOWED, *ON_GPUS, *NO_EFFECT}
    arguments = {
        "table_options", "tables", *ARGUMENTS_FOLLOWED, *ARGUMENTS_OF_OPTIMIZERS, *ARGUMENTS_REFUSED,
        *ARGUMENTS_NO_EFFECT,
    }  # fmt: skip
    assert set(inspect.signature(Tables).parameters) == arguments
    assert {field.name for field in dataclasses.fields(Begin)} == {"mode", *INITIALIZERS}


def test_an_option_that_is_followed_changes_the_table_and_one_without_effect_does_not(tmp_path):
    store = oneemb.make_cached_ssd_store_options(1, str(tmp_path))
    plain = made()
    for name, value in FOLLOWED.items():
        assert made(**{name: store if name == "external_storage" else value}) != plain, name
    said = inspect.getdoc(Options)
    for name, value in (NO_EFFECT | ON_GPUS).items():
        assert made(**{name: value}) == plain, name
        assert name in said, name
    assert all(f"`{name}`" in DOCS for name in ("caching", "global_hbm_for_values", "evict_strategy", "device_id"))


def test_an_argument_of_tables_is_followed_refused_or_without_effect():
    plain = made()
    for name, value in ARGUMENTS_FOLLOWED.items():
        if name == "feature_table_map":
            tables = Tables([Options(**PLAIN)], feature_table_map=value)
            assert tables(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).shape == (1, 8)
        else:
            assert made({name: value}) != plain, name
    for name, (optimizer, value) in ARGUMENTS_OF_OPTIMIZERS.items():
        assert made({"optimizer": optimizer, name: value}) != made({"optimizer": optimizer}), name
    for name, value in ARGUMENTS_NO_EFFECT.items():
        assert made({name: value}) == plain, name
    for name, value in ARGUMENTS_REFUSED.items():
        with pytest.raises(ValueError, match=name):
            made({name: value})


def test_an_option_of_an_initializer_is_followed_by_the_mode_that_reads_it():
    for name, mode in INITIALIZERS.items():
        assert made(initializer_args=Begin(mode, **{name: 0.75})) != made(initializer_args=Begin(mode)), name
    of_modes = [made(initializer_args=Begin(mode)) for mode in Mode]
    assert all(one not in of_modes[:n] for n, one in enumerate(of_modes))


def test_what_ids_without_a_row_read_as_is_that_of_the_strategy():
    with_own = FrequencyAdmissionStrategy(2, Begin(Mode.CONSTANT, value=9.0))
    assert made(admit_strategy=with_own) != made()


def of_another_dtype(group):
    options = {"one": dataclasses.replace(constant(0.5), embedding_dtype=torch.float16)}
    try:
        shard(collection("bags"), options, group, sharder_of("bags"))
    except ValueError as error:
        return str(error)


def test_a_dtype_that_is_not_the_configs_is_refused():
    (said,) = on_ranks(1, of_another_dtype)
    assert "embedding_dtype of table 'one' must be the data_type of its config" in said
