"""Several processes that serve one socket.

What must stay true: a worker that ends is replaced, whatever ended it, and the others go on meanwhile; none is left
when the parent has ended, however it ended. Figures of all are in one folder, where prometheus_client looks for them.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from prometheus_client.multiprocess import mark_process_dead

__all__ = ["WORKER_FOLDER", "end_with_parent", "run_workers"]

WORKER_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own name
_PARENT_DEATH_SIGNAL = 1  # prctl's number
_WAITED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_LEAST_SECONDS = 1.0  # between two begins of a worker


def end_with_parent(parent: int) -> None:
    """Have this worker told to end when its parent, of this id, ends; and hear signals, which the parent blocks."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit("the parent has ended")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED)


def run_workers(command: list[str], listening: socket.socket, workers: int, patience: float) -> None:
    """Run so many of a command, and replace those that end, until SIGTERM or SIGINT. SIGHUP goes to all.

    Args:
        command: a script and its arguments; it gets `--fd` and the number of the socket, `--parent` and the id of this
            process.
        patience: seconds that workers have to end before they are killed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    fd = listening.fileno()
    with tempfile.TemporaryDirectory(prefix="serve") as folder:

        def start() -> tuple[subprocess.Popen[bytes], float]:
            child = subprocess.Popen(
                [sys.executable, *command, "--fd", str(fd), "--parent", str(os.getpid())],
                pass_fds=[fd],
                env=os.environ | {WORKER_FOLDER: folder},
            )
            return child, time.monotonic()

        running = [start() for _ in range(workers)]
        told = 0
        while told not in (signal.SIGTERM, signal.SIGINT):
            heard = signal.sigtimedwait(_WAITED, _LEAST_SECONDS)
            told = 0 if heard is None else heard.si_signo
            if told == signal.SIGHUP:
                for child, _ in running:
                    child.send_signal(signal.SIGHUP)
            for i, (child, begin) in enumerate(running):
                if child.poll() is not None and time.monotonic() - begin > _LEAST_SECONDS:
                    print(f"worker {child.pid} ended with {child.returncode}: another begins", file=sys.stderr)
                    mark_process_dead(child.pid, folder)
                    running[i] = start()
        listening.close()
        for child, _ in running:
            child.terminate()
        deadline = time.monotonic() + patience
        for child, _ in running:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
