"""A small DLRM of TorchRec's, with full static tables or, through `oneemb.tde`, with a few rows of them."""

from dataclasses import dataclass

import numpy as np
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM, DLRMTrain

from oneemb import tde
from oneemb.tde.ps import PS

PATH = "model.sparse_arch.embedding_bag_collection"
VOCABULARY, ROWS, DIM, SAMPLES, DENSE = 400, 20, 8, 4, 3
TABLES = {"one": ["f", "g"], "two": ["h"]}
FEATURES = ["f", "g", "h"]

# Whoever mixes up ids that are equal modulo 2^32, or loses those below 0, trains other rows.
ID_V = np.concatenate(
    [
        np.array([0, -1, 2**32, 2**63 - 1, -(2**63), -(2**32)]),
        np.arange(1, VOCABULARY // 2 - 2),
        np.arange(1, VOCABULARY // 2 - 2) + 2**32,
    ]
)[:VOCABULARY].astype(np.int64)
assert len(np.unique(ID_V)) == VOCABULARY


class _Bags(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type):
        return ["table_wise", "row_wise", "data_parallel", "column_wise"]


class _Ids(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type):
        return ["table_wise", "row_wise", "data_parallel"]


def sharded(module, group, sharding="row_wise", optimizer=EmbOptimType.EXACT_SGD, lr=0.5, names=TABLES, **more):
    """A module that TorchRec has sharded on the CPU, every table alike."""
    fused = {"optimizer": optimizer, "learning_rate": lr, "eps": 1e-6}
    sharders = [_Bags(fused_params=fused), _Ids(fused_params=fused)]
    kernel = "dense" if sharding == "data_parallel" else "fused"
    how = ParameterConstraints(sharding_types=[sharding], compute_kernels=[kernel], **more)
    topology = Topology(world_size=group.size(), compute_device="cpu", local_world_size=group.size())
    planner = EmbeddingShardingPlanner(topology=topology, constraints=dict.fromkeys(names, how))
    plan = planner.collective_plan(module, sharders, group)
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(module, env=env, plan=plan, sharders=sharders, device=torch.device("cpu"))


def configs_of(rows, **more):
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=list(features), **more)
        for name, features in TABLES.items()
    ]


def dlrm(rows):
    torch.manual_seed(1)
    bags = torchrec.EmbeddingBagCollection(tables=configs_of(rows), device=torch.device("meta"))
    torch.manual_seed(2)
    return DLRMTrain(DLRM(bags, dense_in_features=DENSE, dense_arch_layer_sizes=[6, DIM], over_arch_layer_sizes=[5, 1]))


class Samples:
    """What a loader of one rank gives: dense features, jagged ids, labels."""

    def __init__(self, steps, group, ids=True):
        self.steps, self.group, self.ids = steps, group, ids

    def __len__(self):
        return self.steps

    def __iter__(self):
        samples = SAMPLES // self.group.size()
        for step in range(self.steps):
            rng = np.random.default_rng([step, self.group.rank()])
            lengths = rng.integers(0, 3, (len(FEATURES), samples))
            # Some are frequent, most are seen once or twice.
            index = np.minimum(rng.zipf(1.3, lengths.sum()), VOCABULARY) - 1
            index = np.where(rng.random(len(index)) < 0.5, rng.integers(0, VOCABULARY, len(index)), index)
            values = torch.from_numpy(ID_V[index] if self.ids else index)
            kjt = KeyedJaggedTensor(keys=FEATURES, values=values, lengths=torch.from_numpy(lengths.reshape(-1)))
            dense = torch.from_numpy(rng.standard_normal((samples, DENSE)).astype(np.float32))
            yield Batch(dense, kjt, torch.from_numpy(rng.integers(0, 2, samples)))


@dataclass
class Batch:
    """What DLRMTrain takes."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def table_optimizers(model, kind):
    """The user's optimizers of tables: those of data-parallel ones."""
    tables = [its for name, its in model.named_parameters() if PATH in name]
    if kind == "torch's adagrad":
        return [torch.optim.Adagrad(tables, lr=0.5, initial_accumulator_value=0.01)]
    return [tde.RowAdam(tables, lr=0.05)] if kind == "adam" else []


def train(model, batches, optimizers):
    dense = torch.optim.SGD([its for name, its in model.named_parameters() if PATH not in name], lr=0.1)
    losses = []
    for batch in batches:
        for optimizer in [dense, *optimizers]:
            optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        for optimizer in [dense, *optimizers]:
            optimizer.step()
        losses.append(loss.item())
    return losses


def begin_as_tde(model):
    """Let full tables begin with the weights with which `oneemb.tde` begins rows."""
    bags = model.module.model.sparse_arch.embedding_bag_collection
    for key, tensor in bags.state_dict().items():
        table = key.split(".")[1]
        bound = ROWS**-0.5  # what TorchRec takes for tables of so many rows
        ps = PS(f"{PATH}.{table}", [tensor], "memory://begin")
        pairs = torch.from_numpy(np.stack([ID_V, np.arange(VOCABULARY)], 1))
        ps.fetch(pairs, 0, True, bound, -bound).wait()


def rows_of(model):
    """The weights of full tables, where this rank has them: {(table, row): weights}."""
    found = {}
    for key, tensor in model.module.model.sparse_arch.embedding_bag_collection.state_dict().items():
        shards = tensor.local_shards() if hasattr(tensor, "local_shards") else None
        parts = [(0, tensor)] if shards is None else [(its.metadata.shard_offsets[0], its.tensor) for its in shards]
        for begin, rows in parts:
            for row, weights in enumerate(rows.detach().numpy().copy()):
                found[key.split(".")[1], begin + row] = weights
    return found
