"""Quantized collections against TorchRec's, of the same weights on the same batches."""

import copy
import subprocess
import sys
import textwrap
from unittest import mock

import numpy as np
import pytest
import torch

torchrec = pytest.importorskip("torchrec")

import torchrec.inference.modules as theirs  # noqa: E402
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType  # noqa: E402
from torchrec.distributed.global_settings import set_propogate_device  # noqa: E402
from torchrec.distributed.types import ShardingEnv  # noqa: E402
from torchrec.fx import Tracer  # noqa: E402
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection  # noqa: E402
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection  # noqa: E402

import oneemb  # noqa: E402
import oneemb.torchrec as ours  # noqa: E402
from oneemb.kernels.owner import owner_of  # noqa: E402
from oneemb.serving import frozen_rows  # noqa: E402
from oneemb.torchrec.quant_index import IndexedRows  # noqa: E402
from oneemb.torchrec.quant_shards import owner_of_keys  # noqa: E402
from tests.support.tracing_threads import KINDS, another_thread  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*TorchScript.*"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*"),
]

ROWS = 40
DTYPES = {
    "FP32": torch.float32, "FP16": torch.float16, "INT8": torch.int8, "INT4": torch.quint4x2, "INT2": torch.quint2x4,
}  # fmt: skip


def bags(**more):
    return [
        EmbeddingBagConfig(ROWS, 8, "t", feature_names=["f", "g"], **more),
        EmbeddingBagConfig(ROWS, 8, "u", feature_names=["g"], pooling=more.get("pooling", PoolingType.MEAN)),
        EmbeddingBagConfig(ROWS, 16, "v", feature_names=["h"], **more),
    ]


def sequences(**more):
    return [
        EmbeddingConfig(ROWS, 8, "t", feature_names=["f", "g"], **more),
        EmbeddingConfig(ROWS, 8, "u", feature_names=["g"], **more),
    ]


def batch(seed, keys="xhgf", most=ROWS, samples=6, weighted=False, dtype=torch.int64):
    """Features in another order than the tables have them, one that no table has, empty bags."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * samples,), generator=generator)
    ids = torch.randint(0, most, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(list(keys), ids.to(dtype), lengths, weights)


class Model(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(5)
        self.sparse = sparse
        self.dense = torch.nn.Linear(40, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.dense(self.sparse(features).values())


class OfTensors(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.sparse(KeyedJaggedTensor(["x", "h", "g", "f"], values, lengths=lengths)).values()


class Alone(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse

    def forward(self, features: KeyedJaggedTensor):
        return self.sparse(features)


def pair(kind=None, configs=bags, **arguments):
    """Ours, and TorchRec's of the same weights."""
    torch.manual_seed(1)
    kind = kind or "EmbeddingBagCollection"
    float_ours = getattr(ours, kind)(configs(), **arguments).eval()
    float_theirs = getattr(torchrec, kind)(configs(), **arguments)
    float_theirs.load_state_dict(float_ours.state_dict())
    return float_ours, float_theirs


def quantized(collection, dtype="INT8", **arguments):
    return ours.quantize_embeddings(Alone(collection), DTYPES[dtype], False, **arguments).sparse


def their_quantized(collection, dtype="INT8", **arguments):
    sequences = {
        "additional_qconfig_spec_keys": [torchrec.EmbeddingCollection],
        "additional_mapping": {torchrec.EmbeddingCollection: theirs.QuantEmbeddingCollection},
    }
    return theirs.quantize_embeddings(Alone(collection), DTYPES[dtype], False, **sequences, **arguments).sparse


def with_other_ids(seed=0, **more):
    """A collection whose tables have rows of ids from all over int64, some trained."""
    collection = ours.EmbeddingBagCollection(bags(**more), seed=seed)
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    ids = torch.tensor([-1, 2**62, -(2**63), 2**63 - 1, 0, 7, 1 << 40, -5, 3])
    kjt = KeyedJaggedTensor.from_lengths_sync(list("fgh"), ids, torch.tensor([2, 1, 3, 0, 1, 2]))
    collection(kjt).values().square().sum().backward()
    optimizer.step()
    return collection.eval(), kjt


