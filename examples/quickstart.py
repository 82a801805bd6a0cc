"""Three embedding tables and an MLP, trained as one graph. Ids may be any 64-bit integers: no vocabulary is made."""

import tempfile

import torch

import oneemb

torch.manual_seed(0)
path = tempfile.mkdtemp()
embedding = oneemb.MultiTableEmbedding(
    name="my_embedding",
    embedding_dim=16,
    dtype=torch.float32,
    key_type=torch.int64,
    tables=[oneemb.make_table(oneemb.make_uniform_initializer(low=-b, high=b)) for b in (0.1, 0.05, 0.15)],
    store_options=oneemb.make_cached_ssd_store_options(cache_budget_mb=64, persistent_path=path),
)


class TrainGraph(oneemb.TrainGraph):
    def __init__(self):
        super().__init__()
        self.embedding = embedding
        self.mlp = oneemb.nn.FusedMLP(3 * 16, [64, 32], 1, skip_final_activation=True)
        self.add_optimizer(torch.optim.SGD(self.embedding.parameters(), lr=1.0))
        self.add_optimizer(torch.optim.Adam(self.mlp.parameters(), lr=0.01))

    def build(self, ids, label):
        logit = self.mlp(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss


graph = TrainGraph()
known = torch.randint(-(2**63), 2**63 - 1, (3, 500))  # ids of each table
for step in range(101):
    ids = torch.stack([id_N[torch.randint(500, (256,))] for id_N in known], 1)
    loss = graph(ids, ((ids % 2).sum(1) >= 2).float())  # a click where most of the three ids are odd
    if step % 20 == 0:
        print(f"step {step:3}  loss {loss.item():.3f}  rows {embedding.stats()['rows']:,}")
embedding.save_snapshot("trained")
print(f"snapshot 'trained' is in {path}")
