"""A state dict changes the tables that it names, and no others: beside TorchRec's collections and torch's Adagrad."""

import pytest
import torch
import torchrec
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv

import oneemb
from oneemb.torchrec import EmbeddingBagCollection, get_default_sharders
from tests.torchrec.test_sharding import on_ranks

ROWS, DIM, RATE = 30, 4, 0.5

STORES = {
    "device": oneemb.make_device_mem_store_options,
    "ssd": lambda path: oneemb.make_cached_ssd_store_options(1, path),
}


def configs(names):
    return [EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in names]


def batch(names):
    """Every row of each table: torch's dense optimizers move rows without a gradient too."""
    return KeyedJaggedTensor.from_lengths_sync(
        list(names), torch.arange(ROWS).repeat(len(names)), torch.ones(ROWS * len(names), dtype=torch.int64)
    )


class Both:
    """Our collection in a path, and TorchRec's with the same weights."""

    def __init__(self, names, path, make=oneemb.make_device_mem_store_options):
        self.names = names
        self.ours = EmbeddingBagCollection(configs(names), store_options=make(str(path)))
        self.theirs = torchrec.EmbeddingBagCollection(configs(names))
        with torch.no_grad():
            for name, rows in self.read().items():
                self.theirs.embedding_bags[name].weight.copy_(rows)
        self.models = [self.ours, self.theirs]
        self.optimizers = [torch.optim.Adagrad(model.parameters(), lr=RATE) for model in self.models]

    def read(self):
        """The rows, of which reading begins none."""
        with torch.no_grad():
            found = self.ours.eval()(batch(self.names)).to_dict()
        self.ours.train()
        return found

    def train(self, steps):
        for step in range(steps):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                optimizer.zero_grad()
                values = model(batch(self.names)).values()
                (values * torch.linspace(-1, 2 + step, values.numel()).view_as(values)).sum().backward()
                optimizer.step()

    def state(self):
        """State dicts, and what Adagrad has, by table."""
        weights = {name: bag.weight for name, bag in self.theirs.embedding_bags.items()}
        sums = {name: self.optimizers[1].state[weight]["sum"].clone() for name, weight in weights.items()}
        return dict(self.ours.state_dict()), {name: its.detach().clone() for name, its in weights.items()}, sums

    def load(self, state, *tables):
        """Load these tables of what `state` gave."""
        given, weights, sums = state
        missing = self.ours.load_state_dict({key_of(name): given[key_of(name)] for name in tables}, strict=False)
        assert missing.missing_keys == [key_of(name) for name in self.names if name not in tables]
        with torch.no_grad():
            for name in tables:
                weight = self.theirs.embedding_bags[name].weight
                weight.copy_(weights[name])
                if weight in self.optimizers[1].state:
                    self.optimizers[1].state[weight]["sum"].copy_(sums[name])

    def check(self):
        for name, rows in self.read().items():
            torch.testing.assert_close(rows, self.theirs.embedding_bags[name].weight.detach(), msg=name)


def key_of(table):
    return f"embedding_bags.{table}.weight"


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_tables_that_a_state_dict_lacks_keep_their_rows_and_the_state_of_these(tmp_path, make):
    both = Both(["user", "ad", "shop"], tmp_path, make)
    both.train(2)
    state = both.state()
    both.train(3)
    both.load(state, "user", "shop")
    both.check()
    both.train(2)
    both.check()
    both.load(state, "ad")
    both.train(2)
    both.check()


def test_a_state_dict_of_all_tables_is_loaded_as_a_whole_and_brings_its_step(tmp_path):
    both = Both(["user", "ad"], tmp_path)
    both.train(2)
    state = both.state()
    both.train(3)
    both.load(state, "user", "ad")
    both.check()
    assert both.ours.rows[0].stats()["step"] == 2


def test_rows_with_state_that_are_loaded_before_the_first_step_bring_their_step(tmp_path):
    both = Both(["user", "ad"], tmp_path)
    both.train(2)
    state = both.ours.state_dict()
    made = EmbeddingBagCollection(
        configs(["user", "ad"]), store_options=oneemb.make_device_mem_store_options(str(tmp_path))
    )
    oneemb.Optimizer(torch.optim.Adagrad(made.parameters(), lr=RATE), made.rows)
    made(batch(["user", "ad"]))  # Rows of the other table begin, without a step.
    made.load_state_dict({key_of("user"): state[key_of("user")]}, strict=False)
    assert made.rows[0].stats()["step"] == 2


def test_a_row_that_is_not_in_the_snapshot_leaves_the_table_that_is_loaded_alone(tmp_path):
    both = Both(["user", "ad"], tmp_path)
    begun = both.read()
    state = dict(both.ours.state_dict()), begun, {name: torch.zeros(ROWS, DIM) for name in begun}
    both.train(2)
    both.load(state, "user")
    both.check()
    both.train(1)
    both.check()