def fused(weight):
    """FBGEMM's row, by NumPy: D weights of 8 bits, then scale and low as float16."""
    low = weight.min(1).astype(np.float16)
    span = weight.max(1) - low.astype(np.float32)
    scale = np.where(span == 0, 1, span / np.float32(255)).astype(np.float16)
    steps = (weight - low.astype(np.float32)[:, None]) * (np.float32(1) / scale.astype(np.float32))[:, None]
    return np.rint(steps).clip(0, 255), scale, low


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_bags_are_those_of_torchrecs_quantized_module(dtype):
    float_ours, float_theirs = pair()
    found, expected = quantized(float_ours, dtype), their_quantized(float_theirs, dtype)
    for seed in range(3):
        kjt = batch(seed)
        its, other = found(kjt), expected(kjt)
        assert its.keys() == float_ours(kjt).keys() and set(its.keys()) == set(other.keys())
        for key in its.keys():
            if key != "g@u":
                assert torch.equal(its[key], other[key]), key
            torch.testing.assert_close(its[key], other[key], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", ["INT8", "INT4", "INT2"])
def test_rows_have_the_bytes_of_torchrecs(dtype):
    float_ours, float_theirs = pair()
    found, expected = quantized(float_ours, dtype), their_quantized(float_theirs, dtype)
    for name, its in found.embedding_bags.items():
        assert torch.equal(its.ids, torch.arange(ROWS))
        # FBGEMM's kernels have scale and low first, and pad rows.
        row_SB = torch.cat([its.weight[:, -4:], its.weight[:, :-4]], 1)
        their_SB = expected.embedding_bags[name].weight.detach()
        their_SB = getattr(their_SB, "elem", their_SB)
        assert torch.equal(row_SB, their_SB[:, : row_SB.shape[1]])


def test_rows_of_8_bits_are_those_of_the_definition():
    float_ours, _ = pair()
    weights = float_ours.state_dict()["embedding_bags.t.weight"].numpy()
    row_SB = quantized(float_ours).embedding_bags["t"].weight.numpy()
    steps, scale, low = fused(weights)
    np.testing.assert_array_equal(row_SB[:, -4:].copy().view(np.float16), np.stack([scale, low], 1))
    assert np.abs(row_SB[:, :-4].astype(int) - steps).max() <= 1


@pytest.mark.parametrize("dtype, parts", [("INT8", 510), ("INT4", 30), ("INT2", 6)])
def test_weights_are_within_the_stated_bound(dtype, parts):
    collection, kjt = with_other_ids()
    trained, found = collection(kjt), quantized(collection, dtype)(kjt)
    ones = KeyedJaggedTensor(kjt.keys(), kjt.values(), offsets=kjt.offsets())
    assert torch.equal(collection(ones).values(), trained.values())
    for g, group in enumerate(quantized(collection, dtype).groups):
        table_N = torch.zeros(9, dtype=torch.int64)
        ids = kjt.values()
        exact, read = collection.rows[g].read(ids, table_N), group.rows(table_N, ids)
        low, high = exact.min(1, keepdim=True).values, exact.max(1, keepdim=True).values
        bound = (high - low) / parts + 2**-10 * (low.abs() + high - low) + 2**-20
        assert ((read - exact).abs() <= bound).all()
    assert found.values().isfinite().all()


def test_rows_as_trained_give_the_sums_of_eval_mode():
    collection, _ = with_other_ids()
    kjt = batch(4, most=2 * ROWS)
    expected, found = collection(kjt), quantized(collection, "FP32")(kjt)
    for key in expected.keys():
        if key != "g@u":
            assert torch.equal(found[key], expected[key])
        torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("how", ["weighted", "int32", "from offsets", "empty", "no samples"])
def test_batches_of_every_kind(how):
    float_ours, float_theirs = pair(configs=lambda: bags(pooling=PoolingType.SUM), is_weighted=how == "weighted")
    found, expected = quantized(float_ours), their_quantized(float_theirs)
    kjt = batch(1, weighted=how == "weighted", dtype=torch.int32 if how == "int32" else torch.int64)
    if how == "from offsets":
        kjt = KeyedJaggedTensor(kjt.keys(), kjt.values(), offsets=kjt.offsets())
    if how == "empty":
        kjt = KeyedJaggedTensor(kjt.keys(), kjt.values()[:0], lengths=torch.zeros(24, dtype=torch.int64))
    if how == "no samples":
        kjt = KeyedJaggedTensor(kjt.keys(), kjt.values()[:0], lengths=torch.zeros(0, dtype=torch.int64))
        assert found(kjt).values().shape == (0, 40)
        return
    for key in found(kjt).keys():
        torch.testing.assert_close(found(kjt)[key], expected(kjt)[key], rtol=1e-6, atol=1e-7)


def test_variable_batches_give_what_the_float_module_gives():
    collection, _ = with_other_ids()
    kjt = KeyedJaggedTensor(
        ["f", "g", "h"], torch.tensor([1, 2, 3, 4, 5, 99]), lengths=torch.tensor([2, 0, 1, 2, 1]),
        stride_per_key_per_rank=[[2], [1], [2]],
        inverse_indices=(["h", "f", "g"], torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0]])),
    )  # fmt: skip
    expected, found = collection(kjt), quantized(collection, "FP32")(kjt)
    assert found.values().shape == (3, 40)
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", ["FP32", "INT8"])
@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_are_those_of_torchrecs(dtype, need_indices):
    float_ours, float_theirs = pair("EmbeddingCollection", sequences, need_indices=need_indices)
    found, expected = quantized(float_ours, dtype), their_quantized(float_theirs, dtype)
    kjt = batch(2)
    its, other = found(kjt), expected(kjt)
    assert list(its) == list(float_ours(kjt)) and set(its) == set(other)
    for name in its:
        assert torch.equal(its[name].values(), other[name].values())
        assert torch.equal(its[name].lengths(), other[name].lengths())
        if need_indices:
            assert torch.equal(its[name].weights(), float_ours(kjt)[name].weights())
    assert found.need_indices() is need_indices and found.embedding_dim() == 8
    assert found.embedding_names_by_table() == float_ours.embedding_names_by_table()


