"""Revisions of the source tree as packages that can be imported side by side, each in a process of its own.

Nothing is installed: a folder of links maps the tree's folders to packages as its own setup.cfg says, or else as they
lie. It comes first on the path, before the package that the environment has.
"""

import configparser
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["checked_out", "copied", "describe", "link_packages"]


def describe(root: Path) -> str:
    """The commit of a tree, with `-changed` if files that it knows have changed since."""
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    return commit + ("-changed" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


@contextmanager
def checked_out(root: Path, revision: str, folder: Path) -> Iterator[Path]:
    """A tree of one revision, in a git worktree that is removed at the end.

    Raises:
        ValueError: git knows no such revision, or cannot check it out.
    """
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ValueError(f"git knows no revision {revision!r}; name a commit, a branch or a tag") from None
    tree = folder / "tree"
    try:
        if _whole(root, "worktree", "add", "--quiet", "--detach", "--force", str(tree), commit):
            raise ValueError(f"git could not check {revision} out into {tree}; its error is above")
        yield tree
    finally:
        # Not `prune`, which would take with it what git knows of other people's worktrees.
        _whole(root, "worktree", "remove", "--force", "--force", str(tree))


@contextmanager
def copied(root: Path, folder: Path) -> Iterator[Path]:
    """A copy of the packages of a tree as it is now: what is edited during a comparison is no part of it."""
    tree = folder / "tree"
    for name in {*_package_folders(root).values(), "setup.cfg"}:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        elif source.exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree / name)
    yield tree


def link_packages(tree: Path, into: Path) -> Path:
    """A folder from which Python imports the packages of a tree, whatever its layout."""
    folders = _package_folders(tree)
    for package in sorted(folders, key=lambda name: name.count(".")):
        place = into.joinpath(*package.split(".")) if package else into
        place.mkdir(parents=True, exist_ok=True)
        for entry in (tree / folders[package]).iterdir():
            link = place / entry.name
            if not link.exists() and entry.name != "__pycache__":
                link.symlink_to(entry.resolve())
    return into


def _package_folders(tree: Path) -> dict[str, str]:
    """Folder of each package that setup.cfg maps; "" is the parent of those that it does not."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(tree / "setup.cfg")
    lines = config.get("options", "package_dir", fallback="").split("\n")
    mapped = {name.strip(): folder.strip() for name, _, folder in (line.partition("=") for line in lines) if folder}
    return mapped or ({"": "src"} if (tree / "src").is_dir() else {"oneemb": "oneemb"})


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _whole(root: Path, *arguments: str) -> int:
    """Run git to its end, also in face of Ctrl-C: a worktree that is half made could not be removed.

    Returns:
        its exit code.
    """
    process = subprocess.Popen(["git", "-C", root, *arguments], start_new_session=True)
    try:
        return process.wait()
    finally:
        process.wait()
