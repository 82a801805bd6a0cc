"""Folders that are made once for all processes of a run."""

import os

import pytest

from tests.support.forks import fork_context
from tests.support.once import made_once


class Factory:
    """`tmp_path_factory` of one process of several."""

    def __init__(self, folder):
        self.folder = folder

    def getbasetemp(self):
        return self.folder


def _asks(root, pipe):
    os.environ["PYTEST_XDIST_WORKER"] = "gw"
    own = root / str(os.getpid())
    own.mkdir()
    folder = made_once(Factory(own), "what", lambda folder: (folder / str(os.getpid())).touch())
    pipe.send(sorted(path.name for path in folder.iterdir()))


def test_of_several_processes_one_makes_it(tmp_path):
    context, asked = fork_context(), []
    for _ in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=_asks, args=(tmp_path, theirs))
        process.start()
        asked.append((process, ours))
    found = []
    for process, pipe in asked:
        assert pipe.poll(600)
        found.append(pipe.recv())
        process.join()
    assert len(found[0]) == 1 and found == [found[0]] * 3


def test_what_has_failed_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def fail(folder):
        (folder / "half").touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made_once(Factory(tmp_path), "what", fail)
    folder = made_once(Factory(tmp_path), "what", lambda folder: (folder / "whole").touch())
    assert folder == made_once(Factory(tmp_path), "what", fail)
    assert [path.name for path in folder.iterdir()] == ["whole"]
