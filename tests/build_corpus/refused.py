"""What has no place in `build`, though ordinary Python would do it: the graph itself does it, or could not train."""

import torch

import oneemb
from tests.build_corpus.idiom import Idiom
from tests.support.graph_models import make_embedding


class _Steps(Idiom):
    refused = "which the graph does after build; leave it out"

    def trained_by(self):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        return [(self.optimizer, self.scheduler)]

    def then(self):
        raise NotImplementedError

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        self.then()
        return loss


class StepsAnOptimizer(_Steps):
    def then(self):
        self.optimizer.step()


class StepsAJoinedOptimizer(_Steps):
    """What `add_optimizer` has made of it."""

    def then(self):
        (joined,) = self.optimizers if isinstance(self, oneemb.TrainGraph) else self.joined
        joined.step()


class StepsAScheduler(_Steps):
    def then(self):
        self.scheduler.step()


class StepsByAScaler(_Steps):
    def setup(self):
        super().setup()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def build(self, ids, label):
        loss = self.loss(ids, label)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


class StepsWithAClosure(_Steps):
    def build(self, ids, label):
        def closure():
            loss = self.loss(ids, label)
            loss.backward()
            return loss

        return self.optimizer.step(closure)


class EmbeddingOutsideOfTheModel(Idiom):
    refused = "'outside', looked up at"

    def setup(self):
        super().setup()
        self.fields = [make_embedding("outside")]

    def build(self, ids, label):
        loss = self.loss(ids, label) + self.fields[0](ids).sum()
        loss.backward()
        return loss


class EmbeddingThatNothingTrains(Idiom):
    refused = "build gives embedding 'items' a gradient, but no optimizer of the graph trains it"
    refused_outside = True

    def trained_by(self):
        return [torch.optim.SGD(self.mlp.parameters(), lr=0.1)]

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class TwoGradScalers(Idiom):
    refused = "two GradScalers"

    def setup(self):
        super().setup()
        self.scaler, self.other = (torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2))

    def build(self, ids, label):
        for scaler in (self.scaler, self.other):
            loss = self.loss(ids, label)
            scaler.scale(loss).backward()
        return loss


class AutogradBackwardBesideAScaler(Idiom):
    refused = "torch.autograd.backward"
    refused_outside = True

    def setup(self):
        super().setup()
        if isinstance(self, oneemb.TrainGraph):
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0))

    def build(self, ids, label):
        loss = self.loss(ids, label)
        torch.autograd.backward([loss])
        return loss
