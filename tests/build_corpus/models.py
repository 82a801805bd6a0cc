"""Models that people train: each as its paper has it, as small as it gets."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce, cross_entropy, softmax

import oneemb
from tests.build_corpus.idiom import SIZES, Idiom
from tests.support.graph_models import make_embedding


def mlp(*widths: int) -> torch.nn.Module:
    return oneemb.nn.FusedMLP(widths[0], widths[1:-1], widths[-1], skip_final_activation=True)


class Clicks(Idiom):
    """Three fields of ids and four numbers a sample."""

    def batches(self):
        return [(torch.randint(0, 20, (n, 3)), torch.rand(n, 4), torch.rand(n).round()) for n in SIZES]


class Histories(Idiom):
    """A history of ids, of another length in each batch, and a target id."""

    def batches(self):
        lengths = (3, 5, 3, 2, 5, 3) * 2
        return [
            (torch.randint(0, 20, (n, length)), torch.randint(0, 20, (n,)), torch.rand(n).round())
            for n, length in zip(SIZES, lengths, strict=True)
        ]


class DLRM(Clicks):
    def setup(self):
        self.embedding = make_embedding(tables=3)
        self.bottom, self.top = mlp(4, 8, 4), mlp(10, 8, 1)

    def build(self, ids, dense, label):
        x = self.bottom(dense)
        z = torch.cat([x.unsqueeze(1), self.embedding(ids)], 1)
        pairs = z @ z.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, offset=-1)
        loss = bce(self.top(torch.cat([x, pairs[:, i, j]], 1)).squeeze(1), label)
        loss.backward()
        return loss


class DeepFM(Clicks):
    def setup(self):
        self.embedding, self.first = make_embedding(tables=3), make_embedding("first", 1, 3)
        self.deep = mlp(12, 8, 1)

    def build(self, ids, dense, label):
        rows = self.embedding(ids)
        square_of_sum, sum_of_squares = rows.sum(1).pow(2), rows.pow(2).sum(1)
        fm = 0.5 * (square_of_sum - sum_of_squares).sum(1)
        logit = self.first(ids).sum((1, 2)) + fm + self.deep(rows.flatten(1)).squeeze(1)
        loss = bce(logit, label)
        loss.backward()
        return loss


class Cross(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        x0 = x
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class DCNv2(Clicks):
    def setup(self):
        self.embedding = make_embedding(tables=3)
        self.cross, self.deep, self.out = Cross(16, 2), mlp(16, 8, 4), torch.nn.Linear(20, 1)

    def build(self, ids, dense, label):
        x = torch.cat([self.embedding(ids).flatten(1), dense], 1)
        loss = bce(self.out(torch.cat([self.cross(x), self.deep(x)], 1)).squeeze(1), label)
        loss.backward()
        return loss


class XDeepFM(Clicks):
    def setup(self):
        self.embedding, self.deep = make_embedding(tables=3), mlp(12, 8, 1)
        self.compress = torch.nn.ModuleList([torch.nn.Conv1d(9, 2, 1), torch.nn.Conv1d(6, 2, 1)])
        self.out = torch.nn.Linear(4, 1)

    def build(self, ids, dense, label):
        x0 = x = self.embedding(ids)
        pooled = []
        for conv in self.compress:
            x = conv(torch.einsum("bid,bjd->bijd", x, x0).flatten(1, 2))
            pooled.append(x.sum(-1))
        logit = self.out(torch.cat(pooled, 1)) + self.deep(x0.flatten(1))
        loss = bce(logit.squeeze(1), label)
        loss.backward()
        return loss


class AutoInt(Clicks):
    def setup(self):
        self.embedding = make_embedding(tables=3)
        self.attend, self.out = torch.nn.MultiheadAttention(4, 2, batch_first=True), torch.nn.Linear(12, 1)

    def build(self, ids, dense, label):
        rows = self.embedding(ids)
        mixed, _ = self.attend(rows, rows, rows, need_weights=False)
        loss = bce(self.out(torch.relu(mixed + rows).flatten(1)).squeeze(1), label)
        loss.backward()
        return loss


class WideAndDeep(Clicks):
    def setup(self):
        self.wide, self.deep = make_embedding("wide", 1, 3), make_embedding("deep", 4, 3)
        self.mlp = mlp(16, 8, 1)

    def trained_by(self):
        rest = [p for name, p in self.named_parameters() if not name.startswith("wide")]
        return [oneemb.optim.Ftrl(self.wide.parameters(), lr=0.1), torch.optim.Adagrad(rest, lr=0.1)]

    def build(self, ids, dense, label):
        deep = self.mlp(torch.cat([self.deep(ids).flatten(1), dense], dim=1))
        loss = bce(deep.squeeze(1) + self.wide(ids).sum((1, 2)), label)
        loss.backward()
        return loss


class Expert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(12, 6, 4)

    def forward(self, x):
        return self.layers(x)


class MMoE(Clicks):
    def setup(self):
        self.embedding = make_embedding(tables=3)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(3))
        self.gates = torch.nn.ModuleList(torch.nn.Linear(12, 3) for _ in range(2))
        self.towers = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))

    def build(self, ids, dense, label):
        x = self.embedding(ids).flatten(1)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        losses = []
        for gate, tower, target in zip(self.gates, self.towers, (label, 1 - label), strict=True):
            mixed = (softmax(gate(x), -1).unsqueeze(-1) * experts).sum(1)
            losses.append(bce(tower(mixed).squeeze(1), target))
        total = sum(losses)
        total.backward()
        return total, losses


class ESMM(Clicks):
    """Conversions over the whole space: the product of two probabilities."""

    def setup(self):
        self.embedding = make_embedding(tables=3)
        self.ctr, self.cvr = mlp(12, 4, 1), mlp(12, 4, 1)

    def build(self, ids, dense, label):
        x = self.embedding(ids).flatten(1)
        click, convert = torch.sigmoid(self.ctr(x)).squeeze(1), torch.sigmoid(self.cvr(x)).squeeze(1)
        bought = label * (dense[:, 0] > 0.5)
        loss = torch.nn.functional.binary_cross_entropy(click, label)
        loss = loss + torch.nn.functional.binary_cross_entropy(click * convert, bought)
        loss.backward()
        return {"loss": loss, "ctr": click.mean().detach()}


class Tower(torch.nn.Module):
    """Rows and layers of one side."""

    def __init__(self, name):
        super().__init__()
        self.embedding, self.mlp = make_embedding(name, tables=1), mlp(4, 8, 4)

    def forward(self, ids):
        return torch.nn.functional.normalize(self.mlp(self.embedding(ids)), dim=-1)


class TwoTower(Idiom):
    """Softmax over the batch: the other items are negatives."""

    def setup(self):
        self.user, self.item = Tower("user"), Tower("item")

    def build(self, ids, label):
        scores = self.user(ids[:, 0]) @ self.item(ids[:, 1]).T / 0.05
        loss = cross_entropy(scores, torch.arange(ids.shape[0], device=ids.device))
        loss.backward()
        return loss


class NeuralCF(Idiom):
    def build(self, ids, label):
        user, item = self.embedding(ids).unbind(1)
        logit = (user * item).sum(-1) + self.mlp(torch.cat([user, item], -1)).squeeze(-1)
        loss = bce(logit, label)
        loss.backward()
        return loss


class DIN(Histories):
    """The target attends to the history."""

    def setup(self):
        self.embedding, self.attend, self.mlp = make_embedding(tables=1), mlp(16, 8, 1), mlp(8, 8, 1)

    def build(self, history, target, label):
        rows, wanted = self.embedding(history), self.embedding(target)
        query = wanted.unsqueeze(1).expand_as(rows)
        weights = self.attend(torch.cat([query, rows, query - rows, query * rows], -1))
        weights = weights.masked_fill((history == 0).unsqueeze(-1), 0.0)
        pooled = (weights * rows).sum(1)
        loss = bce(self.mlp(torch.cat([pooled, wanted], 1)).squeeze(1), label)
        loss.backward()
        return loss


class DIEN(Histories):
    """A recurrence that is written as a loop over the history."""

    def setup(self):
        self.embedding, self.cell, self.out = make_embedding(tables=1), torch.nn.GRUCell(4, 4), mlp(8, 4, 1)

    def build(self, history, target, label):
        rows, wanted = self.embedding(history), self.embedding(target)
        state = torch.zeros_like(wanted)
        for t in range(history.shape[1]):
            gate = torch.sigmoid((rows[:, t] * wanted).sum(-1, keepdim=True))
            state = gate * self.cell(rows[:, t], state) + (1 - gate) * state
        loss = bce(self.out(torch.cat([state, wanted], 1)).squeeze(1), label)
        loss.backward()
        return loss


class GRU4Rec(Histories):
    def setup(self):
        self.embedding, self.gru = make_embedding(tables=1), torch.nn.GRU(4, 4, batch_first=True)

    def build(self, history, target, label):
        _, state = self.gru(self.embedding(history))
        loss = cross_entropy(state[0] @ self.embedding(target).T, torch.arange(target.shape[0]))
        loss.backward()
        return loss


class SASRec(Histories):
    """Causal attention with positions, negatives drawn in build."""

    def setup(self):
        self.embedding, self.norm = make_embedding(tables=1), torch.nn.LayerNorm(4)
        self.position = torch.nn.Parameter(torch.randn(8, 4) * 0.1)
        self.query, self.key, self.value = (torch.nn.Linear(4, 4) for _ in range(3))

    def build(self, history, target, label):
        length = history.shape[1]
        x = self.embedding(history) + self.position[:length]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 2.0
        x = self.norm(x + scores.masked_fill(later, float("-inf")).softmax(-1) @ self.value(x))
        negative = torch.randint(0, 20, target.shape)
        wanted, other = ((x[:, -1] * self.embedding(one)).sum(-1) for one in (target, negative))
        loss = -torch.nn.functional.logsigmoid(wanted - other).mean()
        loss.backward()
        return loss


class Transformer(Histories):
    def setup(self):
        self.embedding, self.out = make_embedding(tables=1), torch.nn.Linear(4, 1)
        self.encoder = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def build(self, history, target, label):
        x = self.encoder(self.embedding(history), src_key_padding_mask=history == -1)
        loss = bce(self.out(x.mean(1)).squeeze(1), label)
        loss.backward()
        return loss


class Bags(Idiom):
    """Ids of several counts a sample, pooled."""

    def setup(self):
        self.embedding, self.out = make_embedding(tables=1), torch.nn.Linear(12, 1)

    def batches(self):
        offsets = [torch.tensor([0, *sorted(torch.randint(0, 9, (n - 1,)).tolist()), 9]) for n in SIZES]
        return [(torch.randint(0, 20, (9,)), one, torch.rand(len(one) - 1).round()) for one in offsets]

    def build(self, ids, offsets, label):
        ways = [self.embedding(ids, None, offsets, None, pooling) for pooling in ("sum", "mean", "max")]
        loss = bce(self.out(torch.cat(ways, 1)).squeeze(1), label)
        loss.backward()
        return loss


class MatrixFactorization(Idiom):
    """Rows and biases of one side each, and a mean that is a parameter."""

    def setup(self):
        self.rows, self.bias = make_embedding(tables=2), make_embedding("bias", 1, 2)
        self.mean = torch.nn.Parameter(torch.zeros(()))

    def build(self, ids, label):
        rows, bias = self.rows(ids), self.bias(ids)
        rated = self.mean + bias.sum((1, 2)) + rows.prod(1).sum(1)
        loss = (rated - label).square().mean() + 0.01 * (rows.square().mean() + bias.square().mean())
        loss.backward()
        return loss
