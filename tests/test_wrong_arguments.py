"""Arguments that a user gets wrong: errors say what must hold, what came and what to do."""

import inspect
import math

import numpy as np
import pytest
import torch

import oneemb
from tests.support.models import make_embedding

NESTED = [torch.tensor([1, 2]), torch.tensor([3])]


@pytest.fixture
def served(tmp_path):
    """Folder with a snapshot."""
    embedding = make_embedding(tmp_path / "served")
    embedding(torch.arange(3))
    embedding.save_snapshot("first")
    embedding.close()
    return tmp_path / "served"


def lookups(embedding):
    """{name: call with ids as its only argument}."""
    return {
        "call": embedding, "eval": lambda ids: embedding.eval()(ids), "read": embedding.read,
        "erase": embedding.erase, "contains": embedding.contains, "pooling": lambda ids: embedding(ids, pooling="sum"),
        "offsets": lambda ids: embedding(ids, offsets=torch.tensor([0, 1])),
    }  # fmt: skip


CALLS = ["call", "eval", "read", "erase", "contains", "pooling", "offsets"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ids", [[1, 2], ["a"], (1,), 7, None, "a", np.arange(3)], ids=repr)
def test_ids_that_are_no_tensor_are_told_how_to_become_one(tmp_path, call, ids):
    with pytest.raises(
        TypeError, match=f"ids must be a tensor of .*, got {type(ids).__name__}; .*torch.tensor.*hash_ids"
    ):
        lookups(make_embedding(tmp_path))[call](ids)


@pytest.mark.parametrize(
    "dtype, bits", [(torch.float16, 11), (torch.bfloat16, 8), (torch.float32, 24), (torch.float64, 53)]
)
def test_float_ids_are_told_which_ids_have_lost_bits(tmp_path, dtype, bits):
    assert torch.tensor(2**bits + 1).to(dtype).double() == 2**bits != torch.tensor(2**bits - 1).to(dtype).double()
    for name, call in lookups(make_embedding(tmp_path)).items():
        ids = torch.ones(1, 1 if name == "pooling" else 2, dtype=dtype)
        with pytest.raises(TypeError, match=rf"ids must be torch.int64 .*got {dtype} .*above 2\^{bits}, .*lost bits"):
            call(ids)


def test_ids_too_wide_for_the_keys_are_not_told_to_be_cut(tmp_path):
    embedding = make_embedding(tmp_path, key_type=torch.int32)
    with pytest.raises(TypeError, match="key_type=torch.int64, or call ids.to.torch.int32. if all ids fit"):
        embedding(torch.arange(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo], ids=str)
def test_nested_and_sparse_ids_are_told_how_to_become_dense(tmp_path, call, layout):
    sparse = layout is torch.sparse_coo
    ids = torch.eye(2).long().to_sparse() if sparse else torch.nested.nested_tensor(NESTED, layout=layout)
    kind, cure = ("sparse", "to_dense") if sparse else ("nested", "to_padded_tensor.padding_idx")
    with pytest.raises(TypeError, match=f"ids must be .*neither nested nor sparse, got a {kind} tensor; .*{cure}"):
        lookups(make_embedding(tmp_path))[call](ids)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_errors_about_nested_ids_advise_works(tmp_path):
    embedding = make_embedding(tmp_path, padding_idx=-1)
    strided, jagged = (torch.nested.nested_tensor(NESTED, layout=one) for one in (torch.strided, torch.jagged))
    want = embedding(torch.tensor([[1, 2], [3, -1]]), pooling="sum")
    for ids in (strided, jagged):
        assert torch.equal(embedding(ids.to_padded_tensor(-1), pooling="sum"), want)
    assert torch.equal(embedding(jagged.values(), offsets=jagged.offsets()), want)
    assert torch.cat(strided.unbind()).tolist() == [1, 2, 3]


@pytest.mark.parametrize("options", [
    oneemb.make_device_mem_store_options, lambda path: oneemb.make_cached_ssd_store_options(1, path),
])  # fmt: skip
def test_a_path_of_a_file_says_that_it_is_one(tmp_path, options):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(oneemb.StorageError, match=f"persistent_path must be a folder, got the file {file}; give"):
        oneemb.MultiTableEmbedding("items", 4, torch.float32, torch.int64, [oneemb.make_table()], options(file))
    assert file.read_text() == "x"


@pytest.mark.parametrize("path", ["", b"", None, []])
def test_an_empty_path_is_shown_as_it_was_given(path):
    given = [path] if path is None else path
    with pytest.raises(TypeError, match=f"persistent_path must name a folder, .*got {path!r}$".replace("[]", r"\[\]")):
        oneemb.make_device_mem_store_options(given)
    if not isinstance(path, list):
        with pytest.raises((TypeError, ValueError), match="paths must name"):
            oneemb.InferenceEmbedding.open(path)


@pytest.mark.parametrize("dim, error, said", [
    (16.0, TypeError, "an int of 1 or more, got float 16.0"), (float("nan"), TypeError, "an int .*got float nan"),
    (0, ValueError, "1 or more, got 0;"), (-1, ValueError, "1 or more, got -1;"),
    ([], ValueError, "one or more column widths, got an empty one"), ([4, 0], ValueError, "1 or more, got 0;"),
    ([4, 2.0], TypeError, "an int of 1 or more, got float 2.0"),
])  # fmt: skip
def test_a_width_that_is_none_is_shown_as_it_was_given(tmp_path, dim, error, said):
    kind = oneemb.MultiTableMultiColumnEmbedding if isinstance(dim, list) else oneemb.MultiTableEmbedding
    with pytest.raises(error, match=f"embedding_dim must be .*{said}"):
        kind("items", dim, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options())


@pytest.mark.parametrize("kind", [oneemb.MultiTableEmbedding, oneemb.MultiTableMultiColumnEmbedding])
def test_a_constructor_is_named_after_its_class(kind, tmp_path):
    for arguments, more in (((1000, 16), {}), ((), {"num_embeddings": 10})):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}.__init__\(\) "):
            kind(*arguments, **more)
    assert list(inspect.signature(kind).parameters)[:3] == ["name", "embedding_dim", "dtype"]

    class Own(kind):
        def __init__(self, folder):
            dim = [4] if kind is oneemb.MultiTableMultiColumnEmbedding else 4
            options = oneemb.make_device_mem_store_options(folder)
            super().__init__("own", dim, torch.float32, torch.int64, [oneemb.make_table()], options)

    assert Own(tmp_path)(torch.arange(2)).shape == (2, 4)


