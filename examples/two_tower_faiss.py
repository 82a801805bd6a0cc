# %% [markdown]
# # Two towers and a FAISS index
#
# You train vectors of users and films so that a user's films have large products with the user's vector. Then you put
# the films into a FAISS index, measure its recall beside brute force, and add a film that is new.
#
# ```
# pip install 'oneemb[examples]'
# ```
#
# You also need [zoo.py](../../examples/zoo.py) in your folder. The code of this page is
# [two_tower_faiss.py](../../examples/two_tower_faiss.py), which opens as a notebook, too.
#
# ## 1. Data from a known model
#
# 500 users and 1,000 films have a hidden taste. A user is shown 50 films and chooses one of them, most likely one of
# the same taste. As we know the tastes, we know the best AUC that any model can reach.

# %%
import faiss
import torch
from sklearn.metrics import roc_auc_score
from zoo import DIM, Twin, TwoTower

import oneemb

torch.manual_seed(0)
taste_of_user, taste_of_film = torch.randn(500, 4), torch.randn(1000, 4)
count = 100_000
user = torch.randint(500, (count,))
shown = torch.randint(1000, (count, 50))
likes = torch.einsum("nd,nsd->ns", taste_of_user[user], taste_of_film[shown])
film = shown[torch.arange(count), torch.distributions.Categorical(logits=likes).sample()]
users = oneemb.hash_ids([f"user-{n}" for n in range(500)])
films = oneemb.hash_ids([f"film-{n}" for n in range(1000)])
ids = torch.stack([users[user], films[film]], 1)
split = count * 4 // 5
PASSES = 3

# %% [markdown]
# ## 2. Model
#
# One embedding holds two tables. `TwoTower(rows, 2)` has an MLP for each.
#
# - **Store.** A folder on disk: a server reads the rows there when training has ended.
# - **Optimizer.** Adagrad, which moves no row whose gradient is zero. So the twin on `nn.Embedding`, which updates all
#   its rows at each step, trains by the same rule; sums of floats differ in their last bits, and the AUC in its third
#   digit. Adam would also move rows of the twin that the batch does not use.
# - **Rate.** 0.1, a third of the size of the first weights. A film is in some eighty clicks only, and Adagrad lowers
#   the rate by itself.


# %%
def make():
    store = oneemb.make_cached_ssd_store_options(64, "films_rows")
    tables = [oneemb.make_table(oneemb.make_normal_initializer(0.0, 0.3)) for _ in ("users", "films")]
    embedding = oneemb.MultiTableEmbedding("films", DIM, torch.float32, torch.int64, tables, store)
    torch.manual_seed(1)
    return embedding, TwoTower(embedding, 2)


embedding, model = make()
twin = TwoTower(Twin(embedding, ids), 2)
twin.user.load_state_dict(model.user.state_dict())
twin.item.load_state_dict(model.item.state_dict())

# %% [markdown]
# ## 3. Training
#
# The films of the other users in a batch are the negatives: a softmax over the batch needs no list of films. This is a
# plain loop with torch's own optimizer.


# %%
def train(model, ids, passes):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(passes)])
    for at in order.split(512):
        rows = model.rows(ids[at])
        scores = model.user(rows[:, 0]) @ model.item(rows[:, 1]).T
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(at)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


losses = [train(its, ids[:split], PASSES) for its in (model, twin)]
print(f"loss {losses[0]:.2f}, on nn.Embedding {losses[1]:.2f}, {len(embedding)} rows")

# %% [markdown]
# ## 4. AUC
#
# Can the model tell the film that a user chose from one drawn at random? The best AUC uses the hidden tastes.

# %%
test, random = slice(split, count), torch.randint(1000, (count - split,))
label = torch.cat([torch.ones(count - split), torch.zeros(count - split)])
candidates = torch.cat([ids[test], torch.stack([users[user[test]], films[random]], 1)])
hidden = [(taste_of_user[user[test]] * taste_of_film[its]).sum(1) for its in (film[test], random)]
with torch.no_grad():
    auc, of_twin = [roc_auc_score(label, its.eval()(candidates)) for its in (model, twin)]
print(f"AUC {auc:.3f}, on nn.Embedding {of_twin:.3f}, best {roc_auc_score(label, torch.cat(hidden)):.3f}")

# %% [markdown]
# ## 5. The index
#
# `embedding.ids(table)` lists the films that have a row, and `read` gives their rows in eval mode. An HNSW index needs
# no training of its own, and `IndexIDMap` keeps the ids that you already have.


# %%
def vectors_of(tower, ids, table):
    with torch.no_grad():
        return tower(embedding.read(ids, torch.tensor(table))).numpy()


