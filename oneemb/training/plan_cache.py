"""Plans of a graph: for each structure of inputs, the recorded and compiled lookups of `build`."""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from oneemb.embeddings.embedding import TableEmbedding
from oneemb.graph.building import Building
from oneemb.graph.inputs import Structure
from oneemb.graph.model_trace import Box
from oneemb.graph.plan import LookupPlan, Merged
from oneemb.graph.tape import Tape

PLANS_MAX = 16
"""Number of plans that a graph keeps: the ones used last."""

RECORDED_MAX = 32
"""Largest number of recordings for one structure of inputs. A step that makes other lookups is followed by one."""

MISSED_MAX = 3
"""Number of wrong guesses of an embedding's ids after which no more lookups of the embedding are made ahead."""

GIVEN_UP = (
    f"build has looked up other ids than expected after each of {RECORDED_MAX} recordings; its lookups are now made as"
    " in eager mode"
)


class Batch(NamedTuple):
    """The arguments of a call of `build`, and the current embeddings of the graph."""

    embeddings: dict[str, TableEmbedding]

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[Any]
    """The values in the inputs, see `oneemb.graph.inputs`."""
    structure: Structure


Key = tuple[Structure, tuple[bool, tuple[tuple[Any, ...], ...]]]
"""Key of a plan: the structure of inputs; for each embedding, the store and the options that change the plan."""


class Known:
    """Plan of the lookups of `build` for one structure of inputs, and counts of recordings and wrong guesses."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.plan: LookupPlan | None = None
        """The compiled lookups; None = they must be recorded."""
        self.boxes: list[Box] = []
        """Boxes of the picture of `build`, as recorded last."""
        self.recorded = 0
        """Number of recordings."""
        self.missed: Counter[str] = Counter()
        """{embedding: number of steps that did not make an expected lookup of it}."""

    @property
    def given_up(self) -> bool:
        """Whether all lookups are made as in eager mode from now on."""
        return self.plan is None and self.recorded == RECORDED_MAX

    def tape(self, batch: Batch) -> Tape | None:
        """New tape to record the lookups; None = they are recorded already, or were recorded too often."""
        if self.plan is not None or self.given_up:
            return None
        left_out = [name for name, missed in self.missed.items() if missed >= MISSED_MAX]
        return Tape(batch.values, list(batch.structure.names()), left_out)

    def keep(self, plan: LookupPlan, boxes: list[Box]) -> None:
        """Make the lookups of `plan` ahead in later calls. `boxes`: see the attribute."""
        self.plan, self.boxes = plan, boxes
        self.recorded += 1  # not counted if `build` raised, perhaps before its last lookup

    def look_back(self, building: Building, plan: LookupPlan) -> None:
        """Drop the plan, so that lookups are recorded anew, if the step `building` has made unexpected lookups."""
        in_vain = building.in_vain
        if in_vain:
            self.missed.update(in_vain)
        # After the last recording, a plan without wrong guesses is kept even if it lacks some lookups.
        if in_vain or building.others > plan.others and self.recorded < RECORDED_MAX:
            self.plan = None


class PlanCache:
    """Plans of a graph for the structures of inputs that were used last. `name`: the graph's class, for texts."""

    def __init__(self, name: str):
        self._name = name
        self.known: OrderedDict[Key, Known] = OrderedDict()  # in the order of last use
        self._last: Known | None = None
        """Entry of the last call."""
        self.dropped = 0
        """Number of plans that were dropped to make room for others."""
        self.merged: Merged = {}
        self.latest: LookupPlan | None = None
        """Plan of the last call."""

    @property
    def plan_of_last_call(self) -> LookupPlan:
        """Plan of the last call. RuntimeError if its lookups are not compiled."""
        if why := self.why_not_compiled():
            raise RuntimeError(why)
        assert self.latest is not None
        return self.latest

    @property
    def boxes_of_last_call(self) -> list[Box]:
        """Boxes of the picture of the last call. RuntimeError if there was no call, or it was not recorded."""
        last = next(reversed(self.known.values()), None)
        if last is None:
            raise RuntimeError("there is nothing to draw yet: call the graph with a batch first")
        if not last.boxes:
            raise RuntimeError(
                "there is nothing to draw: the last call had no lookup and no loss that could be recorded"
            )
        return last.boxes

    def why_not_compiled(self) -> str:
        """Reason why the lookups of the last call are not compiled; "" = they are compiled."""
        if self.known and next(reversed(self.known.values())).given_up:
            return f"nothing is compiled for such inputs any more: {GIVEN_UP}"
        return "" if self.latest is not None else "nothing is compiled yet: call the graph with a batch first"

    def of(self, batch: Batch, inserts: bool) -> Known:
        """Entry for a call, made if it does not exist, and marked as used last. `inserts`: see `key_of`."""
        key = key_of(batch, inserts)
        if self._last is not None and self._last.key == key:  # comparing takes less time than hashing the key
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
        """Forget all plans: lookups are recorded anew."""
        self._last = None
        self.known.clear()

    def _forget_exchanged(self, embeddings: Mapping[str, TableEmbedding]) -> None:
        """Drop the plans of embeddings that are no longer in the graph, so that their rows and paths are freed."""
        stores = {embedding.store for embedding in embeddings.values()}
        for key, known in list(self.known.items()):
            if not stores.issuperset(store for store, *_ in key[1][1]):
                del self.known[key]
                if known.plan is self.latest:
                    self.latest = None
        self.merged = {members: store for members, store in self.merged.items() if stores.issuperset(members)}

    def _make_room(self, structure: Structure) -> None:
        """Drop the least recently used plan if the graph has `PLANS_MAX` plans. The first time, warn."""
        if len(self.known) < PLANS_MAX:
            return
        before: Structure = next(reversed(self.known))[0]
        if self.dropped == 0:
            changed = before.difference(structure) or "the state of modules, between training, eval, frozen and others"
            warnings.warn(
                f"{self._name} has been compiled for {PLANS_MAX + 1} structures of inputs, and keeps the {PLANS_MAX}"
                f" plans that were used last; the last change is {changed}. Pass inputs that change from call to call"
                " as tensors, or inside a tuple, list or dict of a fixed length",
                stacklevel=2,
            )
        self.known.popitem(last=False)
        self.dropped += 1


def key_of(batch: Batch, inserts: bool) -> Key:
    """Key of a call's plan; calls with equal keys share a plan. `inserts`: whether lookups may insert rows and get
    gradients."""
    lookups = [
        (
            embedding.store, embedding.num_tables, embedding.key_type, embedding.padding_idx,
            embedding.store.format, embedding.store.backend.place,
            inserts and (embedding.training, embedding.is_trained),
        )
        for embedding in batch.embeddings.values()
    ]  # fmt: skip
    return batch.structure, (inserts, tuple(lookups))
