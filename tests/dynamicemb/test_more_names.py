"""Helpers by dynamicemb's names, and names that have no meaning here, whose imports say why."""

import importlib

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from oneemb.dynamicemb.construct_twin_module import generate_sparse_feature
from oneemb.dynamicemb.dump_load import check_emb_collection_modules
from oneemb.dynamicemb.embedding_admission import KVCounter, MultiTableKVCounter
from oneemb.dynamicemb.optimizer import get_required_arg, string_to_opt_type
from oneemb.dynamicemb.utils import assert_tensors_equal, tabulate

ABSENT = {
    "optimizer": ("AdamDynamicEmbeddingOptimizer", "SGDDynamicEmbeddingOptimizer", "BaseDynamicEmbeddingOptimizer",
                  "pad_optimizer_states_from_checkpoint", "truncate_optimizer_states_for_checkpoint"),
    "construct_twin_module": ("Platform",), "batched_dynamicemb_tables": ("StorageLayout",),
    "planner": ("rw_sharding",),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in ABSENT.items() for name in names])
def test_an_import_of_a_name_without_meaning_says_what_there_is(module, name):
    with pytest.raises(ImportError, match=f"oneemb.dynamicemb.{module} has no {name}: .*; .*"):
        exec(f"from oneemb.dynamicemb.{module} import {name}")
    assert not hasattr(importlib.import_module(f"oneemb.dynamicemb.{module}"), "Other")


def test_optimizers_are_known_by_their_values():
    assert all(string_to_opt_type(its.value) is its for its in EmbOptimType)
    with pytest.raises(ValueError, match="optimizer_str must be one of .*'adam'.*, got 'Adam'"):
        string_to_opt_type("Adam")
    assert get_required_arg({"lr": 0.5}, "lr") == 0.5
    with pytest.raises(ValueError, match="args must have 'eps', got 'lr'; add it"):
        get_required_arg({"lr": 0.5}, "eps")


def test_a_table_is_text():
    assert tabulate([["a", "bc"], ["def", 1], ["", 22]], sub_headers=True).splitlines() == [
        "a   | bc", "----+---", "def | 1", "----+---", "    | 22"]  # fmt: skip
    with pytest.raises(ValueError, match="as many cells"):
        tabulate([[1, 2], [3]], ["a", "b"])


def test_tensors_are_compared():
    assert_tensors_equal(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert_tensors_equal(torch.ones(2), torch.full((2,), 1.2), atol=0.3)
    with pytest.raises(AssertionError):
        assert_tensors_equal(torch.ones(2), torch.full((2,), 1.2))


def test_batches_of_a_series_have_every_id_once():
    batches = [generate_sparse_feature(["f", "g"], [5, 2], 3, k) for k in range(2)]
    assert [its["f"].values().tolist() for its in batches] == [[0, 1, 2], [3, 4]]
    assert [its["g"].values().tolist() for its in batches] == [[0, 1], []]
    assert [its.lengths().tolist() for its in batches] == [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]


def test_a_counter_of_several_tables_counts_by_itself(tmp_path):
    counter = MultiTableKVCounter([KVCounter(2), KVCounter(10)], torch.device("cpu"))
    keys, tables = torch.tensor([7, -1, 7]), torch.tensor([0, 0, 1])
    assert counter.add(keys, tables, torch.tensor([1, 2, 3])).tolist() == [1, 2, 3]
    assert counter.add(keys, tables, torch.tensor([1, 1, 1])).tolist() == [2, 3, 4]
    counter.add(torch.tensor([9]), torch.tensor([0]), torch.tensor([5]))  # The first table has room for two.
    assert counter.lookup(torch.tensor([7, -1, 9]), torch.zeros(3, dtype=torch.int64))[0].tolist() == [0, 3, 5]
    paths = [str(tmp_path / "keys"), str(tmp_path / "counts")]
    counter.dump(*paths, 0)
    other = MultiTableKVCounter([KVCounter(2)], torch.device("cpu"))
    other.load(*paths, 0)
    assert other.size() == 2 and counter.size(1) == 1
    other.erase(torch.tensor([9]), torch.tensor([0]))
    assert other.lookup(torch.tensor([-1, 9]), torch.zeros(2, dtype=torch.int64))[1].tolist() == [True, False]
    with pytest.raises(TypeError, match="kv_counters must be KVCounters"):
        MultiTableKVCounter([3], torch.device("cpu"))


def test_a_model_without_sharded_collections_has_none():
    found = [torch.nn.Linear(1, 1)]
    assert check_emb_collection_modules(torch.nn.Linear(2, 2), found) is found and len(found) == 1
