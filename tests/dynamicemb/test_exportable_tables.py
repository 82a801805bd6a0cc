"""Tables for inference: rows of a dump, looked up by a module that torch.export takes."""

import numpy as np
import pytest
import torch
import torchrec
from torch.fx.experimental import _config as symbolic_shapes
from torchrec import EmbeddingConfig

import oneemb.torchrec
from oneemb.dynamicemb import (
    DynamicEmbInitializerArgs as Begin,
    DynamicEmbInitializerMode as Mode,
    DynamicEmbPoolingMode as Pooling,
    DynamicEmbTableOptions as Options,
)
from oneemb.dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from oneemb.dynamicemb.exportable_tables import (
    InferenceEmbeddingCollection,
    InferenceLinearBucketTable,
    apply_inference_embedding_collection,
    create_inference_embedding_collection,
)

DIM = 4
IDS = {"users": [5, -3, 2**60, 0, 77], "goods": [5, 6, -(2**63)]}
CONFIGS = [
    EmbeddingConfig(num_embeddings=8, embedding_dim=DIM, name="users", feature_names=["user", "friend"]),
    EmbeddingConfig(num_embeddings=3, embedding_dim=DIM, name="goods", feature_names=["item"]),
]
TABLES = [0, 0, 1]  # of features


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a dump, and {(table, id): row}."""
    folder = tmp_path_factory.mktemp("dump")
    options = [Options(dim=DIM, initializer_args=Begin(Mode.NORMAL)) for _ in IDS]
    tables = BatchedDynamicEmbeddingTablesV2(options, list(IDS), pooling_mode=Pooling.NONE)
    counts = torch.tensor([len(ids) for ids in IDS.values()])
    ids = torch.tensor([n for its in IDS.values() for n in its])
    rows = tables(ids, torch.tensor([0, *counts.cumsum(0)])).detach()
    tables.dump(str(folder))
    table_of = np.repeat(np.arange(2), counts)
    return folder, {(t, n): row.numpy() for t, n, row in zip(table_of.tolist(), ids.tolist(), rows, strict=True)}


def loaded(folder, pooling_mode=-1):
    made = create_inference_embedding_collection(CONFIGS, pooling_mode)
    made.load_from_dynamicemb_file(str(folder))
    return made


def batch_of(seed, bags=5):
    """Ids, offsets of features, the table of each id, offsets of bags over all ids, and weights."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, len(TABLES)) if bags else np.zeros(len(TABLES), int)
    table_N = np.repeat(TABLES, counts)
    known = [[*IDS["users"], 123, -1], [*IDS["goods"], 0, 2**62]]
    ids = [int(rng.choice(np.array(known[t], object))) for t in table_N]
    ends = np.sort(rng.integers(0, len(ids) + 1, max(0, bags - 1))).tolist()
    pooled = torch.tensor([0, *ends, len(ids)] if bags else [0])
    offsets = torch.tensor([0, *np.cumsum(counts)])
    return torch.tensor(ids, dtype=torch.int64), offsets, table_N, pooled, torch.rand(len(ids))


def test_a_dump_is_looked_up_and_other_ids_read_as_zeros(trained):
    folder, rows = trained
    made = loaded(folder)
    for seed in range(5):
        ids, offsets, table_N, *_ = batch_of(seed)
        expected = [rows.get((t, n), np.zeros(DIM)) for t, n in zip(table_N.tolist(), ids.tolist(), strict=True)]
        assert np.array_equal(made(ids, offsets).numpy(), np.array(expected, np.float32).reshape(-1, DIM))
    scores, found, places = made.hash_table.lookup(torch.tensor([77, 78]), torch.tensor([0, 0]))
    assert scores.tolist() == [0, 0] and found.tolist() == [True, False] and places.tolist() == [3, -1]


@pytest.mark.parametrize("mode", [1, 2])
def test_bags_are_sums_or_means_of_their_rows(trained, mode):
    folder, rows = trained
    made = loaded(folder, mode)
    for seed in range(5):
        ids, offsets, table_N, pooled, weights = batch_of(seed)
        row_ND = [rows.get((t, n), np.zeros(DIM)) for t, n in zip(table_N.tolist(), ids.tolist(), strict=True)]
        row_ND = np.array(row_ND, np.float64).reshape(-1, DIM) * weights.double().numpy()[:, None]
        for bag, (begin, end) in enumerate(zip(pooled[:-1], pooled[1:], strict=True)):
            expected = row_ND[begin:end].sum(0) / (max(1, end - begin) if mode == 2 else 1)
            assert made(ids, offsets, pooled, weights)[bag].numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", [-1, 1, 2])
