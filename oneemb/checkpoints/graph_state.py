"""State of a training graph without its rows: functions that take, compare, restore and read it.

    state      dense parameters and buffers, optimizers, schedulers, scaler, steps, random generators, and for each
               embedding the name and identity of a snapshot
    others     with ranks: for each rank after the first, the state that only this rank has

Dense parameters and their optimizer state are the same on all ranks, as with DistributedDataParallel, so the state has
those of the first rank. `others` has the random generators of each rank, and the buffers and extra states of modules
that differ from those of the first rank.

Invariants:
- if a state is loaded by as many ranks as have saved it, each rank continues with the same bits. Otherwise all ranks
  get the state of the first; a rank that existed before keeps its random generators, and a further rank gets generators
  seeded by the first rank's state and its own number;
- names leave out the `.module` of DistributedDataParallel: a wrapped module loads the state of an unwrapped one, and
  the other way round;
- a state that does not fit the graph is refused before anything has changed.
"""

import io
import pickle
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Literal, NamedTuple, NotRequired, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from oneemb.checkpoints.named_snapshot import SnapshotName
from oneemb.checkpoints.state_bytes import hash_of, load_bytes, to_bytes
from oneemb.checkpoints.state_entries import check_entries
from oneemb.checkpoints.state_names import (
    buffers_of,
    named_embeddings,
    own_scalers_of,
    param_names_of,
    tensors_of,
    with_extra_state,
)
from oneemb.graph.ranks import AnyRanks
from oneemb.training.compiled_graph import CompiledGraph
from oneemb.training.eager import Optimizer
from oneemb.training.train_state import TrainState

_FORMAT = 2


class RandomState(TypedDict):
    """States of the random generators of a process."""

    torch: Tensor
    cuda: list[Tensor]
    """States of the generators of all GPUs; with ranks, only of the rank's GPU."""
    python: tuple[Any, ...]
    numpy: list[Any]


class Other(TypedDict):
    """State that only one rank has, of the ranks after the first."""

    random: RandomState
    tensors: dict[str, torch.Tensor]
    extra: dict[str, Any]
    loader: NotRequired[Any]


class State(TypedDict):
    """State of a training graph without its rows."""

    format: int
    embeddings: dict[str, SnapshotName]
    tensors: dict[str, torch.Tensor]
    extra: dict[str, Any]
    optimizers: list[dict[str, Any]]
    optimizer_classes: list[str]
    optimizer_names: NotRequired[list[list[list[str | None]]]]
    """For each optimizer, the names of the parameters of each param group. Older states lack this entry."""
    skipped: list[int]
    lr_schedulers: list[dict[str, Any] | None]
    grad_scaler: dict[str, Any] | None
    own_grad_scalers: dict[str, dict[str, Any]]
    steps: int
    random: RandomState
    others: NotRequired[list[Other]]
    loader: NotRequired[Any]


class LoadedKeys(NamedTuple):
    """Names that a load has ignored."""

    missing_keys: list[str]
    """Names that only the graph has; they keep their values."""
    unexpected_keys: list[str]
    """Names that only the state has."""


# ---- take -----------------------------------------------------------------------------------------------------------


def check_between_updates(graph: CompiledGraph, train: TrainState) -> None:
    """Raise RuntimeError if accumulated gradients wait for an update: a state holds no gradients."""
    if train.micro_batches:
        raise RuntimeError(
            f"no micro-batch may wait for its update in a save, but {train.micro_batches} of"
            f" {graph.config.accumulation_steps} do; save after the call that ends with the update"
        )


