"""The command `oneemb`, also `python -m oneemb`. What it can do is in `oneemb.commands`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: always; 0 = done, 1 = a check found contradictions, 2 = it could not be done.
    """
    try:
        import click  # noqa: F401
        import tqdm  # noqa: F401
    except ImportError as error:
        print(f"the command line needs {error.name}; install it with: pip install 'oneemb[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from oneemb.commands import oneemb

    oneemb(prog_name="oneemb")
