"""Cases of compare.py can be made, sampled and closed."""

import time

import pytest
from _case import Timed
from _compare_side import Cases, all_cases

SMALL = [name for name in all_cases() if name.startswith("small/")]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case_gives_numbers_above_0(name):
    cases = Cases(all_cases())
    made = cases.answer({"make": name, "calls": 3})
    assert made == {"unit": "calls" if name.endswith("calls") else "ms", "calls": 3}
    assert cases.answer({"sample": 3})["sample"] > 0
    assert cases.answer({"close": name}) == {}


def test_a_case_that_cannot_be_made_is_told_with_its_line_and_the_next_one_goes_on():
    def broken():
        raise AttributeError("there is no such thing\nand more of it")

    cases = Cases({"broken": broken, "fine": all_cases()["small/eager/calls"]})
    assert cases.answer({"make": "broken", "calls": None})["missing"].startswith(
        "AttributeError: there is no such thing (test_cases.py:"
    )
    assert cases.answer({"make": "fine", "calls": None}) == {"unit": "calls", "calls": 1}
    cases.answer({"close": "fine"})


def test_a_timed_case_gives_milliseconds_and_as_many_calls_as_fill_a_turn():
    numbers = []

    def call(i):
        numbers.append(i)
        time.sleep(0.01)

    timed = Timed(call, lambda: None)
    assert 1 <= timed.calls <= 20, timed.calls
    assert timed.sample(timed.calls) >= 10
    assert numbers == list(range(len(numbers))), "each call takes the next batch"


def test_every_part_of_the_work_has_cases():
    parts = {name.split("/")[0] for name in all_cases()}
    assert parts == {"headline", "batch", "small", "eval", "dlrm", "longest"}
