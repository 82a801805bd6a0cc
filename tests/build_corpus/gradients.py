"""Losses, backward passes, and what hooks into them."""

import copy

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import oneemb
from tests.build_corpus.idiom import Idiom
from tests.support.graph_models import make_embedding


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class SeveralLosses(Idiom):
    def build(self, ids, label):
        rows = self.embedding(ids)
        losses = [self.loss(ids, label), rows.square().mean(), rows.abs().mean()]
        for loss in losses:
            loss.backward(retain_graph=True)
        return losses


class WeighsLosses(Idiom):
    """Uncertainty weights, which are parameters."""

    def setup(self):
        super().setup()
        self.log_variance = torch.nn.Parameter(torch.zeros(2))

    def build(self, ids, label):
        losses = torch.stack([self.loss(ids, label), self.embedding(ids).square().mean()])
        total = (torch.exp(-self.log_variance) * losses + self.log_variance).sum()
        total.backward()
        return total, losses.detach()


class AutogradBackward(Idiom):
    def build(self, ids, label):
        logit = self.logit(ids)
        torch.autograd.backward([logit], [torch.sigmoid(logit.detach()) - label])
        return logit


class BackwardWithAGradient(Idiom):
    def build(self, ids, label):
        loss = (self.logit(ids) - label).square()
        loss.backward(gradient=torch.ones_like(loss) / loss.numel())
        return loss.detach()


