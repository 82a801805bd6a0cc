"""TorchRec's introduction, step by step on a CPU, with oneemb's collections in place of TorchRec's.

    python examples/torchrec_tutorial.py

Where the introduction hashes ids into a table, this one looks them up as they are.
"""

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.ao import quantization
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter

from oneemb.torchrec import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    QuantEmbeddingBagCollection,
    shard_quant_model,
)

torch.manual_seed(0)

# ---- Modules and data types ------------------------------------------------------------------------------------------

ebc = EmbeddingBagCollection(
    device="cpu",
    tables=[
        torchrec.EmbeddingBagConfig(
            name=f"{feature}_table", embedding_dim=64, num_embeddings=4096, feature_names=[feature],
            pooling=torchrec.PoolingType.SUM,
        )
        for feature in ("product", "user")
    ],
)  # fmt: skip
print(ebc.embedding_bags)

# A JaggedTensor is the ids of one feature: so many in each example. A KeyedJaggedTensor has several features.
product = JaggedTensor(values=torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1]))
user = JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2]))
print("products of each example:", [ids.tolist() for ids in product.to_dense()])
kjt = KeyedJaggedTensor.from_jt_dict({"product": product, "user": user})
print("keys:", kjt.keys(), "lengths:", kjt.lengths().tolist(), "offsets:", kjt.offsets().tolist())

pooled = ebc(kjt)
print("pooled embeddings:", pooled.keys(), tuple(pooled.values().shape))

# Any int64 is an id: nothing is hashed, nothing collides, and the table grows.
met = KeyedJaggedTensor(["product", "user"], torch.tensor([-7, 2**62, 5, 6]), lengths=torch.tensor([1, 1, 1, 1]))
rows: Any = ebc.rows[0]  # the embedding under both tables, which are alike
before = rows.stats()["rows"]
ebc(met)
print("rows before and after two ids that no table of 4096 rows has:", before, rows.stats()["rows"])

# ---- Sharding --------------------------------------------------------------------------------------------------------

if not dist.is_initialized():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
ranks = dist.GroupMember.WORLD
env = ShardingEnv.from_process_group(ranks)

# A new collection: what lives on ranks begins without rows if it is made on the meta device, and grows.
ebc = EmbeddingBagCollection(ebc.embedding_bag_configs())
sharder = EmbeddingBagCollectionSharder()
planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
plan = planner.collective_plan(ebc, [sharder], ranks)
print(plan)

sharded_ebc = sharder.shard(ebc, plan.plan[""], env, torch.device("cpu"))
output = sharded_ebc(kjt)
print("a sharded module gives an awaitable:", type(output).__name__)
for key, embedding in output.wait().to_dict().items():
    print(key, tuple(embedding.shape))

# DistributedModelParallel does all of that to the collections of a model.
model = DistributedModelParallel(copy.deepcopy(ebc), device=torch.device("cpu"))
print("the same numbers:", torch.equal(model(kjt).wait().values(), output.wait().values()))

# ---- Optimizers ------------------------------------------------------------------------------------------------------

# Rows are updated in the backward pass, by the optimizer of the sharder ...
fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 0.002}
sharder_with_fused_params = EmbeddingBagCollectionSharder(fused_params=fused_params)
sharded_with_fused_params = sharder_with_fused_params.shard(ebc, plan.plan[""], env, torch.device("cpu"))
rate, other_rate = (
    sharded.fused_optimizer.param_groups[0]["lr"] for sharded in (sharded_ebc, sharded_with_fused_params)
)
print(f"rates: {rate} of the first sharded module, {other_rate} with fused_params")

# ... or by one that the parameters were given before.
with_optimizer = copy.deepcopy(ebc)
for parameter in with_optimizer.parameters():
    apply_optimizer_in_backward(torch.optim.Adam, [parameter], {"lr": 0.5})  # Adam on a CPU
sharded_with_adam = sharder.shard(with_optimizer, plan.plan[""], env, torch.device("cpu"))
print("rate by apply_optimizer_in_backward:", sharded_with_adam.fused_optimizer.param_groups[0]["lr"])

others = dict(in_backward_optimizer_filter(sharded_with_fused_params.named_parameters()))
print("parameters that no optimizer steps in the backward pass:", list(others))

losses = []
for _ in range(3):
    values = sharded_with_fused_params(kjt).wait().values()
    loss = torch.sum(torch.ones_like(values) - values)
    loss.backward()  # No step follows.
    losses.append(loss.item())
print("losses:", [round(loss, 2) for loss in losses])
dist.destroy_process_group()

# ---- Inference -------------------------------------------------------------------------------------------------------


class InferenceModule(torch.nn.Module):
    def __init__(self, ebc: torch.nn.Module):
        super().__init__()
        self.ebc_ = ebc

    def forward(self, kjt: KeyedJaggedTensor) -> torchrec.KeyedTensor:
        pooled: torchrec.KeyedTensor = self.ebc_(kjt)
        return pooled


# The rows of both ids that no table of 4096 rows has, too: what is trained is what is served.
trained = EmbeddingBagCollection(ebc.embedding_bag_configs())
trained(met)
module = InferenceModule(trained)
for name, parameter in module.named_parameters():
    print(name, tuple(parameter.shape), parameter.dtype)

# Quantization: 8 bits a weight, by torch's own tool.
qconfig = QuantConfig(
    activation=quantization.PlaceholderObserver.with_args(dtype=torch.float),
    weight=quantization.PlaceholderObserver.with_args(dtype=torch.int8),
)
qebc = quantization.quantize_dynamic(
    module, qconfig_spec={EmbeddingBagCollection: qconfig},
    mapping={EmbeddingBagCollection: QuantEmbeddingBagCollection}, inplace=False,
)  # fmt: skip
print(f"quantized: {qebc}")
for name, buffer in qebc.state_dict().items():
    print(name, tuple(buffer.shape), buffer.dtype)
error = (qebc(kjt).values() - module.eval()(kjt).values()).abs().max().item()
print(f"largest error of a sum: {error:.5f}")

# Sharding: each row is on one of two devices, both of which are the CPU here.
sharded_qebc, _ = shard_quant_model(copy.deepcopy(qebc), world_size=2, compute_device="cpu", sharding_device="cpu")
print("sharded, the same bits:", torch.equal(sharded_qebc(kjt).values(), qebc(kjt).values()))
print("also of ids that no table of 4096 rows has:", torch.equal(sharded_qebc(met).values(), qebc(met).values()))

# Compilation: a program that needs neither Python nor this library.
graph = Tracer(leaf_modules=["FrozenRows"]).trace(sharded_qebc)  # what looks rows up stays one module
graph_module = torch.fx.GraphModule(sharded_qebc, graph)
print(graph_module.code)
scripted = torch.jit.script(graph_module)
path = f"{tempfile.mkdtemp()}/model.pt"
scripted.save(path)
print("scripted, saved and loaded, the same bits:", torch.equal(torch.jit.load(path)(kjt).values(), qebc(kjt).values()))
