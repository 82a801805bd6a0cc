"""What build does beside computing: it counts, keeps, prints, draws numbers, asks for the time."""

import collections
import datetime
import functools
import logging
import random
import time
import warnings

import numpy as np
import torch

from tests.build_corpus.idiom import Idiom

CALLS = 0


class AppendsToAList(Idiom):
    def setup(self):
        super().setup()
        self.losses = []

    def build(self, ids, label):
        loss = self.loss(ids, label)
        self.losses.append(loss.detach())
        loss.backward()
        return loss

    def seen(self):
        return self.losses


class AppendsNumbers(AppendsToAList):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        self.losses.append(loss.item())
        loss.backward()
        return loss


class AppendsForLong(AppendsToAList):
    def batches(self):
        return super().batches() * 3

    def build(self, ids, label):
        loss = self.loss(ids, label) / (len(self.losses) + 1)
        self.losses.append(loss.detach())
        loss.backward()
        return loss


class SetsInADict(Idiom):
    def setup(self):
        super().setup()
        self.metrics = collections.defaultdict(list)

    def build(self, ids, label):
        loss = self.loss(ids, label)
        self.metrics["loss"].append(loss.detach())
        self.metrics["size"].append(ids.shape[0])
        loss.backward()
        return loss

    def seen(self):
        return dict(self.metrics)


class KeepsTheLastLogit(Idiom):
    def build(self, ids, label):
        self.last = self.logit(ids)
        loss = (self.last - label).square().mean()
        loss.backward()
        return loss

    def seen(self):
        return self.last.detach()


class CountsCalls(Idiom):
    def setup(self):
        super().setup()
        self.seen_batches = 0

    def build(self, ids, label):
        self.seen_batches += 1
        loss = self.loss(ids, label) / self.seen_batches
        loss.backward()
        return loss

    def seen(self):
        return self.seen_batches


class CountsInAGlobal(Idiom):
    def setup(self):
        super().setup()
        global CALLS
        CALLS = 0

    def build(self, ids, label):
        global CALLS
        CALLS += 1
        loss = self.loss(ids, label) / CALLS
        loss.backward()
        return loss

    def seen(self):
        return CALLS


class CountsInAClosure(Idiom):
    def setup(self):
        super().setup()
        count = 0

        def tick():
            nonlocal count
            count += 1
            return count

        self.tick = tick

    def build(self, ids, label):
        loss = self.loss(ids, label) / self.tick()
        loss.backward()
        return loss


class CountsInACounter(Idiom):
    def setup(self):
        super().setup()
        self.counter = collections.Counter()

    def build(self, ids, label):
        self.counter.update(["calls"])
        loss = self.loss(ids, label)
        loss.backward()
        return loss

    def seen(self):
        return dict(self.counter)


class CountsInABuffer(Idiom):
    def setup(self):
        super().setup()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def build(self, ids, label):
        self.count += 1
        loss = self.loss(ids, label) / self.count
        loss.backward()
        return loss


class AverageInABuffer(Idiom):
    def setup(self):
        super().setup()
        self.register_buffer("mean", torch.zeros(()))

    def build(self, ids, label):
        loss = self.loss(ids, label)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        (loss - self.mean).backward()
        return loss