def test_sequences_of_several_data_types():
    def configs():
        return [EmbeddingConfig(ROWS, 8, name, feature_names=[f]) for name, f in [("t", "h"), ("u", "g"), ("v", "f")]]

    float_ours, float_theirs = pair("EmbeddingCollection", configs)
    by_table = {"per_table_weight_dtype": {"u": torch.float16}}
    found, expected = quantized(float_ours, **by_table), their_quantized(float_theirs, **by_table)
    kjt = batch(2)
    assert list(found(kjt)) == ["h", "g", "f"]
    assert all(torch.equal(its.values(), expected(kjt)[name].values()) for name, its in found(kjt).items())
    assert all(
        torch.equal(its.values(), found(kjt)[name].values()) for name, its in torch.jit.script(found)(kjt).items()
    )


# ---- ids without a row -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["FP32", "INT4"])
def test_ids_without_a_row_read_as_they_would_begin(dtype):
    collection, _ = with_other_ids(seed=9)
    ids = torch.tensor([-77, 2**50, 12345])
    kjt = KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], ids, torch.ones(3, dtype=torch.int64))
    rows = collection.rows[0].stats()["rows"]
    assert torch.equal(quantized(collection, dtype)(kjt).values(), collection(kjt).values())
    assert collection.rows[0].stats()["rows"] == rows


