"""Finds and replaces the KeyedJaggedTensors in a batch of a user's loader, at any depth of its containers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torchrec import KeyedJaggedTensor


def find_jagged(data: Any, data_info: Mapping[Any, str] | None, paths: list[str]) -> dict[str, KeyedJaggedTensor]:
    """{path of a collection: its KeyedJaggedTensor in the batch}; ValueError if they do not match the paths.

    Args:
        data: a batch.
        data_info: {index, key or field name in the batch: path of the collection that looks up the KeyedJaggedTensor
            there}; None = the n-th KeyedJaggedTensor of the batch, however deep it is, belongs to the n-th path.
        paths: paths of the collections.
    """
    if data_info is None:
        found: list[KeyedJaggedTensor] = []

        def note(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
            found.append(kjt)
            return kjt

        _map(data, note)
        if len(found) != len(paths):
            raise ValueError(
                f"a batch must have a KeyedJaggedTensor for each of the paths {paths}, in their order, got"
                f" {len(found)}; pass data_info to say which is for which path"
            )
        return dict(zip(paths, found, strict=True))
    parts = {}
    for at, path in data_info.items():
        part = _part(data, at)
        if not isinstance(part, KeyedJaggedTensor):
            raise ValueError(
                f"data_info: {at!r} of a batch must be a KeyedJaggedTensor, for path {path!r}, got"
                f" {type(part).__name__}"
            )
        parts[path] = part
    return parts


def replace_jagged(
    data: Any, data_info: Mapping[Any, str] | None, paths: list[str], new: Mapping[str, KeyedJaggedTensor]
) -> Any:
    """Copy of the batch with other KeyedJaggedTensors in the places where `find_jagged` finds them; `new` has them by
    path."""
    if data_info is None:
        order = iter(paths)
        return _map(data, lambda kjt: new[next(order)])
    for at, path in data_info.items():
        data = _with_part(data, at, new[path])
    return data


def _map(data: Any, of_kjt: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> Any:
    """Copy of the containers of a batch, with of_kjt(k) in place of each KeyedJaggedTensor k."""
    if isinstance(data, KeyedJaggedTensor):
        return of_kjt(data)
    if isinstance(data, tuple | list):
        parts = [_map(part, of_kjt) for part in data]
        if all(one is other for one, other in zip(parts, data, strict=True)):
            return data
        if hasattr(data, "_fields"):
            return type(data)(*parts)
        return type(data)(parts)
    if isinstance(data, dict):
        by_key = {key: _map(part, of_kjt) for key, part in data.items()}
        return data if all(by_key[key] is data[key] for key in data) else type(data)(by_key)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data)]
        changed = {name: _map(getattr(data, name), of_kjt) for name in names}
        changed = {name: part for name, part in changed.items() if part is not getattr(data, name)}
        return _replaced(data, changed) if changed else data
    return data


def _replaced(data: Any, changed: Mapping[str, Any]) -> Any:
    """Copy of a dataclass with these fields changed, made without `__init__`, which may need other arguments."""
    copy = object.__new__(type(data))
    for field in dataclasses.fields(data):
        object.__setattr__(copy, field.name, changed.get(field.name, getattr(data, field.name)))
    return copy


def _part(data: Any, at: Any) -> Any:
    try:
        return getattr(data, _field(data, at)) if dataclasses.is_dataclass(data) else data[at]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"data_info has {at!r}, which a batch of class {type(data).__name__} does not have") from error


def _with_part(data: Any, at: Any, new: Any) -> Any:
    if dataclasses.is_dataclass(data):
        return _replaced(data, {_field(data, at): new})
    if isinstance(data, dict):
        return type(data)({**data, at: new})
    parts = list(data)
    parts[at] = new
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def _field(data: Any, at: Any) -> str:
    return dataclasses.fields(data)[at].name if isinstance(at, int) else at
