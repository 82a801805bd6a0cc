"""Python that asks a tensor what it is: its rank, its sizes, its dtype, its device; and its values."""

import math

import torch

from tests.build_corpus.idiom import SIZES, Idiom
from tests.support.graph_models import make_embedding


class ManyColumns(Idiom):
    """Between two and four columns of one table, another number in each batch."""

    def setup(self):
        self.embedding, self.mlp = make_embedding(tables=1), torch.nn.Linear(4, 1)

    def batches(self):
        return [
            (torch.randint(0, 20, (n, c)), torch.rand(n)) for n, c in zip(SIZES, (2, 3, 2, 4, 3, 2) * 2, strict=True)
        ]


class BranchOnDim(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label) if ids.dim() == 2 else self.loss(ids.view(-1, 2), label)
        loss.backward()
        return loss


class RankThatVaries(Idiom):
    def batches(self):
        return [
            (torch.randint(0, 20, (4, 2)) if i % 2 else torch.randint(0, 20, (4, 1, 2)), torch.rand(4))
            for i in range(12)
        ]

    def build(self, ids, label):
        if ids.ndim == 3:
            ids = ids[:, 0] + 1
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class DtypeThatVaries(Idiom):
    def batches(self):
        return [(ids, label.long() if i % 2 else label) for i, (ids, label) in enumerate(super().batches())]

    def build(self, ids, label):
        if label.dtype != torch.float32:
            label = label.float() * 0.5
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class IsFloatingPoint(Idiom):
    def build(self, ids, label):
        if not torch.is_floating_point(label) or not label.is_floating_point():
            label = label.float()
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class BranchOnDevice(Idiom):
    def build(self, ids, label):
        if ids.device.type != "cpu" or ids.is_cuda:
            raise RuntimeError("this model runs on the CPU")
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class BranchOnTrailingSize(ManyColumns):
    def build(self, ids, label):
        rows = self.embedding(ids)
        pooled = rows.mean(1) if ids.shape[1] > 2 else rows.sum(1)
        loss = (self.mlp(pooled).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class LoopOverColumns(ManyColumns):
    def build(self, ids, label):
        total = 0
        for column in range(ids.size(1)):
            total = total + self.embedding(ids[:, column]) / (column + 1)
        loss = (self.mlp(total).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class LoopOverUnbind(ManyColumns):
    def build(self, ids, label):
        total = sum(self.embedding(one) for one in ids.unbind(1))
        loss = (self.mlp(total).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class LoopOverTensor(ManyColumns):
    def build(self, ids, label):
        total = sum(self.embedding(one) for one in ids.T)
        loss = (self.mlp(total).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class SpreadChunks(Idiom):
    def build(self, ids, label):
        left, *rest = torch.chunk(self.embedding(ids), 2, dim=1)
        loss = self.loss(ids, label) + (left * rest[0]).sum()
        loss.backward()
        return loss


class SizesInATuple(ManyColumns):
    def build(self, ids, label):
        *_, columns = ids.shape
        loss = (self.mlp(self.embedding(ids).sum(1)).squeeze(1) - label).square().mean() / columns
        loss.backward()
        return loss


class SizesByName(Idiom):
    def build(self, ids, label):
        size, columns = ids.shape
        rows = self.embedding(ids.reshape(size, columns)).view(size, -1)
        loss = (self.mlp(rows).reshape(size) - label).square().sum() / size
        loss.backward()
        return loss


class LenOfABatch(Idiom):
    def build(self, ids, label):
        loss = (self.logit(ids) - label).square().sum() / len(ids)
        loss.backward()
        return loss


class NumberOfABatch(Idiom):
    def build(self, ids, label):
        weight = 1.0 / max(1.0, 2.0) / ids.shape[0] + label.numel() * 0.1
        loss = (self.logit(ids) - label).square().sum() * weight * math.sqrt(ids.size(0))
        loss.backward()
        return loss


class BranchOnBatchSize(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        if ids.shape[0] > 3:
            loss = loss * 2
        loss.backward()
        return loss


class MaxOfBatchSize(Idiom):
    def build(self, ids, label):
        loss = (self.logit(ids) - label).square().sum() / max(ids.shape[0], 4)
        loss.backward()
        return loss


class LoopOverSamples(Idiom):
    def build(self, ids, label):
        logit = self.logit(ids)
        loss = sum((logit[i] - label[i]).square() for i in range(ids.shape[0]))
        loss.backward()
        return loss


class HalfABatch(Idiom):
    def build(self, ids, label):
        half = int(math.ceil(ids.shape[0] / 2))
        loss = self.loss(ids[:half], label[:half]) + 0.1 * self.loss(ids[half:], label[half:])
        loss.backward()
        return loss


class SliceByBatchSize(Idiom):
    def build(self, ids, label):
        half = ids.shape[0] // 2
        loss = self.loss(ids[half:], label[half:])
        loss.backward()
        return loss


class BranchOnAValue(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        if label.sum() > 2:
            loss = loss * 2
        loss.backward()
        return loss


class SkipWithoutPositives(Idiom):
    def build(self, ids, label):
        positive = (label > 0).nonzero()
        loss = self.loss(ids, label)
        if len(positive):
            loss = loss + self.logit(ids[positive[:, 0]]).sum()
        loss.backward()
        return loss


class WhileOnAValue(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        while loss > 0.3:
            loss = loss / 2
        loss.backward()
        return loss


class NumberOfATensor(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label) * (1.0 + float(label.mean()))
        loss.backward()
        return loss


class ItemOfATensor(Idiom):
    def build(self, ids, label):
        rate = label.mean().item()
        loss = self.loss(ids, label) * (2.0 if rate > 0.5 else 1.0)
        loss.backward()
        return loss


class ItemAsAFactor(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label) * label.mean().item()
        loss.backward()
        return loss, loss.item()


class ValuesAsAList(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        for value in label.tolist():
            loss = loss + 0.1 * value
        loss.backward()
        return loss


class MaskInPlaceOfABranch(Idiom):
    def build(self, ids, label):
        loss = torch.where(label.sum() > 2, 2.0, 1.0) * self.loss(ids, label)
        loss.backward()
        return loss


class MaskedRows(Idiom):
    """Sizes that depend on values."""

    def build(self, ids, label):
        kept = ids[:, 0] % 3 != 0
        rows = self.embedding(ids)[kept]
        loss = self.loss(ids, label) + rows.sum() * 0.1 + self.embedding(ids.unique().view(-1, 1).expand(-1, 2)).sum()
        loss.backward()
        return loss


class BranchOnRequiresGrad(Idiom):
    def build(self, ids, label):
        rows = self.embedding(ids)
        loss = self.loss(ids, label) + (rows.square().sum() if rows.requires_grad else 0.0)
        loss.backward()
        return loss


class OptionalArgument(Idiom):
    def batches(self):
        return [(*one, torch.rand(len(one[1]))) if i % 2 else one for i, one in enumerate(super().batches())]

    def build(self, ids, label, weight=None):
        loss = (self.logit(ids) - label).square()
        loss = (loss if weight is None else loss * weight).mean()
        loss.backward()
        return loss


class MatchOnRank(Idiom):
    def build(self, ids, label):
        match ids.dim():
            case 1:
                ids = ids.unsqueeze(0)
            case 2:
                pass
            case _:
                raise ValueError("ids must be [B, 2]")
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class AssertOnShapes(Idiom):
    def build(self, ids, label):
        assert ids.shape[1] == 2 and ids.dim() == 2, "two columns"
        assert ids.shape[0] == label.shape[0]
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class CheckThatRaises(Idiom):
    def build(self, ids, label):
        if ids.shape[0] != label.shape[0]:
            raise ValueError(f"{ids.shape[0]} samples and {label.shape[0]} labels")
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class TextOfAShape(Idiom):
    def build(self, ids, label):
        name = f"{ids.shape[1]} columns"
        loss = self.loss(ids, label)
        loss.backward()
        return loss, name


class ShapesCompared(Idiom):
    def build(self, ids, label):
        logit = self.logit(ids)
        if logit.shape != label.shape:
            logit = logit.view_as(label)
        loss = (logit - label).square().mean()
        loss.backward()
        return loss


class IsTensor(Idiom):
    def build(self, ids, label):
        if not torch.is_tensor(ids):
            ids = torch.zeros_like(ids)
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class IsInstance(Idiom):
    def build(self, ids, label):
        if not isinstance(ids, torch.Tensor):
            raise TypeError(f"ids must be a tensor, got {type(ids).__name__}")
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class NumberOrTensor(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        for term in (loss, 2.0, label):
            loss = loss + (term.mean() if isinstance(term, torch.Tensor) else 10 * term)
        loss.backward()
        return loss


class TypeOf(Idiom):
    def build(self, ids, label):
        by_type = {torch.Tensor: 1.0}
        loss = self.loss(ids, label) * by_type.get(type(label), 7.0)
        loss.backward()
        return loss


class HasAttribute(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss = loss * (3.0 if hasattr(label, "sample_weight") else 1.0)
        loss.backward()
        return loss


class CatchesErrors(Idiom):
    def build(self, ids, label):
        try:
            rows = self.embedding(ids).flatten(1)
        except KeyError:
            rows = torch.zeros(ids.shape[0], 8)
        loss = (self.mlp(rows).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = make_embedding()

    def forward(self, ids):
        x = self.embedding(ids)
        return x * 2 if x.sum() > 0 else x + self.embedding(ids.flip(0))


class BranchInATower(Idiom):
    def setup(self):
        self.tower = Tower()

    def build(self, ids, label):
        loss = (self.tower(ids).sum((1, 2)) - label).square().mean()
        loss.backward()
        return loss
