"""What people write in `build`: each idiom gives what ordinary Python gives, call and run, or is refused in words."""

import inspect
import zlib

import pytest
import torch

import oneemb
from oneemb.graph.building import Expected
from oneemb.storage.table import aio_reader
from tests.build_corpus import (
    batches,
    control_flow,
    effects,
    gradients,
    guess,
    helpers,
    models,
    modules,
    refused as refusals,
    state,
)
from tests.build_corpus.idiom import CRASH, EQUAL, REFUSED, WAYS, WRONG, Idiom, judge


def idioms_of(subject):
    """The idioms of a file: its classes that have a step, but for those whose names begin with an underscore."""
    classes = [one for one in vars(subject).values() if inspect.isclass(one) and issubclass(one, Idiom)]
    own = [one for one in classes if one.__module__ == subject.__name__ and one is not guess.Fields]
    return [one for one in own if one.build is not Idiom.build and not one.__name__.startswith("_")]


def merged(idiom):
    """The same with three embeddings, which are merged."""
    return type(f"{idiom.__name__}Merged", (idiom,), {"fields": 3, "__module__": idiom.__module__})


SUBJECTS = (models, control_flow, batches, helpers, state, effects, gradients, modules, refusals, guess)
IDIOMS = [idiom for subject in SUBJECTS for idiom in idioms_of(subject)]
MERGED = [merged(idiom) for idiom in idioms_of(guess)]


def cases():
    """Idioms and the ways in which they are judged. `make test` tries a guess in both, others in one of the two."""
    for idiom in IDIOMS:
        if idiom.__module__ == guess.__name__:
            yield idiom, WAYS
        else:
            chosen = zlib.crc32(idiom.__name__.encode()) % len(WAYS)  # the same whatever stands before it
            for n, way in enumerate(WAYS):
                yield pytest.param(idiom, (way,), marks=() if n == chosen else pytest.mark.slow)
    for n, idiom in enumerate(MERGED):
        yield pytest.param(idiom, WAYS, marks=pytest.mark.slow if n % 8 else ())


def name_of(value):
    if isinstance(value, tuple):
        return " and ".join(value)
    return f"{value.__module__.rpartition('.')[2]}-{value.__name__}"


@pytest.fixture(autouse=True)
def no_direct_reads(monkeypatch):
    """Nothing is on disk here, and to try out how it is read takes longer than an idiom."""
    monkeypatch.setattr(aio_reader, "AIO_NUMBERS", None)


@pytest.mark.parametrize(("idiom", "ways"), list(cases()), ids=name_of)
def test_idiom(idiom, ways):
    outcome, said = judge(idiom, ways=ways)
    assert outcome is (REFUSED if idiom.refused else EQUAL), f"{outcome.name}: {said}"


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
        raise oneemb.BuildError("this has no place in build")


class NamesTheLine(Saboteur):
    def spoil(self, result):
        raise oneemb.BuildError(f"this has no place in build at {models.__file__}:1")


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


@pytest.mark.parametrize("fields", [1, 3])
def test_the_judge_sees_a_guess_that_nobody_checks(fields, monkeypatch):
    def trusts(self, lookup):
        return lookup.ids.shape == self.lookup.ids.shape

    monkeypatch.setattr(Expected, "is_of", trusts)
    idiom = guess.IdsOfANumberThatChanges if fields == 1 else merged(guess.IdsOfANumberThatChanges)
    assert judge(idiom)[0] is WRONG
