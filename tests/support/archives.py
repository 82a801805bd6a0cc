"""Source archives and wheels of this tree, built in a copy of it, since setuptools writes beside the sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "TRAINS", "built", "named_by_git", "run"]

ROOT = Path(__file__).resolve().parents[2]

TRAINS = """
import pathlib, torch, oneemb
store = oneemb.make_device_mem_store_options()
with oneemb.MultiTableEmbedding("e", 4, torch.float32, torch.int64, [oneemb.make_table()], store) as embedding:
    optimizer = torch.optim.Adam(embedding.parameters())
    embedding(torch.tensor([1, 2, 1])).sum().backward()
    optimizer.step()
    print(len(embedding), pathlib.Path(oneemb.__file__).parent.parent)
"""
"""A program that trains rows; it prints how many there are and the folder in which oneemb was found."""


def run(folder, *command, timeout=600, **more):
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def named_by_git():
    """Names of the files of this tree that git knows."""
    names = run(ROOT, "git", "ls-files", "-z").split("\0")
    return [name for name in names if name and os.path.lexists(ROOT / name)]


def built(folder, kind, python=sys.executable):
    """Path of the archive of this tree in `folder`, which `python` builds.

    Args:
        kind: "sdist" or "wheel".
    """
    source = folder / f"{kind}-source"
    for name in named_by_git():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(folder)!r}))"
    return folder / run(source, python, "-c", code).split()[-1]
