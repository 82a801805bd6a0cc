"""Ranks that own rows together and keep them on a GPU: what they look up and train is what they would on the host."""

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

import oneemb
from tests.cuda.conftest import SIMULATED
from tests.cuda.test_train import on_gpu
from tests.support.optimizers import OPTIMIZERS

DIM, RANKS, STEPS = 8, 2, 2
WAYS = ["ids", "mean", "weighted", "max"]


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    size_P = torch.randint(0, 30, (4,), generator=generator)
    ids = torch.randint(0, 200, (int(size_P.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), size_P.cumsum(0)])
    return ids, offsets, torch.rand(len(ids), generator=generator)


def on_threads(function, *args):
    """What a function of a process group gives on each rank, all in this process."""
    store = distributed.HashStore()

    def call(rank):
        return function(distributed.ProcessGroupGloo(store, rank, RANKS, datetime.timedelta(seconds=60)), *args)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(call, range(RANKS)))


def trains(group, path, way, gpu):
    embedding = oneemb.MultiTableEmbedding(
        "items", DIM, torch.float32, torch.int64, [oneemb.make_table()],
        oneemb.make_device_mem_store_options(path), num_threads=1, process_group=group, padding_idx=3,
    )  # fmt: skip
    optimizer = OPTIMIZERS["adagrad"](embedding.parameters())
    device = torch.device("cpu") if gpu is None or SIMULATED else gpu.device
    if gpu is not None and SIMULATED:
        embedding.store.form.move_to(torch.device("cuda"))
    else:
        embedding.to(device)
    found = []
    for step in range(STEPS):
        ids, offsets, weights = (one.to(device) for one in batch_of(step, group.rank()))
        if way == "ids":
            rows = embedding(ids)
        else:
            scales = weights if way == "weighted" else None
            rows = embedding(ids, None, offsets, scales, way if way in ("mean", "max") else "sum")
        rows.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(rows.detach().cpu())
    found.append(embedding.eval()(torch.arange(200, device=device)).detach().cpu())
    embedding.close()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_ranks_on_a_gpu_train_as_on_the_host(gpu, tmp_path, way):
    on_host = on_threads(trains, str(tmp_path / "host"), way, None)
    with on_gpu(gpu):
        there = on_threads(trains, str(tmp_path / "gpu"), way, gpu)
    for its, expected in zip(there, on_host, strict=True):
        for rows, expected_rows in zip(its, expected, strict=True):
            torch.testing.assert_close(rows, expected_rows, rtol=1e-5, atol=1e-6)