def others_of(graph: CompiledGraph, ranks: AnyRanks, what: str) -> list[Other] | None:
    """On the first rank, the states that only the ranks after it have; [] on other ranks; None = no ranks. Every rank
    must make the call. RuntimeError if parameters are sharded over ranks, so that no rank has all of them."""
    if ranks.alone:
        return None
    what = f"{what}: what each rank has of its own"
    hashes = ranks.all_gather(what, lambda: _hashes(graph))
    differ = {name for name, hash in hashes[ranks.rank].items() if hash != hashes[0].get(name)}
    own = ranks.all_gather(what, lambda: b"" if ranks.first else to_bytes(_own(graph, differ)))
    found: list[Other] = []

    def read() -> None:
        _warn_of_differences(graph, hashes)
        found.extend(load_bytes(io.BytesIO(data), "what a rank has of its own") for data in own[1:])

    ranks.by_first(what, read)
    return found


def state_of(
    graph: CompiledGraph, train: TrainState, snapshots: Mapping[str, SnapshotName], others: Sequence[Other] | None
) -> State:
    """Current state of a graph. `others`: result of `others_of`."""
    state: State = {
        "format": _FORMAT,
        "embeddings": dict(snapshots),
        "tensors": {name: tensor.detach() for name, tensor in tensors_of(graph).items()},
        "extra": {name: module.get_extra_state() for name, module in with_extra_state(graph).items()},
        "optimizers": [optimizer.state_dict() for optimizer in train.optimizers],
        "optimizer_classes": _classes(train),
        "optimizer_names": [param_names_of(graph, optimizer) for optimizer in train.optimizers],
        "skipped": [optimizer.skipped for optimizer in train.optimizers],
        "lr_schedulers": [None if scheduler is None else scheduler.state_dict() for scheduler in train.lr_schedulers],
        "grad_scaler": None if train.scaler is None else train.scaler.state_dict(),
        "own_grad_scalers": {name: scaler.state_dict() for name, scaler in own_scalers_of(graph).items()},
        "steps": train.steps,
        "random": random_now(of_rank=others is not None),
    }
    if others:
        state["others"] = list(others)
    if (loader := _loader_state(graph)) is not None:
        state["loader"] = loader
    return state


def _own(graph: CompiledGraph, differ: set[str]) -> Other:
    """State that only this rank has. `differ`: names of the tensors and extra states that differ from the first
    rank's."""
    buffers, modules = buffers_of(graph), with_extra_state(graph)
    own: Other = {
        "random": random_now(of_rank=True),
        "tensors": {name: tensor.detach() for name, tensor in buffers.items() if name in differ},
        "extra": {name: module.get_extra_state() for name, module in modules.items() if _EXTRA + name in differ},
    }
    if (loader := _loader_state(graph)) is not None:
        own["loader"] = loader
    return own


