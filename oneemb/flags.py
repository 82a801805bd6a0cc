"""Arguments that are True or False."""

import numpy as np


def check_flags(**flags: object) -> None:
    """Raise TypeError unless all `flags`, by name, are bools."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, got {type(flag).__name__} {flag!r:.100}")
