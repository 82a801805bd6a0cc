"""A small training job whose every number can be compared: embeddings, an MLP and an optimizer for both."""

import os
import signal
import sys

import torch

import oneemb
from tests.support.models import make_embedding, rows_of, zipf_ids
from tests.support.optimizers import OPTIMIZERS

TABLES, DIM, STEPS = 3, 8, 12


class Job:
    """Trains on the same batches wherever it runs: `run(begin, end)` gives the losses of those steps, as hex."""

    def __init__(self, folder, optimizer="adam", store="device", *, batch=64, ids=2000, **embedding):
        self.folder = folder
        self.batch_B = zipf_ids(batch, TABLES, STEPS, ids=ids)
        generator = torch.Generator().manual_seed(5)
        self.label_B = torch.randint(0, 2, self.batch_B.shape[:2], generator=generator).float()
        embedding = {"seed": 11, **embedding}
        self.embedding = make_embedding(f"{folder}/rows", store=store, tables=TABLES, dim=DIM, **embedding)
        torch.manual_seed(6)
        self.mlp = oneemb.nn.FusedMLP(TABLES * DIM, [16], 1, skip_final_activation=True)
        params = [*self.embedding.parameters(), *self.mlp.parameters()]
        self.optimizer = oneemb.Optimizer(OPTIMIZERS[optimizer](params), [self.embedding])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 3, 0.7)

    def run(self, begin, end):
        losses = []
        for ids, label in zip(self.batch_B[begin:end], self.label_B[begin:end], strict=True):
            logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item().hex())
        return losses

    def save(self):
        self.embedding.save_snapshot("resume")
        parts = (self.mlp, self.optimizer, self.scheduler)
        torch.save([part.state_dict() for part in parts], f"{self.folder}/dense.pt")

    def load(self):
        self.embedding.load_snapshot("resume")
        states = torch.load(f"{self.folder}/dense.pt", weights_only=False)
        for part, state in zip((self.mlp, self.optimizer, self.scheduler), states, strict=True):
            part.load_state_dict(state)

    def rows(self):
        """{(table, id): bytes of weights and state} of all known rows, by way of a snapshot."""
        self.embedding.save_snapshot("rows", overwrite=True)
        path = self.embedding.store_options.persistent_path
        with oneemb.make_persistent_table_reader(path, "rows", torch.int64, torch.float32, with_tables=True) as reader:
            return {
                (int(table), int(id)): row.tobytes()
                for table_N, id_N, row_NW in reader
                for table, id, row in zip(table_N, id_N, row_NW, strict=True)
            }

    def weights(self, ids):
        return [rows_of(self.embedding, ids, table) for table in range(TABLES)]


def _interrupted(folder, cases):
    """Train, save in the middle, train on and be killed, with every job in the process's hands."""
    jobs = [Job(f"{folder}/{name}-{store}", name, store) for name, store in cases]
    for job in jobs:
        job.run(0, STEPS // 2)
        job.save()
    for job in jobs:
        job.run(STEPS // 2, STEPS // 2 + 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(folder, cases):
    """What the uninterrupted job must have done too: losses after the snapshot, rows, dense weights."""
    results = {}
    for name, store in cases:
        job = Job(f"{folder}/{name}-{store}", name, store)
        job.load()
        losses = job.run(STEPS // 2, STEPS)
        results[name, store] = losses, job.rows(), job.mlp.state_dict()
    torch.save(results, f"{folder}/resumed.pt")


if __name__ == "__main__":
    _do, _folder, *_cases = sys.argv[1:]
    {"interrupted": _interrupted, "resumed": _resumed}[_do](_folder, [tuple(case.split("/")) for case in _cases])
