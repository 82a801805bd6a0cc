"""The command `oneemb`, also `python -m oneemb`. Its subcommands are in `oneemb.cli.commands`."""

import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    """End the program by an exception, so that unfinished work is undone."""
    # If an exception is raised while torch is imported, torch calls abort(), which undoes no more than this and has
    # another exit code.
    loading = getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
    if loading:
        os._exit(128 + number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: always; 0 = done, 1 = a check found damage, 2 = the command failed, 130 = interrupted, 143 =
            terminated.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        from oneemb.cli.commands import oneemb

        oneemb(prog_name="oneemb")
    except KeyboardInterrupt:  # before the command handles it
        raise SystemExit(128 + signal.SIGINT) from None
