"""JSON in which a long list is written and parsed once, however many texts contain it.

Every snapshot of an embedding has the list of the embedding's tables. A list of a hundred thousand tables takes a third
of a second to parse, so a parsed list is kept, by its text, as long as anything refers to it.

Invariants:
- `to_json` and `from_json` return what `json.dumps` and `json.loads` return;
- no caller changes a `LongList`: several snapshots share it.
"""

import json
import re
import weakref
from typing import Any

# Least number of characters of a list that is kept, and of a text that is searched for such lists.
_LONG_MIN = 1 << 16

_decoder = json.JSONDecoder()
_blanks = re.compile(r"[ \t\n\r]*")


class LongList(list[Any]):
    """A list that knows its JSON text; None = what `json.dumps` writes. Its items are as a parsed JSON has them: lists
    rather than tuples, strings as keys of dicts."""

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
    """The value of a JSON text; equal long lists in objects are one `LongList`. ValueError or RecursionError if it is
    not JSON."""
    if len(data) < _LONG_MIN:
        return json.loads(data)
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    value, end = _value(text, _after_blanks(text, 0))
    if _after_blanks(text, end) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and the place after its end."""
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
    """Place of the first character, other than a blank, after a mark that comes next."""
    at = _after_blanks(text, at)
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"Expecting {mark!r} delimiter", text, at)
    return _after_blanks(text, at + 1)


def _after_blanks(text: str, at: int) -> int:
    match = _blanks.match(text, at)
    assert match is not None
    return match.end()
