"""Lookups that are hard to foresee: a graph looks up ahead of `build` what it is expected to ask for, and must not be
wrong where it asks for something else.

Each is judged with one embedding, and with three that are merged.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import oneemb
from tests.build_corpus.idiom import SIZES, Idiom
from tests.support.graph_models import make_embedding

__all__ = ["Fields"]


class Fields(Idiom):
    """Looks ids up in several embeddings of one table."""

    fields = 1

    def setup(self):
        self.embeddings = torch.nn.ModuleList(
            make_embedding(f"field {i}", tables=1, seed=i) for i in range(self.fields)
        )
        self.head = torch.nn.Linear(4, 1)
        self.steps_begun = 0

    def rows(self, ids, *more):
        """[*] -> [*, 4]"""
        return sum(embedding(ids, *more) for embedding in self.embeddings)

    def error(self, rows, label):
        """[B, 4], [B] -> []"""
        return (self.head(rows).squeeze(-1) - label).square().mean()

    def between(self, step):
        self.step = step

    def take(self, ids, label):
        """The loss; most idioms change this alone."""
        raise NotImplementedError

    def build(self, ids, label):
        loss = self.take(ids, label)
        loss.backward()
        return loss


# ---- ids that depend on more than the batch -------------------------------------------------------------------------


class IdsOfANumberThatChanges(Fields):
    def take(self, ids, label):
        return self.error(self.rows((ids[:, 0] + self.step) % 20), label)


class IdsOfATensorThatIsReplaced(Fields):
    def between(self, step):
        self.shift = torch.tensor([step, 2 * step])

    def take(self, ids, label):
        return self.error(self.rows(ids + self.shift).sum(1), label)


class IdsOfATensorThatChangesInPlace(Fields):
    def setup(self):
        super().setup()
        self.register_buffer("shift", torch.zeros(2, dtype=torch.int64))

    def take(self, ids, label):
        loss = self.error(self.rows(ids + self.shift).sum(1), label)
        self.shift += 1
        return loss


class AnotherLookupBeforeTheBatchChanges(Fields):
    """The first lookup is none that was seen before, and the batch's own tensor changes after it."""

    change = staticmethod(lambda ids: ids.add_(1))

    def take(self, ids, label):
        if self.step % 3:
            self.rows(torch.arange(5) + self.step)
            self.change(ids)
        return self.error(self.rows(ids).sum(1), label)


class AnotherLookupBeforeTheBatchChangesUnseen(AnotherLookupBeforeTheBatchChanges):
    """torch does not see what NumPy writes."""

    @staticmethod
    def change(ids):
        ids.numpy()[:] += 1


class IdsOfASumThatTheBatchAddsTo(Fields):
    """What a guess does ahead must not be done to the user's tensor."""

    def setup(self):
        super().setup()
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))

    def take(self, ids, label):
        total = self.total.add_(ids.sum())
        return self.error(self.rows((ids[:, 0] + total) % 20), label)


class IdsCopiedIntoABuffer(Fields):
    def setup(self):
        super().setup()
        self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))

    def take(self, ids, label):
        before = self.rows(self.kept)
        after = self.rows(self.kept.copy_(ids[0]))
        return self.error(self.rows(ids[:, 0]), label) + before.square().sum() + after.sum()


class IdsWrittenIntoOut(Fields):
    def setup(self):
        super().setup()
        self.space = torch.zeros(4, 2, dtype=torch.int64)

    def batches(self):
        return [(torch.randint(0, 20, (4, 2)), torch.rand(4)) for _ in SIZES]

    def take(self, ids, label):
        first = self.rows(self.space).sum()
        return self.error(self.rows(torch.add(ids, 1, out=self.space)).sum(1), label) + first.square()


class QueueOfIds(Fields):
    """The ids of earlier batches as negatives."""

    def setup(self):
        super().setup()
        self.register_buffer("queue", torch.zeros(8, dtype=torch.int64))

    def take(self, ids, label):
        loss = self.error(self.rows(ids[:, 0]), label) + self.rows(self.queue).square().mean()
        self.queue[: len(ids)] = ids[:, 0]
        self.queue.copy_(self.queue.roll(len(ids)))
        return loss


class RandomIds(Fields):
    def take(self, ids, label):
        return self.error(self.rows(ids[:, 0]) - self.rows(torch.randint(0, 20, label.shape)), label)


