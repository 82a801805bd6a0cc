"""Tables of TorchRec, plain and with managed collisions, against TorchRec's own modules."""

import numpy as np
import pytest
import safetensors.torch
import torch
import torchrec
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import oneemb
from tests.support.foreign import assert_same, make_embedding, rows_in

ROWS, DIM = 16, 4
IDS = [2**60, 7, 2**60, 99, -5, 7, 7, 12345678901]
CPU = torch.device("cpu")


def mch(policy, rows=ROWS):
    return MCHManagedCollisionModule(rows, CPU, policy, eviction_interval=1)


def mpzch():
    return HashZchManagedCollisionModule(ROWS, CPU, total_num_buckets=2)


KINDS = {
    "lfu": lambda: mch(LFU_EvictionPolicy()),
    "lru": lambda: mch(LRU_EvictionPolicy()),
    "distance": lambda: mch(DistanceLFU_EvictionPolicy()),
    "mpzch": mpzch,
}


def collection(module, kind=EmbeddingBagConfig):
    config = kind(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f"])
    managed = ManagedCollisionCollection({"t": module}, [config])
    if kind is EmbeddingBagConfig:
        return ManagedCollisionEmbeddingBagCollection(
            torchrec.EmbeddingBagCollection(tables=[config]), managed, return_remapped_features=True
        )
    return ManagedCollisionEmbeddingCollection(
        torchrec.EmbeddingCollection(tables=[config]), managed, return_remapped_features=True
    )


def fill(model):
    """Train managed collisions with the ids. MPZCH gives ids rows only on a GPU, so its ids are put where TorchRec's
    lookup on a CPU looks for them first."""
    if hasattr(module := model._managed_collision_collection._managed_collision_modules["t"], "_mch_slots"):
        for _ in range(3):
            model(features(IDS))
    model.eval()
    for id in sorted(set(IDS)) if isinstance(module, HashZchManagedCollisionModule) else ():
        place = int(model(features([id]))[1]["f"].values())
        while module._hash_zch_identities[place] != -1:
            place = place // 8 * 8 + (place + 1) % 8  # each of two buckets has 8 rows
        module._hash_zch_identities[place] = id
    return model


def features(ids):
    return KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor(ids), torch.ones(len(ids), dtype=torch.long))


def weight_of(model):
    [weight] = [tensor for name, tensor in model.state_dict().items() if name.endswith("t.weight")]
    return weight


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
@pytest.mark.parametrize("managed", KINDS)
def test_each_id_has_the_row_that_torchrec_looks_up(tmp_path, managed, kind):
    torch.manual_seed(1)
    model = fill(collection(KINDS[managed](), kind))
    _, remapped = model(features(IDS))
    rows = dict(zip(IDS, weight_of(model)[remapped["f"].values()].detach().numpy(), strict=True))
    assert len({row.tobytes() for row in rows.values()}) == 5
    report = oneemb.import_foreign(tmp_path / "t", model.state_dict(), "torchrec", name="t", snapshot="s")
    assert_same(rows_in(tmp_path / "t", "s"), rows)
    assert report.rows == 5
    assert any("here each id has a row of its own" in one for one in report.not_carried)
    if managed in ("lfu", "lru"):
        assert any("give with_scores=True" in one for one in report.not_carried)


def test_counts_are_the_scores_of_a_policy(tmp_path):
    model = fill(collection(KINDS["lfu"]()))
    policy = oneemb.policies.RowPolicy(evict=oneemb.policies.LFU(), capacity=100)
    embedding = make_embedding(tmp_path / "e", DIM, policy=policy)
    report = oneemb.import_foreign(embedding, model.state_dict(), "torchrec", with_scores=True)
    scores = dict(zip(IDS, embedding.scores(torch.tensor(IDS)).tolist(), strict=True))
    module = model._managed_collision_collection._managed_collision_modules["t"]
    ids, counts = module._mch_sorted_raw_ids.tolist(), module._mch_counts.tolist()
    assert scores == {one: count for one, count in zip(ids, counts, strict=True) if one in IDS}
    assert scores[7] > scores[99] > 0
    assert report.scores == 5
    embedding.close()


def test_times_of_mpzch_are_the_scores_of_a_policy(tmp_path):
    model = fill(collection(mpzch()))
    state = model.state_dict()
    [name] = [name for name in state if name.endswith("_hash_zch_identities")]
    hours = torch.arange(100, 100 + ROWS, dtype=torch.int32).view(-1, 1)
    state[name.replace("identities", "metadata")] = hours
    policy = oneemb.policies.RowPolicy(evict=oneemb.policies.GivenScore(), capacity=100)
    embedding = make_embedding(tmp_path / "e", DIM, policy=policy)
    oneemb.import_foreign(embedding, state, "torchrec", with_scores=True)
    ids = state[name].flatten()
    used = ids != -1
    assert embedding.scores(ids[used]).tolist() == hours.flatten()[used].tolist()
    embedding.close()


