"""Names and tools that releases of TorchRec after the pinned one brought."""

import pytest
import torch
import torchrec
from torchrec import EmbeddingBagConfig, EmbeddingConfig

import oneemb.torchrec


@pytest.mark.parametrize("name", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_a_collection_has_the_methods_that_the_installed_torchrec_has(name):
    theirs, ours = ({m for m in dir(getattr(one, name)) if m[0] != "_"} for one in (torchrec, oneemb.torchrec))
    assert theirs <= ours


def test_a_choice_of_kernels_is_kept_and_changes_nothing():
    configs = [EmbeddingConfig(name="s", embedding_dim=4, num_embeddings=9, feature_names=["f"])]
    collection = oneemb.torchrec.EmbeddingCollection(tables=configs)
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([3, 8, 3]), torch.tensor([2, 1]))
    before = collection(features)["f"].values()
    assert collection.use_sorted_select() is False
    collection.set_use_sorted_select(True)
    assert collection.use_sorted_select() is True and torch.equal(collection(features)["f"].values(), before)


@pytest.mark.parametrize("library", [oneemb.torchrec, torchrec], ids=["oneemb's modules", "TorchRec's modules"])
@pytest.mark.parametrize("rows", [1000, 2**40])
def test_a_dry_run_plans_a_model_with_collections(library, rows):
    dry_run = pytest.importorskip("torchrec.distributed.planner.dry_run", reason="TorchRec 1.9 brought it")
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.types import PlannerSessionContext, TrainingFramework

    meta = torch.device("meta")
    bags = [EmbeddingBagConfig(name="t", embedding_dim=16, num_embeddings=rows, feature_names=["f"])]
    sequences = [EmbeddingConfig(name="s", embedding_dim=16, num_embeddings=rows, feature_names=["g"])]
    model = torch.nn.Sequential(
        library.EmbeddingBagCollection(tables=bags, device=meta),
        library.EmbeddingCollection(tables=sequences, device=meta),
    )
    request = dry_run.DryRunRequest(
        model=model,
        sharders=oneemb.torchrec.get_default_sharders(),
        sku_list=["SKU"],
        training_framework=TrainingFramework("apf"),
        world_size=2,
        local_world_size=2,
        batch_size=64,
    )
    context = PlannerSessionContext(request=request, results={})
    (result,) = dry_run.DryRunOrchestrator(DefaultPlannerExecutor()).plan(request, context).values()
    assert result.success, result.planner_failure_reason
    assert result.sharding_plan.plan["0"].keys() == {"t"} and result.sharding_plan.plan["1"].keys() == {"s"}
