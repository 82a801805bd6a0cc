"""A thread that makes the whole file of a version with many layers, while the version serves.

Invariant: an error in the thread fails no lookup and no takeover: layers go on to be added, and after the next version
the thread tries again.
"""

import logging
import threading

from oneemb.kernels.threads import Threads
from oneemb.serving.build import Source, Version, make_whole
from oneemb.serving.layers import is_large
from oneemb.storage.serving.layered_file import LayeredFile

_log = logging.getLogger("oneemb")


class WholeFiles:
    """Makes one whole file at a time, on one core, for the versions of one embedding."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def serves(self, source: Source, version: Version, file: LayeredFile) -> None:
        """Begin to make the whole file of a version that has just been taken over, if its layers are large and no other
        file is being made."""
        if is_large(file) and (self._thread is None or not self._thread.is_alive()):
            self._ends = threading.Event()
            self._thread = threading.Thread(
                target=_make, args=(source, version, self._ends), name="oneemb-whole-file", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Make the thread end soon. The call does not wait for it."""
        self._ends.set()


def _make(source: Source, version: Version, ends: threading.Event) -> None:
    try:
        make_whole(source, version, Threads(1), ends.is_set)
    except Exception as error:
        if not ends.is_set():
            _log.warning("no whole file of %s is made: %s: %s", version, type(error).__name__, error)