def test_a_new_table_begins_with_rows_of_its_own(tmp_path):
    old = Both(["user", "ad"], tmp_path)
    old.train(3)
    state, weights, sums = old.state()
    old.ours.close()
    fresh = EmbeddingBagCollection(configs(["user", "shop"]), store_options=STORES["device"](str(tmp_path / "other")))
    begun = fresh(batch(["user", "shop"]))["shop"].detach()
    new = EmbeddingBagCollection(configs(["user", "shop"]), store_options=STORES["device"](str(tmp_path)))
    found = new.load_state_dict(state, strict=False)
    assert found.missing_keys == [key_of("shop")] and found.unexpected_keys == [key_of("ad")]
    rows = new.eval()(batch(["user", "shop"])).to_dict()
    assert torch.equal(rows["shop"], begun) and new.rows[0].stats()["rows"] == ROWS
    torch.testing.assert_close(rows["user"], weights["user"])
    optimizer = torch.optim.Adagrad(new.train().parameters(), lr=RATE)
    new(batch(["user", "shop"]))["user"].sum().backward()
    optimizer.step()
    moved = new(batch(["user", "shop"]))["user"].detach()
    torch.testing.assert_close(moved, weights["user"] - RATE / (sums["user"] + 1).sqrt())


def test_a_collection_that_has_grown_by_a_table_loads_the_others_with_their_state(tmp_path):
    old = Both(["user", "ad"], tmp_path)
    old.train(3)
    state, weights, _ = old.state()
    old.ours.close()
    new = EmbeddingBagCollection(configs(["user", "ad", "shop"]), store_options=STORES["device"](str(tmp_path)))
    new.load_state_dict(state, strict=False)
    rows = new.eval()(batch(["user", "ad", "shop"])).to_dict()
    for name in ("user", "ad"):
        torch.testing.assert_close(rows[name], weights[name])
    assert new.rows[0].stats()["step"] == 3 and new.rows[0].stats()["rows"] == 2 * ROWS


def test_tables_of_two_state_dicts_are_each_of_its_own(tmp_path):
    both = Both(["user", "ad"], tmp_path)
    both.train(1)
    first, first_weights, _ = both.state()
    both.train(1)
    second, second_weights, _ = both.state()
    both.train(1)
    both.ours.load_state_dict({key_of("user"): first[key_of("user")], key_of("ad"): second[key_of("ad")]})
    rows = both.read()
    torch.testing.assert_close(rows["user"], first_weights["user"])
    torch.testing.assert_close(rows["ad"], second_weights["ad"])


def test_a_table_is_loaded_by_itself(tmp_path):
    both = Both(["user", "ad"], tmp_path)
    both.train(1)
    state, weights, _ = both.state()
    both.train(1)
    newer = both.read()["ad"]
    both.ours.embedding_bags["user"].load_state_dict({"weight": state[key_of("user")]})
    rows = both.read()
    torch.testing.assert_close(rows["user"], weights["user"])
    assert torch.equal(rows["ad"], newer)


def test_rows_that_no_optimizer_has_stepped_are_loaded_without_state_and_that_is_said(tmp_path):
    old = Both(["user", "ad"], tmp_path)
    old.train(2)
    state, weights, _ = old.state()
    old.ours.close()
    new = EmbeddingBagCollection(configs(["user", "ad"]), store_options=STORES["device"](str(tmp_path)))
    new(batch(["user", "ad"]))
    with pytest.warns(UserWarning, match="load it before the first lookup to go on with the state"):
        new.load_state_dict({key_of("user"): state[key_of("user")]}, strict=False)
    torch.testing.assert_close(new.eval()(batch(["user", "ad"]))["user"], weights["user"])


def test_a_snapshot_that_is_gone_or_of_another_optimizer_changes_nothing(tmp_path):
    both = Both(["user", "ad"], tmp_path)
    both.train(1)
    state = {key_of("user"): both.state()[0][key_of("user")]}
    both.train(1)
    before = both.read()
    both.ours.rows[0].detach_optimizer("drop")
    adam = torch.optim.Adam(both.ours.parameters(), lr=0.0)
    both.ours(batch(both.names)).values().sum().backward()
    adam.step()
    with pytest.raises(RuntimeError, match="'adagrad'"):
        both.ours.load_state_dict(state, strict=False)
    both.ours.rows[0].delete_snapshot(oneemb.snapshot_name(state[key_of("user")]))
    with pytest.raises(RuntimeError, match="no snapshot named"):
        both.ours.load_state_dict(state, strict=False)
    for name, rows in both.read().items():
        assert torch.equal(rows, before[name])


def load_on_ranks(group, path):
    names = ["user", "ad"]
    model = torchrec.EmbeddingBagCollection(configs(names), device=torch.device("meta"))
    sharders = get_default_sharders(
        {"optimizer": "exact_adagrad", "learning_rate": RATE}, store_options=STORES["device"](path)
    )
    plan = EmbeddingShardingPlanner(topology=Topology(group.size(), "cpu")).collective_plan(model, sharders, group)
    env = ShardingEnv.from_process_group(group)
    model = DistributedModelParallel(model, env=env, plan=plan, sharders=sharders, device=torch.device("cpu"))

    def step():
        values = model(batch(names)).values()
        values.sum().backward()
        return values.detach().split(DIM, dim=1)

    step()
    state = model.state_dict()
    user, _ = step()
    next_user, _ = step()
    _, ad = step()
    user_of_state = {key: its for key, its in state.items() if "user" in key}
    model.load_state_dict(user_of_state, strict=False)
    user_then, ad_then = step()
    next_user_then, _ = step()
    return [torch.equal(user_then, user), torch.equal(next_user_then, next_user), bool((ad_then < ad).all())]


@pytest.mark.filterwarnings("ignore:.*what the plan says")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_load_the_named_tables_alone(tmp_path, ranks):
    assert on_ranks(ranks, load_on_ranks, str(tmp_path)) == [[True, True, True]] * ranks
