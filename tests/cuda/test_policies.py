"""Rows leave a GPU's store as they leave one on the host."""

import contextlib

import pytest
import torch

import oneemb
from oneemb.policies import LFU, LRU, AdmitAfter, RowPolicy
from tests.cuda.test_train import on_gpu


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("admit", [None, AdmitAfter(2)], ids=["all", "seen twice"])
@pytest.mark.parametrize("evict", [LRU(), LFU()], ids=str)
def test_the_same_rows_come_and_leave_on_a_gpu(gpu, tmp_path, store, evict, admit):
    found = []
    for place in ("host", "gpu"):
        path = tmp_path / place
        options = (
            oneemb.make_device_mem_store_options(path, capacity=30)
            if store == "device"
            else oneemb.make_cached_host_mem_store_options(1, path, capacity=30)
        )
        embedding = oneemb.MultiTableEmbedding(
            "rows", 4, torch.float32, torch.int64, [oneemb.make_table()], options,
            oneemb.make_constant_initializer(1.0),
            policy=RowPolicy(
                evict, expire_after_steps=4, sweep_steps=2, admit=admit, absent="zeros" if admit else "initial"
            ),
        )  # fmt: skip
        with on_gpu(gpu, embedding) if place == "gpu" else contextlib.nullcontext():
            found.append(what_happens(embedding))
        embedding.close()
    assert found[0] == found[1]


def what_happens(embedding):
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.25)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(8):
        its = (torch.rand(16, generator=generator) ** 2 * 60).long().to(embedding.weight.device)
        optimizer.zero_grad()
        loss = embedding(its).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scores = embedding.scores(torch.arange(60)).tolist()
    assert embedding.set_scores(torch.arange(60), torch.arange(60)) == sum(score > 0 for score in scores)
    embedding.save_snapshot("all")
    embedding.load_snapshot("all")
    embedding.erase(torch.arange(40, 45))
    embedding.save_delta("less", "all")
    embedding.load_snapshot("less")
    embedding.eval()
    read = embedding(torch.arange(60).to(embedding.weight.device)).cpu().tolist()
    embedding.train()
    stats = embedding.stats()
    left, rows, refused = stats["policy"]["left"], stats["rows"], stats["policy"].get("refused")
    assert stats["device"]["pinned"] == 0
    later = embedding.scores(torch.arange(60)).tolist()
    assert embedding.erase(torch.arange(10)) == sum(score > 0 for score in scores[:10])
    return losses, scores, read, later, left, rows, refused, embedding.evict(), embedding.stats()["rows"]
