"""What people write in `build`: each idiom gives what ordinary Python gives, call and run, or is refused with its line.

An outcome beside an idiom is today's. One that is WRONG or CRASH is a fault of ours, with its reason in a line.
"""

import inspect

import pytest
import torch

import oneemb
from oneemb.storage.table import aio_reader
from tests.build_corpus import batches, control_flow, effects, gradients, helpers, models, modules, state
from tests.build_corpus.idiom import CRASH, REFUSED, WRONG, Idiom, judge


def idioms_of(subject):
    """The idioms of a file: its classes that say what becomes of them."""
    classes = [one for one in vars(subject).values() if inspect.isclass(one) and issubclass(one, Idiom)]
    return [one for one in classes if "expected" in vars(one)]


SUBJECTS = (models, control_flow, batches, helpers, state, effects, gradients, modules)
IDIOMS = [one for subject in SUBJECTS for one in idioms_of(subject)]


@pytest.fixture(autouse=True)
def no_direct_reads(monkeypatch):
    """Nothing is on disk here, and to try out how it is read takes longer than an idiom."""
    monkeypatch.setattr(aio_reader, "AIO_NUMBERS", None)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda one: f"{one.__module__.rpartition('.')[2]}-{one.__name__}")
def test_idiom(idiom):
    outcome, said = judge(idiom)
    assert outcome is idiom.expected, f"{outcome.name}, not {idiom.expected.name}: {said}"


class Saboteur(oneemb.TrainGraph):
    """A graph that is wrong in the third step."""

    def _step(self, *args):
        result = super()._step(*args)
        return self.spoil(result) if self.steps == 3 else result

    def spoil(self, result):
        raise NotImplementedError


class LosesABit(Saboteur):
    def spoil(self, result):
        return torch.nextafter(result, torch.tensor(9.0))


class ChangesAWeight(Saboteur):
    def spoil(self, result):
        bias = self.mlp.layers[0].bias.data
        bias[0] = torch.nextafter(bias[0], torch.tensor(9.0))
        return result


class InsertsRows(Saboteur):
    def spoil(self, result):
        self.embedding(torch.tensor([[98, 99]]))
        return result


class SaysMore(Saboteur):
    def spoil(self, result):
        print("more")
        return result


class NamesNoLine(Saboteur):
    def spoil(self, result):
        raise oneemb.BuildError("build cannot be traced")


class NamesTheLine(Saboteur):
    def spoil(self, result):
        raise oneemb.BuildError(f"build cannot be traced at {models.__file__}:1")


class RefusesTooLate(LosesABit, NamesTheLine):
    def _step(self, *args):
        return NamesTheLine.spoil(self, None) if self.steps == 3 else super()._step(*args)


@pytest.mark.parametrize(
    "graph, outcome",
    [
        (LosesABit, WRONG), (ChangesAWeight, WRONG), (InsertsRows, WRONG), (SaysMore, WRONG), (NamesNoLine, CRASH),
        (NamesTheLine, REFUSED), (RefusesTooLate, WRONG),
    ],
)  # fmt: skip
def test_the_judge_sees_what_a_graph_does_wrong(graph, outcome):
    assert judge(models.NeuralCF, graph)[0] is outcome
