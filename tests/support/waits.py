"""Waits with a limit: a test that hangs fails at the line that waits."""

PATIENCE_S = 60


def came(event):
    """Wait until an event is set."""
    assert event.wait(PATIENCE_S), "the event has not come"


def ended(*threads):
    """Wait until threads, or processes, have ended."""
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread} has not ended"