def test_ids_without_a_row_in_a_path(tmp_path):
    options = oneemb.make_device_mem_store_options(str(tmp_path))
    collection = ours.EmbeddingBagCollection(
        bags(init_fn=torch.nn.init.ones_), store_options={"t": options, "v": options}
    ).eval()
    kjt = KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], torch.tensor([-7, 88, 9]), torch.ones(3).long())
    found = quantized(collection)  # though a collection in a path cannot be copied
    assert torch.equal(found(kjt)["f"], torch.ones(1, 8)) and torch.equal(found(kjt)["h"], torch.ones(1, 16))
    assert torch.equal(found(kjt).values(), collection(kjt).values())


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["FP16", "INT4"])
def test_state_dicts_bring_rows_and_what_others_read_as(dtype, tmp_path):
    collection, _ = with_other_ids()
    made = quantized(collection, dtype)
    torch.save(made.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    assert {key.rpartition(".")[0] for key in state} == {f"embedding_bags.{name}" for name in "tuv"}
    other = ours.QuantEmbeddingBagCollection(made.embedding_bag_configs(), False)
    kjt = batch(3, most=3 * ROWS)
    assert not other(kjt).values().any()
    other.load_state_dict(state)
    assert torch.equal(other(kjt).values(), made(kjt).values())
    assert all(torch.equal(its, state[key]) for key, its in other.state_dict().items())


def test_state_that_does_not_fit_is_refused_and_changes_nothing():
    collection, kjt = with_other_ids()
    made, state = quantized(collection), quantized(collection, "INT4").state_dict()
    before = made(kjt).values()
    with pytest.raises(
        RuntimeError, match=r"embedding_bags.t: weight must be uint8 .*, 12\], rows of 8 weights as INT8"
    ):
        made.load_state_dict(state)
    state = made.state_dict()
    state["embedding_bags.t.ids"] = state["embedding_bags.t.ids"].flip(0)
    with pytest.raises(RuntimeError, match="ids must be int64 in ascending order"):
        made.load_state_dict(state)
    del state["embedding_bags.t.ids"]
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags.t.ids"):
        made.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*dense.weight"):
        made.load_state_dict({**made.state_dict(), "dense.weight": torch.ones(1)})
    assert torch.equal(made(kjt).values(), before)


def changed(state, part, change):
    """The state of a module whose table t differs in one part."""
    state = {key: tensor.clone() for key, tensor in state.items()}
    state[f"embedding_bags.t.{part}"] = change(state[f"embedding_bags.t.{part}"])
    return state


def absent_with(place, value):
    def change(absent):
        absent[place] = value if isinstance(value, int) else int(np.float64(value).view(np.int64))
        return absent

    return change


def of_kind(kind, *params):
    return lambda absent: torch.cat(
        [absent[:3], torch.tensor([kind]), torch.tensor(params, dtype=torch.float64).view(torch.int64)]
    )


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("ids", lambda ids: None, "t: ids must be a tensor with values, got NoneType"),
        ("ids", lambda ids: ids.to("meta"), "t: ids must be a tensor with values"),
        ("weight", lambda weight: torch.full_like(weight, 255), "t: the scales of weight must be finite, those of id"),
        ("absent", absent_with(1, (1 << 23) - 1), "t: absent must describe"),  # for which lookups would have room
        ("absent", absent_with(4, float("nan")), "t: absent must describe"),
        ("absent", of_kind(4, 0, 0, 0, 0), "t: absent must describe"),
        ("absent", of_kind(4, 1e300, 0, 0, 0), "t: absent must describe"),
        ("absent", of_kind(3, 0, 1, 0, 0), "t: absent must describe"),
    ],
)
def test_hostile_state_is_refused_and_changes_nothing(part, change, says):
    made, kjt = quantized(with_other_ids()[0]), batch(0, most=400)
    before = made(kjt).values()
    with pytest.raises(RuntimeError, match=says):
        made.load_state_dict(changed(made.state_dict(), part, change))
    assert torch.equal(made(kjt).values(), before)


