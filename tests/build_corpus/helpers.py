"""Functions and classes that build is made of."""

import contextlib
import functools

import torch

from tests.build_corpus.idiom import Idiom


def squared(logit, label, *, reduce="mean"):
    return getattr((logit - label).square(), reduce)()


class Functions(Idiom):
    def build(self, ids, label):
        loss = squared(self.logit(ids), label) + functools.partial(squared, reduce="sum")(self.logit(ids), 1 - label)
        loss.backward()
        return loss


class Focal:
    """A loss that is no module."""

    def __init__(self, gamma):
        self.gamma = gamma

    def __call__(self, logit, label):
        p = torch.sigmoid(logit)
        return -((1 - p).pow(self.gamma) * label * p.log() + p.pow(self.gamma) * (1 - label) * (1 - p).log()).mean()


class CallableObject(Idiom):
    def setup(self):
        super().setup()
        self.focal = Focal(2.0)

    def build(self, ids, label):
        loss = self.focal(self.logit(ids), label)
        loss.backward()
        return loss


def logged(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs)

    return run


class DecoratorsAndProperties(Idiom):
    @property
    def scale(self):
        return 2.0

    @staticmethod
    def half(x):
        return x / 2

    @logged
    def scored(self, ids):
        return self.half(self.logit(ids)) * self.scale

    def build(self, ids, label):
        loss = squared(self.scored(ids), label)
        loss.backward()
        return loss


class Generators(Idiom):
    def terms(self, ids, label):
        yield self.loss(ids, label)
        for power in (1, 2):
            yield self.embedding(ids).abs().pow(power).mean()

    def build(self, ids, label):
        loss = functools.reduce(lambda a, b: a + b, self.terms(ids, label))
        loss.backward()
        return loss


class Recursion(Idiom):
    def nested(self, x, depth):
        return x if depth == 0 else self.nested(torch.tanh(x) + x, depth - 1)

    def build(self, ids, label):
        loss = squared(self.nested(self.logit(ids), 3), label)
        loss.backward()
        return loss


class _Base(Idiom):
    def build(self, ids, label):
        return self.loss(ids, label)


class SuperBuild(_Base):
    def build(self, ids, label):
        loss = super().build(ids, label) * 2
        loss.backward()
        return loss


class BlockOfOnesOwn(Idiom):
    @contextlib.contextmanager
    def half(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield self.mlp

    def build(self, ids, label):
        with self.half() as mlp:
            logit = mlp(self.embedding(ids).flatten(1)).squeeze(1)
        loss = squared(logit.float(), label)
        loss.backward()
        return loss


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


class ScriptedFunction(Idiom):
    def build(self, ids, label):
        loss = squared(scripted(self.logit(ids)), label)
        loss.backward()
        return loss


class Vmap(Idiom):
    def build(self, ids, label):
        rows = self.embedding(ids)
        dots = torch.func.vmap(lambda pair: pair[0] @ pair[1])(rows)
        loss = squared(dots, label)
        loss.backward()
        return loss


class CompiledFunction(Idiom):
    def setup(self):
        super().setup()
        self.compiled_square = torch.compile(squared, backend="eager")

    def build(self, ids, label):
        loss = self.compiled_square(self.logit(ids), label)
        loss.backward()
        return loss


@functools.singledispatch
def pooled(x):
    raise TypeError(f"cannot pool {type(x).__name__}")


@pooled.register
def _(x: torch.Tensor):
    return x.sum(-1)


class SingleDispatch(Idiom):
    def build(self, ids, label):
        loss = squared(pooled(self.embedding(ids)).sum(1), label)
        loss.backward()
        return loss


class Operators(Idiom):
    """Reflected, in place, comparisons, slices, None and Ellipsis."""

    def build(self, ids, label):
        x = self.embedding(ids)
        x = 1 - x[..., :2] * 2.0 + x[:, None, :, 2:].squeeze(1) ** 2
        x += 1
        x @= torch.ones(2, 2)
        weight = (label > 0.5) & ~(ids[:, 0] == 3) | (label < 0)
        loss = (x.sum((1, 2)) * weight).mean() + (-x).abs().max()
        loss.backward()
        return loss