class RandomOrderOfIds(Fields):
    def take(self, ids, label):
        shuffled = ids[torch.randperm(len(ids))][:, 0]
        other = torch.randint_like(shuffled, 30)
        return self.error(self.rows(shuffled) + self.rows(other) + self.rows((ids[:, 1] * torch.rand(1)).long()), label)


class RandomIdsOfAGenerator(Fields):
    def setup(self):
        super().setup()
        self.generator = torch.Generator().manual_seed(5)

    def take(self, ids, label):
        other = torch.empty_like(ids[:, 0]).random_(0, 30, generator=self.generator)
        return self.error(self.rows(ids[:, 0]) + self.rows(other), label)


class IdsFromNumPy(Fields):
    def take(self, ids, label):
        hashed = torch.from_numpy(ids.numpy() * 7 % 17)
        drawn = torch.from_numpy(np.random.randint(0, 20, len(ids)))
        return self.error(self.rows(hashed).sum(1) + self.rows(drawn), label)


class IdsFromPython(Fields):
    def take(self, ids, label):
        listed = torch.tensor([i * 3 % 11 for i in ids[:, 0].tolist()])
        return self.error(self.rows(listed) + self.rows(torch.tensor([self.step] * len(ids))), label)


class IdsOfTheBestRow(Fields):
    """The second lookup is of ids that the rows of the first one give."""

    def take(self, ids, label):
        rows = self.rows(ids)
        best = ids.gather(1, rows.sum(-1).argmax(1, keepdim=True)).squeeze(1)
        return self.error(self.rows(best) + self.rows(rows.argmax(-1)[:, 0]), label)


class IdsThatAreTheSizeOfABatch(Fields):
    """A constant that happens to be the first batch's size, and numbers that are sizes."""

    def take(self, ids, label):
        return self.error(self.rows(ids[:, 0] % 4) + self.rows(ids[:, 1] % len(ids)), label)


# ---- ids that change in place ---------------------------------------------------------------------------------------


class ChangedInPlace(Fields):
    def change(self, ids):
        ids.add_(1)

    def take(self, ids, label):
        column = ids[:, 0]
        self.change(column)
        rows = self.rows(column) + self.rows(ids).sum(1)
        self.change(ids)
        rows = rows + self.rows(ids)[:, 1]
        self.change(column)
        return self.error(rows + self.rows(column) * 2 + self.rows(ids).sum(1), label)

    def build(self, ids, label):
        loss = super().build(ids, label)
        return loss, ids.clone()


class ChangedThroughData(ChangedInPlace):
    def change(self, ids):
        ids.data.add_(1)


class ChangedThroughNumPy(ChangedInPlace):
    def change(self, ids):
        ids.numpy()[...] += 1


class ChangedThroughAView(ChangedInPlace):
    def change(self, ids):
        ids.view(ids.shape)[:2] += 1


class ChangedThroughASetter(ChangedInPlace):
    def change(self, ids):
        ids.data = ids + 1


class ChangedAfterwards(ChangedInPlace):
    """Between the lookup and its backward pass."""

    def take(self, ids, label):
        loss = self.error(self.rows(ids[:, 0]), label)
        ids.zero_()
        return loss


class ListChangedInPlace(Fields):
    def batches(self):
        return [([1, 2, i], torch.rand(3)) for i in range(12)]

    def take(self, ids, label):
        rows = self.rows(torch.tensor(ids))
        ids[0] = self.step
        return self.error(rows + self.rows(torch.tensor(ids)), label)


class ArrayInABatch(Fields):
    def batches(self):
        return [(ids.numpy(), label) for ids, label in super().batches()]

    def take(self, ids, label):
        shared, copied = torch.from_numpy(ids), torch.as_tensor(ids, dtype=torch.int64).clone()
        rows = self.rows(shared[:, 0])
        ids += 1
        return self.error(rows + self.rows(shared[:, 1]) + self.rows(copied[:, 1]), label)


# ---- lookups that come and go ---------------------------------------------------------------------------------------


class AnotherEmbeddingEveryThirdStep(Fields):
    def setup(self):
        super().setup()
        self.other = make_embedding("other", tables=1, seed=9)

    def take(self, ids, label):
        rows = self.rows(ids[:, 0])
        if self.step % 3 == 1:
            rows = rows + self.other(ids[:, 1] + self.step)
        return self.error(rows, label)


