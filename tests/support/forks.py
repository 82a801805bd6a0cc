"""Children of fork, and processes that a server forks which has loaded torch and oneemb."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import types


def fork_context():
    """A context of multiprocessing whose processes have the imports of tests/support/rank_imports.py."""
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


def run_code(code, *arguments, cwd=None, environment=None, seconds=600):
    """Run `python -c code arguments...` as a fork of the server, and return its exit code, stdout and stderr.

    A test of how an interpreter begins or ends must start a process instead.

    Args:
        environment: variables set in addition to those of this process.

    Returns:
        A CompletedProcess, as from `subprocess.run` with captured text.

    Raises:
        TimeoutExpired: the code did not end within `seconds`, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(its) for its in arguments]
        environment = os.environ | (environment or {})
        process = fork_context().Process(target=_main, args=(code, arguments, cwd, environment, folder))
        process.start()
        try:
            process.join(seconds)
        finally:  # Also after Ctrl-C.
            if late := process.exitcode is None:
                process.kill()
                process.join()
        printed = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        printed = [file.read_text() if file.exists() else "" for file in printed]
        if late:
            raise subprocess.TimeoutExpired(code, seconds, *printed)
        return subprocess.CompletedProcess(code, process.exitcode, *printed)


def _main(code, arguments, cwd, environment, folder):
    """Run `code` as the program of this process."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    sys.path.insert(0, os.getcwd())
    sys.argv = ["-c", *arguments]
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    exec(compile(code, "<string>", "exec"), program.__dict__)