class Average:
    """A metric as people write it, no module."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, count):
        self.total = self.total + value * count
        self.count += count


class MetricObject(Idiom):
    def setup(self):
        super().setup()
        self.average = Average()

    def build(self, ids, label):
        loss = self.loss(ids, label)
        self.average.update(loss.detach(), ids.shape[0])
        loss.backward()
        return loss

    def seen(self):
        return self.average.total, self.average.count


class AverageModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.values = []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, value):
        self.values.append(value.item())
        self.total += value.detach()
        return self.total / len(self.values)


class MetricModule(Idiom):
    def setup(self):
        super().setup()
        self.average = AverageModule()

    def build(self, ids, label):
        loss = self.loss(ids, label)
        mean = self.average(loss)
        loss.backward()
        return loss, mean

    def seen(self):
        return self.average.values


class Prints(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        print("loss", loss.detach(), "of", ids.shape[0])
        loss.backward()
        return loss


class PrintsAnFString(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        print(f"loss {loss.item():.3f}")
        loss.backward()
        return loss


class PrintsToAFile(Idiom):
    def setup(self):
        super().setup()
        self.file = _Lines()

    def build(self, ids, label):
        loss = self.loss(ids, label)
        print(loss.detach(), file=self.file)
        loss.backward()
        return loss

    def seen(self):
        return self.file.lines


class _Lines:
    def __init__(self):
        self.lines = []

    def write(self, text):
        self.lines.append(text)


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Logs(Idiom):
    def setup(self):
        super().setup()
        self.logger, self.handler = logging.Logger("corpus"), _Records()
        self.logger.addHandler(self.handler)

    def build(self, ids, label):
        loss = self.loss(ids, label)
        self.logger.info("loss %s", loss.detach())
        loss.backward()
        return loss

    def seen(self):
        return self.handler.lines


class WritesAFile(Idiom):
    def setup(self):
        super().setup()
        self.file = _Lines()

    def build(self, ids, label):
        loss = self.loss(ids, label)
        self.file.write("step\n")
        loss.backward()
        return loss

    def seen(self):
        return self.file.lines


class Warns(Idiom):
    def setup(self):
        super().setup()
        self.messages = []

    def build(self, ids, label):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("build warns", stacklevel=1)
        self.messages.extend(str(one.message) for one in caught)
        loss = self.loss(ids, label)
        loss.backward()
        return loss

    def seen(self):
        return self.messages


class PythonRandom(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label) * random.random()
        loss.backward()
        return loss


class LayerDrop(Idiom):
    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        if random.random() < 0.5:
            x = x * 2
        loss = (self.mlp(x).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class NumPyRandom(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label) * np.random.uniform(0.5, 1.5)
        loss.backward()
        return loss


class NumPyRandomArray(Idiom):
    def build(self, ids, label):
        factors = torch.as_tensor(np.random.rand(2), dtype=torch.float32)
        loss = self.loss(ids, label) * factors.sum()
        loss.backward()
        return loss


class TorchRandom(Idiom):
    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(ids.shape[0], 1)
        loss = (self.mlp(torch.nn.functional.dropout(x, 0.2)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class NegativesDrawnInBuild(Idiom):
    def build(self, ids, label):
        negative = torch.stack([ids[:, 0], torch.randint(0, 20, (ids.shape[0],))], 1)
        loss = (self.logit(negative) - self.logit(ids)).sigmoid().mean()
        loss.backward()
        return loss


class SeedsInBuild(Idiom):
    def build(self, ids, label):
        torch.manual_seed(3)
        loss = self.loss(ids, label) * torch.rand(())
        loss.backward()
        return loss


class Time(Idiom):
    """The times of all calls differ."""

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        self.times.add(time.perf_counter())
        return loss

    def setup(self):
        super().setup()
        self.times = set()

    def seen(self):
        return len(self.times)


class Today(Idiom):
    def setup(self):
        super().setup()
        self.days = iter(range(1, 31))

    def now(self):
        return datetime.date(2024, 1, next(self.days))

    def build(self, ids, label):
        loss = self.loss(ids, label) * self.now().day
        loss.backward()
        return loss


class Iterator(Idiom):
    def setup(self):
        super().setup()
        self.schedule = iter([1.0, 0.5, 0.25, 0.2, 0.1, *[0.05] * 7])

    def build(self, ids, label):
        loss = self.loss(ids, label) * next(self.schedule)
        loss.backward()
        return loss


class Memoised(Idiom):
    def setup(self):
        super().setup()
        self.cache = {}

    def build(self, ids, label):
        size = label.shape[0]
        if "ramp" not in self.cache:
            self.cache["ramp"] = torch.arange(8) / 8
        loss = self.loss(ids, label * self.cache["ramp"][:size])
        loss.backward()
        return loss

    def seen(self):
        return self.cache


class LruCache(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label) * _factor(3)
        loss.backward()
        return loss


@functools.lru_cache
def _factor(n):
    return 1.0 / n


class OwnListsAndDicts(Idiom):
    """Containers that begin and end within the call."""

    def build(self, ids, label):
        parts, named = [], {}
        for i in range(2):
            parts.append(self.embedding(ids)[:, i])
            named[f"part_{i}"] = parts[-1].mean()
        parts.reverse()
        loss = (self.mlp(torch.cat(parts, 1)).squeeze(1) - label).square().mean() + sum(named.values())
        loss.backward()
        return {**named, "loss": loss}