@pytest.mark.parametrize("arguments", [("path",), (), (None, "a"), (3,)])
def test_a_served_embedding_is_made_by_open(arguments):
    with pytest.raises(
        TypeError, match=r"InferenceEmbedding is made by open; call oneemb.InferenceEmbedding.open\(path"
    ):
        oneemb.InferenceEmbedding(*arguments)


def test_the_error_about_two_optimizers_names_both(tmp_path):
    embedding = make_embedding(tmp_path)
    former, optimizer = (kind(embedding.parameters(), lr=0.1) for kind in (torch.optim.SGD, torch.optim.Adam))
    embedding(torch.arange(3)).sum().backward()
    former.step()
    embedding(torch.arange(3)).sum().backward()
    with pytest.raises(ValueError, match=r"one optimizer, here Adam, and is trained by another SGD; call .*detach_opt"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"has an optimizer already, SGD; call embedding.detach_.* before Adam trains"):
        oneemb.Optimizer(optimizer)


@pytest.mark.parametrize("more, said", [
    ({"dtype": "fp16"}, "^dtype must be one of float32, float16, int8, int4, got 'fp16'$"),
    ({"dtype": torch.bfloat16}, "^dtype must be one of .*, got torch.bfloat16$"),
    ({"dtype": None}, "^dtype .*got None$"),
    ({"absent": "mean"}, "^absent must be \"initial\" or \"zeros\", got 'mean'$"),
    ({"absent": None}, "^absent .*None$"),
    ({"snapshot": 3}, "^snapshot must be the name of a snapshot, or None for the newest, got int 3"),
])  # fmt: skip
def test_arguments_of_open_are_told_one_by_one(served, more, said):
    with pytest.raises((TypeError, ValueError), match=said):
        oneemb.InferenceEmbedding.open(served, **more)