class BackwardIsConditional(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        if self.training and loss.requires_grad is not None:
            loss.backward()
        return loss


class GradientPenalty(Idiom):
    """Through the dense layers: their input's gradient, differentiated once more."""

    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        logit = self.mlp(x).squeeze(1)
        (grad,) = torch.autograd.grad(logit.sum(), x, create_graph=True)
        loss = (logit - label).square().mean() + 0.1 * (grad.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss


class DetachAndNoGrad(Idiom):
    def build(self, ids, label):
        with torch.no_grad():
            target = self.logit(ids)
        loss = self.loss(ids, label) + (self.logit(ids.detach()) - target.detach() - 1).square().mean()
        loss.backward()
        return loss


@torch.no_grad()
def frozen(model, ids):
    return model.logit(ids).sigmoid()


class NoGradAsADecorator(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, 0.5 * label + 0.5 * frozen(self, ids))
        loss.backward()
        return loss


class InferenceMode(Idiom):
    def build(self, ids, label):
        with torch.inference_mode():
            shown = self.mlp(torch.ones(1, 8)).clone()
        loss = self.loss(ids, label)
        loss.backward()
        return loss, shown


class StraightThrough(Idiom):
    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        x = x + (x.sign() * 0.1 - x).detach()
        loss = (self.mlp(x).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class CustomFunction(Idiom):
    def build(self, ids, label):
        x = Reverse.apply(self.embedding(ids).flatten(1), 0.5)
        loss = (self.mlp(x).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class ReverseModule(torch.nn.Module):
    def forward(self, x):
        return Reverse.apply(x, 0.5)


class CustomFunctionInAModule(Idiom):
    def setup(self):
        super().setup()
        self.reverse = ReverseModule()

    def build(self, ids, label):
        loss = (self.mlp(self.reverse(self.embedding(ids)).flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class CheckpointOfAModule(Idiom):
    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        loss = (checkpoint(self.mlp, x, use_reentrant=False).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class ReentrantCheckpoint(Idiom):
    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        loss = (checkpoint(self.mlp, x, use_reentrant=True).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class CheckpointWithDropout(Idiom):
    def setup(self):
        super().setup()
        self.dropout = torch.nn.Dropout(0.5)

    def build(self, ids, label):
        def tower(x):
            return self.mlp(self.dropout(x))

        x = self.embedding(ids).flatten(1)
        loss = (checkpoint(tower, x, use_reentrant=False).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class HookOnRows(Idiom):
    def build(self, ids, label):
        rows = self.embedding(ids)
        rows.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        loss = (self.mlp(rows.flatten(1)).squeeze(1) - label).square().mean()
        loss.backward()
        return loss


class HookOnATensor(Idiom):
    def setup(self):
        super().setup()
        self.norms = []

    def note(self, grad):
        self.norms.append(grad.norm())

    def build(self, ids, label):
        logit = self.logit(ids)
        logit.register_hook(self.note)
        loss = (logit - label).square().mean()
        loss.backward()
        return loss

    def seen(self):
        return self.norms


class HookOnAParameter(Idiom):
    def setup(self):
        super().setup()
        self.mlp.layers[0].weight.register_hook(lambda grad: grad * 0.5)

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class HooksOnADenseModule(Idiom):
    def setup(self):
        super().setup()
        self.shapes = []
        self.mlp.register_forward_hook(lambda module, args, out: out * 2)
        self.mlp.register_full_backward_hook(lambda module, grad_in, grad_out: self.shapes.append(grad_out[0].shape[0]))

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss

    def seen(self):
        return self.shapes


class HookOnAnEmbedding(Idiom):
    def setup(self):
        super().setup()
        self.embedding.register_forward_hook(lambda module, args, out: out * 2)

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class SavedTensorHooks(Idiom):
    def build(self, ids, label):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            loss = self.loss(ids, label)
        loss.backward()
        return loss


class RetainGrad(Idiom):
    """The gradient of a value, read after backward."""

    def build(self, ids, label):
        x = self.embedding(ids).flatten(1)
        x.retain_grad()
        loss = (self.mlp(x).squeeze(1) - label).square().mean()
        loss.backward()
        return loss, x.grad.norm()


class ReadsGradients(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss, sum(p.grad.norm() for p in self.mlp.parameters())


class ChangesGradients(Idiom):
    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        for parameter in self.mlp.parameters():
            parameter.grad.mul_(0.5)
        return loss


class ClipsDenseParameters(Idiom):
    def build(self, ids, label):
        loss = 10 * self.loss(ids, label)
        loss.backward()
        norm = clip_grad_norm_(self.mlp.parameters(), 0.1)
        clip_grad_value_(self.mlp.parameters(), 0.05)
        return loss, norm


class _Clips(Idiom):
    """Against torch alone, with a dense table that begins with the same rows."""

    tolerance = 1e-4

    def setup(self):
        super().setup()
        self.embedding.eval()
        rows = self.embedding(torch.arange(20).view(-1, 1).expand(-1, 2))
        self.embedding.train()
        table = torch.nn.Embedding.from_pretrained(rows.transpose(0, 1).flatten(0, 1), freeze=False)
        self.plain = table, copy.deepcopy(self.mlp)

    def batches(self):
        self.given = super().batches()
        return self.given

    def trained_by(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1)]

    def clip(self, parameters):
        raise NotImplementedError

    def build(self, ids, label):
        loss = 20 * self.loss(ids, label)
        loss.backward()
        self.clip(self.parameters())
        return loss

    def oracle(self):
        table, mlp = self.plain
        parameters = [*table.parameters(), *mlp.parameters()]
        optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
        for ids, label in self.given:
            rows = table(ids + torch.tensor([0, 20]))
            loss = 20 * bce(mlp(rows.flatten(1)).squeeze(1), label)
            optimizer.zero_grad()
            loss.backward()
            self.clip(parameters)
            optimizer.step()
            losses.append(loss)
        return losses


class ClipsTheNorm(_Clips):
    def clip(self, parameters):
        clip_grad_norm_(parameters, 0.5)


class ClipsValues(_Clips):
    def clip(self, parameters):
        clip_grad_value_(list(parameters), 0.3)


class Accumulates(Idiom):
    def setup(self):
        super().setup()
        self.config.accumulation_steps = 2

    def build(self, ids, label):
        loss = self.loss(ids, label) / 2
        loss.backward()
        return loss


class AccumulationThatChanges(Accumulates):
    def between(self, step):
        self.config.accumulation_steps = 3 if step < 2 else 1


class Autocast(Idiom):
    def build(self, ids, label):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logit = self.logit(ids)
            half = logit @ logit
        loss = (logit.float() - label).square().mean() + 0.01 * half.float()
        loss.backward()
        return loss, logit.detach()


class AutocastOnAndOff(Idiom):
    def between(self, step):
        self.half = step % 2 == 0

    def build(self, ids, label):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            logit = self.logit(ids)
        loss = (logit.float() - label).square().mean()
        loss.backward()
        return loss


class ZeroGradFirst(Idiom):
    def build(self, ids, label):
        self.zero_grad()
        loss = self.loss(ids, label)
        loss.backward()
        return loss


class PenaltyOnWeights(Idiom):
    def build(self, ids, label):
        penalty = sum(p.square().sum() for name, p in self.mlp.named_parameters() if "weight" in name)
        loss = self.loss(ids, label) + 0.01 * penalty
        loss.backward()
        return loss


class PenaltyOnRows(Idiom):
    def build(self, ids, label):
        rows = self.embedding(ids)
        loss = (self.mlp(rows.flatten(1)).squeeze(1) - label).square().mean() + 0.01 * rows.square().sum()
        loss.backward()
        return loss


class ReturnsNothing(Idiom):
    def build(self, ids, label):
        self.loss(ids, label).backward()


class UnscalesAndClips(Idiom):
    """As torch's examples do, but for the step."""

    def setup(self):
        super().setup()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)

    def trained_by(self):
        (self.optimizer,) = super().trained_by()
        return [self.optimizer]

    def build(self, ids, label):
        loss = 20 * self.loss(ids, label)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.parameters(), 0.1)
        if not isinstance(self, oneemb.TrainGraph):
            self.scaler.update()
        return loss, norm

    def seen(self):
        return self.scaler.state_dict()


class StepsAnOptimizerOfItsOwn(Idiom):
    """Of a layer that the graph does not train."""

    def setup(self):
        super().setup()
        self.critic = torch.nn.Linear(8, 1)
        self.own = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.own, 0.9)

    def trained_by(self):
        return [torch.optim.Adam([*self.embedding.parameters(), *self.mlp.parameters()], lr=0.01)]

    def build(self, ids, label):
        self.own.zero_grad()
        rows = self.embedding(ids).flatten(1)
        (self.critic(rows.detach()).squeeze(1) - label).square().mean().backward()
        self.own.step()
        self.schedule.step()
        loss = self.loss(ids, label) + self.critic(rows).square().mean()
        loss.backward()
        return loss


class StepsRowsOfItsOwn(StepsAnOptimizerOfItsOwn):
    """Of an embedding that the graph does not train, before it is looked up again."""

    def setup(self):
        super().setup()
        self.other = make_embedding("other", tables=1)
        self.own = torch.optim.SGD(self.other.parameters(), lr=0.1)

    def build(self, ids, label):
        self.own.zero_grad()
        self.other(ids[:, 0]).square().sum().backward()
        self.own.step()
        self.own.zero_grad()
        with torch.no_grad():
            rows = self.other(ids[:, 1])
        loss = self.loss(ids, label) + (self.embedding(ids) * rows[:, None]).sum()
        loss.backward()
        return loss


class ZeroGradAfterBackward(Idiom):
    """Of the whole model, of the layers, and by the optimizer."""

    def between(self, step):
        self.step = step

    def trained_by(self):
        (self.optimizer,) = super().trained_by()
        return [self.optimizer]

    def build(self, ids, label):
        self.loss(ids, label).backward()
        if self.step:  # a first step without a gradient is warned of
            (self.zero_grad, self.mlp.zero_grad, self.optimizer.zero_grad, lambda: None)[self.step % 4]()
        loss = self.logit(ids).square().mean()
        if self.step % 3 != 1:
            loss.backward()
        return loss.detach()


class BackwardAfterClipping(Idiom):
    def build(self, ids, label):
        loss = 20 * self.loss(ids, label)
        loss.backward(retain_graph=True)
        norm = clip_grad_norm_(self.parameters(), 0.1)
        loss.backward()
        return loss, norm


class HooksBeforeAnEmbedding(Idiom):
    def setup(self):
        super().setup()
        self.shapes = []
        self.embedding.register_forward_pre_hook(lambda module, args: (args[0] % 7,))
        self.embedding.weight.register_post_accumulate_grad_hook(lambda weight: self.shapes.append(weight.grad.shape))

    def build(self, ids, label):
        loss = self.loss(ids, label)
        loss.backward()
        return loss

    def seen(self):
        return self.shapes
