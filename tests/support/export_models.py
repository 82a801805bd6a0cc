"""Graphs that are exported, one for each way of looking up, and what runs their programs without oneemb."""

import os
import subprocess
import sys

import torch

import oneemb

__all__ = ["LOOKUPS", "Click", "Score", "embedding_at", "run_alone", "train_rows", "trained_click"]

TABLES, DIM = 3, 6


def embedding_at(folder, name="clicks", tables=TABLES, dtype=torch.float32, dim=DIM, drawn=False, **options):
    """An embedding without rows.

    Args:
        drawn: whether rows begin with random numbers, of which a program has several hundred ops.
    """
    drawing = [oneemb.make_uniform_initializer(-1, 1), None, oneemb.make_constant_initializer(0.25)]
    initializers = drawing if drawn else [oneemb.make_constant_initializer(value) for value in (0.5, -1.5, 0.25)]
    made = [oneemb.make_table(initializers[t % 3]) for t in range(tables)]
    store = oneemb.make_device_mem_store_options(str(folder / name))
    return oneemb.MultiTableEmbedding(name, dim, dtype, torch.int64, made, store, padding_idx=5, **options)


def train_rows(embedding):
    """Give ids -40 to 39 rows, of weights that differ."""
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.arange(-40, 40).unsqueeze(1).expand(-1, embedding.num_tables)
    rows = embedding(ids).float()
    print("seed 3")
    (rows * torch.randn(rows.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    optimizer.step()


class Click(oneemb.TrainGraph):
    """A model of ids [B, T]."""

    def __init__(self, folder, **options):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = embedding_at(folder, **options)
        self.mlp = oneemb.nn.FusedMLP(TABLES * DIM, [8], 1, skip_final_activation=True)
        self.norm = torch.nn.BatchNorm1d(TABLES * DIM)
        self.drop = torch.nn.Dropout(0.5)
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.3))

    def build(self, ids, label):
        logit = self.mlp(self.drop(self.norm(self.embedding(ids).float().flatten(1)))).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss, logit


class Score(oneemb.EvalGraph):
    """The scores of a `Click`."""

    def __init__(self, click):
        super().__init__()
        self.embedding, self.mlp, self.norm = click.embedding, click.mlp, click.norm

    def build(self, ids):
        return self.mlp(self.norm(self.embedding(ids).float().flatten(1))).squeeze(1)


def trained_click(folder, steps=3, **options):
    """A `Click` after some steps."""
    graph, generator = Click(folder, **options), torch.Generator().manual_seed(1)
    for _ in range(steps):
        graph(torch.randint(-40, 40, (64, TABLES), generator=generator), torch.rand(64, generator=generator).round())
    return graph


def _bags(samples, seed, tables=TABLES):
    """ids [N], offsets [B * T + 1], some of them empty, and others of padding alone."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (samples * tables,), generator=generator)
    ids = torch.randint(-60, 60, (int(lengths.sum()),), generator=generator)
    ids[: int(lengths[:6].sum())] = 5
    return ids, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


class _Lookup(oneemb.EvalGraph):
    def __init__(self, embedding, look_up):
        super().__init__()
        self.embedding, self.look_up = embedding, look_up

    def build(self, *args):
        return self.look_up(self.embedding, *args)


def _graph(look_up, batch):
    return lambda embedding: _Lookup(embedding, look_up), batch


def _ids(samples, seed):
    return torch.randint(-60, 60, (samples, TABLES), generator=torch.Generator().manual_seed(seed))


def _weights(samples, seed):
    ids, offsets = _bags(samples, seed)
    return ids, offsets, torch.randn(len(ids), generator=torch.Generator().manual_seed(seed))


def _tables_of_bags(samples, seed):
    ids, offsets = _bags(samples, seed)
    return ids, offsets, torch.arange(len(offsets) - 1) % 2 * 2


LOOKUPS = {
    "ids": _graph(lambda e, ids: e(ids), lambda n, s: (_ids(n, s),)),
    "tables": _graph(lambda e, ids: e(ids, torch.tensor([2, 0, 2])), lambda n, s: (_ids(n, s),)),
    "tables of ids": _graph(lambda e, ids, t: e(ids, t), lambda n, s: (_ids(n, s), _ids(n, s + 1) % 3)),
    "one table": _graph(lambda e, ids: e(ids[:, 0], torch.tensor(1)), lambda n, s: (_ids(n, s),)),
    "read": _graph(lambda e, ids: e.read(ids), lambda n, s: (_ids(n, s),)),
    "sum": _graph(lambda e, ids, o: e(ids, offsets=o), _bags),
    "mean": _graph(lambda e, ids, o: e(ids, offsets=o, pooling="mean"), _bags),
    "max": _graph(lambda e, ids, o: e(ids, offsets=o, pooling="max"), _bags),
    "weighted": _graph(lambda e, ids, o, w: e(ids, offsets=o, per_sample_weights=w), _weights),
    "columns": _graph(lambda e, ids, o: e(ids, offsets=o, columns=[0, 1, 1]), _bags),
    "tables of bags": _graph(lambda e, ids, o, t: e(ids, t, o, pooling="mean"), _tables_of_bags),
}
"""By name: what makes a graph of an embedding, and what makes a batch of so many samples from a seed."""


def run_alone(folder, *programs):
    """What programs give in a process that cannot import oneemb or numba: (path, format, inputs) each."""
    torch.save([(str(path), format, list(inputs)) for path, format, inputs in programs], folder / "inputs.pt")
    code = """
import sys
sys.modules.update(oneemb=None, numba=None)  # an import of either fails
import torch
def load(path, format):
    if format == "export":
        return torch.export.load(path).module()
    if format == "torchscript":
        return torch.jit.load(path)
    return torch._inductor.aoti_load_package(path)
with torch.no_grad():
    found = [load(path, format)(*inputs) for path, format, inputs in torch.load("inputs.pt")]
torch.save(found, "outputs.pt")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=environment)
    return torch.load(folder / "outputs.pt")
