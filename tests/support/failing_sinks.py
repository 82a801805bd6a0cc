"""Lets allocations of a publisher, or of a server that follows, fail one at a time; run as a program with
failing_malloc.c preloaded.

    python failing_sinks.py LIBRARY KIND FOLDER STRIDE

KIND is a kind of tests/support/published.py, or "server". After each failure the sink shows the version before or the
new one, completely, and the next call shows the new one. The oracle is a dict of rows for each version.
"""

import gc
import sys
import warnings
from pathlib import Path

import torch

import oneemb
from tests.support.failing_allocations import Preloaded, load_loops
from tests.support.published import Job, Place, publishing

MOST = 400


class Server:
    """A server that follows a job by layers, as a `Place`."""

    def __init__(self, job):
        self._job, self._served = job, oneemb.InferenceEmbedding.open(job.folder, absent="zeros")

    def bring(self):
        self._served.refresh()

    def check(self, job, name):
        assert self._served.version.name == name
        keys = sorted({key for rows in job.rows.values() for key in rows})
        tables, ids = (torch.tensor(column) for column in zip(*keys, strict=True))
        rows = self._served(ids, tables).numpy()
        zeros = bytes(rows[0].nbytes)
        for key, row in zip(keys, rows, strict=True):
            assert row.tobytes() == job.rows[name].get(key, zeros), key


class Published:
    """A sink of a kind, opened for each version."""

    def __init__(self, job, kind, folder):
        self._job, self._place = job, Place(kind, folder, None)
        self.check = self._place.check

    def bring(self):
        publisher = publishing(self._job, self._place.make())
        try:
            publisher.flush()
        finally:
            publisher.close()


def run(allocations, kind, folder, stride):
    """Returns a line for each thing that did not hold, and the number of failures."""
    job = Job(folder / "job")

    def save():
        job.save(f"v{len(job.rows)}", count=400, ids=3000, whole=len(job.rows) % 5 == 0)
        return list(job.rows)[-2:]

    load_loops()
    save()
    subject = Server(job) if kind == "server" else Published(job, kind, folder / "sink")
    for _ in range(7):  # which compiles and imports what it needs
        subject.bring()
        before, name = save()
    gc.collect()
    gc.freeze()  # Collections after failed calls skip what was there before.
    wrong, failures = [], 0
    for n in range(0, MOST, stride):
        error = None
        allocations.fail_after(n)
        try:
            subject.bring()
        except Exception as raised:
            error = repr(raised)  # Its traceback would keep what the call has held.
        count = allocations.counted()
        allocations.fail_after(-1)
        failures += count > n
        gc.collect()
        try:
            try:
                subject.check(job, name)
            except AssertionError:
                subject.check(job, before)
                assert error is not None, "no error, and the version before"
            subject.bring()
            subject.check(job, name)
        except Exception as raised:
            wrong.append(f"{kind}, {name}, allocation {n} of {count}, {error}: {type(raised).__name__} {raised}"[:600])
        if error is None and count <= n or len(wrong) > 5:
            break
        before, name = save()
    return wrong, failures


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    library, kind, folder, stride = sys.argv[1:5]
    wrong, failures = run(Preloaded(library), kind, Path(folder), int(stride))
    print(*wrong, sep="\n")
    print(f"{failures} failures")