def test_rows_are_served_in_a_dtype_of_torch(served):
    for dtype in (torch.float32, torch.float16, torch.int8):
        by_name = oneemb.InferenceEmbedding.open(served, dtype=str(dtype).removeprefix("torch."))
        ids = torch.arange(5)
        assert torch.equal(oneemb.InferenceEmbedding.open(served, dtype=dtype)(ids), by_name(ids))


def test_a_served_embedding_is_told_what_its_calls_take(served):
    embedding = oneemb.InferenceEmbedding.open(served)
    for snapshot in (None, 3, ["first"]):
        with pytest.raises(TypeError, match="snapshot must be the name of a snapshot, got"):
            embedding.rollback(snapshot)
    for seconds, error in [
        ("x", TypeError),
        (None, TypeError),
        (True, TypeError),
        (0, ValueError),
        (float("nan"), ValueError),
    ]:
        with pytest.raises(error, match="seconds must be "):
            embedding.follow(seconds)


def test_a_served_embedding_shows_what_it_serves(served):
    embedding = oneemb.InferenceEmbedding.open(served, dtype="float16")
    assert repr(embedding) == "InferenceEmbedding(snapshot='first', tables=1, rows=3, dim=4, dtype=float16)"
    embedding.close()
    assert repr(embedding) == "InferenceEmbedding(closed)"


NOT_FLAGS = [None, "yes", 1, 0.0, [], torch.ones(2)]


@pytest.mark.parametrize("wrong", NOT_FLAGS, ids=str)
def test_a_flag_that_is_no_bool_is_told_before_anything_changes(served, tmp_path, wrong):
    embedding = make_embedding(tmp_path / "rows")
    embedding(torch.arange(3))
    embedding.save_snapshot("first")
    calls = {
        "overwrite": lambda **flag: embedding.save_snapshot("first", **flag),
        "keep_evicted": lambda **flag: embedding.save_delta("second", "first", **flag),
        "weights_only": lambda **flag: embedding.load_snapshot("first", **flag),
        "verify": lambda **flag: oneemb.InferenceEmbedding.open(served, **flag),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} must be True or False, got {type(wrong).__name__}"):
            call(**{name: wrong})
    with pytest.raises(TypeError, match="overwrite must be True or False"):
        embedding.save_delta("second", "first", overwrite=wrong)
    assert embedding.snapshots() == ["first"] and embedding(torch.arange(3)).shape == (3, 4)


@pytest.mark.parametrize("name", [None, 3, b"first", ["first"]])
def test_a_name_of_a_snapshot_is_text(tmp_path, name):
    embedding = make_embedding(tmp_path)
    for call in (embedding.load_snapshot, embedding.delete_snapshot):
        with pytest.raises(TypeError, match=f"name must be the name of a snapshot, got {type(name).__name__} "):
            call(name)


@pytest.mark.parametrize("wrong", NOT_FLAGS, ids=str)
def test_flags_of_lookups_and_of_pretrained_rows_are_bools(served, wrong):
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1])
    with make_embedding(served) as embedding:
        for look_up in (embedding, oneemb.InferenceEmbedding.open(served)):
            with pytest.raises(TypeError, match="include_last_offset must be True or False, got .*nn.EmbeddingBag"):
                look_up(ids, offsets=offsets, include_last_offset=wrong)
        assert embedding(ids, offsets=offsets, include_last_offset=False).shape == (2, 4)
    with pytest.raises(TypeError, match="freeze must be True or False"):
        oneemb.MultiTableEmbedding.from_pretrained(torch.eye(3), freeze=wrong)


OPTIONS = [
    (kind, option)
    for kind in ("Lamb", "Lars", "RowWiseAdagrad", "Ftrl", "SmartDecayAdam", "PartialRowWiseAdam")
    for option in inspect.signature(getattr(oneemb.optim, kind)).parameters
    if option != "params"
]


@pytest.mark.parametrize("kind, option", OPTIONS)
def test_options_of_optimizers_are_numbers(kind, option):
    weight = torch.nn.Parameter(torch.ones(2))
    for wrong in (None, "x", [None], {}, float("nan"), -math.inf, math.inf, (0.9, None)):
        with pytest.raises((TypeError, ValueError), match=rf"{kind}: {option}.* must be .*, got "):
            getattr(oneemb.optim, kind)([weight], **{option: wrong})
