"""Four recommenders as small modules: two-tower, DCN, DeepFM, SASRec; each beside its twin on torch.nn.Embedding.

    python examples/zoo.py                # all four: AUC on rows that grow with the ids, AUC of the twin
    python examples/zoo.py deepfm --steps 500

A model gets its rows from a module that maps ids [B, F] to [B, F, D]. That is an `oneemb.MultiTableEmbedding`, which
takes any 64-bit id; or a `Twin`, a table of torch with the same first rows, which needs the list of all ids beforehand.
"""

import argparse

import torch

import oneemb

DIM = 16
Tensors = tuple[torch.Tensor, ...]


def mlp(*widths: int) -> torch.nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    layers: list[torch.nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class TwoTower(torch.nn.Module):
    """Scores are products of a user's vector and an item's, so that items can be found by an index of vectors."""

    def __init__(self, rows: torch.nn.Module, fields: int):
        super().__init__()
        self.rows, self.of_user = rows, fields // 2
        self.user, self.item = mlp(self.of_user * DIM, 32, 16), mlp((fields - self.of_user) * DIM, 32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        user, item = self.user(rows[:, : self.of_user].flatten(1)), self.item(rows[:, self.of_user :].flatten(1))
        return (user * item).sum(-1)


class DCN(torch.nn.Module):
    """Deep & Cross Network, version 2: x' = x0 * (W x + b) + x, beside an MLP. Wang et al., WWW 2021."""

    def __init__(self, rows: torch.nn.Module, fields: int):
        super().__init__()
        width = fields * DIM
        self.rows, self.cross = rows, torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.deep, self.score = mlp(width, 32, 16), torch.nn.Linear(width + 16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = crossed = self.rows(ids).flatten(1)
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        scores: torch.Tensor = self.score(torch.cat([crossed, self.deep(first)], 1)).squeeze(1)
        return scores


class DeepFM(torch.nn.Module):
    """A factorization machine and an MLP on the same rows; the last weight of a row is its field's linear term.
    Guo et al., IJCAI 2017."""

    def __init__(self, rows: torch.nn.Module, fields: int):
        super().__init__()
        self.rows, self.deep = rows, mlp(fields * (DIM - 1), 32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        factors, linear = self.rows(ids).split([DIM - 1, 1], -1)
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(-1) / 2
        scores: torch.Tensor = linear.sum((1, 2)) + pairs + self.deep(factors.flatten(1)).squeeze(1)
        return scores


class SASRec(torch.nn.Module):
    """Self-attention over the items before; the last id is the candidate. Kang, McAuley, ICDM 2018."""

    def __init__(self, rows: torch.nn.Module, fields: int):
        super().__init__()
        self.rows, self.place = rows, torch.nn.Parameter(torch.zeros(fields - 1, DIM))
        self.layer = torch.nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(fields - 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        seen = self.layer(rows[:, :-1] + self.place, self.mask, is_causal=True)
        scores: torch.Tensor = (seen[:, -1] * rows[:, -1]).sum(-1) * 4
        return scores


class Twin(torch.nn.Module):
    """A table of torch for a list of ids that is complete, with the first rows of an embedding."""

    def __init__(self, embedding: oneemb.MultiTableEmbedding, ids: torch.Tensor):
        super().__init__()
        fields = (
            torch.arange(ids.shape[1]) if embedding.num_tables > 1 else torch.zeros(ids.shape[1], dtype=torch.int64)
        )
        self.keys, self.fields = torch.unique(ids + fields), fields  # ids are multiples of 8: keys of fields differ
        self.table = torch.nn.Embedding.from_pretrained(embedding.read(self.keys & -8, self.keys & 7), freeze=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(torch.searchsorted(self.keys, ids + self.fields))
        return rows


def clicks(count: int) -> Tensors:
    """Ids [count, 4] of user, country, item and category, and whether the item was clicked: tastes meet categories."""
    user, item = torch.randint(400, (count,)), torch.randint(300, (count,))
    taste, quality = torch.randn(400, 10), torch.randn(300) / 2
    logit = 1.5 * taste[user, item % 10] + quality[item] - 0.5
    ids = torch.stack([user * 7919, user % 20, item * 104729 - 1000, item % 10], 1)
    return ids * 8, torch.bernoulli(logit.sigmoid())


def walks(count: int) -> Tensors:
    """Ids [count, 9] of eight items of a walk and a candidate, and whether the candidate was the walk's next item."""
    item, items = torch.randint(200, (count,)), []
    for _ in range(9):
        items.append(item)
        item = (item + torch.randint(1, 6, (count,))) % 200  # The next item is near the last one.
    label = torch.bernoulli(torch.full((count,), 0.5))
    items[-1] = torch.where(label == 1, items[-1], torch.randint(200, (count,)))
    return torch.stack(items, 1) * 7919 * 8, label


MODELS = {"two_tower": (TwoTower, clicks), "dcn": (DCN, clicks), "deepfm": (DeepFM, clicks), "sasrec": (SASRec, walks)}


def train(model: torch.nn.Module, ids: torch.Tensor, label: torch.Tensor, steps: int) -> float:
    """AUC on the last fifth of the log, after so many steps on the others."""
    optimizer, split = torch.optim.Adagrad(model.parameters(), lr=0.05), len(ids) * 4 // 5
    for step in range(steps):
        at = torch.arange(step * 256, step * 256 + 256) % split
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids[at]), label[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        score = model.eval()(ids[split:])
    rank, clicked = score.argsort().argsort().double() + 1, label[split:] == 1
    n = int(clicked.sum())
    return float((rank[clicked].sum() - n * (n + 1) / 2) / (n * (len(rank) - n)))


def compare(name: str, steps: int = 400, examples: int = 30_000, seed: int = 0) -> tuple[float, float]:
    """AUC of the model, and that of its twin."""
    torch.manual_seed(seed)
    model, draw = MODELS[name]
    ids, label = draw(examples)
    tables = [oneemb.make_table()] * (1 if draw is walks else ids.shape[1])
    store = oneemb.make_device_mem_store_options()
    with oneemb.MultiTableEmbedding(name, DIM, torch.float32, torch.int64, tables, store, seed=seed) as embedding:
        rows = model(embedding, ids.shape[1])
        twin = model(Twin(embedding, ids), ids.shape[1])
        dense = {key: value for key, value in rows.named_parameters() if not key.startswith("rows.")}
        twin.load_state_dict(dense, strict=False)
        return train(rows, ids, label, steps), train(twin, ids, label, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all without one")
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    for chosen in arguments.models or MODELS:
        ours, torchs = compare(chosen, arguments.steps)
        print(f"{chosen}: AUC {ours:.4f}, on nn.Embedding {torchs:.4f}", flush=True)
