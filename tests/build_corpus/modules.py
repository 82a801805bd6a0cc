"""Modules: embeddings of one's own, wrappers, leaves that change their input, and what is done to ids and rows."""

import torch

import oneemb
from tests.build_corpus.idiom import Idiom
from tests.support.graph_models import make_embedding


class Doubled(oneemb.MultiTableEmbedding):
    def forward(self, ids):
        return super().forward(ids) * 2


class WithMethods(oneemb.MultiTableEmbedding):
    def normalized(self, ids):
        return torch.nn.functional.normalize(self(ids), dim=-1)


def of_class(kind, **kwargs):
    embedding = make_embedding(**kwargs)
    embedding.__class__ = kind
    return embedding


class _Plain(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class OverriddenForward(_Plain):
    def setup(self):
        super().setup()
        self.embedding = of_class(Doubled)


class MethodOfAnEmbedding(Idiom):
    def setup(self):
        super().setup()
        self.embedding = of_class(WithMethods)

    def build(self, ids, label):
        loss = (self.mlp(self.embedding.normalized(ids).flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class PatchedForward(_Plain):
    def setup(self):
        super().setup()
        forward = self.embedding.forward
        self.embedding.forward = lambda ids: forward(ids) + 1


class AddsOne(torch.nn.Module):
    """Changes the ids that it is given."""

    def forward(self, ids):
        ids += 1
        return ids.float().mean()


class LeafChangesIds(Idiom):
    def setup(self):
        super().setup()
        self.adds = AddsOne()

    def build(self, ids, label):
        mean = self.adds(ids)
        loss = self.loss(ids, label) + mean * 0.0
        loss.backward()
        return loss


class LeafChangesIdsBetweenLookups(LeafChangesIds):
    def build(self, ids, label):
        before = self.embedding(ids)
        mean = self.adds(ids)
        loss = self.loss(ids, label) + before.sum() + mean * 0.0
        loss.backward()
        return loss


class LeafChangesALabel(Idiom):
    def setup(self):
        super().setup()
        self.adds = AddsOne()

    def build(self, ids, label):
        self.adds(label)
        loss = (self.logit(ids) - label).square().mean()
        loss.backward()
        return loss


class ChangesIdsInPlace(Idiom):
    def build(self, ids, label):
        before = self.embedding(ids)
        ids.add_(1).clamp_(max=15)
        loss = self.loss(ids, label) + before.square().sum()
        loss.backward()
        return loss


class AssignsIds(Idiom):
    def build(self, ids, label):
        ids = ids.clone()
        ids[ids > 10] = 0
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class AssignsRows(Idiom):
    def build(self, ids, label):
        rows = self.embedding(ids).clone()
        rows[:, 0] = 0.0
        loss = (self.mlp(rows.flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class HashesIds(Idiom):
    def build(self, ids, label):
        hashed = (ids * 2654435761 + 12345).remainder(17)
        crossed = torch.stack([hashed[:, 0] * 100 + ids[:, 1], ids.sum(1)], dim=1)
        loss = self.loss(torch.where(crossed > 500, hashed, crossed), label)
        loss.backward()
        return loss


class NumPyInBuild(Idiom):
    def build(self, ids, label):
        import numpy as np

        hashed = torch.from_numpy(np.asarray(ids) % 7)
        loss = self.loss(hashed, label)
        loss.backward()
        return loss


class TheSameLookupTwice(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label) + self.embedding(ids).sum() + self.embedding(ids.flip(0)).square().sum()
        loss.backward()
        return loss


class ManyEmbeddingsAlike(Idiom):
    def setup(self):
        self.fields = torch.nn.ModuleDict({name: make_embedding(name, tables=1) for name in ("user", "item")})
        self.mlp = oneemb.nn.FusedMLP(8, [8], 1, skip_final_activation=True)

    def build(self, ids, label):
        rows = [field(ids[:, i]) for i, (name, field) in enumerate(sorted(self.fields.items()))]
        loss = (self.mlp(torch.cat(rows, 1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class EmbeddingInASequential(Idiom):
    def setup(self):
        self.model = torch.nn.Sequential(make_embedding(), torch.nn.Flatten(1), torch.nn.Linear(8, 1))

    def build(self, ids, label):
        loss = (self.model(ids).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class HooksItself(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = make_embedding()
        self.register_forward_hook(lambda module, args, rows: rows * 3)
        self.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, ids):
        return self.embedding(ids)


class HooksOnAWrapper(Idiom):
    def setup(self):
        super().setup()
        self.embedding = HooksItself()

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class CallsForward(Idiom):
    """Of modules, in place of calling them."""

    def build(self, ids, label):
        loss = (self.mlp.forward(self.embedding(ids).flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class CallsForwardOfAnEmbedding(Idiom):
    def build(self, ids, label):
        loss = (self.mlp(self.embedding.forward(ids).flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class ReadsOptionsOfAnEmbedding(Idiom):
    def build(self, ids, label):
        rows = self.embedding(ids).reshape(-1, self.embedding.embedding_dim * self.embedding.num_tables)
        loss = (self.mlp(rows).squeeze(1) - label).square().mean() / self.embedding.embedding_dim**0.5
        loss.backward()
        return loss


class BatchNorm(Idiom):
    def setup(self):
        super().setup()
        self.norm = torch.nn.BatchNorm1d(8)

    def build(self, ids, label):
        loss = (self.mlp(self.norm(self.embedding(ids).flatten(1))).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class WeightNorm(Idiom):
    def setup(self):
        super().setup()
        self.head = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 1))

    def build(self, ids, label):
        loss = (self.head(self.embedding(ids).flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class TiedWeights(Idiom):
    """A layer's weight is used as a matrix."""

    def setup(self):
        super().setup()
        self.layer = torch.nn.Linear(4, 4)

    def build(self, ids, label):
        left, right = self.embedding(ids).unbind(1)
        x = self.layer(left) @ self.layer.weight.T + self.layer.bias
        loss = ((x * right).sum(1) - label).square().mean()
        loss.backward()
        return loss


class Stacks(Idiom):
    """A layer of each kind by name, as a config has them."""

    def setup(self):
        super().setup()
        self.layers = torch.nn.ModuleDict({"in": torch.nn.Linear(8, 8), "out": torch.nn.Linear(8, 1)})
        self.order = ["in", "relu", "out"]

    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        for name in self.order:
            x = self.layers[name](x) if name in self.layers else getattr(torch, name)(x)
        loss = (x.squeeze(1) - label).square().mean()
        loss.backward()
        return loss