def test_tables_that_do_not_go_together_are_refused_and_change_nothing():
    collection, kjt = with_other_ids(pooling=PoolingType.MEAN)  # t and u are one group
    made = quantized(collection)
    before, state = made(kjt).values(), made.state_dict()
    with pytest.raises(RuntimeError, match=r"embedding_bags: tables of one embedding must have different numbers, got"):
        made.load_state_dict(changed(state, "absent", lambda _: state["embedding_bags.u.absent"].clone()))
    assert torch.equal(made(kjt).values(), before)
    salts = np.array([frozen_rows.salts_of(2, attempt)[1] for attempt in range(frozen_rows.SALTS_MAX)])
    ids = torch.from_numpy(np.unique(salts))
    hostile = changed(state, "ids", lambda _: torch.zeros(1, dtype=torch.int64))
    hostile["embedding_bags.t.weight"] = torch.zeros(1, 12, dtype=torch.uint8)
    hostile |= {"embedding_bags.u.ids": ids, "embedding_bags.u.weight": torch.zeros(len(ids), 12, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="no salts of 64 tries keep the keys of 2 tables apart"):
        made.load_state_dict(hostile)
    assert torch.equal(made(kjt).values(), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bytes_where_a_model_gets_another_dtype(dtype):
    made, kjt = quantized(with_other_ids()[0], dtype), batch(0, most=400)
    before = made(kjt).values()
    for change in (made.half, made.bfloat16, made.double):
        assert torch.equal(change()(kjt).values(), before)


def test_on_the_meta_device_there_are_no_rows():
    made = quantized(ours.EmbeddingBagCollection(bags(), device="meta"))
    assert made.device.type == "meta" and made.embedding_bag_configs()[0].data_type.name == "INT8"
    with pytest.raises(RuntimeError, match="on the meta device"):
        made(batch(0))
    expected = quantized(with_other_ids()[0])
    state = expected.state_dict()
    with pytest.warns(UserWarning, match="on the meta device"):
        made.load_state_dict(state)
    made = made.to_empty(device="cpu")
    assert not made(batch(0)).values().any()
    made.load_state_dict(state)
    assert torch.equal(made(batch(0)).values(), expected(batch(0)).values())


def test_a_whole_model_is_saved_and_loaded(tmp_path):
    collection, kjt = with_other_ids()
    model = ours.quantize_inference_model(Alone(collection))
    sharded, _ = ours.shard_quant_model(copy.deepcopy(model), 2, "cpu", "cpu")
    expected = model(kjt).values()
    for number, its in enumerate([model, sharded]):
        torch.save(its, tmp_path / f"{number}.pt")
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=False)
        assert torch.equal(loaded(kjt).values(), expected)


def test_a_copy_and_a_moved_module_have_the_rows():
    collection, kjt = with_other_ids()
    made = quantized(collection)
    copied = copy.deepcopy(made).to("cpu").half()
    assert torch.equal(copied(kjt).values(), made(kjt).values())
    rows = copied.groups[0].rows.frozen.rows
    rows.zero_()
    assert not torch.equal(copied(kjt).values(), made(kjt).values())


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_both_kinds_of_modules_in_one_model(inplace):
    float_ours, float_theirs = pair()
    model = torch.nn.ModuleDict({"a": Model(float_ours), "b": Model(float_theirs), "c": Model(float_ours)})
    made = ours.quantize_embeddings(model, torch.int8, inplace, output_dtype=torch.float16)
    assert (made is model) is inplace and not made.training
    assert isinstance(made["a"].sparse, ours.QuantEmbeddingBagCollection)
    assert isinstance(made["b"].sparse, theirs.QuantEmbeddingBagCollection)
    assert made["c"].sparse is made["a"].sparse and float_ours(batch(0)).values().dtype == torch.float32
    found = made["a"].sparse(batch(0))
    assert found.values().dtype == made["a"].sparse.output_dtype() == torch.float16
    if not inplace:
        assert model["a"].sparse is float_ours and made["a"].dense is not model["a"].dense
        assert not hasattr(float_ours, "qconfig")


def test_torchrecs_own_functions_take_these_classes():
    float_ours, _ = pair()
    expected = quantized(float_ours)(batch(0)).values()
    made = theirs.quantize_embeddings(
        Alone(float_ours), torch.int8, False, [ours.EmbeddingBagCollection],
        {ours.EmbeddingBagCollection: ours.QuantEmbeddingBagCollection},
    )  # fmt: skip
    assert torch.equal(made(batch(0)).values(), expected)
    made = theirs.quantize_inference_model(Alone(float_ours), ours.DEFAULT_QUANT_MAPPING)
    assert torch.equal(made(batch(0)).values(), expected)
    made, plan = theirs.shard_quant_model(
        made, world_size=2, compute_device="cpu", sharding_device="cpu", sharders=ours.DEFAULT_SHARDERS
    )
    assert list(plan.plan) == ["sparse"] and len(made.sparse.groups[0].rows.shards) == 2
    assert torch.equal(made(batch(0)).values(), expected)


def test_dtypes_by_table_and_a_collection_alone():
    float_ours, float_theirs = pair()
    by_table = {"t": torch.quint4x2, "v": torch.float16}
    made = ours.quantize_inference_model(float_ours, per_table_weight_dtype=by_table)
    assert [config.data_type.name for config in made.embedding_bag_configs()] == ["INT4", "INT8", "FP16"]
    expected = theirs.quantize_inference_model(Alone(float_theirs), per_table_weight_dtype=by_table)(batch(0))
    for key in made(batch(0)).keys():
        torch.testing.assert_close(made(batch(0))[key], expected[key], rtol=1e-6, atol=1e-8)


def test_collections_behind_feature_processors():
    def model(kind):
        torch.manual_seed(1)
        collection = kind([EmbeddingBagConfig(ROWS, 8, "t", feature_names=["f", "g"])], is_weighted=True)
        processors = PositionWeightedModuleCollection({"f": 5, "g": 5}, torch.device("cpu"))
        return Alone(Alone(FeatureProcessedEmbeddingBagCollection(collection, processors)))

    kjt = batch(0, "fg", weighted=True)
    found, expected = (
        quantize(model(kind))(kjt)
        for kind, quantize in [
            (ours.EmbeddingBagCollection, ours.quantize_inference_model),
            (torchrec.EmbeddingBagCollection, theirs.quantize_inference_model),
        ]
    )
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(dtype=torch.float8_e4m3fn),
            r"table 't': the data type of rows must be one of FP32, FP16, INT8, INT4, INT2",
        ),
        (dict(dtype=torch.int64), r"table 't'"),
        (dict(output_dtype=torch.quint8), "output_dtype must be"),
    ],
)
def test_what_is_refused(change, message):
    arguments = {"dtype": torch.int8, **change}
    with pytest.raises(ValueError, match=message):
        ours.quantize_embeddings(Alone(pair()[0]), arguments.pop("dtype"), False, **arguments)


