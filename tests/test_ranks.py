"""Several ranks that own rows together train as one process does on all of their batches together."""

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import oneemb

TABLES, DIM, BATCH, IDS = 2, 4, 6, 40

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rowwise_adagrad": lambda parameters: oneemb.optim.RowWiseAdagrad(parameters, lr=0.1),
    "ftrl": lambda parameters: oneemb.optim.Ftrl(parameters, lr=0.1),
}

LOOKUPS = ["plain", "sum", "mean", "max", "weighted"]


def batch_of(step, rank, ranks):
    """The part of a step's batch that a rank has; all have as many samples."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(-IDS, IDS, (BATCH * 12, TABLES, 3), generator=generator) * (2**56)
    label, scale = torch.rand(BATCH * 12, generator=generator), torch.rand(ids.shape, generator=generator)
    own = slice(rank * len(ids) // ranks, (rank + 1) * len(ids) // ranks)
    return ids[own], label[own], scale[own]


class Model(torch.nn.Module):
    def __init__(self, path, how, store, group):
        super().__init__()
        torch.manual_seed(0)
        options = {
            "device": lambda: oneemb.make_device_mem_store_options(path),
            "ssd": lambda: oneemb.make_cached_ssd_store_options(1, path),
        }[store]()
        self.how = how
        self.embedding = oneemb.MultiTableEmbedding(
            "items", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES, options, num_threads=1,
            process_group=group,
        )  # fmt: skip
        self.dense = torch.nn.Sequential(torch.nn.Linear(TABLES * DIM, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        if group is not None:
            self.dense = DistributedDataParallel(self.dense, process_group=group)

    def loss(self, ids, label, scale):
        if self.how == "plain":
            rows = self.embedding(ids[..., 0])
        else:
            offsets = torch.arange(0, ids.numel() + 1, ids.shape[2])
            weights = scale.flatten() if self.how == "weighted" else None
            pooling = "sum" if self.how == "weighted" else self.how
            rows = self.embedding(ids.flatten(), offsets=offsets, per_sample_weights=weights, pooling=pooling)
        return torch.nn.functional.mse_loss(self.dense(rows.flatten(1)).squeeze(1), label)


def weights_of(embedding):
    """The weights of all ids there may be."""
    ids = torch.arange(-IDS, IDS) * (2**56)
    embedding.eval()
    rows = embedding(ids[:, None].expand(-1, TABLES))
    embedding.train()
    return rows.detach().numpy()


def train(group, path, how, optimizer, store="device", steps=30, accumulated=1, clip=None, joined=False):
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    model = Model(path, how, store, group)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if joined:
        optimizer = oneemb.Optimizer(optimizer)
    losses = []
    for step in range(steps):
        loss = model.loss(*batch_of(step, rank, ranks))
        (loss / accumulated).backward()
        losses.append(loss.item())
        if step % accumulated == accumulated - 1:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), *clip)
            optimizer.step()
            optimizer.zero_grad()
    stats = model.embedding.stats()
    rows = model.embedding.store.rows if hasattr(model.embedding.store, "rows") else stats["rows"]
    dense = torch.cat([parameter.detach().flatten() for parameter in model.dense.parameters()]).numpy()
    result = losses, weights_of(model.embedding), dense, (rows, stats["step"], stats["device"]["pinned"])
    model.embedding.close()
    return result


def check_equal_to_one(results, alone):
    losses, weights, dense, (rows, steps, _) = alone
    np.testing.assert_allclose(np.mean([result[0] for result in results], axis=0), losses, rtol=1e-6)
    for _, its_weights, its_dense, (_, its_steps, pinned) in results:
        # Adam and the like divide a gradient by its size: the rounding of one that is nearly 0 grows.
        assert relative(its_weights, weights) < 5e-6
        assert relative(its_dense, dense) < 5e-6
        assert its_steps == steps and pinned == 0
    assert sum(result[3][0] for result in results) == rows
    if len(results) > 1:
        assert all(0 < result[3][0] < rows for result in results)


def relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("how", LOOKUPS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_equal_one_process(tmp_path, rank_pool, ranks, how):
    results = rank_pool(ranks, train, str(tmp_path / "ranks"), how, "adagrad")
    check_equal_to_one(results, train(None, str(tmp_path / "one"), how, "adagrad"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_every_optimizer(tmp_path, rank_pool, optimizer):
    results = rank_pool(4, train, str(tmp_path / "ranks"), "plain", optimizer)
    check_equal_to_one(results, train(None, str(tmp_path / "one"), "plain", optimizer))


@pytest.mark.parametrize(
    "options", [{"accumulated": 3}, {"clip": (0.05,)}, {"clip": (0.02, float("inf"))}, {"joined": True, "clip": (0.1,)}]
)
def test_with_accumulation_and_clipping(tmp_path, rank_pool, options):
    results = rank_pool(2, _train_with, str(tmp_path / "ranks"), options)
    check_equal_to_one(results, train(None, str(tmp_path / "one"), "mean", "adam", **options))


def _train_with(group, path, options):
    return train(group, path, "mean", "adam", **options)


def test_stores_and_runs_change_no_bit(tmp_path, rank_pool):
    first, *others = [
        rank_pool(2, train, str(tmp_path / f"{i}"), "weighted", "adam", store)
        for i, store in enumerate(("device", "device", "ssd"))
    ]
    for other in others:
        for (losses, weights, dense, _), (its_losses, its_weights, its_dense, _) in zip(first, other, strict=True):
            assert losses == its_losses
            assert weights.tobytes() == its_weights.tobytes() and dense.tobytes() == its_dense.tobytes()
