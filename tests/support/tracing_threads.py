"""A thread that is in the middle of what sets torch's process-wide flags."""

import contextlib
import threading
import warnings

import torch

__all__ = ["KINDS", "another_thread"]

_PATIENCE_S = 60


def _export(wait):
    class Model(torch.nn.Module):
        def forward(self, x):
            wait()
            return x + 1

    torch.export.export(Model(), (torch.zeros(2),), strict=False)


def _compile(wait):
    def backend(module, example):
        wait()
        return module

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))


KINDS = {"export": _export, "compile": _compile}


@contextlib.contextmanager
def another_thread(kind):
    """Within it another thread is inside of torch.export, or of torch.compile."""
    inside, leave, errors = threading.Event(), threading.Event(), []

    def wait():
        inside.set()
        assert leave.wait(_PATIENCE_S)

    def run():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                KINDS[kind](wait)
        except BaseException as error:
            errors.append(error)
        finally:
            inside.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert inside.wait(_PATIENCE_S) and not errors, errors
        yield
    finally:
        leave.set()
        thread.join()
    assert not errors, errors
