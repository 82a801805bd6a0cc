"""The state of a call of `build`: the lookups that it is expected to make, or the tape that records its lookups.

    Building(...).call(build, batch)
            self.embedding(ids)       Building.look_up: if a lookup of these ids is expected, its rows are at hand;
            loss.backward()           otherwise the lookup is made as in eager mode

Invariant: a lookup, expected or not, returns the same rows and inserts the same ids as in eager mode: the ids that
`build` looks up are compared with the expected ids, value by value.
"""

import contextvars
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from oneemb.graph import ops
from oneemb.graph.arguments import Lookup, Planned
from oneemb.graph.build_error import BuildError, user_line
from oneemb.graph.model_trace import ModelTrace
from oneemb.graph.modules import REGISTER
from oneemb.graph.ranks import AnyRanks
from oneemb.graph.tape import Tape, version_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StoreFullError


class LooksUp(Protocol):
    """Interface of the embedding modules that a graph uses."""

    name: str
    store: EmbeddingStore
    training: bool
    ranks: AnyRanks
    lookups: Any
    """Object that makes the lookups; its `asks_ranks` says whether rows come from other ranks, which must then make
    the same lookups."""

    @property
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """Parameters that stand for the rows."""

    @property
    def is_trained(self) -> bool:
        """Whether the rows get gradients."""


class AnyReserved(Protocol):
    """Interface of reserved lookups: `Reserved`, `ReservedPart`, `AnnouncedLookup` and `Lease`."""

    @property
    def inserts(self) -> bool:
        """Whether the lookup inserts unknown ids. False = the step that trains the rows inserts them."""

    def acquire(self) -> ops.Lease | None:
        """Pinned lease on the rows, with unknown ids inserted if `inserts`; None = ranks must make the lookup
        unannounced."""

    def drop(self) -> None:
        """Unpin the rows."""

    def forget(self) -> None:
        """Drop the reference to the lease, without unpinning its rows."""


class MadeLookup:
    """A lookup that `build` has made. Autograd holds its rows.

    Args:
        lease: the lease on the rows. This object holds only a weak reference to it.
    """

    _made: Callable[[], ops.Lease | None] = staticmethod(lambda: None)
    """Returns the lease; None = the lease is gone, or the lookup is not made yet."""

    def __init__(self, lease: ops.Lease):
        self._made = weakref.ref(lease)

    @property
    def has_grad(self) -> bool:
        """Whether a backward pass has given the rows a gradient."""
        lease = self._made()
        return lease is not None and lease.has_grad

    def drop(self) -> None:
        """Unpin the rows."""
        if (lease := self._made()) is not None:
            lease.unpin()


class Expected(MadeLookup):
    """A lookup that `build` is expected to make.

    Args:
        planned: the lookup, as the plan has returned it.
        changes: `changes` of the store when the rows were read.
        waits: whether comparing ids makes the host wait, for a GPU.
    """

    def __init__(self, planned: Planned, changes: int, waits: bool):
        self.embedding, self.lookup, reserved, rows, self.origin = planned
        self.reserved: AnyReserved | None = reserved
        self.rows: torch.Tensor | None = rows
        self.changes, self.waits = changes, waits
        self.lease: ops.Lease | None = None
        """Lease of the lookup; None = the lookup is not made yet."""
        self._version = None if self.origin is None else (self.origin.data_ptr(), version_of(self.origin))

    def is_of(self, asked: Lookup) -> bool:
        """Whether `asked`, the lookup that `build` makes, has the expected ids, tables and bags."""
        planned, ids = self.lookup, asked.ids
        if asked.columns != planned.columns:
            return False
        counted = ids is self.origin and not ids.is_inference()  # torch counts no changes of inference tensors.
        if counted and self.waits and (ids.data_ptr(), version_of(ids)) == self._version:
            ids = planned.ids  # The ids have not changed, so the host need not wait for a GPU to compare them.
        return (
            (ids is planned.ids or _same(ids, planned.ids))
            and (asked.table_ids is planned.table_ids or _same(asked.table_ids, planned.table_ids))
            and (asked.offsets is planned.offsets or _same(asked.offsets, planned.offsets))
        )

    def read(self, store: EmbeddingStore, asked: Lookup) -> torch.Tensor | None:
        """The current weights for the lookup; None = the expected rows cannot be used."""
        scales, planned = asked.per_sample_weights, self.lookup
        if self.rows is not None and store.changes == self.changes and asked.pooling == planned.pooling:
            if scales is planned.per_sample_weights or _same(scales, planned.per_sample_weights):
                return self.rows
        if self.lease is None or not self.lease.is_valid:
            return None
        return ops.gather(self.lease, scales, asked.pooling)

    def look_up(self, asked: Lookup, has_gradient: bool) -> None:
        """Make the lookup on all ranks, unannounced."""
        reserved, scales, pooling = self.reserved, asked.per_sample_weights, asked.pooling
        assert isinstance(reserved, ops.AnnouncedLookup)

        def check(keys: ops.BatchKeys) -> None:
            if scales is not None or pooling != "sum":
                ops.check_pooling(keys, scales, pooling)

        self.lease = reserved.look_up(check, has_gradient=has_gradient)

    @property
    def inserts(self) -> bool:
        """Whether the lookup inserts unknown keys; see `Reserved.inserts`."""
        return self.reserved is not None and self.reserved.inserts

    def hand_over(self) -> None:
        """Drop the references to lease and rows. Autograd holds them until `build` drops the values computed from the
        rows."""
        assert self.lease is not None and self.reserved is not None
        self._made = weakref.ref(self.lease)
        self.reserved.forget()
        self.lease = self.reserved = self.rows = None

    def drop(self) -> None:
        """Unpin the rows."""
        if self.reserved is not None:
            self.reserved.drop()
        else:
            super().drop()


