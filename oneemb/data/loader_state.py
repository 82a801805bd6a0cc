"""State of a loader: small, immutable, and made of types that a checkpoint can hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oneemb.data.source import Position

_FORMAT = 1


@dataclass(frozen=True)
class Window:
    """Rows that are read, and permuted, together."""

    spans: list[list[Any]]
    """[position, rows] of runs of rows that are read one after the other."""
    key: list[int]
    """Key of the permutation; [] = rows stay in order."""
    begin: int
    """First of the permuted rows that are left."""
    end: int
    """End of the permuted rows that this rank gives."""


@dataclass(frozen=True)
class LoaderState:
    """Place between two batches of one rank."""

    open: list[Window]
    """Windows with rows that were not given yet."""
    next: Position
    """Position of the source behind these windows."""
    rank: int
    world_size: int
    epoch: int = 0
    number: int = 0
    """Number of the next window in the epoch."""
    batches: int | None = None
    """Batches that this rank, and every other one, gives in the rest of the epoch; None = a live source."""
    rows: int | None = None
    """Rows that this rank gives in the rest of the epoch; None = a live source."""
    dropped: int = 0
    """Bad rows that this rank has left out."""

    def as_dict(self) -> dict[str, Any]:
        """The state as a dict of numbers, strings, lists and dicts."""
        return {"format": _FORMAT, **vars(self), "open": [dict(vars(window)) for window in self.open]}


def read_states(state: Any) -> list[LoaderState]:
    """States in one dict, or in the list of the dicts of all ranks, in the order of ranks.

    Raises:
        ValueError: a dict is no state of a loader, or the list has not the states of all ranks of one save.
    """
    dicts = state if isinstance(state, list) else [state]
    states = []
    for one in dicts or [None]:
        try:
            if one["format"] != _FORMAT:
                raise ValueError
            fields = {name: one[name] for name in LoaderState.__dataclass_fields__}
            states.append(LoaderState(**{**fields, "open": [Window(**window) for window in one["open"]]}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_state_dict must get a result of state_dict of an oneemb.data.Loader, format {_FORMAT}, got"
                f" {one!r:.200}"
            ) from error
    states.sort(key=lambda one: one.rank)
    if isinstance(state, list) and [(one.rank, one.world_size) for one in states] != [
        (rank, len(states)) for rank in range(len(states))
    ]:
        raise ValueError(
            "load_state_dict must get the states of all ranks of one save, got those of ranks"
            f" {[f'{one.rank} of {one.world_size}' for one in states]}; pass graph.loader_states as it is"
        )
    return states


def share_windows(states: Sequence[LoaderState], world_size: int) -> list[list[Window]]:
    """Windows of each of `world_size` ranks. Each rank gets a part of the rows left in each open window of `states`."""
    shared: list[list[Window]] = [[] for _ in range(world_size)]
    for window in (window for one in states for window in one.open):
        for rank, mine in enumerate(shared):
            begin, end = (window.begin + (window.end - window.begin) * edge // world_size for edge in (rank, rank + 1))
            mine += [replace(window, begin=begin, end=end)] if begin < end else []
    return shared