def _loader_state(graph: CompiledGraph) -> Any:
    """State of the loader; None = the loader has no state, or (with a warning) a checkpoint cannot hold it."""
    if (state := graph.loader_state) is None:
        return None
    try:
        load_bytes(io.BytesIO(to_bytes(state)), "the state of the loader")
    except (ValueError, TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        warnings.warn(
            "the state of the loader is not saved, since a checkpoint can only hold numbers, strings and tensors, in"
            f" lists and dicts; save graph.loader_state yourself ({error})",
            stacklevel=2,
        )
        return None
    return state


_EXTRA = "the extra state of "


def _hashes(graph: CompiledGraph) -> dict[str, str]:
    """{name: hash} of each tensor and extra state."""
    tensors = tensors_of(graph)
    for name, tensor in tensors.items():
        if hasattr(tensor, "device_mesh"):
            raise RuntimeError(
                f"{name} must not be sharded over ranks, since a state holds the tensors of the first rank alone; wrap"
                " dense modules in DistributedDataParallel, or save them by torch.distributed.checkpoint and each"
                " embedding by save_snapshot"
            )
    hashes = {name: hash_of(tensor.detach()) for name, tensor in tensors.items()}
    return hashes | {
        _EXTRA + name: hash_of(module.get_extra_state()) for name, module in with_extra_state(graph).items()
    }


def _warn_of_differences(graph: CompiledGraph, hashes: Sequence[Mapping[str, str]]) -> None:
    first, buffers = hashes[0], buffers_of(graph)
    parameters = [name for name in tensors_of(graph) if name not in buffers]
    differ = [name for name in parameters if any(of_rank.get(name) != first[name] for of_rank in hashes)]
    if differ:
        warnings.warn(
            f"dense parameters are not the same on all ranks: {', '.join(differ[:3])}{', ...' * (len(differ) > 3)}."
            " The saved state has only the parameters of rank 0; wrap dense modules in DistributedDataParallel",
            stacklevel=2,
        )


# ---- compare --------------------------------------------------------------------------------------------------------


def check_fits(
    graph: CompiledGraph, train: TrainState, state: State, where: str, *, strict: bool = True
) -> LoadedKeys:  # fmt: skip
    """Raise ValueError unless the state fits the graph; rows are not checked. Returns the names that only the graph or
    only the state has; if `strict`, such names raise ValueError, too. `where` names the state in errors."""
    if state.get("format") != _FORMAT:
        raise ValueError(f"{where} has format {state.get('format')!r}, this version of oneemb reads format {_FORMAT}")
    embeddings = named_embeddings(graph)
    shapes = _shapes(tensors_of(graph))
    saved = _shapes(state["tensors"])
    hold_nothing = {f"{name}.weight" for name in embeddings}
    for name in sorted({*shapes, *saved} - hold_nothing):
        if shapes.get(name) != saved.get(name) and (strict or name in shapes and name in saved):
            raise ValueError(
                f"{where} does not fit: {name} is {saved.get(name)} there, {shapes.get(name)} in the graph"
            )
    classes = _classes(train)
    if not strict:
        for cls, own in zip(state["optimizer_classes"], classes, strict=False):
            if cls != own:
                raise ValueError(f"{where} does not fit: the optimizer is {cls} there, {own} in the graph")
        keys = _keys(tensors_of(graph), embeddings, own_scalers_of(graph), with_extra_state(graph), classes,
                     train.lr_schedulers, train.scaler)  # fmt: skip
        saved_keys = _keys(state["tensors"], state["embeddings"], state.get("own_grad_scalers", ()), state["extra"],
                           state["optimizers"], state["lr_schedulers"], state["grad_scaler"])  # fmt: skip
        saved_keys -= _not_taken(train, state)
        hold_nothing |= {f"{name}.weight" for name in state["embeddings"]}
        return LoadedKeys(sorted(keys - saved_keys - hold_nothing), sorted(saved_keys - keys - hold_nothing))
    expected = (
        ("embeddings", sorted(state["embeddings"]), sorted(embeddings)),
        ("modules with extra state", sorted(state["extra"]), sorted(with_extra_state(graph))),
        ("optimizers", state["optimizer_classes"], classes),
        (
            "the numbers of parameters in each param group",
            [_group_sizes(optimizer_state) for optimizer_state in state["optimizers"]],
            [_group_sizes(optimizer.state_dict()) for optimizer in train.optimizers],
        ),
        (
            "learning rate schedulers",
            [scheduler_state is not None for scheduler_state in state["lr_schedulers"]],
            [scheduler is not None for scheduler in train.lr_schedulers],
        ),
        ("a GradScaler", state["grad_scaler"] is not None, train.scaler is not None),
        ("GradScalers of build", sorted(state.get("own_grad_scalers", ())), sorted(own_scalers_of(graph))),
    )
    for what, there, here in expected:
        if there != here:
            raise ValueError(f"{where} does not fit: {what} are {there} there, {here} in the graph")
    return LoadedKeys([], [])


def _not_taken(train: TrainState, state: State) -> set[str]:
    """Names of the optimizers and schedulers that cannot load their saved state, since their param groups differ."""
    keys = set[str]()
    for n, (optimizer, saved) in enumerate(zip(train.optimizers, state["optimizers"], strict=False)):
        here, there = _group_sizes(optimizer.state_dict()), _group_sizes(saved)
        if here != there and "optimizer_names" not in state:  # No name says to which parameter a state belongs.
            keys.add(f"optimizers.{n}")
        if len(here) != len(there):
            keys.add(f"lr_schedulers.{n}")
    return keys


def _classes(train: TrainState) -> list[str]:
    return [type(optimizer.optimizer).__name__ for optimizer in train.optimizers]


def _keys(
    tensors: Iterable[str], embeddings: Iterable[str], own_scalers: Iterable[str], extra: Iterable[str],
    optimizers: Sequence[object], lr_schedulers: Sequence[object], scaler: object,
) -> set[str]:  # fmt: skip
    """Names of all parts of a state."""
    keys = {*tensors, *embeddings, *own_scalers, *(f"{name}._extra_state" for name in extra)}
    keys |= {f"optimizers.{n}" for n in range(len(optimizers))}
    keys |= {f"lr_schedulers.{n}" for n, scheduler in enumerate(lr_schedulers) if scheduler is not None}
    return keys | ({"grad_scaler"} if scaler is not None else set())


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _group_sizes(state: dict[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


# ---- restore --------------------------------------------------------------------------------------------------------


def restore_dense(graph: CompiledGraph, train: TrainState, state: State, ranks: AnyRanks) -> None:
    """Load everything but rows into this rank's graph. Parts that graph and state both have must fit."""
    others = state.get("others", [])
    saved_tensors, saved_extra = state["tensors"], state["extra"]
    if ranks.rank > 0 and ranks.size == 1 + len(others):
        own = others[ranks.rank - 1]
        saved_tensors, saved_extra = saved_tensors | own["tensors"], saved_extra | own["extra"]
    with torch.no_grad():
        for name, tensor in tensors_of(graph).items():
            if name in saved_tensors:
                tensor.copy_(saved_tensors[name])
    for name, module in with_extra_state(graph).items():
        if name in saved_extra:
            module.set_extra_state(saved_extra[name])
    not_taken = _not_taken(train, state)
    for n, (optimizer, skipped) in enumerate(zip(train.optimizers, state["skipped"], strict=False)):
        if f"optimizers.{n}" not in not_taken:
            optimizer.load_state_dict(_state_for(graph, optimizer, state, n))
            optimizer.skipped = skipped
    for n, (scheduler, scheduler_state) in enumerate(zip(train.lr_schedulers, state["lr_schedulers"], strict=False)):
        if scheduler is not None and scheduler_state is not None and f"lr_schedulers.{n}" not in not_taken:
            scheduler.load_state_dict(scheduler_state)
    if train.scaler is not None and state["grad_scaler"] is not None:
        train.scaler.load_state_dict(state["grad_scaler"])
    for name, scaler in own_scalers_of(graph).items():
        if name in state["own_grad_scalers"]:
            scaler.load_state_dict(state["own_grad_scalers"][name])
    train.drop_gradients(() if train.scaled_by is None else (train.scaled_by,))
    train.steps = state["steps"]
    all_ranks: list[State | Other] = [state, *others]
    states = [one.get("loader") for one in all_ranks]
    graph.at_loader_state(states[ranks.rank] if ranks.size == len(states) else None, None if None in states else states)
    restore_random([state["random"], *(own["random"] for own in others)], ranks)


def _state_for(graph: CompiledGraph, optimizer: Optimizer, state: State, n: int) -> dict[str, Any]:
    """State dict to load into optimizer `n`: saved states are matched by the names of parameters, and parameters
    without a saved state keep their current one."""
    saved, now = state["optimizers"][n], optimizer.state_dict()
    names = state["optimizer_names"][n] if "optimizer_names" in state else None
    if names is None or names == param_names_of(graph, optimizer):
        return saved
    of_name = {
        name: saved["state"][number]
        for group, names_of_group in zip(saved["param_groups"], names, strict=True)
        for number, name in zip(group["params"], names_of_group, strict=True)
        if name is not None and number in saved["state"]
    }
    merged = dict(now["state"])
    for group, names_of_group in zip(now["param_groups"], param_names_of(graph, optimizer), strict=True):
        merged |= {
            number: of_name[name]
            for number, name in zip(group["params"], names_of_group, strict=True)
            if name in of_name
        }
    groups = [
        {**group, **(saved["param_groups"][g] if g < len(saved["param_groups"]) else {}), "params": group["params"]}
        for g, group in enumerate(now["param_groups"])
    ]
    return {"state": merged, "param_groups": groups}


# ---- read -----------------------------------------------------------------------------------------------------------


def load_state(file: str | IO[bytes], where: str, *, mmap: bool = False) -> State:
    """The state in a file. ValueError if the file holds no state, or is damaged.

    Args:
        file: path of the file, or the file open for reading.
        where: name of the file in errors.
        mmap: if True, which needs a path, tensors stay in the file and checksums are not compared.
    """
    state = load_bytes(file, where, mmap=mmap)
    if not isinstance(state, dict) or not {"format", "embeddings", "tensors"} <= state.keys():
        raise ValueError(f"{where} is not a checkpoint of a TrainGraph, which graph.save() writes; load such a file")
    if type(state["format"]) is not int:
        raise ValueError(f"{where} is damaged: its entry 'format' must be an integer; load another checkpoint")
    if state["format"] == _FORMAT:  # `check_fits` refuses other formats, whose entries are others.
        check_entries(state, where)
    return cast(State, state)


_SEED_DIGITS = 8  # hexadecimal digits: NumPy takes a seed of 32 bits


def random_now(*, of_rank: bool) -> RandomState:
    """Current states of the random generators. `of_rank`: whether to read only the current GPU's generator."""
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available():
        # With ranks, only one GPU: reading a GPU's state takes memory on it.
        cuda = [torch.cuda.get_rng_state()] if of_rank else torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": _of_numpy(np.random.get_state()),
    }


def _of_numpy(state: Any) -> list[Any]:
    """State of a NumPy generator in a form that a file can hold: with its keys in a tensor."""
    name, keys, *rest = state
    return [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]


def restore_random(saved: Sequence[RandomState], ranks: AnyRanks) -> None:
    """Set the random generators of this rank. `saved`: the states that each rank has saved."""
    mine = saved[ranks.rank] if ranks.rank < len(saved) else _random_of_further(saved, ranks.rank)
    torch.set_rng_state(mine["torch"])
    if ranks.alone and torch.cuda.is_available() and len(mine["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(mine["cuda"])
    elif torch.cuda.is_available() and mine["cuda"]:
        torch.cuda.set_rng_state(mine["cuda"][0])
    random.setstate(mine["python"])
    name, keys, *rest = mine["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def _random_of_further(saved: Sequence[RandomState], rank: int) -> RandomState:
    """States for a rank that has saved none. A generator with equal states on all ranks gets this state, since its
    numbers are meant to be equal; any other is seeded by the first rank's state and this rank's number."""

    def state(kind: Literal["torch", "cuda", "python", "numpy"]) -> Any:
        hashes = [hash_of(of_rank[kind]) for of_rank in saved]
        if len(hashes) > 1 and len(set(hashes)) == 1:
            return saved[0][kind]
        seed = int(hash_of([hashes[0], rank])[:_SEED_DIGITS], 16)
        match kind:
            case "torch":
                return torch.Generator().manual_seed(seed).get_state()
            case "cuda":
                cuda = torch.cuda.is_available()
                return [torch.Generator("cuda").manual_seed(seed).get_state()] if cuda else []
            case "python":
                return random.Random(seed).getstate()
        return _of_numpy(np.random.RandomState(seed).get_state())

    return {"torch": state("torch"), "cuda": state("cuda"), "python": state("python"), "numpy": state("numpy")}
