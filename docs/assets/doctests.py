"""Extension of griffe: `Example:` of a docstring is a doctest, as `Examples:` is in the style guide of Google."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(\s*)Example:\s*$", re.MULTILINE)


class Doctests(griffe.Extension):
    """Renames the section `Example:` of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
