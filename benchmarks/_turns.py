"""Processes that work strictly in turn, each on a revision of its own.

The parent asks one side at a time and waits for its answer: one line of JSON each way. A side without a request is
parked: it waits in a read of a pipe, and before it answers it waits until its other threads rest, as OpenMP's spin for
some milliseconds after their last loop. A side ends when its pipe does: it outlives no parent, however that one ends.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["Side", "SideError", "rest", "serve"]

# Other threads rest where they use less than a twentieth of a core for so long.
_QUIET_S = 0.005
_QUIET_SHARE = 0.05
_REST_S_MAX = 1.0


class SideError(RuntimeError):
    """A side has ended, or has answered something else than a line of JSON."""


class Side:
    """The parent's end of a process.

    Args:
        name: of the revision, for messages.
        command: what `serve` runs in. Its standard output is the pipe of answers.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] = os.environ):
        self.name = name
        # A session of its own: Ctrl-C reaches the parent alone, which then ends its sides.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Give the turn to the side. Returns its answer, after which it is parked.

        Raises:
            SideError: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            code = self._process.wait()
            raise SideError(
                f"the process of {self.name} ended with exit code {code} at {request}; its errors are above"
            )
        return json.loads(answer)

    def close(self) -> None:
        """End the process: at once, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # a request that it has not read
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the parent's requests, one at a time, until its end of the pipe is closed.

    Each answer gets `rested`: whether all other threads of this process were at rest when it went out.
    """
    # What libraries print must not come between answers.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        reply = answer(json.loads(line))
        reply["rested"] = rest()
        try:
            out.write(json.dumps(reply).encode() + b"\n")
        except BrokenPipeError:  # the parent has gone
            return


def rest(seconds_max: float = _REST_S_MAX) -> bool:
    """Wait until the other threads of this process use no processor. Returns whether they came to rest in time."""
    end = time.monotonic() + seconds_max
    while time.monotonic() < end:
        others = time.process_time() - time.thread_time()
        time.sleep(_QUIET_S)
        if time.process_time() - time.thread_time() - others < _QUIET_S * _QUIET_SHARE and not _others_run():
            return True
    return False


def _others_run() -> bool:
    """Whether another thread of this process uses a processor, or waits for one that other programs use."""
    for task in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError):  # The thread has ended.
            state = Path(task.path, "stat").read_text().rpartition(")")[2].split()[0]
            if state == "R" and int(task.name) != threading.get_native_id():
                return True
    return False
