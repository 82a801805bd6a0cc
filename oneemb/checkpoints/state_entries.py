"""Checks of the entries of a state that a file of `graph.save` holds, before any entry is used.

Invariant: an entry of another type than `graph.save` writes is a ValueError that names the file and the entry.
"""

import random
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch


class _Entry(NamedTuple):
    """Type of an entry: its words in errors, and the function that says whether a value has the type."""

    words: str
    fits: Callable[[Any], bool]


def _dict_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Mapping) and all(isinstance(name, str) and fits(one) for name, one in value.items())
    )


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value))


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


def _anything(value: object) -> bool:
    return True


def _names_a_snapshot(value: Any) -> bool:
    kinds = (str, type(None))
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("oneemb_snapshot", 0), kinds)
        and isinstance(value.get("oneemb_identity"), kinds)
        and isinstance(value.get("oneemb_since"), kinds)
    )


def _of_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and _list_of(lambda group: isinstance(group, Mapping) and _is(list)(group.get("params")))(
            value.get("param_groups")
        )
    )


def _of_generators(value: Any) -> bool:
    """Whether random generators take the states. States of GPUs are not tried."""
    if not isinstance(value, Mapping) or not _list_of(_is(torch.Tensor))(value.get("cuda")):
        return False
    try:
        torch.Generator().set_state(value["torch"])
        random.Random().setstate(value["python"])
        name, keys, *rest = value["numpy"]
        np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), *rest))
    except Exception:  # Hostile values raise errors of any class.
        return False
    return True


def _of_rank(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        name in value and _ENTRIES[name].fits(value[name]) for name in ("random", "tensors", "extra")
    )


_DICT_OR_NONE = _is(dict, type(None))
_ENTRIES = {
    "embeddings": _Entry("{name: name and identity of a snapshot}", _dict_of(_names_a_snapshot)),
    "tensors": _Entry("{name: tensor}", _dict_of(_is(torch.Tensor))),
    "extra": _Entry("{name: extra state}", _dict_of(_anything)),
    "optimizers": _Entry("a list of state dicts of optimizers", _list_of(_of_optimizer)),
    "optimizer_classes": _Entry("a list of names of classes", _list_of(_is(str))),
    "skipped": _Entry("a list of integers", _list_of(_is(int))),
    "lr_schedulers": _Entry("a list of state dicts of schedulers", _list_of(_DICT_OR_NONE)),
    "grad_scaler": _Entry("a state dict of a GradScaler, or None", _DICT_OR_NONE),
    "steps": _Entry("an integer", _is(int)),
    "random": _Entry("states of random generators", _of_generators),
}
_OPTIONAL = {
    "own_grad_scalers": _Entry("{name: state dict of a GradScaler}", _dict_of(_is(dict))),
    "optimizer_names": _Entry(
        "lists of names of parameters", _list_of(_list_of(_list_of(_is(str, type(None)))))
    ),
    "others": _Entry("a list of states of ranks", _list_of(_of_rank)),
    "earlier": _Entry("a list of names of snapshots", _list_of(_dict_of(_names_a_snapshot))),
}  # fmt: skip
"""Entries that files of earlier releases, or of one rank, do not have."""


def check_entries(state: Mapping[str, Any], where: str, names: Collection[str] = tuple(_ENTRIES)) -> None:
    """Raise ValueError unless a state has the entries `names`, and these and its optional entries have the types that
    `graph.save` writes. `where` names the file in errors."""
    for name, entry in (_ENTRIES | _OPTIONAL).items():
        if name in names and name not in state:
            raise ValueError(f"{where} is damaged: it has no entry {name!r}; {_ADVICE}")
        if name in state and (name in names or name in _OPTIONAL) and not entry.fits(state[name]):
            got = f"{type(state[name]).__name__} {reprlib.repr(state[name])}"
            raise ValueError(f"{where} is damaged: its entry {name!r} must be {entry.words}, got {got}; {_ADVICE}")


_ADVICE = "take another checkpoint, or save it again by graph.save"
