"""Every argument of `oneemb.tde` is followed, refused or without effect."""

import inspect
import pathlib

import pytest
import torch
from torchrec import EmbeddingBagConfig

from oneemb.tde import IDTransformer, IDTransformerCollection, PSCollection, TensorList, wrap
from tests.tde.tables import kjt_of

DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "tde.md").read_text()


def test_every_argument_is_known():
    told = {"url", "dataloader", "module", "configs_dict", "data_info", "num_prefetch"}  # by test_dataloader.py
    assert set(inspect.signature(wrap).parameters) == {
        *told, "eviction_config", "transform_config", "ps_config", "parallel",
    }  # fmt: skip
    assert "`parallel` starts a thread a collection | has no effect" in DOCS
    assert "`init_fn` of a config is not followed" in DOCS


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: IDTransformer(4, {"type": "lru"}), "eviction_config must be a type out of mixed_lru_lfu"),
        (lambda: IDTransformer(4, {"type": "mixed_lru_lfu", "ttl": 3}), "eviction_config must be .*ttl"),
        (lambda: IDTransformer(4, None, {"type": "thread"}), "transform_config must be a type out of naive, cacheline"),
        (lambda: IDTransformer(4, None, {"type": "naive", "threads": 3}), "transform_config must be .*threads"),
        (
            lambda: PSCollection("p", {}, "memory://", {"chunk": 3}),
            r"ps_config must have no options but .* got \['chunk'\]",
        ),
    ],
)
def test_an_option_that_is_not_known_is_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def leaving(eviction_config=None, transform_config=None):
    """The ids that leave a full table, of which some were looked up more often than others."""
    transformer = IDTransformer(8, eviction_config, transform_config)
    for time, ids in enumerate([range(8), *[range(4)] * 20, range(4, 8)]):
        its = torch.tensor(list(ids))
        transformer.transform(TensorList([its]), TensorList([torch.empty_like(its)]), time)
    return transformer.evict(4)[:, 0].tolist()


def test_the_power_of_a_new_id_is_followed_and_both_transformers_are_the_same():
    plain = leaving()
    assert leaving({"type": "mixed_lru_lfu"}, {"type": "cacheline"}) == plain
    assert leaving({"type": "mixed_lru_lfu", "min_used_freq_power": 5}) == plain
    assert leaving({"type": "mixed_lru_lfu", "min_used_freq_power": 31}) != plain


class Asked:
    """A config that notes what is asked of it."""

    def __init__(self, config):
        self.config, self.names = config, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.config, name)


def begun(seed=0, **changes):
    """Rows that no server has, and what was asked of the table's config."""
    table = torch.zeros(3, 4)
    rows = PSCollection("p", {"t": (None, [table])}, "memory://options", {"chunk_size": 4})
    config = Asked(EmbeddingBagConfig(3, 4, "t", feature_names=["f"], **changes))
    collection = IDTransformerCollection([config], None, None, rows, reinitialise=True, seed=seed)
    _, handles = collection.transform(kjt_of([7, 8, 9], [], []))
    for handle in handles:
        handle.wait()
    return table, config.names


def test_rows_that_begin_anew_follow_the_seed_and_the_bounds_of_the_config_alone():
    """TorchRec's module, which holds the table, follows the other fields of a config."""
    plain, asked = begun()
    assert asked == {"num_embeddings", "name", "feature_names", "get_weight_init_min", "get_weight_init_max"}
    assert torch.equal(begun()[0], plain) and 0 < plain.abs().max() <= 3**-0.5
    assert not torch.equal(begun(seed=1)[0], plain)
    assert begun(weight_init_min=2.0, weight_init_max=3.0)[0].min() >= 2.0
    assert torch.equal(begun(init_fn=torch.nn.init.ones_)[0], plain)
