"""Memory that runs out at any call between an index and its free slots, however little the call allocates.

tests/test_failed_allocations.py lets real allocations fail, but large ones only, of which few lie there.
"""

import sys

import pytest

from oneemb.storage.tiers import hot_tier, memory_tier
from tests.support.failing_allocations import Subject

FUNCTIONS = {"_bring_in", "_evict_these", "_keep", "_reserve", "_take", "erase", "make_temporary", "free_temporary"}
FILES = {hot_tier.__file__, memory_tier.__file__}

# Calls that allocate nothing.
SAFE = {"__enter__", "__exit__", "len", "_pin"}


class Calls:
    """As `Preloaded` of failing_allocations.py, but raises MemoryError in place of the n-th call of these functions."""

    def fail_after(self, n):
        self._left = n
        sys.setprofile(None if n < 0 else self._profile)

    def _profile(self, frame, event, argument):
        if event == "call":
            caller, name = frame.f_back, frame.f_code.co_name
        elif event == "c_call":
            caller, name = frame, argument.__name__
        else:
            return
        code = None if caller is None else caller.f_code
        if code and code.co_name in FUNCTIONS and code.co_filename in FILES and name not in SAFE:
            self._left -= 1
            if self._left < 0:
                raise MemoryError(f"{name} in line {caller.f_lineno}")


CASES = {"device": ["step", "erase", "import_rows"], "ssd": ["step", "erase"], "policy": ["lookup"]}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("store", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_call_that_fails_for_want_of_memory_harms_nothing_or_breaks_the_store(store, every, tmp_path):
    calls, subject = Calls(), Subject(store, tmp_path / "rows", 0, dim=512, ids=2000, batch=200)
    for name in CASES[store]:
        n, failed, ends = 0, "to begin with", set()
        while failed:
            subject.embedding.clear()
            for _ in range(2 + (store == "ssd")):
                subject.step()[0]()  # Each has new rows; the cache is full.
            before = subject.row = subject.read(range(subject.id_count))
            call, after = getattr(subject, name)()
            calls.fail_after(n)
            try:
                call()
                failed = ""
            except MemoryError as error:
                failed = str(error)
            finally:
                calls.fail_after(-1)
            subject.optimizer.zero_grad()
            wrong = subject.wrongs(before, after)
            assert not wrong, f"{name}: {failed}"
            ends.add("sound" if wrong is not None else "broken")
            n += every
        assert n > 5 and ends == {"sound", "broken"}
