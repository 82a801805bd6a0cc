"""Plans of a graph: the known lookups of `build`, for each structure of inputs."""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from oneemb.embeddings.embedding import TableEmbedding
from oneemb.graph.building import Building
from oneemb.graph.inputs import Structure
from oneemb.graph.plan import Merged, Plan
from oneemb.graph.tape import Tape

PLANS_MAX = 16
"""Plans that a graph keeps: those used last."""

RECORDED_MAX = 32
"""Recordings of the lookups of one structure of inputs at most: one after each step that has made others."""

MISSED_MAX = 3
"""Lookups of an embedding with other ids than were expected, after which none are expected any more."""

GIVEN_UP = (
    f"build has looked up other ids than expected, however often its lookups were recorded ({RECORDED_MAX} times); they"
    " are made as in eager mode"
)


class Batch(NamedTuple):
    """The arguments of a call of `build`, and the graph's embeddings now."""

    embeddings: dict[str, TableEmbedding]

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[Any]
    """Values nested in the inputs, see `oneemb.graph.inputs`."""
    structure: Structure


Key = tuple[Structure, tuple[bool, tuple[tuple[Any, ...], ...]]]
"""Key of a plan: the nesting of inputs; for each embedding its store, and options that change the plan."""


class Known:
    """Lookups of `build` for one structure of inputs, as far as they are known."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.plan: Plan | None = None
        """None = they are to be recorded."""
        self.recorded = 0
        self.missed: Counter[str] = Counter()
        """Number of lookups of each embedding that were expected in vain."""

    @property
    def given_up(self) -> bool:
        """Whether all lookups are made as in eager mode from now on."""
        return self.plan is None and self.recorded == RECORDED_MAX

    def tape(self, batch: Batch) -> Tape | None:
        """Tape to record the lookups with; None = they are recorded, or recording has failed too often."""
        if self.plan is not None or self.given_up:
            return None
        left_out = [name for name, missed in self.missed.items() if missed >= MISSED_MAX]
        return Tape(batch.values, list(batch.structure.names()), left_out)

    def keep(self, plan: Plan) -> None:
        """Have the lookups made that were recorded."""
        self.plan = plan
        self.recorded += 1  # not where `build` has raised, before all of its lookups

    def look_back(self, building: Building, plan: Plan) -> None:
        """Have the lookups recorded anew if a step has made others than were expected."""
        in_vain = building.in_vain
        if in_vain:
            self.missed.update(in_vain)
        # A plan that misses none and lacks some is still better than none, once there is no other to be had.
        if in_vain or building.others > plan.others and self.recorded < RECORDED_MAX:
            self.plan = None


class PlanCache:
    """Plans of the lookups of a graph, whose class is `name`, for the structures of inputs that were used last."""

    def __init__(self, name: str):
        self._name = name
        self.known: OrderedDict[Key, Known] = OrderedDict()  # that used last is the last
        self._last: Known | None = None
        """Lookups of the last call."""
        self.dropped = 0
        """Number of plans that were dropped for others."""
        self.merged: Merged = {}
        self.latest: Plan | None = None
        """Plan of the last call."""

    @property
    def plan_of_last_call(self) -> Plan:
        """Plan of the last call; raises RuntimeError if there is none."""
        if why := self.why_not_compiled():
            raise RuntimeError(why)
        assert self.latest is not None
        return self.latest

    def why_not_compiled(self) -> str:
        """Reason why the lookups of the last call are not compiled; empty = they are."""
        if self.known and next(reversed(self.known.values())).given_up:
            return f"nothing is compiled for such inputs any more: {GIVEN_UP}"
        return "" if self.latest is not None else "nothing is compiled yet: call the graph with a batch first"

    def of(self, batch: Batch, inserts: bool) -> Known:
        """Lookups of a call, used last from now on; see `key_of`."""
        key = key_of(batch, inserts)
        if self._last is not None and self._last.key == key:  # A hash of the key takes longer.
            return self._last
        known = self.known.get(key)
        if known is None:
            self._forget_exchanged(batch.embeddings)
            self._make_room(batch.structure)
            known = self.known[key] = Known(key)
        self.known.move_to_end(key)
        self._last = known
        return known

    def clear(self) -> None:
        """Forget all lookups: they are recorded anew."""
        self._last = None
        self.known.clear()

    def _forget_exchanged(self, embeddings: Mapping[str, TableEmbedding]) -> None:
        """Drop the plans of embeddings that are no part of the graph any more: their rows and paths are freed."""
        stores = {embedding.store for embedding in embeddings.values()}
        for key, known in list(self.known.items()):
            if not stores.issuperset(store for store, *_ in key[1][1]):
                del self.known[key]
                if known.plan is self.latest:
                    self.latest = None
        self.merged = {members: store for members, store in self.merged.items() if stores.issuperset(members)}

    def _make_room(self, structure: Structure) -> None:
        """Drop the least recently used plan if `PLANS_MAX` are kept; the first time, with a warning."""
        if len(self.known) < PLANS_MAX:
            return
        before: Structure = next(reversed(self.known))[0]
        if self.dropped == 0:
            changed = before.difference(structure) or "the state of modules, between training, eval, frozen and others"
            warnings.warn(
                f"{self._name} has been compiled {PLANS_MAX + 1} times, for inputs of as many structures, and"
                f" keeps the {PLANS_MAX} that were used last; what changed this time is {changed}. Give what changes"
                " from call to call as tensors, or inside a tuple, list or dict of a fixed length",
                stacklevel=2,
            )
        self.known.popitem(last=False)
        self.dropped += 1


def key_of(batch: Batch, inserts: bool) -> Key:
    """Key of a call's plan, which calls with equal keys share. `inserts`: lookups may insert rows and get gradients."""
    lookups = [
        (
            embedding.store, embedding.num_tables, embedding.key_type, embedding.padding_idx,
            embedding.store.format, embedding.store.backend.place,
            inserts and (embedding.training, embedding.is_trained),
        )
        for embedding in batch.embeddings.values()
    ]  # fmt: skip
    return batch.structure, (inserts, tuple(lookups))
