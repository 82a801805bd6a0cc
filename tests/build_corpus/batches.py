"""What a batch may be, and what it holds beside tensors."""

import enum
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tests.build_corpus.idiom import Idiom


class Wrapped(Idiom):
    """The usual ids and labels, as `wrap` has them; one value a batch."""

    def batches(self):
        return [(self.wrap(i, *one),) for i, one in enumerate(super().batches())]


class Dict(Wrapped):
    def wrap(self, i, ids, label):
        return {"features": {"ids": ids}, "label": label}

    def build(self, batch):
        loss = self.loss(batch["features"]["ids"], batch["label"])
        loss.backward()
        return {"loss": loss}


class KeywordArguments(Idiom):
    def batches(self):
        return [dict(ids=ids, label=label) for ids, label in super().batches()]

    def build(self, *, label, **features):
        loss = sum(self.loss(one, label) for one in features.values())
        loss.backward()
        return loss


class DictMethods(Wrapped):
    def wrap(self, i, ids, label):
        return {"ids": ids, "label": label} | ({"weight": torch.rand(len(ids))} if i % 2 else {})

    def build(self, batch):
        rest = {name: value for name, value in batch.items() if name not in ("ids", "label")}
        error = (self.logit(batch.get("ids")) - batch["label"]).square()
        loss = (error * rest.pop("weight", 1.0)).mean()
        loss.backward()
        return loss


class Sample(NamedTuple):
    ids: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor | None = None


class ANamedTuple(Wrapped):
    def wrap(self, i, ids, label):
        return Sample(ids, label, None if i % 2 else torch.rand(len(ids)))

    def build(self, batch):
        loss = self.loss(batch.ids, batch.label)
        if batch.weight is not None:
            loss = loss * batch.weight.mean()
        loss.backward()
        return batch._replace(label=loss, weight=None)


@dataclass
class Batch:
    ids: torch.Tensor
    label: torch.Tensor
    domain: str = "web"

    def halved(self):
        return replace(self, label=self.label / 2)


class ADataclass(Wrapped):
    def wrap(self, i, ids, label):
        return Batch(ids, label)

    def build(self, batch):
        halved = batch.halved()
        loss = self.loss(halved.ids, halved.label)
        loss.backward()
        return loss


class ADataclassOfStrings(Wrapped):
    def wrap(self, i, ids, label):
        return Batch(ids, label, "app" if i % 2 else "web")

    def build(self, batch):
        loss = self.loss(batch.ids, batch.label) * (2.0 if batch.domain == "app" else 1.0)
        loss.backward()
        return loss


class ANamespace(Wrapped):
    def wrap(self, i, ids, label):
        return SimpleNamespace(ids=ids, label=label)

    def build(self, batch):
        loss = self.loss(batch.ids, batch.label)
        loss.backward()
        return loss


class Jagged:
    """A batch class of one's own."""

    def __init__(self, ids, label):
        self._ids, self.label = ids, label

    def column(self, i):
        return self._ids[:, i]

    @property
    def ids(self):
        return torch.stack([self.column(0), self.column(1)], 1)


class AClassOfOnesOwn(Wrapped):
    def wrap(self, i, ids, label):
        return Jagged(ids, label)

    def build(self, batch):
        loss = self.loss(batch.ids, batch.label) + 0.1 * self.embedding(batch.column(0)[:, None].expand(-1, 2)).sum()
        loss.backward()
        return loss


class ListOfDicts(Wrapped):
    def wrap(self, i, ids, label):
        return [{"ids": ids, "label": label}] * (1 + i % 2)

    def build(self, batch):
        loss = sum(self.loss(**one) for one in batch) / len(batch)
        loss.backward()
        return loss


class OrderedAndDefaultDicts(Wrapped):
    def wrap(self, i, ids, label):
        return OrderedDict(ids=ids, labels=defaultdict(int, {"click": label}))

    def build(self, batch):
        loss = self.loss(batch["ids"], batch["labels"]["click"])
        loss.backward()
        return loss


class MissingKeyOfADefaultDict(Wrapped):
    def wrap(self, i, ids, label):
        return defaultdict(lambda: 2.0, ids=ids, label=label)

    def build(self, batch):
        loss = self.loss(batch["ids"], batch["label"]) * batch["weight"]
        loss.backward()
        return loss


class NumbersThatVary(Idiom):
    def batches(self):
        return [(*one, 0.5 * i, i) for i, one in enumerate(super().batches())]

    def build(self, ids, label, scale, step):
        loss = self.loss(ids, label) * (1.0 + scale) / (step + 1)
        loss.backward()
        return loss


class BranchOnANumber(Idiom):
    def batches(self):
        return [(*one, i) for i, one in enumerate(super().batches())]

    def build(self, ids, label, step):
        loss = self.loss(ids, label)
        if step >= 3:
            loss = loss * 0.5
        loss.backward()
        return loss


class ModeByName(Idiom):
    def batches(self):
        return [dict(ids=a, label=b, mode="sum" if i % 2 else "mean") for i, (a, b) in enumerate(super().batches())]

    def build(self, ids, label, mode="mean"):
        loss = getattr((self.logit(ids) - label).square(), mode)()
        loss.backward()
        return loss


class StringInABatch(Wrapped):
    def wrap(self, i, ids, label):
        return {"ids": ids, "label": label, "domain": "app" if i % 2 else "web"}

    def build(self, batch):
        loss = self.loss(batch["ids"], batch["label"]) * {"app": 2.0, "web": 1.0}[batch["domain"]]
        loss.backward()
        return loss


class Task(enum.Enum):
    CLICK = 1
    LIKE = 2


class AnEnum(Idiom):
    def batches(self):
        return [(*one, Task.LIKE if i % 2 else Task.CLICK) for i, one in enumerate(super().batches())]

    def build(self, ids, label, task):
        loss = self.loss(ids, label) * (2.0 if task == Task.LIKE else 1.0)
        loss.backward()
        return loss


class AnEnumByIdentity(AnEnum):
    def build(self, ids, label, task):
        loss = self.loss(ids, label) * (2.0 if task is Task.LIKE else 1.0)
        loss.backward()
        return loss


class PassedThrough(Wrapped):
    """Strings and objects that build only hands back."""

    def wrap(self, i, ids, label):
        return {"ids": ids, "label": label, "session": f"s{i}", "names": ["a"] * i}

    def build(self, batch):
        loss = self.loss(batch["ids"], batch["label"])
        loss.backward()
        return loss, batch["session"], batch["names"]


Point = namedtuple("Point", "left right")


class TreeMap(Wrapped):
    def wrap(self, i, ids, label):
        return Point({"ids": ids}, [label])

    def build(self, batch):
        moved = torch.utils._pytree.tree_map(lambda one: one * 1, batch)
        loss = self.loss(moved.left["ids"], moved.right[0])
        loss.backward()
        return loss


class ChangesTheBatch(Wrapped):
    def wrap(self, i, ids, label):
        self.kept = {"ids": ids, "label": label}
        return self.kept

    def build(self, batch):
        loss = self.loss(batch["ids"], batch.pop("label"))
        loss.backward()
        batch["done"] = True
        return loss

    def seen(self):
        return sorted(self.kept)