def test_a_width_that_does_not_fill_bytes_is_refused():
    collection = ours.EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, "t", feature_names=["f"])])
    assert quantized(collection, "INT4").embedding_bags["t"].weight.shape == (ROWS, 6)
    with pytest.raises(ValueError, match="table 't': embedding_dim must be a multiple of 8, .* got 4"):
        quantized(collection, "INT2")


@pytest.mark.parametrize("value, dtype", [(float("nan"), "INT8"), (float("inf"), "FP16"), (1e6, "FP16"), (1e8, "INT8")])
def test_rows_that_do_not_fit_are_named(value, dtype):
    collection = ours.EmbeddingBagCollection(bags())
    state = collection.state_dict()
    state["embedding_bags.u.weight"][17, 3] = value
    collection.load_state_dict(state)
    with pytest.raises(oneemb.StorageError, match="row of id 17 in table 'u'"):
        quantized(collection, dtype)
    made = quantized(collection, "FP32")
    kjt = KeyedJaggedTensor.from_lengths_sync(list("fgh"), torch.tensor([17]), torch.tensor([0, 1, 0]))
    np.testing.assert_equal(float(made(kjt)["g@u"][0, 3]), np.float32(value))


def test_pruning_is_refused():
    model = Alone(pair()[0])
    theirs.set_pruning_data(model, {"t": 3}, [ours.EmbeddingBagCollection])
    with pytest.raises(ValueError, match="set_pruning_data"):
        ours.quantize_inference_model(model)


def test_a_malformed_batch_is_an_error():
    made = quantized(pair()[0])
    with pytest.raises(ValueError, match="lacks the features"):
        made(batch(0, "fg"))
    with pytest.raises(ValueError, match="add up"):
        made(KeyedJaggedTensor(list("fgh"), torch.tensor([1, 2]), lengths=torch.tensor([1, 1, 1])))


# ---- programs --------------------------------------------------------------------------------------------------------


