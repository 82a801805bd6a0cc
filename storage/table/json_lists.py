"""Writes and parses JSON; a long list is written once and parsed once, however many texts contain it.

Every snapshot of an embedding has the list of the embedding's tables. A list of a hundred thousand tables takes a third
of a second to parse, so {text: parsed list} is kept as long as anything refers to the list.

Invariants:
- `to_json` and `from_json` return what `json.dumps` and `json.loads` return;
- no caller changes a `LongList`: several snapshots share it.
"""

import json
import re
import weakref
from typing import Any

# Lists with at least this many characters of JSON are kept; shorter texts are not searched for kept lists.
_LONG_MIN = 1 << 16

_decoder = json.JSONDecoder()
_blanks = re.compile(r"[ \t\n\r]*")


class LongList(list[Any]):
    """A list with its JSON text. The items must be as `json.loads` returns them: lists, no tuples, and dicts with
    strings as keys. text: None = the text that `json.dumps` writes."""

    def __init__(self, items: list[Any], text: str | None = None):
        super().__init__(items)
        self.text = json.dumps(items) if text is None else text
        if len(self.text) >= _LONG_MIN:
            _known[self.text] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # A copy is a plain list, which the caller may change.


_known: "weakref.WeakValueDictionary[str, LongList]" = weakref.WeakValueDictionary()


def to_json(value: Any) -> str:
    """JSON text of a value. TypeError, ValueError or RecursionError if JSON cannot hold it."""
    if isinstance(value, LongList):
        return value.text
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return "{" + ", ".join(f"{json.dumps(key)}: {to_json(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def from_json(data: bytes | str) -> Any:
    """Parse a JSON text; equal long lists in objects become the same `LongList`. ValueError or RecursionError if the
    text is not JSON."""
    if len(data) < _LONG_MIN:
        return json.loads(data)
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    value, end = _value(text, _after_blanks(text, 0))
    if _after_blanks(text, end) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _value(text: str, at: int) -> tuple[Any, int]:
    """Parse the value that begins at index `at` of the text; returns the value and the index after its end."""
    if text.startswith("{", at):
        return _object(text, at)
    if not text.startswith("[", at):
        return _decoder.raw_decode(text, at)
    for known, found in list(_known.items()):
        if text.startswith(known, at):  # A list ends with its bracket, so no longer list begins with this text.
            return found, at + len(known)
    value, end = _decoder.raw_decode(text, at)
    return (LongList(value, text[at:end]) if end - at >= _LONG_MIN else value), end


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _after_blanks(text, at + 1)
    while not (text.startswith("}", at) and not found):
        if not text.startswith('"', at):
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key, at = _decoder.raw_decode(text, at)
        at = _after(":", text, at)
        found[key], at = _value(text, at)
        at = _after_blanks(text, at)
        if text.startswith("}", at):
            break
        at = _after(",", text, at)
    return found, at + 1


def _after(mark: str, text: str, at: int) -> int:
    """Skip blanks, the required character `mark`, and blanks; returns the index after them."""
    at = _after_blanks(text, at)
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"Expecting {mark!r} delimiter", text, at)
    return _after_blanks(text, at + 1)


def _after_blanks(text: str, at: int) -> int:
    match = _blanks.match(text, at)
    assert match is not None
    return match.end()
