"""The command `oneemb`, also `python -m oneemb`. Its commands are in `oneemb.cli.commands`."""

import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    """End the program as an error would, so that unfinished work is undone."""
    # torch answers an exception in the midst of its own import with abort(), which undoes no more than this and has
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
        SystemExit: always; 0 = done, 1 = a check found contradictions, 2 = it could not be done, 130 = it was
            interrupted, 143 = it was told to end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        from oneemb.cli.commands import oneemb

        oneemb(prog_name="oneemb")
    except KeyboardInterrupt:  # while something is imported
        raise SystemExit(128 + signal.SIGINT) from None