class OneOfTheEmbeddings(Fields):
    """What is merged is not always looked up."""

    def take(self, ids, label):
        rows = self.embeddings[self.step % self.fields](ids[:, 0])
        return self.error(rows, label)


class OtherwiseAnotherColumn(Fields):
    """A guess inserts nothing: each column's ids are its own."""

    def batches(self):
        return [(ids * 2 + torch.tensor([0, 1]), label) for ids, label in super().batches()]

    def take(self, ids, label):
        return self.error(self.rows(ids[:, 0] + 100 * (self.step // 4) if self.step % 3 else ids[:, 1]), label)


class SwappedInSomeSteps(Fields):
    def take(self, ids, label):
        left, right = ids.unbind(1)
        if self.step % 3 == 2:
            left, right = right, left
        return self.error(self.rows(left) * 2 + self.rows(right), label)


class TwiceTheSameInSomeSteps(Fields):
    def take(self, ids, label):
        left, right = ids.unbind(1)
        return self.error(self.rows(left) * 2 + self.rows(left if self.step % 2 else right), label)


class SeveralTimesAsLong(Fields):
    """As many lookups as a number says."""

    def take(self, ids, label):
        rows = self.rows(ids[:, 0])
        for i in range(self.step % 4):
            rows = rows + self.rows(ids[:, 1] + i)
        return self.error(rows, label)


class NoLookupInSomeSteps(Fields):
    def take(self, ids, label):
        rows = self.rows(ids[:, 0]) if self.step % 3 else torch.ones(len(ids), 4)
        return self.error(rows, label)


class OtherwisePooled(Fields):
    def take(self, ids, label):
        pooling = ("sum", "mean", "max")[self.step // 2 % 3]
        offsets = torch.arange(0, ids.numel() + 1, 2)
        return self.error(self.rows(ids.flatten(), None, offsets, None, pooling), label)


class ScalesThatAreLearned(Fields):
    def setup(self):
        super().setup()
        self.scale = torch.nn.Parameter(torch.ones(2))

    def take(self, ids, label):
        offsets = torch.arange(0, ids.numel() + 1, 2)
        scales = self.scale.repeat(len(ids)) if self.step % 3 else torch.ones(ids.numel())
        return self.error(self.rows(ids.flatten(), None, offsets, scales), label)


class ScalesOfFrozenRows(ScalesThatAreLearned):
    """Which have a gradient though the rows have none."""

    def between(self, step):
        super().between(step)
        self.embeddings.requires_grad_(step % 3 == 1).train(step % 4 < 2)

    def build(self, ids, label):
        loss = super().build(ids, label)
        return loss, self.scale.grad


class TablesThatChange(Fields):
    def setup(self):
        super().setup()
        self.embeddings = torch.nn.ModuleList(make_embedding(f"of {i}", tables=3) for i in range(self.fields))

    def take(self, ids, label):
        return self.error(self.rows(ids[:, 0], (ids[:, 1] + self.step) % 3), label)


class CatchesAnErrorOfALookup(Fields):
    def take(self, ids, label):
        try:
            rows = self.rows(ids[:, 0] if self.step % 3 else ids[:, 0].float())
        except TypeError:
            rows = self.rows(ids[:, 1])
        return self.error(rows, label)


class RaisesInSomeSteps(Fields):
    raises = (KeyError,)

    def take(self, ids, label):
        rows = self.rows(ids[:, 0] + self.step)
        if self.step % 4 in (0, 3):
            raise KeyError(f"step {self.step}")
        return self.error(rows + self.rows(ids[:, 1]), label)


class RaisesAfterBackward(Fields):
    raises = (KeyError,)

    def build(self, ids, label):
        loss = self.error(self.rows(ids[:, 0]), label)
        loss.backward()
        if self.step % 3 == 1:
            raise KeyError(f"step {self.step}")
        return loss


class RaisesForBadIds(Fields):
    raises = (TypeError,)

    def take(self, ids, label):
        good = self.rows(ids[:, 0])
        return self.error(good + self.rows(ids[:, 1].int() if self.step % 5 == 2 else ids[:, 1]), label)


# ---- modes ----------------------------------------------------------------------------------------------------------


class WithoutGradientBetweenOthers(Fields):
    def take(self, ids, label):
        first = self.rows(ids[:, 0])
        with torch.no_grad():
            target = self.rows(ids[:, 1] + 100)
        return self.error(first + target + self.rows(ids[:, 1]), label)


class WithoutGradientInSomeSteps(Fields):
    def take(self, ids, label):
        with torch.set_grad_enabled(self.step % 3 != 1):
            rows = self.rows(ids[:, 0])
        return self.error(rows, label)


class InferenceMode(Fields):
    def take(self, ids, label):
        with torch.inference_mode():
            shown = self.rows(ids[:, 0] % 7 + 50).sum().item()
        return self.error(self.rows(ids[:, 0]) + self.rows(ids[:, 1]), label) * (1 + shown)


class EvalInsideBuild(Fields):
    """Unknown ids are not inserted, or are when they are trained."""

    def batches(self):
        return [(ids + 3 * i, label) for i, (ids, label) in enumerate(super().batches())]

    def take(self, ids, label):
        self.embeddings.eval()
        with torch.no_grad():
            shown = self.rows(ids[:, 1] + 100)
        rows = self.rows(ids[:, 0] + 200)
        self.embeddings.train()
        return self.error(rows + shown.detach() + self.rows(ids[:, 0]), label)


class EvalInsideBuildInSomeSteps(EvalInsideBuild):
    def take(self, ids, label):
        self.embeddings.train(self.step % 3 != 1)
        with torch.no_grad():
            shown = self.rows(ids[:, 1] + 100)
        self.embeddings.train()
        return self.error(shown + self.rows(ids[:, 0]), label)


class TrainInsideBuild(EvalInsideBuild):
    """In a module that is in eval mode."""

    def setup(self):
        super().setup()
        self.embeddings.eval()

    def take(self, ids, label):
        with torch.no_grad():
            shown = self.rows(ids[:, 0])
        self.embeddings.train(self.step % 3 == 1)
        with torch.no_grad():
            shown = shown + self.rows(ids[:, 1] + 100)
        self.embeddings.eval()
        return self.error(shown + self.rows(ids[:, 0] + 200), label)


class FrozenInsideBuild(EvalInsideBuild):
    def take(self, ids, label):
        self.embeddings.requires_grad_(self.step % 3 != 1)
        rows = self.rows(ids[:, 0])
        self.embeddings.requires_grad_(True)
        return self.error(rows + self.rows(ids[:, 1]), label)


class EvalEveryThirdStep(EvalInsideBuild):
    def between(self, step):
        super().between(step)
        self.train(step % 3 != 1)

    def build(self, ids, label):
        loss = self.error(self.rows(ids[:, 0] + self.step), label)
        if self.training:
            loss.backward()
        return loss.detach()


class AccumulatesOtherLookups(Fields):
    def setup(self):
        super().setup()
        self.config.accumulation_steps = 3

    def take(self, ids, label):
        return self.error(self.rows(ids[:, self.step % 2]), label)


class SeveralBackwardPasses(Fields):
    def build(self, ids, label):
        losses = [self.error(self.rows(ids[:, 0] + self.step % 2), label)]
        losses[0].backward()
        losses.append(self.error(self.rows(ids[:, 1]), label))
        losses[1].backward()
        self.zero_grad() if self.step % 4 == 1 else None
        losses.append(self.error(self.rows(ids[:, 0]), label))
        losses[2].backward()
        return [loss.detach() for loss in losses]


# ---- batches --------------------------------------------------------------------------------------------------------


class ViewsByBatchSize(Fields):
    def take(self, ids, label):
        flat = ids.reshape(-1)
        return self.error(
            self.rows(flat.view(ids.shape[0], -1)).sum(1) + self.rows(flat.view(len(label), 2)[:, 1]), label
        )


class LastBatchSmaller(Fields):
    def batches(self):
        return [(torch.randint(0, 20, (size, 2)), torch.rand(size)) for size in [4] * 11 + [1]]

    def take(self, ids, label):
        positions = torch.arange(ids.shape[0])
        return self.error(self.rows(ids.view(ids.size(0), -1)).mean(1) + self.rows(positions), label)


class Row(NamedTuple):
    ids: torch.Tensor
    label: torch.Tensor


@dataclass
class Record:
    ids: torch.Tensor
    label: torch.Tensor


class _Wrapped(Fields):
    def wrap(self, ids, label):
        raise NotImplementedError

    def unwrap(self, batch):
        raise NotImplementedError

    def batches(self):
        return [(self.wrap(*batch),) for batch in super().batches()]

    def build(self, batch):
        ids, label = self.unwrap(batch)
        return super().build(ids, label)

    def take(self, ids, label):
        return self.error(self.rows(ids[:, 0]) + self.rows((ids[:, 1] + self.step) % 20), label)


class BatchAsAList(_Wrapped):
    def wrap(self, ids, label):
        return [ids, [label]]

    def unwrap(self, batch):
        return batch[0], batch[1][0]


class BatchAsADict(_Wrapped):
    def wrap(self, ids, label):
        return {"left": ids[:, 0], "right": {"ids": ids[:, 1]}, "label": label}

    def unwrap(self, batch):
        return torch.stack([batch["left"], batch["right"]["ids"]], 1), batch["label"]


class BatchAsANamedTuple(_Wrapped):
    def wrap(self, ids, label):
        return Row(ids, label)

    def unwrap(self, batch):
        return batch.ids, batch.label


class BatchAsADataclass(_Wrapped):
    def wrap(self, ids, label):
        return Record(ids, label)

    def unwrap(self, batch):
        return batch.ids, batch.label


class BatchAsAnObject(_Wrapped):
    def wrap(self, ids, label):
        batch = torch.nn.Module()  # any class that is no structure
        batch.ids, batch.label = ids, label
        return batch

    def unwrap(self, batch):
        return batch.ids, batch.label


class RaggedLists(Fields):
    """Ids as Python has them, of another number in each sample."""

    def batches(self):
        return [
            ([torch.randint(0, 20, (i % 4,)).tolist() for i in range(step, step + 4)], torch.rand(4))
            for step in range(12)
        ]

    def take(self, ids, label):
        flat = torch.tensor([one for sample in ids for one in sample], dtype=torch.int64)
        offsets = torch.tensor([0, *np.cumsum([len(sample) for sample in ids])])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor([0, *sample]) for sample in ids], batch_first=True)
        return self.error(self.rows(flat, None, offsets, None, "mean") + self.rows(padded).sum(1), label)


# ---- what calls build, and what build calls -------------------------------------------------------------------------


class CheckpointOfALookup(Fields):
    def take(self, ids, label):
        rows = checkpoint(lambda ids: torch.tanh(self.rows(ids)) ** 2, ids[:, 0], use_reentrant=False)
        return self.error(rows + self.rows(ids[:, 1]), label)


class ReentrantCheckpointOfALookup(Fields):
    def take(self, ids, label):
        needed = torch.zeros(1, requires_grad=True)
        rows = checkpoint(lambda ids, one: torch.tanh(self.rows(ids)) ** 2 + one, ids[:, 0], needed, use_reentrant=True)
        return self.error(rows + self.rows(ids[:, 1]), label)


class LookupsOnThreads(Fields):
    def take(self, ids, label):
        mine = self.rows(ids[:, 0])
        with ThreadPoolExecutor(1) as other:
            theirs = other.submit(self.rows, ids[:, 1]).result()
        return self.error(mine + theirs, label)


class LooksUpWhileAnotherThreadDoes(Fields):
    """Rows that are not trained, so that the order of the two changes no number."""

    def take(self, ids, label):
        def read():
            with torch.no_grad():
                self.rows(ids[:, 1] + 100)

        thread = threading.Thread(target=read)
        thread.start()
        loss = self.error(self.rows(ids[:, 0]), label)
        thread.join()
        return loss


class Score(oneemb.EvalGraph):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings

    def build(self, ids):
        return sum(embedding(ids) for embedding in self.embeddings)


class EvalGraphInsideBuild(Fields):
    """Inserts nothing, and its lookups are its own."""

    def setup(self):
        super().setup()
        self.score = [Score(self.embeddings)]  # no part of the model

    def take(self, ids, label):
        first = self.rows(ids[:, 0])
        shown = self.score[0](ids[:, 1] + 100)
        return self.error(first + shown + self.rows(ids[:, 1]), label)


class EvalGraphAsAModule(EvalGraphInsideBuild):
    def setup(self):
        super().setup()
        self.scores = Score(self.embeddings)

    def take(self, ids, label):
        best = self.scores(ids).sum(-1).argmax(1, keepdim=True)
        return self.error(self.rows(ids.gather(1, best)).squeeze(1), label)
