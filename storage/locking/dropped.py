"""Closes objects that are dropped without being closed."""

import _thread
import threading
import weakref
from typing import Any, Protocol

from oneemb.kernels.threads import within_thread_code


class _Closes(Protocol):
    def close(self) -> None: ...


def close_when_dropped(owner: object, its: _Closes) -> "weakref.finalize[Any, Any]":
    """Have `its` closed when nobody has `owner` any more, unless what is returned is detached before.

    At exit the system frees what there is."""
    finalizer = weakref.finalize(owner, _close, its)
    finalizer.atexit = False
    return finalizer


def _close(its: _Closes) -> None:
    """The garbage collector may ask for it on any thread, in the middle of anything."""
    of_a_store = threading.current_thread().name.startswith("oneemb-")  # Which close may have to wait for.
    if of_a_store or within_thread_code():
        # Where this thread goes on: to start one by `threading` is to wait for locks that it may hold.
        _thread.start_new_thread(threading.Thread(target=its.close, name="close").start, ())
        return
    try:
        its.close()
    except KeyboardInterrupt:  # Python drops what is raised here: it comes again, a moment later.
        threading.Timer(0.01, _thread.interrupt_main).start()
