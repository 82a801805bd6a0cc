"""Work in children of fork, and processes that are forks of a server which has torch and oneemb loaded."""

import multiprocessing
import os


def fork_context():
    """A context of multiprocessing whose processes have loaded already what tests/support/rank_imports.py loads."""
    if os.environ.get("ONEEMB_TEST_GPU"):  # A fork of a process that has asked for GPUs cannot use them.
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    return context


def in_child(work):
    """A child of fork in which `work()` runs."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if work() is True else 1))
    child.start()
    return child


def ended_well(child, patience_s=60):
    """Whether the child's work has given True; a child that hangs is killed."""
    child.join(patience_s)
    if child.is_alive():
        child.kill()
        child.join()
        return "it hangs"
    return child.exitcode == 0
