"""What people write in `build`: each idiom gives what ordinary Python gives, call and run, or is refused with its line.

An outcome beside an idiom is today's. One that is WRONG or CRASH is a fault of ours, with its reason in a line.
"""

import inspect

import pytest

from oneemb.storage.table import aio_reader
from tests.build_corpus import batches, control_flow, effects, gradients, helpers, models, modules, state
from tests.build_corpus.idiom import Idiom, judge


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
