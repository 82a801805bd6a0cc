"""A click model on several processes that own the rows together: trained, stopped, resumed on another number.

    torchrun --standalone --nproc-per-node 2 examples/several_ranks.py --epochs 2
    torchrun --standalone --nproc-per-node 3 examples/several_ranks.py --epochs 4    # goes on after epoch 2
    python examples/several_ranks.py --epochs 4                                      # one process, the same losses

Each epoch ends with a checkpoint, and a job begins after the last one that is in the folder.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import oneemb

TABLES, DIM, BATCH, STEPS = 3, 8, 240, 25  # BATCH: samples of all ranks together, divisible by 2, 3, 4 and 5


class Model(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.mlp = torch.nn.Sequential(torch.nn.Linear(TABLES * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, ids):
        return self.mlp(self.embedding(ids).flatten(1)).squeeze(1)


class Clicks(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, ids, clicked):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(ids), clicked)
        loss.backward()
        return loss.detach()


def batches(epoch, rank, ranks):
    """This rank's part of each batch of an epoch."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(STEPS):
        ids = torch.randint(0, 500, (BATCH, TABLES), generator=generator)
        clicked = ((ids % 2).sum(1) >= 2).float()  # a click where most of the three ids are odd
        own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        yield ids[own], clicked[own]


def train(folder, epochs, report=lambda epoch, loss: None):
    """Train on the ranks of the default process group, or alone, and call `report` after each epoch."""
    several = distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)
    embedding = oneemb.MultiTableEmbedding(
        "clicks", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
        oneemb.make_cached_ssd_store_options(cache_budget_mb=16, persistent_path=str(Path(folder) / "rows")),
        process_group=distributed.group.WORLD if several else None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model(embedding)
    graph = Clicks(DistributedDataParallel(model) if several else model)
    checkpoint, begin = Path(folder) / "checkpoint", 0
    if checkpoint.exists():
        graph.load(checkpoint)
        begin = embedding.stats()["step"] // STEPS
    for epoch in range(begin, epochs):
        losses = torch.stack(list(graph.run(batches(epoch, rank, ranks))))
        loss = losses.mean()
        if several:
            distributed.all_reduce(loss)
        graph.save(checkpoint, keep=2)
        report(epoch, loss.item() / ranks)
    embedding.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="several_ranks")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")

    def report(epoch, loss):
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.6f}  ranks {ranks}", flush=True)

    train(options.folder, options.epochs, report)
    if "RANK" in os.environ:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
