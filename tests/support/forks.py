"""Work in children of fork."""

import multiprocessing
import os


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
