"""Processes that stay for many tests, each a rank of gloo groups of every size.

def looks_up(ranks_group, path): ...           at the top level of a test's module; runs on each rank

results = rank_pool(3, looks_up, path)          what it gave on ranks 0, 1 and 2
"""

import os
import pathlib
import shutil
import sys
import tempfile
import traceback

from tests.support.forks import fork_context

RANKS_MAX = 4
SECONDS = 120


class FailedOnRank(AssertionError):
    """Tracebacks of what the function raised, by rank."""


class RankPool:
    """Starts its processes when it is first called, and anew after a call that failed."""

    def __init__(self):
        self.processes, self.folder = [], None

    def __call__(self, ranks, function, *args, seconds=SECONDS):
        """Results of `function(process_group, *args)`, one a rank.

        Raises:
            FailedOnRank: the function raised on a rank, or did not end within `seconds`, or a rank has died.
        """
        if not self.processes:
            self._start()
        for rank, (_, pipe) in enumerate(self.processes[:ranks]):
            try:
                pipe.send((ranks, function, args))
            except BrokenPipeError:
                self.close()
                raise FailedOnRank(f"rank {rank} of {ranks} has died before") from None
        results, failed = [], []
        for rank, (_, pipe) in enumerate(self.processes[:ranks]):
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
        self.folder = tempfile.mkdtemp()
        for rank in range(RANKS_MAX):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.folder, there), daemon=True)
            process.start()
            there.close()
            self.processes.append((process, here))

    def close(self):
        for process, pipe in self.processes:
            pipe.close()
            process.kill()
            process.join()
        if self.folder is not None:
            shutil.rmtree(self.folder)
        self.processes, self.folder = [], None


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
