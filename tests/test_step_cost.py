"""The cost of a small step in numbers that depend on no machine: calls of functions, and loops launched.

A bound is today's count, noted beside it, and a few more calls. A change that makes a step dearer raises a bound, and
says in its message why; one that makes it cheaper lowers it.
"""

import contextvars

import _small
import pytest
from _case import count_calls
from _small import READS, STEPS

from oneemb.kernels.threads import Threads
from tests.support.walk import walk_of_ids

# Of one step or lookup: the most calls of Python functions, of C functions, and loops launched. Counted with Python
# 3.11 and the torch of constraints/test.txt; later Pythons inline comprehensions and count less.
STEP_BOUNDS = {
    "eager": (250, 252, 6),  # 236, 238, 6
    "graph": (318, 332, 6),  # 302, 317, 6
}
READ_BOUNDS = {
    "eval": (60, 60, 2),  # 55, 54, 2
    "served": (44, 40, 1),  # 40, 35, 1
}


def least(call):
    """The fewest calls of a few times: a collection of garbage may call what belongs to other tests. An empty context
    has no variables that other tests have set; a step looks at each of them."""
    counted = [contextvars.Context().run(count_calls, call) for _ in range(5)]
    return min(its.python for its in counted), min(its.c for its in counted)


# Files of the packages that one lookup of ids without gradient enters.
FILES_MAX = 19  # 17, and two more in a process that has loaded the loops of GPUs


def launched(call, monkeypatch):
    run, loops = Threads.run, []

    def counted(self, loop, *args, **kwargs):
        loops.append(loop)
        return run(self, loop, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Threads, "run", counted)
        call()
    return len(loops)


def costs(system, call, monkeypatch):
    try:
        for _ in range(3):
            call(0)
        return *least(lambda: call(0)), launched(lambda: call(0), monkeypatch)
    finally:
        system.close()


@pytest.mark.parametrize("name", STEP_BOUNDS)
def test_a_small_step_makes_no_more_calls_and_launches_no_more_loops_than_it_did(name, monkeypatch):
    system = STEPS[name]()
    found = costs(system, system.step, monkeypatch)
    assert all(one <= most for one, most in zip(found, STEP_BOUNDS[name], strict=True)), found


def test_a_step_costs_no_more_in_a_module_of_many_globals(monkeypatch):
    # A scaler may be among them: a step looks.
    for i in range(1000):
        monkeypatch.setitem(vars(_small), f"global_{i}", i)
    found = costs(system := STEPS["graph"](), system.step, monkeypatch)
    assert all(one <= most for one, most in zip(found, STEP_BOUNDS["graph"], strict=True)), found


@pytest.mark.parametrize("name", READ_BOUNDS)
def test_a_lookup_of_one_sample_makes_no_more_calls_and_launches_no_more_loops_than_it_did(name, monkeypatch):
    system = READS[name]()
    found = costs(system, system.read, monkeypatch)
    assert all(one <= most for one, most in zip(found, READ_BOUNDS[name], strict=True)), found


def test_a_lookup_of_ids_enters_no_more_files_than_it_did(tmp_path):
    walk = walk_of_ids(str(tmp_path))
    assert 0 < len({file for file, _ in walk}) <= FILES_MAX, walk


def test_variables_of_other_code_are_not_counted(monkeypatch):
    system = STEPS["graph"]()
    others = [contextvars.ContextVar(f"other_{i}") for i in range(100)]

    def among_others():
        for other in others:
            other.set(1)
        return costs(system, system.step, monkeypatch)

    assert all(
        one <= most for one, most in zip(contextvars.Context().run(among_others), STEP_BOUNDS["graph"], strict=True)
    )


def test_a_step_that_has_become_a_tenth_dearer_is_found(monkeypatch):
    system = STEPS["graph"]()

    def dearer(i):
        system.step(i)
        for _ in range(100):
            (lambda: len(""))()

    python, c, _ = costs(system, dearer, monkeypatch)
    assert python > STEP_BOUNDS["graph"][0] and c > STEP_BOUNDS["graph"][1]


def test_a_loop_more_is_found(monkeypatch):
    system = STEPS["eager"]()
    twice = costs(system, lambda i: [system.step(i), system.read(i)], monkeypatch)
    assert twice[2] > STEP_BOUNDS["eager"][2]


def test_calls_are_counted_by_kind():
    def inner():
        return len("")

    counted = count_calls(lambda: [inner(), inner(), abs(-1)])
    assert (counted.python, counted.c) == (2, 3)
