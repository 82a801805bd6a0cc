"""Tables without a model: what a step does to their rows is done to a dictionary too."""

import numpy as np
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from oneemb.adapters.tables import ranks_of_job
from oneemb.storage.remote.parameter_server import ServerError
from oneemb.storage.remote.servers import MemoryServer
from oneemb.tde import DataLoader, IDTransformerCollection, PSCollection
from oneemb.tde.steps import Steps
from oneemb.tde.traffic import ServerCalls

__all__ = ["FaultyServer", "Tables", "kjt_of"]

DIM = 2


class FaultyServer:
    """A server in memory, which fails when it is told to, and tells what it was asked."""

    def __init__(self):
        self.name, self.kept = "memory://faulty", {}
        self.server = MemoryServer(self.kept)
        self.fail, self.calls, self.before = set(), [], lambda call: None

    def _call(self, call, table, id_N):
        self.before(call)
        if "#" not in table:  # no row but how often one was pushed
            self.calls.append((call, id_N.tolist()))
        if call in self.fail:
            raise ServerError(f"{call} was told to fail")

    def pull(self, table, id_N, widths):
        self._call("pull", table, id_N)
        return self.server.pull(table, id_N, widths)

    def push(self, table, id_N, parts):
        self._call("push", table, id_N)
        self.server.push(table, id_N, parts)

    def close(self):
        pass


class Tables:
    """Two tables of one collection, weights and one state; `rows` is what every row must be."""

    def __init__(self, rows, monkeypatch, server=None):
        self.server = server or FaultyServer()
        monkeypatch.setattr("oneemb.tde.ps.open_server", lambda url: self.server)
        self.tensors = {name: [torch.rand(rows, DIM), torch.rand(rows)] for name in ("one", "two")}
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=features,
                weight_init_min=0.5, weight_init_max=0.5,
            )
            for name, features in [("one", ["f", "g"]), ("two", ["h"])]
        ]  # fmt: skip
        traffic = ServerCalls()
        places = PSCollection("ebc", {name: (None, its) for name, its in self.tensors.items()}, "a", traffic=traffic)
        self.collection = IDTransformerCollection(configs, ps_collection=places, reinitialise=True)
        self.steps = Steps({"ebc": self.collection}, ranks_of_job(), traffic)
        self.rows = {}

    def __contains__(self, path):
        return path == "ebc"

    def loader(self, batches, depth, **more):
        return DataLoader(self, batches, **({"paths": ["ebc"]} | more), num_prefetch=depth)

    def step(self, ids, cache, step):
        """What an optimizer would do with the rows of a batch; checks first that they are as they were left."""
        for feature in cache.keys():
            name = "two" if feature == "h" else "one"
            of_id = dict(zip(ids[feature].values().tolist(), cache[feature].values().tolist(), strict=True))
            for id, place in of_id.items():
                weight, state = (tensor[place] for tensor in self.tensors[name])
                want = self.rows.get((name, id), [0.5, 0.5, 0.0])
                assert [*weight.tolist(), float(state)] == want, (step, name, id, place)
                value = float(np.float32(step + id % 97 + 1))
                self.tensors[name][0][place] = value
                self.tensors[name][1][place] = -value
                self.rows[name, id] = [value, value, -value]


def kjt_of(f, g, h, **more):
    lengths = [len(f), len(g), len(h)]
    return KeyedJaggedTensor(
        keys=["f", "g", "h"],
        values=torch.tensor([*f, *g, *h], dtype=torch.int64),
        lengths=torch.tensor(lengths),
        **more,
    )
