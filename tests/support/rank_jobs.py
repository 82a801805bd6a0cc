"""Ranks that are processes of their own, some of which are to die or be interrupted.

job = RankJob(3, trains, path)        `trains(group, report, path)` on each; `report(value)` comes here
job.wait_for("begins")                from every rank
job.kill(1)
job.end()                             [(exit code, reports)] of each; fails if one does not end in time

A function that is killed again and again reports ("begins", version) and ("saved", version): `killed` starts it, kills
it, and gives the greatest version that a rank has saved.
"""

import contextlib
import datetime
import os
import shutil
import signal
import tempfile
import time
import weakref

from tests.support.forks import fork_context

__all__ = ["RankJob", "killed"]


class RankJob:
    """Starts the ranks.

    Args:
        size: how many; 0 = one process, whose function gets None for a group.
        timeout_s: of their process group.
    """

    def __init__(self, size, function, *args, timeout_s=6.0):
        context = fork_context()
        self.folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._processes, self._pipes, self.reports = [], [], [[] for _ in range(max(1, size))]
        for rank in range(max(1, size)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(rank, size, self.folder, timeout_s, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def wait_for(self, word, seconds=60, ranks=None):
        """Wait until every rank, or each of these, has reported this word, or a tuple that begins with it."""
        end, ranks = time.monotonic() + seconds, range(len(self.reports)) if ranks is None else ranks
        while not all(any(_word(report) == word for report in self.reports[rank]) for rank in ranks):
            self.read()
            assert time.monotonic() < end, f"no {word!r} from ranks {list(ranks)}:\n{self.texts()}"
            time.sleep(0.01)

    def kill(self, rank, number=signal.SIGKILL):
        """Send a rank a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)

    def kill_some(self, rng):
        """Kill one of the ranks, or all."""
        ranks = range(len(self._processes))
        for rank in ranks if rng.random() < 0.3 else [rng.choice(ranks)]:
            self.kill(rank)

    def last(self, word):
        """The greatest number that a rank has reported with this word; 0 if there is none."""
        return max((report[1] for its in self.reports for report in its if _word(report) == word), default=0)

    def end(self, seconds=60):
        """The exit code of each rank, and its reports; fails, with all stacks, if one does not end."""
        end, late = time.monotonic() + seconds, []
        for rank, process in enumerate(self._processes):
            while process.exitcode is None and time.monotonic() < end:
                self.read()
                process.join(0.05)
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
                late.append(rank)
        if late:
            time.sleep(1)
        self.read()
        for process in self._processes:
            process.kill()
            process.join()
        assert not late, f"ranks {late} have not ended:\n{self.texts()}"
        return list(zip([process.exitcode for process in self._processes], self.reports, strict=True))

    def texts(self):
        """What the ranks have reported last, and printed."""
        texts = []
        for rank, its in enumerate(self.reports):
            with open(f"{self.folder}/stderr-{rank}") as file:
                texts.append(f"---- rank {rank}: {its[-3:]}\n{file.read()[-6000:]}")
        return "\n".join(texts)

    def read(self):
        """Take what ranks have reported since."""
        for pipe, its in zip(self._pipes, self.reports, strict=True):
            try:
                while pipe.poll():
                    its.append(pipe.recv())
            except EOFError:
                pass


_LONG_S = 120  # Longer than `end` waits: a rank that waits for a dead one until then fails the test.


def killed(size, function, *args, rng, waits=False, **how):
    """Start a job and kill some of its ranks at a random moment, or all.

    Args:
        waits: whether every rank gets to save once before.

    Returns:
        The version with which the ranks began, the same on all, and the greatest one that any has saved.
    """
    job = RankJob(size, function, *args, timeout_s=_LONG_S, **how)
    job.wait_for("begins")
    if waits:
        job.wait_for("saved")
    time.sleep(rng.uniform(0, 0.5))
    job.kill_some(rng)
    job.end()
    (begun,) = {its[0][1] for its in job.reports}
    return begun, job.last("saved")


def _word(report):
    return report[0] if isinstance(report, tuple) else report


def _work(rank, size, folder, timeout_s, pipe, function, args):
    import faulthandler
    import sys

    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if size:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )  # fmt: skip
    function(distributed.group.WORLD, pipe.send, *args)
    sys.stderr.flush()