def test_an_exported_program_gives_the_same_of_any_number_of_ids_and_bags(trained, mode):
    made, dynamic = loaded(trained[0], mode), {0: torch.export.Dim.DYNAMIC}
    shapes = [dynamic, None, dynamic, dynamic] if mode == 1 else [dynamic, None, dynamic][: 2 + (mode > 0)]

    def arguments(*its):
        ids, offsets, _, pooled, weights = batch_of(*its)
        return (ids, offsets, pooled, weights)[: len(shapes)]

    with symbolic_shapes.patch(backed_size_oblivious=True):
        program = torch.export.export(made, arguments(3), dynamic_shapes=shapes).module()
    for bags in (0, 1, 2, 7):
        its = arguments(bags, bags)
        assert torch.equal(program(*its), made(*its))


def test_rows_by_number_are_those_of_a_tensor_of_all_tables():
    weights = torch.rand(10, DIM)  # the last row of the last table is not there
    made = create_inference_embedding_collection(CONFIGS, use_dynamic=False)
    made.load_from_embedding_table(weights)
    found = made(torch.tensor([7, 0, 8, 1, 0, 2, -1]), torch.tensor([0, 2, 3, 7]))
    zeros = torch.zeros(1, DIM)
    assert torch.equal(found, torch.cat([weights[[7, 0]], zeros, weights[[9, 8]], zeros, zeros]))
    by_id = create_inference_embedding_collection(CONFIGS, use_dynamic=True)
    by_id.load_from_embedding_table(weights)
    assert torch.equal(by_id(torch.tensor([7, 0, 8]), torch.tensor([0, 1, 2, 3]))[:2], weights[[7, 0]])
    with pytest.raises(ValueError, match=r"table_weights must be \[at most 11, 4\]"):
        made.load_from_embedding_table(torch.rand(12, DIM))


