"""Rows of tables on their way to a server and back; collections; the names that upstream's scripts import."""

import numpy as np
import pytest
import torch
from torchrec import EmbeddingConfig

from oneemb.storage.remote.servers import open_server
from oneemb.tde import PS, IDTransformerCollection, NoRoomError
from tests.support.forks import run_code
from tests.tde.tables import Tables, kjt_of


def pairs(*its):
    return torch.tensor(its, dtype=torch.int64)


def test_weights_and_states_of_any_width_and_type_come_back_to_the_bit():
    torch.manual_seed(0)
    tensors = [torch.randn(9, 3).to(torch.bfloat16), torch.randn(9, 3), torch.randn(9)]
    tensors[1][2] = torch.tensor([float("nan"), float("inf"), -0.0])
    kept = [its.clone() for its in tensors]
    ps = PS("table", tensors, "memory://widths", 7)
    ps.evict(pairs([-1, 2], [2**62, 5], [2**32 - 1, 7]))
    for its in tensors:
        its.zero_()
    ps.fetch(pairs([-1, 0], [2**62, 5], [2**32 - 1, 8], [1, 1]), 0).wait()
    for its, was in zip(tensors, kept, strict=True):
        words = torch.int16 if its.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(its[[0, 5, 8]].view(words), was[[2, 5, 7]].view(words)) and not its[1].any()


def test_rows_that_no_server_has_begin_as_a_function_of_table_and_id_within_the_bounds():
    def begun(table, ids, cache, **bounds):
        tensor, state = torch.ones(8, 64), torch.ones(8)
        PS(table, [tensor, state], "memory://begun").fetch(
            pairs(*zip(ids, cache, strict=True)), 0, True, **bounds
        ).wait()
        assert not state[cache].any()
        return tensor[cache]

    first = begun("one", [3, 2**32 + 3, -3], [0, 1, 2], weight_init_max=0.25, weight_init_min=-0.25)
    assert torch.equal(first, begun("one", [-3, 3, 2**32 + 3], [7, 4, 5], weight_init_max=0.25, weight_init_min=-0.25)[
        [1, 2, 0]
    ])  # fmt: skip
    assert len(first.unique()) > 180 and -0.25 <= first.min() < -0.2 and 0.2 < first.max() <= 0.25
    assert not torch.equal(
        first, begun("two", [3, 2**32 + 3, -3], [0, 1, 2], weight_init_max=0.25, weight_init_min=-0.25)
    )


def test_pushes_are_cut_into_chunks(monkeypatch):
    tables = Tables(6, monkeypatch)
    ps = PS("t", [torch.ones(6, 2)], "any", 4)
    ps.evict(pairs(*[[n, n] for n in range(5)]))
    assert [its for _, its in tables.server.calls] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="chunk_size"):
        PS("t", [torch.ones(6, 2)], "any", 0)


def test_a_collection_by_itself_transforms_and_says_when_it_is_full():
    configs = [EmbeddingConfig(name="a", num_embeddings=3, embedding_dim=4, feature_names=["f", "g"]),
               EmbeddingConfig(name="h", num_embeddings=3, embedding_dim=4)]  # fmt: skip
    collection = IDTransformerCollection(configs)
    kjt, handles = collection.transform(kjt_of([9, 8], [8, 7], [9]))
    for handle in handles:
        handle.wait()
    assert kjt.values().tolist() == [0, 1, 1, 2, 0]
    with pytest.raises(NoRoomError, match="without a parameter server none leaves"):
        collection.transform(kjt_of([6], [], []))
    assert collection.transform(kjt_of([7], [], []))[0].values().tolist() == [2]


@pytest.mark.parametrize(
    ("names", "features", "words"),
    [(["a", "b"], [["f"], ["f"]], "looked up in one table"), (["a", "a"], [["f"], ["g"]], "must have different names")],
)
def test_tables_that_share_a_feature_or_a_name_are_refused(names, features, words):
    configs = [
        EmbeddingConfig(name=name, num_embeddings=3, embedding_dim=4, feature_names=its)
        for name, its in zip(names, features, strict=True)
    ]
    with pytest.raises(ValueError, match=words):
        IDTransformerCollection(configs)


def test_scripts_find_upstreams_names(tmp_path):
    code = """
from oneemb.compat import install
install("torchrec_dynamic_embedding")
import torch
import torchrec_dynamic_embedding as tde
from torchrec_dynamic_embedding.dataloader import DataLoader, save, wrap
from torchrec_dynamic_embedding.id_transformer import IDTransformer
from torchrec_dynamic_embedding.id_transformer_collection import IDTransformerCollection
from torchrec_dynamic_embedding.id_transformer_group import IDTransformerGroup
from torchrec_dynamic_embedding.ps import PS, PSCollection
from torchrec_dynamic_embedding.tensor_list import TensorList
from torchrec_dynamic_embedding.utils import _get_sharded_modules_recursive
import oneemb.tde
assert tde is oneemb.tde and tde.wrap is wrap and tde.save is save
try:
    torch.ops.tde.register_io("/no/such/plugin.so")
except Exception as error:
    print(type(error).__name__)
"""
    done = run_code(code)
    assert done.returncode == 0 and "Error" in done.stdout, done.stderr


def test_a_module_that_was_not_wrapped_has_nothing_to_save():
    from oneemb import tde

    with pytest.raises(ValueError, match="model that oneemb.tde.wrap returned"):
        tde.save(torch.nn.Linear(1, 1))


def test_what_memory_has_of_a_name_is_there_again():
    PS("t", [torch.full((2, 2), 3.0)], "memory://again").evict(pairs([1, 1]))
    (weights,), found = open_server("memory://again").pull("t", np.array([1, 2]), [2])
    assert found.tolist() == [[True], [False]] and weights[0].tolist() == [3.0, 3.0]