def _same(given: Any, guessed: torch.Tensor | None) -> bool:
    # Any: a user's value; the lookup refuses a value that is no tensor.
    if given is None or guessed is None:
        return False
    alike = isinstance(given, torch.Tensor) and given.dtype == guessed.dtype and given.device == guessed.device
    return alike and not given.requires_grad and given.shape == guessed.shape and ops.equal(given, guessed)


class Building:
    """A call of `build`.

    Args:
        names: {store: name of the embedding in the graph}.
        expected: the lookups that `build` is expected to make.
        on_all_made: called once, when no more expected lookup waits: all rows are acquired, or the rest is cancelled.
        tape: records the lookups; None = no recording.
        trace: records the boxes of a picture, beside the tape; None = no recording.
        backward: called in place of `Tensor.backward`, with its arguments; None = no replacement.
        steppers: the optimizers that the graph steps after `build`.
        announced: the lookups that ranks have announced to each other, expected by this plan or not.
        at_once: name of the embedding whose only planned lookup is made when `build` calls it, not ahead; "" = no
            such embedding.
        count: calls the function that makes the lookup of `at_once`, and counts and times it.
    """

    def __init__(
        self,
        names: Mapping[EmbeddingStore, str],
        expected: Sequence[Expected] = (),
        on_all_made: Callable[[], object] = lambda: None,
        tape: Tape | None = None,
        backward: Callable[..., None] | None = None,
        steppers: Collection[torch.optim.Optimizer] = (),
        announced: ops.Announced = ops.NOTHING_ANNOUNCED,
        at_once: str = "",
        count: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda make: make(),
        trace: ModelTrace | None = None,
    ):
        self.others = 0
        """Number of lookups that were not expected."""
        self._steppers = steppers
        self._announced = announced
        self._names = names
        self._expected: dict[str, list[Expected]] = {}
        self._waiting = len(expected)
        self._at_once, self._count = at_once, count
        self.thread: int | None = None
        """Thread that runs `build`."""
        for lookup in expected:
            self._expected.setdefault(lookup.embedding, []).append(lookup)
        self._on_all_made = on_all_made
        self.tape, self.trace = tape, trace
        self.backward = backward
        if not expected:
            on_all_made()

    def call(self, build: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Result of `build`. It runs in a copy of the context, so an interrupt cannot leave this object current."""
        context = contextvars.copy_context()
        try:
            return context.run(self._call, build, args, kwargs)
        finally:
            if self._announced.lookups:
                self._announced.end()
            for variable, value in context.items():  # variables that `build` has set
                if variable is not _building and variable.get(_building) is not value:
                    variable.set(value)

    def _call(self, build: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        _building.set(self)
        self.thread = threading.get_ident()
        if self.tape is None and self.backward is None:
            return build(*args, **kwargs)
        with _Mode(self):
            return build(*args, **kwargs)

    def look_up(
        self, embedding: LooksUp, asked: Lookup, has_gradient: bool, now: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The rows of a lookup that `build` makes.

        Args:
            asked: arguments of the lookup.
            has_gradient: whether rows or `per_sample_weights` may get a gradient.
            now: makes the lookup as in eager mode.

        Raises:
            BuildError: the rows would be trained, but the embedding is no part of the graph.
        """
        name = self._names.get(embedding.store)
        if name is None:
            if has_gradient and embedding.is_trained:
                raise BuildError(
                    f"embedding {embedding.name!r}, looked up{user_line()}, is no part of the graph, which would not"
                    f" train its rows; {REGISTER}, or freeze the embedding with requires_grad_(False)"
                )
            return now()
        again = ops.in_backward()  # A plan has the lookups of the forward pass, not those that repeat them.
        if self.tape is not None and not again:
            self._announced.miss(embedding.store, inserts=embedding.training)
            made = self.tape.lookup(name, asked, now)
            if self.trace is not None:
                self.trace.lookup(name, asked, made)
            return made
        try:
            if again:
                return now()
            if name == self._at_once:
                if self._announced.lookups:
                    self._announced.miss(embedding.store, inserts=embedding.training)
                made = self._count(now)
                self._at_once = ""  # A failed lookup does not count: the next call tries again.
                return made
            lookup = self._take(self._expected.get(name, []), embedding, asked)
            if lookup is None:
                self._announced.miss(embedding.store, inserts=embedding.training)
            elif lookup.reserved is not None and lookup.lease is None:  # The ranks have announced different lookups.
                if lookup.reserved not in self._announced.lookups:  # The announced lookups are of an older plan.
                    self._announced.miss(embedding.store, inserts=embedding.training)
                lookup.look_up(asked, has_gradient)
            if lookup is not None:
                lease, rows = lookup.lease, lookup.read(embedding.store, asked)
                if rows is not None and lease is not None and has_gradient:
                    rows = ops.with_grad(rows, lease, embedding.weights, asked.per_sample_weights, embedding.ranks)
                    lookup.hand_over()
                    return rows
                if rows is not None and not has_gradient:
                    lookup.drop()
                    return rows.detach()
            rows = now()
            self.others += 1  # A failed lookup is not counted, here or on the tape.
            return rows
        except StoreFullError:
            if embedding.lookups.asks_ranks or not self._cancel_expected():  # With ranks, a lookup is not tried again.
                raise
            return now()

    def _take(self, waiting: list[Expected], embedding: LooksUp, asked: Lookup) -> Expected | None:
        """Take the lookup with the arguments `asked` out of `waiting`, acquire it and return it; None = no such
        lookup."""
        for lookup in waiting:
            in_this_mode = lookup.inserts == embedding.training
            if embedding.lookups.asks_ranks:
                in_this_mode &= lookup.lookup.sums_bags == asked.sums_bags
            if in_this_mode and lookup.is_of(asked):
                waiting.remove(lookup)
                lookup.lease = None if lookup.reserved is None else lookup.reserved.acquire()
                self._waiting -= 1
                if not self._waiting:
                    self._on_all_made()
                return lookup
        return None

    def _cancel_expected(self) -> bool:
        """Cancel the expected lookups: they pin rows that eager mode would not pin yet, perhaps in vain. Returns
        whether a lookup was cancelled."""
        waiting = [lookup for lookups in self._expected.values() for lookup in lookups]
        self._expected.clear()
        self._waiting = 0
        for lookup in waiting:
            lookup.drop()
        if waiting:
            self._on_all_made()
        return bool(waiting)

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise BuildError if `optimizer`, which is about to step, is one that the graph steps."""
        if any(optimizer is stepper for stepper in self._steppers):
            raise BuildError(steps_itself(optimizer))

    @property
    def in_vain(self) -> list[str]:
        """Names of embeddings with a lookup that was expected but not made."""
        names = [name for name, lookups in self._expected.items() if lookups] if self._expected else []
        return [self._at_once, *names] if self._at_once else names


def steps_itself(stepper: object) -> str:
    """Text of the error for a `build` that steps an optimizer or scheduler of the graph."""
    return f"build steps {type(stepper).__name__}{user_line()}, which the graph does after build; leave it out"


class _Mode(TorchFunctionMode):
    """Mode that passes the torch functions that `build` calls to the tape, and replaces `backward`."""

    def __init__(self, building: Building):
        super().__init__()
        self._building = building

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        building, kwargs = self._building, kwargs or {}
        # torch.compile would trace and compile the lines below. Unlike is_compiling, this function answers for the
        # frame that is traced, not for the process.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        if building_now() is not building:  # An interrupt has ended the call before torch removed the mode.
            return func(*args, **kwargs)
        if func is torch.Tensor.backward and building.backward is not None:
            result = building.backward(*args, **kwargs)
        else:
            result = func(*args, **kwargs) if building.tape is None else building.tape.call(func, args, kwargs)
        if building.trace is not None:
            building.trace.call(func, args, kwargs, result)
        return result


_building: contextvars.ContextVar[Building] = contextvars.ContextVar("building")


def building_now() -> Building | None:
    """The call of `build` that runs on this thread; None = no call. Threads that `build` starts look up as in eager
    mode, even with a copy of the context."""
    building = _building.get(None)
    return building if building is not None and building.thread == threading.get_ident() else None
