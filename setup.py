"""The description of a release, and a refusal to build from a tree that has lost its links; setup.cfg has the rest.

A package index shows README.md beside no files, so the description has its links made absolute.
"""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def described(readme: str, source: str) -> str:
    """README with absolute links: pages of the repository at `source`, and the bytes of its pictures.

    Before:  [install](docs/install.md), src="docs/a.svg"
    After:   [install](SOURCE/blob/main/docs/install.md), src="SOURCE/raw/main/docs/a.svg"
    """
    readme = re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", rf"]({source}/blob/main/\1)", readme)
    return re.sub(r'\b(src|srcset)="(?![a-z]+:)([^"]+)"', rf'\1="{source}/raw/main/\2"', readme)


for folder in ("graph", "storage", "kernels"):
    if not (ROOT / "oneemb" / folder).is_dir():
        raise SystemExit(
            f"oneemb/{folder} must be a folder, or a link to the folder beside oneemb; some archives drop links. Clone"
            " the tree with git, or run in its root:"
            " rm -f oneemb/graph oneemb/storage oneemb/kernels && ln -s ../graph ../storage ../kernels oneemb/"
        )

config = ConfigParser(interpolation=None)
config.read(ROOT / "setup.cfg")
urls = dict(re.findall(r"(\w+) = (\S+)", config["metadata"]["project_urls"]))
setup(long_description=described((ROOT / "README.md").read_text(), urls["Source"]))