def test_traced_and_scripted_models_give_the_same_bits_without_oneemb(tmp_path):
    model = ours.quantize_inference_model(OfTensors(with_other_ids()[0]))
    model, _ = ours.shard_quant_model(model, 2, "cpu", "cpu")
    kjt = batch(0, most=2 * ROWS)
    given = kjt.values(), kjt.lengths()
    expected = model(*given)
    graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(model)
    traced = torch.fx.GraphModule(model, graph)
    assert torch.equal(traced(*given), expected)
    scripted = torch.jit.script(traced)
    assert torch.equal(scripted(*given), expected)
    scripted.save(tmp_path / "model.pt")
    torch.save((*given, expected), tmp_path / "batch.pt")
    code = """
        import sys, torch, fbgemm_gpu
        *given, expected = torch.load("batch.pt")
        assert torch.equal(torch.jit.load("model.pt")(*given), expected)
        assert not {"oneemb", "torchrec"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.parametrize("dtype", DTYPES)
def test_modules_are_scripted_as_they_are(dtype):
    made = quantized(pair()[0], dtype)
    assert torch.equal(torch.jit.script(made)(batch(0)).values(), made(batch(0)).values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["sum", "mean", "weighted", "zeros"])
def test_a_call_gives_the_bits_of_a_script(dtype, how):
    """The loop that pools rows while it reads them, against aten ops: rows that ids have and lack, in any order."""
    pooling = PoolingType.MEAN if how == "mean" else PoolingType.SUM
    more = {"init_fn": torch.nn.init.zeros_} if how == "zeros" else {}
    tables = bags(pooling=pooling, **more)
    collection = ours.EmbeddingBagCollection(tables, is_weighted=how == "weighted", seed=3)
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    collection(batch(0, weighted=True)).values().square().sum().backward()
    optimizer.step()
    made = quantized(collection.eval(), dtype, output_dtype=torch.float16 if how == "zeros" else torch.float32)
    scripted = torch.jit.script(made)
    for seed, most in [(0, ROWS), (1, 3 * ROWS), (2, 1 << 62)]:
        kjt = batch(seed, most=most, samples=40, weighted=True)
        with mock.patch.object(IndexedRows, "pool", autospec=True, side_effect=IndexedRows.pool) as pool:
            found = made(kjt).values()
        assert pool.call_count == len(made.groups)
        assert found.view(torch.int16).equal(scripted(kjt).values().view(torch.int16))


def test_a_call_gives_gradients_of_the_weights_of_ids():
    collection, _ = pair(configs=lambda: bags(pooling=PoolingType.SUM), is_weighted=True)
    made, kjt = quantized(collection), batch(1, weighted=True)
    expected = made(kjt).values()
    weights = kjt.weights().clone().requires_grad_()
    found = made(KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths())).values()
    assert torch.equal(found, expected)
    found.sum().backward()
    assert weights.grad.count_nonzero() > 0


def test_rows_whose_memory_is_moved_are_read_where_they_are():
    made = quantized(with_other_ids()[0])
    expected = made(batch(0)).values()
    for buffer in made.buffers():
        buffer.share_memory_()
    assert torch.equal(made(batch(0)).values(), expected)
    made.groups[0].rows.frozen.rows.zero_()
    assert not torch.equal(made(batch(0)).values(), expected)


def test_sequences_are_traced_and_scripted():
    made = quantized(pair("EmbeddingCollection", sequences, need_indices=True)[0])
    kjt, expected = batch(0), made(batch(0))
    traced = torch.fx.GraphModule(made, Tracer().trace(made))
    for program in (traced, torch.jit.script(Alone(made))):
        found = program(kjt)
        assert found.keys() == expected.keys()
        for name, its in found.items():
            assert torch.equal(its.values(), expected[name].values())
            assert torch.equal(its.weights(), expected[name].weights())
            assert torch.equal(its.lengths(), expected[name].lengths())


@pytest.mark.parametrize("kind", KINDS)
def test_calls_beside_a_thread_that_exports_or_compiles_are_checked_and_read_by_the_index(kind):
    made = quantized(with_other_ids()[0])
    want, malformed = made(batch(0)).values(), batch(0)
    malformed._lengths = malformed.lengths() + 1
    with (
        another_thread(kind),
        mock.patch.object(IndexedRows, "pool", autospec=True, side_effect=IndexedRows.pool) as pool,
    ):
        assert torch.equal(made(batch(0)).values(), want) and pool.called
        with pytest.raises(ValueError, match="lengths must add up"):
            made(malformed)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_exported_programs_take_batches_of_any_size(devices):
    model = ours.quantize_inference_model(OfTensors(with_other_ids()[0]))
    model, _ = ours.shard_quant_model(model, devices, "cpu", "cpu")
    first, other = batch(0), batch(1, most=2 * ROWS, samples=9)
    dynamic = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    program = torch.export.export(model, (first.values(), first.lengths()), dynamic_shapes=dynamic, strict=False)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("oneemb" in name for name in names)
    for kjt in (first, other):
        assert torch.equal(program.module()(kjt.values(), kjt.lengths()), model(kjt.values(), kjt.lengths()))


@pytest.mark.slow
def test_a_compiled_package_gives_the_same_bits(tmp_path):
    model = ours.quantize_inference_model(OfTensors(with_other_ids()[0]))
    first, other = batch(0), batch(1, most=2 * ROWS, samples=9)
    dynamic = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    program = torch.export.export(model, (first.values(), first.lengths()), dynamic_shapes=dynamic, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    torch.testing.assert_close(compiled(other.values(), other.lengths()), model(other.values(), other.lengths()))


# ---- sharded ---------------------------------------------------------------------------------------------------------


def test_owners_in_aten_ops_are_those_of_the_kernel():
    generator = np.random.default_rng(0)
    ids = generator.integers(-(2**63), 2**63 - 1, 4000)
    ids[:4] = [0, -1, -(2**63), 2**63 - 1]
    tables = generator.integers(0, 1 << 23, len(ids)).astype(np.int32)
    for owners in (1, 2, 3, 7, 1000, 2**31 - 1):
        found = owner_of_keys(torch.from_numpy(tables).long(), torch.from_numpy(ids), owners)
        np.testing.assert_array_equal(found.numpy(), owner_of(tables, ids, owners))


@pytest.mark.parametrize("dtype", ["FP32", "INT8"])
@pytest.mark.parametrize("devices", [1, 2, 5])
def test_sharded_models_give_the_bits_of_unsharded_ones(devices, dtype):
    collection, _ = with_other_ids()
    made = ours.quantize_embeddings(Alone(collection), DTYPES[dtype], False)
    sharded, plan = ours.shard_quant_model(copy.deepcopy(made), devices, "cpu", "cpu")
    assert set(plan.plan["sparse"]) == {"t", "u", "v"}
    for seed in range(3):
        kjt = batch(seed, most=2 * ROWS)
        assert torch.equal(sharded(kjt).values(), made(kjt).values())
    state = sharded.state_dict()
    assert all(torch.equal(its, state[key]) for key, its in made.state_dict().items())
    other, _ = ours.shard_quant_model(quantized_empty(made.sparse), devices, "cpu", "cpu")
    other.load_state_dict(state)
    assert torch.equal(other(batch(0)).values(), made(batch(0)).values())
    if devices > 1:
        sizes = [len(shard.frozen.key_S) for shard in sharded.sparse.groups[0].rows.shards]
        assert sum(sizes) == len(made.sparse.groups[0].rows.frozen.key_S) and len(sizes) == devices


def quantized_empty(like):
    return Alone(ours.QuantEmbeddingBagCollection(like.embedding_bag_configs(), False))


def test_a_plan_and_an_environment_of_torchrec_shard_too():
    from torchrec.distributed.shard import _shard_modules

    made = ours.quantize_inference_model(Alone(pair()[0]))
    expected = made(batch(0)).values()
    alone = _shard_modules(copy.deepcopy(made), ShardingEnv.from_local(1, 0), torch.device("cpu"))
    assert type(alone.sparse) is ours.QuantEmbeddingBagCollection  # TorchRec's default sharders do not know it
    assert torch.equal(alone(batch(0)).values(), expected)
    sharded = _shard_modules(
        made, ShardingEnv.from_local(3, 0), torch.device("cpu"), sharders=ours.DEFAULT_SHARDERS
    )  # fmt: skip
    assert type(sharded.sparse).__name__ == "ShardedEmbeddingBagCollection"
    assert torch.equal(sharded(batch(0)).values(), expected)


def test_torchrecs_modules_are_sharded_beside_ours():
    float_ours, float_theirs = pair()
    made = ours.quantize_inference_model(torch.nn.ModuleDict({"a": Alone(float_ours), "b": Alone(float_theirs)}))
    expected = made["b"](batch(0))
    weights = theirs.get_table_to_weights_from_tbe(made)
    set_propogate_device(True)
    try:
        made, plan = ours.shard_quant_model(made, 2, "cpu", "cpu")
        assert set(plan.plan) == {"a.sparse", "b.sparse"}
        assert "ShardedQuant" in type(made["b"].sparse).__name__
        theirs.assign_weights_to_tbe(made, weights)
        assert all(torch.equal(made["b"](batch(0))[key], expected[key]) for key in expected.keys())
    finally:
        set_propogate_device(False)
