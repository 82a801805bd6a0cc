"""Python values that build reads and that change between two calls."""

import os
from dataclasses import dataclass

import numpy as np
import torch

from tests.build_corpus.idiom import Idiom

SCALE = 1.0


class AttributeNumber(Idiom):
    def between(self, step):
        self.beta = 0.5 * step

    def build(self, ids, label):
        loss = self.loss(ids, label) * (1.0 + self.beta)
        loss.backward()
        return loss


class AttributeOfManyValues(Idiom):
    def batches(self):
        return super().batches() * 3

    def between(self, step):
        self.warmup = str(step)

    def build(self, ids, label):
        loss = self.loss(ids, label) * min(1.0, int(self.warmup) / 30)
        loss.backward()
        return loss


class AttributeFlag(Idiom):
    def between(self, step):
        self.warm = step < 2

    def build(self, ids, label):
        rows = self.embedding(ids).flatten(1)
        rows = rows.detach() if self.warm else rows
        loss = (self.mlp(rows).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class AttributeString(Idiom):
    def between(self, step):
        self.reduction = ("mean", "sum")[step % 2]

    def build(self, ids, label):
        loss = torch.nn.functional.mse_loss(self.logit(ids), label, reduction=self.reduction)
        loss.backward()
        return loss


class AttributeThatComesAndGoes(Idiom):
    def between(self, step):
        if step == 2:
            self.extra = 3.0
        elif step == 4:
            del self.extra

    def build(self, ids, label):
        loss = self.loss(ids, label) * getattr(self, "extra", 1.0)
        loss.backward()
        return loss


class ListOfNumbers(Idiom):
    def setup(self):
        super().setup()
        self.factors = [1.0]

    def between(self, step):
        self.factors.append(step * 0.1)

    def build(self, ids, label):
        loss = sum(self.loss(ids, label) * factor for factor in self.factors)
        loss.backward()
        return loss


class DictOfNumbers(Idiom):
    def setup(self):
        super().setup()
        self.factors = {"click": 1.0}

    def between(self, step):
        self.factors["click"] += 1.0

    def build(self, ids, label):
        loss = self.loss(ids, label) * self.factors["click"]
        loss.backward()
        return loss


@dataclass
class Settings:
    alpha: float = 1.0


class ConfigObject(Idiom):
    def setup(self):
        super().setup()
        self.settings = Settings()

    def between(self, step):
        self.settings.alpha = 1.0 + step

    def build(self, ids, label):
        loss = self.loss(ids, label) * self.settings.alpha
        loss.backward()
        return loss


class GlobalNumber(Idiom):
    def between(self, step):
        global SCALE
        SCALE = 1.0 + step

    def build(self, ids, label):
        loss = self.loss(ids, label) * SCALE
        loss.backward()
        return loss


class ClosureCell(Idiom):
    def setup(self):
        super().setup()
        temperature = 1.0

        def set_temperature(value):
            nonlocal temperature
            temperature = value

        self.set_temperature, self.scaled = set_temperature, lambda x: x * temperature

    def between(self, step):
        self.set_temperature(1.0 + step)

    def build(self, ids, label):
        loss = self.scaled(self.loss(ids, label))
        loss.backward()
        return loss


class ClassAttribute(Idiom):
    gamma = 1.0

    def between(self, step):
        type(self).gamma = 1.0 + step

    def build(self, ids, label):
        loss = self.loss(ids, label) * self.gamma
        loss.backward()
        return loss


class EnvironmentVariable(Idiom):
    def between(self, step):
        os.environ["CORPUS_SCALE"] = str(1 + step)

    def build(self, ids, label):
        loss = self.loss(ids, label) * float(os.environ["CORPUS_SCALE"])
        loss.backward()
        return loss


class NumPyScalarAttribute(Idiom):
    def between(self, step):
        self.beta = np.float64(0.5 * step)

    def build(self, ids, label):
        loss = self.loss(ids, label) * (1.0 + self.beta)
        loss.backward()
        return loss


class NumPyArray(Idiom):
    def setup(self):
        super().setup()
        self.factors = np.ones(1, np.float32)

    def between(self, step):
        self.factors += step

    def build(self, ids, label):
        loss = self.loss(ids, label) * torch.from_numpy(self.factors).sum()
        loss.backward()
        return loss


class TensorAttributeChangedInPlace(Idiom):
    def setup(self):
        super().setup()
        self.prior = torch.ones(1)

    def between(self, step):
        self.prior.mul_(1.5)

    def build(self, ids, label):
        loss = self.loss(ids, label) * self.prior.sum()
        loss.backward()
        return loss


class TensorAttributeReplaced(Idiom):
    def between(self, step):
        self.prior = torch.full((1 + step,), 1.0 + step)

    def build(self, ids, label):
        loss = self.loss(ids, label) * self.prior.mean()
        loss.backward()
        return loss


class TensorInAListReplaced(Idiom):
    def setup(self):
        super().setup()
        self.priors = [torch.ones(1)]

    def between(self, step):
        self.priors[0] = torch.full((1,), 1.0 + step)

    def build(self, ids, label):
        loss = self.loss(ids, label) * self.priors[0].mean()
        loss.backward()
        return loss


class BufferOfPositions(Idiom):
    def setup(self):
        super().setup()
        self.register_buffer("shift", torch.zeros(2, dtype=torch.int64))

    def between(self, step):
        self.shift = self.shift + step

    def build(self, ids, label):
        loss = self.loss(ids + self.shift, label)
        loss.backward()
        return loss


class TrainAndEval(Idiom):
    def setup(self):
        super().setup()
        self.dropout = torch.nn.Dropout(0.5)

    def between(self, step):
        self.train(step % 2 == 0)

    def build(self, ids, label):
        loss = (self.dropout(self.logit(ids)) - label).square().mean()
        if self.training:
            loss.backward()
        return loss.detach()


class Scaled(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.flag = embedding, True

    def forward(self, ids):
        rows = self.embedding(ids)
        return rows * 2 if self.training and self.flag else rows


class WrapperInEval(Idiom):
    def setup(self):
        super().setup()
        self.wrapper = Scaled(self.embedding)

    def between(self, step):
        self.wrapper.training = step % 2 == 0

    def build(self, ids, label):
        loss = (self.mlp(self.wrapper(ids).flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class FlagOfAWrapper(WrapperInEval):
    def between(self, step):
        self.wrapper.flag = step % 2 == 0


class FlagOfALeaf(Idiom):
    def setup(self):
        super().setup()
        self.dropout = torch.nn.Dropout(0.5)

    def between(self, step):
        self.dropout.p = 0.05 * step
        self.mlp.train(step % 2 == 0)

    def build(self, ids, label):
        loss = (self.dropout(self.logit(ids)) - label).square().mean()
        loss.backward()
        return loss


class FreezesParameters(Idiom):
    def between(self, step):
        self.mlp.requires_grad_(step % 2 == 0)

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class FreezesRows(Idiom):
    def between(self, step):
        self.embedding.weight.requires_grad_(step % 2 == 0)

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class ModuleReplaced(Idiom):
    def between(self, step):
        if step == 2:
            self.head = torch.nn.ReLU()
        elif step == 0:
            self.head = torch.nn.Identity()

    def build(self, ids, label):
        loss = (self.head(self.logit(ids)) - label).square().mean()
        loss.backward()
        return loss


class ModuleAppended(Idiom):
    def setup(self):
        super().setup()
        self.heads = torch.nn.ModuleList([torch.nn.Identity()])

    def between(self, step):
        if step == 2:
            self.heads.append(torch.nn.Tanh())

    def build(self, ids, label):
        x = self.logit(ids)
        for head in self.heads:
            x = head(x)
        loss = (x - label).square().mean()
        loss.backward()
        return loss


class FunctionReplaced(Idiom):
    def between(self, step):
        self.activation = torch.tanh if step < 2 else torch.relu

    def build(self, ids, label):
        loss = (self.activation(self.logit(ids)) - label).square().mean()
        loss.backward()
        return loss


class LearningRate(Idiom):
    def between(self, step):
        self.group["lr"] = 0.01 * (step + 1)

    def trained_by(self):
        (optimizer,) = super().trained_by()
        self.group = optimizer.param_groups[0]
        return [optimizer]

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss
