"""Dense weights, extra states and names of snapshots of a checkpoint, found by the names of a module's parts.

Invariant: a checkpoint with entries of wrong types is a ValueError that names the file.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from oneemb.checkpoints.named_snapshot import SnapshotName, decode
from oneemb.checkpoints.state_entries import check_entries
from oneemb.checkpoints.state_names import tensors_of, with_extra_state

T = TypeVar("T")

_EXTRA = "_extra_state"
_WRAPPED = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names of the attributes in which torch's wrappers (`torch.compile`, DistributedDataParallel,
FullyShardedDataParallel, `checkpoint_wrapper`) hold the wrapped module. They are parts of names in a state dict."""


class Weights(NamedTuple):
    """Contents of a checkpoint, or of a dict in it."""

    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    snapshots: Mapping[str, SnapshotName]


class _Names(NamedTuple):
    """Names of the parts of a module."""

    shapes: dict[str, tuple[int, ...]]
    extra: set[str]
    places: list[str]


def weights_for(
    module: torch.nn.Module, places: Collection[str], checkpoint: object, prefix: str | None, path: str
) -> Weights:
    """Weights of a module in a checkpoint, by the names of the module's parts. If the names do not fit, the names of
    torch's wrappers, such as `_orig_mod`, are left out of them, in the checkpoint and in the module.

    Args:
        places: names of the embeddings in the module.
        checkpoint: content of the file `path`.
        prefix: name of the module in the checkpoint; None = the only name that fits.

    Raises:
        ValueError: the file is no checkpoint, or does not fit.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(module).items()}
    names = _Names(shapes, set(with_extra_state(module)), list(places))
    dicts = [checkpoint, *checkpoint.values()] if isinstance(checkpoint, Mapping) else []
    found = [weights for one in dicts if (weights := _weights_in(one, path)) is not None]
    if not found:
        raise ValueError(
            f"{path} is no checkpoint that names snapshots; save it by graph.save, or by torch.save of the module's"
            " state_dict() or of a dict that holds it"
        )
    problems: dict[str, str] = {}
    for named in _as_named, _plain:
        for weights in found:
            if (fit := _fit(weights, names, prefix, named, problems, path)) is not None:
                return fit
    first = names.places[0]
    saved = sorted(name for weights in found for name in weights.snapshots)
    told = "; ".join(f"under {tried!r}, {problem}" for tried, problem in problems.items())
    raise ValueError(
        f"{path} does not fit the module: {told or f'no name ends in {first!r}'}; its embeddings are {saved}. Serve the"
        " module that the job has saved, or give its name in the checkpoint as prefix="
    )


def set_weights(module: torch.nn.Module, weights: Weights, path: str) -> None:
    """Give the tensors and extra states of a module those of the checkpoint `path`, a result of `weights_for`.
    ValueError if the module does not take one."""
    try:
        with torch.no_grad():
            for name, tensor in tensors_of(module).items():
                tensor.copy_(weights.tensors[name])
        for name, part in with_extra_state(module).items():
            part.set_extra_state(weights.extra[name])
    except Exception as error:  # A module's own `set_extra_state` may raise any error.
        raise ValueError(
            f"{path} does not fit the module: {name!r} does not take its state there: {type(error).__name__}: {error};"
            " serve the module that the job has saved, or take another checkpoint"
        ) from error


def _fit(
    weights: Weights, names: _Names, prefix: str | None, named: Callable[[str], str], problems: dict[str, str],
    path: str,
) -> Weights | None:  # fmt: skip
    """`weights` under the names of the module, if these fit after `named` has changed all names. Otherwise None, and
    `problems` gets {prefix: reason}."""
    tensors, extra, snapshots = (_renamed(part, named) for part in weights)
    shapes = _renamed(names.shapes, named)
    if tensors is None or extra is None or snapshots is None or shapes is None:
        return None  # Two names are equal without those of wrappers.
    first, fits = named(names.places[0]), dict[str, Weights]()
    for tried in [_before(name, first) for name in snapshots] if prefix is None else [named(prefix)]:
        if tried is None:
            continue

        def there(name: str, tried: str = tried) -> str:
            return _joined(tried, named(name))

        has = {name: tensors.get(there(name)) for name in names.shapes}
        missing = [name for name in names.places if there(name) not in snapshots]
        missing += [name for name, tensor in has.items() if tensor is None]
        missing += [_joined(name, _EXTRA) for name in names.extra if there(name) not in extra]
        other = [
            f"{name} is {tuple(tensor.shape)} there, {names.shapes[name]} in the module"
            for name, tensor in has.items()
            if tensor is not None and tuple(tensor.shape) != names.shapes[name]
        ]
        if not missing and not other:
            fits[tried] = Weights(
                {name: tensors[there(name)] for name in names.shapes},
                {name: extra[there(name)] for name in names.extra},
                {name: snapshots[there(name)] for name in names.places},
            )
        problems[tried] = other[0] if other else f"it has no {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}"
    if len(fits) > 1:
        raise ValueError(f"{path} has several modules that fit, {list(fits)}; give one of these names as prefix=")
    return next(iter(fits.values()), None)


def _weights_in(found: object, path: str) -> Weights | None:
    """Weights in the content of a file of `graph.save`, or in a state dict; None = neither, or without an embedding.
    ValueError if an entry has a wrong type."""
    if not isinstance(found, Mapping):
        return None
    if {"format", "embeddings", "tensors", "extra"} <= found.keys():
        check_entries(found, path, ("embeddings", "tensors", "extra"))
        return Weights(found["tensors"], found["extra"], found["embeddings"])
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    snapshots: dict[str, SnapshotName] = {}
    for key, value in found.items():
        name, _, last = str(key).rpartition(".")
        if last != _EXTRA:
            if isinstance(value, torch.Tensor):
                tensors[str(key)] = value
            continue
        try:
            snapshots[name] = decode(value)
        except ValueError:
            extra[name] = value
    return Weights(tensors, extra, snapshots) if snapshots else None


def _as_named(name: str) -> str:
    return name


def _plain(name: str) -> str:
    """The name without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _renamed(values: Mapping[str, T], named: Callable[[str], str]) -> dict[str, T] | None:
    """`values` under changed names; None = two of the changed names are equal."""
    renamed = {named(name): value for name, value in values.items()}
    return renamed if len(renamed) == len(values) else None


def _before(name: str, last: str) -> str | None:
    """Part of `name` before `last`; None if `name` does not end in `last`."""
    if name == last:
        return ""
    if not last:
        return name
    return name.removesuffix(f".{last}") if name.endswith(f".{last}") else None


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