@pytest.mark.parametrize("optimizer", ["rowwise", "adagrad", "adam"])
def test_the_state_of_fused_optimizers_comes_along_and_goes_back(tmp_path, optimizer):
    """State in TorchRec's names, under which the rows came in; its own sharded modules make them in test_sharding."""
    torch.manual_seed(2)
    plain = torchrec.EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f"])]
    )
    draws = torch.Generator().manual_seed(3)
    state = {
        "rowwise": {"t.momentum1": torch.rand(ROWS, generator=draws)},
        "adagrad": {"t.momentum1": torch.rand(ROWS, DIM, generator=draws)},
        "adam": {
            "t.momentum1": torch.rand(ROWS, DIM, generator=draws),
            "t.exp_avg_sq": torch.rand(ROWS, DIM, generator=draws),
            "t.step": torch.tensor(9.0),
        },
    }[optimizer]
    report = oneemb.import_foreign(
        tmp_path / "t", plain.state_dict(), "torchrec", name="t", state=state, with_state=True, snapshot="s"
    )
    assert report.optimizer == {"rowwise": "row_wise_adagrad"}.get(optimizer, optimizer)
    assert report.step == (9 if optimizer == "adam" else 1)
    columns = [weight_of(plain), *(value.view(ROWS, -1) for value in state.values() if value.dim())]
    assert_same(rows_in(tmp_path / "t", "s"), dict(enumerate(torch.cat(columns, 1).detach().numpy())))
    oneemb.export_foreign(
        tmp_path / "t", tmp_path / "out.safetensors", "torchrec", name="t", num_embeddings=ROWS, with_state=True,
        snapshot="s",
    )  # fmt: skip
    out = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert torch.equal(out.pop("embedding_bags.t.weight"), weight_of(plain))
    assert out.pop("optimizer.t.step") == report.step
    assert {name: value.tolist() for name, value in out.items()} == {
        f"optimizer.{name}": value.tolist() for name, value in state.items() if name != "t.step"
    }
    again = oneemb.import_foreign(
        tmp_path / "t2", tmp_path / "out.safetensors", "torchrec", state="optimizer", with_state=True, snapshot="s"
    )
    assert (again.optimizer, again.step) == (report.optimizer, report.step)
    assert_same(rows_in(tmp_path / "t2", "s"), rows_in(tmp_path / "t", "s"))


def test_rows_of_any_ids_go_out_to_managed_collisions_that_look_up_the_same(tmp_path):
    ids, weight = torch.tensor(sorted(set(IDS), reverse=True)), torch.randn(5, DIM)
    oneemb.import_foreign(tmp_path / "t", {"w": weight}, "torch", ids=ids, snapshot="s")
    options = {"name": "t", "managed_collisions": True, "snapshot": "s"}
    path = tmp_path / "out.safetensors"
    oneemb.export_foreign(tmp_path / "t", path, "torchrec", num_embeddings=ROWS, **options)
    model = collection(KINDS["lfu"]())
    left_out = model.load_state_dict(safetensors.torch.load_file(path), strict=False)
    assert not left_out.unexpected_keys
    model.eval()
    pooled, _ = model(features(ids.tolist()))
    assert torch.equal(pooled.values(), weight)
    oneemb.import_foreign(tmp_path / "t2", path, "torchrec", snapshot="s")
    assert_same(rows_in(tmp_path / "t2", "s"), rows_in(tmp_path / "t", "s"))
    with pytest.raises(ValueError, match="num_embeddings must be above 5"):
        oneemb.export_foreign(tmp_path / "t", path, "torchrec", num_embeddings=5, overwrite=True, **options)
    assert torch.equal(safetensors.torch.load_file(path)["_embedding_module.embedding_bags.t.weight"][:5].sort(0)[0],
                       weight.sort(0)[0])  # fmt: skip


def test_damaged_buffers_are_errors(tmp_path):
    model = collection(KINDS["lfu"]())
    model(features(IDS))
    prefix = "_managed_collision_collection._managed_collision_modules.t."
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, change, text in [
        ("_mch_remapped_ids_mapping", lambda tensor: tensor.fill_(3), "must have each row once"),
        ("_mch_sorted_raw_ids", lambda tensor: tensor[:9], r"must be integers \[16\]"),
        ("_mch_sorted_raw_ids", lambda tensor: tensor.fill_(4), "id 4 of row 1 comes a second time"),
        ("_mch_remapped_ids_mapping", lambda tensor: None, "must have the buffer _mch_remapped_ids_mapping"),
    ]:
        damaged = dict(whole)
        damaged[prefix + name] = change(whole[prefix + name].clone())
        if damaged[prefix + name] is None:
            del damaged[prefix + name]
        with pytest.raises(oneemb.StorageError, match=text):
            oneemb.import_foreign(tmp_path / "t", damaged, "torchrec", snapshot="s")
    with pytest.raises(oneemb.StorageError, match="must have table 'u' of TorchRec, and has 't'"):
        oneemb.import_foreign(tmp_path / "t", whole, "torchrec", name="u", snapshot="s")
    assert np.isfinite(next(iter(whole.values())).float().numpy()).all()