known = embedding.ids(table=1)
vectors = vectors_of(model.item, known, 1)
neighbors = faiss.IndexHNSWFlat(16, 32, faiss.METRIC_INNER_PRODUCT)
neighbors.hnsw.efSearch = 256
index = faiss.IndexIDMap(neighbors)
index.add_with_ids(vectors, known.numpy())
exact = faiss.IndexIDMap(faiss.IndexFlatIP(16))
exact.add_with_ids(vectors, known.numpy())

queries = vectors_of(model.user, users[:500], 0)
for k in (10, 100):
    near, all_of_them = index.search(queries, k)[1], exact.search(queries, k)[1]
    recall = sum(len(set(a) & set(b)) for a, b in zip(near, all_of_them, strict=True)) / near.size
    print(f"recall@{k} {recall:.2f} of brute force")

# %% [markdown]
# `efSearch` is how many films a search keeps in sight: more of them raise the recall, and the time of a search. The
# default is 16, too few for the best 100.
#
# ## 6. New films, and unknown ones
#
# A film without a row reads as its first weights, which say nothing about it: ask `contains` before you index or
# recommend it. It gets a row when you train on its first clicks. Then add it to the index.

# %%
new = oneemb.hash_ids(["film-new"])
print("has a row:", embedding.contains(new, table=1).item())
fans = users[taste_of_user[:, 0].topk(100).indices]
embedding.detach_optimizer()  # the rows and their state go on with another optimizer object
model.train()
train(model, torch.stack([fans, new.expand(100)], 1), passes=1)
index.add_with_ids(vectors_of(model.item, new, 1), new.numpy())
print("has a row:", embedding.contains(new, table=1).item(), "films in the index:", index.ntotal)

# %% [markdown]
# Vectors of the other films change as you train on: section 8 has an index that follows them.
#
# ## 7. Save, resume, serve
#
# A snapshot holds all rows with their optimizer state. The towers go into a file of their own. Another process resumes
# from both; a server opens the folder without training.

# %%
embedding.save_snapshot("today")
torch.save({"user": model.user.state_dict(), "item": model.item.state_dict()}, "towers.pt")
embedding.close()  # in place of the end of the process

embedding, model = make()
embedding.load_snapshot("today")
towers = torch.load("towers.pt")
model.user.load_state_dict(towers["user"])
model.item.load_state_dict(towers["item"])
print(f"resumed with {len(embedding)} rows")

served = oneemb.InferenceEmbedding.open("films_rows", dtype="float16")
with torch.no_grad():
    vector = model.user(served(users[:1], torch.tensor(0)).float())
print("films for user-0:", len(index.search(vector.numpy(), 5)[1][0]), "from version", served.version.name)
served.close()

# %% [markdown]
# ## 8. An index that follows the job
#
# `oneemb.publish` brings each snapshot and delta into an index: new vectors for the films that were trained, and none
# for films that are gone. The index knows which version it shows, so a server can compare it with that of its rows. The
# towers stay as they are here. If they changed, all vectors would: then the job publishes a new index with each model.


# %%
def hnsw(vectors):
    made = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    made.hnsw.efSearch = 256
    return made


def tower(rows):
    with torch.no_grad():
        return model.item(torch.from_numpy(rows)).numpy()


model.user.requires_grad_(False)
model.item.requires_grad_(False)
followed = oneemb.sinks.Faiss("films_index", hnsw, table=1, vectors=tower)
with oneemb.publish("films_rows", [followed]) as publisher:
    publisher.flush()
    model.train()
    train(model, ids[split:], passes=1)
    embedding.save_delta("tomorrow", since="today")

films_now = embedding.ids(table=1)
exact = faiss.IndexIDMap(faiss.IndexFlatIP(16))
exact.add_with_ids(vectors_of(model.item, films_now, 1), films_now.numpy())
queries = vectors_of(model.user, users[:500], 0)
_, near, version = followed.search(queries, 10)
all_of_them = exact.search(queries, 10)[1]
of_followed = sum(len(set(a) & set(b)) for a, b in zip(near, all_of_them, strict=True)) / near.size
print(f"version {version.name}: recall@10 {of_followed:.2f} of brute force")
embedding.close()

# %% [markdown]
# [Publish](../publish.md) has other sinks, and what happens when one fails.
#
# ## Next
#
# - [Serving](../serving.md): a server that follows the job.
# - [Policies](../policies.md): films that nobody has clicked for a month lose their row.
# - [DeepFM on flights](deepfm.md), [SASRec on flights](sasrec.md).
