"""Jobs in a background thread, whose errors are raised in the caller's thread.

Invariants: at most one job runs at a time; an error is kept until a call has raised it, once.
"""

import threading
from collections.abc import Callable

from oneemb.kernels.threads import start
from oneemb.storage.errors import StorageError


class Background:
    """Runs one job at a time, each in a thread of its own.

    Args:
        name: what the jobs do, for errors.
    """

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run the job in the background. No other may be running."""
        assert not self.busy
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"oneemb-{self._name}", daemon=True)
        start(self._thread)

    def raise_error(self) -> None:
        """Raise what ended a job early, as a StorageError, once."""
        error, self._error = self._error, None
        if isinstance(error, StorageError):
            raise error
        if error is not None:
            raise StorageError(f"{self._name} in the background failed: {error!r}") from error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