class Model(torch.nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.sparse = collection
        self.dense = torch.nn.Linear(DIM, 1)


@pytest.mark.parametrize("module", [torchrec, oneemb.torchrec])
def test_collections_of_a_model_are_put_into_their_place(module, trained):
    model = Model(module.EmbeddingCollection(tables=CONFIGS))
    assert apply_inference_embedding_collection(model, {"goods": True}, {"users": 20}) is model
    made = model.inner.sparse
    assert isinstance(made, InferenceEmbeddingCollection) and made.use_dynamic_hash
    assert made.table_names_ == ["users", "goods"] and made.feature_names_ == ["user", "friend", "item"]
    assert made.hash_table.begin_T.tolist() == [0, 20, 23] and CONFIGS[0].num_embeddings == 8
    made.load_from_dynamicemb_file(str(trained[0]), ["goods"])
    assert made.hash_table.size_T.tolist() == [0, 3]
    for said in ({}, {"users": True, "goods": False}):
        with pytest.raises(
            ValueError, match=r"dynamic_table_configs must have one value for all tables of 'inner\.sparse'"
        ):
            apply_inference_embedding_collection(Model(module.EmbeddingCollection(tables=CONFIGS)), said, {})


def test_what_cannot_be_is_refused_by_name(trained):
    options = [Options(dim=DIM, max_capacity=3)] * 2
    for arguments, message in [
        (([Options(dim=DIM)], True, -1), "init_capacity or max_capacity above 0"),
        (([*options, Options(dim=8, max_capacity=3)], True, -1), "must have the same dim, above 0"),
        ((options, True, 0), "pooling_mode must be one of"),
        ((options, True, -1, ["a"]), "table_names must be one for each of 2 tables"),
        ((options, True, -1, None, None, [1, 0]), "feature_table_map must be numbers of tables, 0 to 1, never falling"),
        ((options, True, -1, None, None, None, torch.int8), "output_dtype must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            InferenceEmbeddingCollection(*arguments)
    small = InferenceEmbeddingCollection(options, True, -1, list(IDS))
    with pytest.raises(oneemb.StoreFullError, match="the ids of table 0 must be at most 3, got 5"):
        small.load_from_dynamicemb_file(str(trained[0]))
    with pytest.raises(ValueError, match=r"table_names must be some of .* got \['other'\]"):
        small.load_from_dynamicemb_file(str(trained[0]), ["other"])
    with pytest.raises(ValueError, match="use_dynamic_hash must be True"):
        InferenceEmbeddingCollection(options, False, -1, list(IDS)).load_from_dynamicemb_file(str(trained[0]))
    with pytest.raises(ValueError, match="pooling_offsets must be given with pooling_mode 1"):
        InferenceEmbeddingCollection(options, True, 1)(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
    for keys in (torch.tensor([[1, 2]]), torch.tensor([1.5, 2.0])):
        with pytest.raises(ValueError, match=r"keys must be integers \[N\]"):
            InferenceEmbeddingCollection(options, True, -1)(keys, torch.tensor([0, 1, 2]))


WRONG_OFFSETS = [[0, 1, 2], [0, 1, 2, 4], [1, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3, 3], [0, 3], [5]]
"""Offsets of three features with three ids: too few ids, too many, a late begin, a fall, wrong numbers of bags."""


@pytest.mark.parametrize("wrong", WRONG_OFFSETS)
def test_offsets_that_do_not_cover_the_ids_are_refused_by_name(trained, wrong):
    ids, good = torch.tensor([5, 0, 6]), torch.tensor([0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"^offsets must begin with 0, never fall and end .* features, 3, got \["):
        loaded(trained[0])(ids, torch.tensor(wrong))
    if len(wrong) == 4 or wrong == [5]:  # Bags may be of any number.
        with pytest.raises(ValueError, match=r"^pooling_offsets must begin with 0, .* number of keys, got \["):
            loaded(trained[0], 1)(ids, good, torch.tensor(wrong))


def test_an_exported_program_refuses_offsets_that_do_not_cover_its_ids(trained):
    made, dynamic = loaded(trained[0], 1), {0: torch.export.Dim.DYNAMIC}
    ids, good, pooled = torch.tensor([5, 0, 6]), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 3])
    with symbolic_shapes.patch(backed_size_oblivious=True):
        exported = torch.export.export(made, (ids, good, pooled), dynamic_shapes=[dynamic] * 3)
    program = exported.module()
    assert torch.equal(program(ids, good, pooled), made(ids, good, pooled))
    two_each = torch.tensor([0, 1, 1, 2, 2, 2, 3])  # offsets of two bags of each feature
    assert torch.equal(program(ids, two_each, pooled), made(ids, two_each, pooled))
    for wrong in WRONG_OFFSETS:
        with pytest.raises(RuntimeError, match="^offsets must begin with 0"):
            program(ids, torch.tensor(wrong), pooled)
    for wrong in ([0, 1, 2], [1, 2, 3], [0, 2, 1, 3], [0, 4]):
        with pytest.raises(RuntimeError, match="^pooling_offsets must begin with 0"):
            program(ids, good, torch.tensor(wrong))


def test_arguments_without_effect_and_of_other_shapes_are_refused_by_name(trained):
    ids, offsets, pooled = torch.tensor([5, 0, 6]), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 3])
    for more in ({"pooling_offsets": pooled}, {"per_sample_weights": torch.ones(3)}):
        with pytest.raises(ValueError, match=f"{next(iter(more))} must be None with pooling_mode -1"):
            loaded(trained[0])(ids, offsets, **more)
    made = loaded(trained[0], 1)
    for weights in (torch.ones(1), torch.ones(4), torch.ones(3, 1)):
        with pytest.raises(ValueError, match="per_sample_weights must be one for each of 3 keys"):
            made(ids, offsets, pooled, weights)
    for wrong in (offsets.float(), offsets[None], offsets[:0]):
        with pytest.raises(ValueError, match=r"^offsets must be integers of one dimension, \[number of parts \+ 1\]"):
            made(ids, wrong, pooled)
    assert torch.equal(made(ids, offsets.int(), pooled.int()), made(ids, offsets, pooled))


def test_a_table_without_ids_finds_none():
    _, found, places = InferenceLinearBucketTable([4, 4]).lookup(torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert found.tolist() == [False, False] and places.tolist() == [-1, -1]
