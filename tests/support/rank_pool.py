"""Processes that stay for many tests, each a rank of gloo groups of every size.

def looks_up(ranks_group, path): ...           at the top level of a test's module; runs on each rank

results = rank_pool(3, looks_up, path)          what it gave on ranks 0, 1 and 2
"""

import os
import pathlib
import sys
import tempfile
import traceback

from tests.support.forks import fork_context

RANKS_MAX = 4
SECONDS = 120


class FailedOnRank(AssertionError):
    """What the function raised on some ranks."""


class RankPool:
    """Starts its processes when it is first called, and anew after a test that did not end."""

    def __init__(self):
        self._processes = []

    def __call__(self, ranks, function, *args, seconds=SECONDS):
        """What `function(process_group, *args)` gives on each of the ranks.

        Raises:
            FailedOnRank: it raised on some, or did not end within so many seconds.
        """
        if not self._processes:
            self._start()
        for _, pipe in self._processes[:ranks]:
            pipe.send((ranks, function, args))
        results, failed = [], []
        for rank, (_, pipe) in enumerate(self._processes[:ranks]):
            if not pipe.poll(seconds):
                self.close()
                raise FailedOnRank(f"rank {rank} of {ranks} did not end within {seconds} s{''.join(failed)}")
            try:
                result, failure = pipe.recv()
            except EOFError:
                self.close()
                raise FailedOnRank(f"rank {rank} of {ranks} has died{''.join(failed)}") from None
            results.append(result)
            if failure is not None:
                failed.append(f"\n---- rank {rank} ----\n{failure}")
        if failed:
            self.close()  # The ranks may be at different points of what they were doing.
            raise FailedOnRank("".join(failed))
        return results

    def _start(self):
        context = fork_context()
        folder = tempfile.mkdtemp()
        for rank in range(RANKS_MAX):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, folder, there), daemon=True)
            process.start()
            there.close()
            self._processes.append((process, here))

    def close(self):
        for process, pipe in self._processes:
            pipe.close()
            process.kill()
            process.join()
        self._processes = []


def _work(rank, folder, pipe):
    sys.path[:0] = [path for path in (os.getcwd(), str(pathlib.Path(__file__).parent)) if path not in sys.path]
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS_MAX)
    groups = {size: distributed.new_group(list(range(size))) for size in range(1, RANKS_MAX + 1)}
    while True:
        try:
            size, function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        result = failure = None
        try:
            result = function(groups[size], *args)
        except BaseException:
            failure = traceback.format_exc()
        pipe.send((result, failure))
