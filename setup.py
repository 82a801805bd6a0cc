"""Refuses to build from a copy of the source tree that has lost its links; setup.cfg has the rest."""

from pathlib import Path

from setuptools import setup

for folder in ("graph", "storage", "kernels"):
    if not (Path(__file__).parent / "oneemb" / folder).is_dir():
        raise SystemExit(
            f"oneemb/{folder} must be a folder, or a link to the folder beside oneemb; some archives drop links. Clone"
            " the tree with git, or run in its root:"
            " rm -f oneemb/graph oneemb/storage oneemb/kernels && ln -s ../graph ../storage ../kernels oneemb/"
        )
setup()
