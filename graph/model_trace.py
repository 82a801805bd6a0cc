"""Records what a call of `build` does with rows, as a graph of few boxes for people to look at.

    rows = self.embedding(ids)                      ids -> items
    hidden = torch.cat([rows.flatten(1), age], 1)   items, age -> concat
    loss = loss_function(self.mlp(hidden), label)   concat -> mlp;  mlp, label -> loss

Views, such as `flatten`, get no box. The outermost modules without embeddings get a box each. The record is made while
lookups are recorded, and changes nothing of the call.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from oneemb.graph.arguments import Lookup
from oneemb.graph.tape import leaves
from oneemb.storage.locking.signals_deferred import signals_deferred

Kind = Literal["input", "table", "pooling", "op", "module", "loss", "result"]

BOXES_MAX = 5000
"""Largest number of boxes that are recorded in a call; later ops get none."""

_VIEWS = frozenset(
    "flatten view view_as reshape unflatten squeeze unsqueeze transpose permute movedim contiguous to float double"
    " half bfloat16 long int bool cpu cuda type clone detach requires_grad_ getitem get split chunk unbind select "
    "narrow expand expand_as as_tensor unsafe_split tensor_split retain_grad".split()
)
"""Names of functions that get no box: a reader of the picture takes result and argument for the same value."""

_NAMES = {"cat": "concat", "concatenate": "concat", "matmul": "matmul", "truediv": "div"}


@dataclass(frozen=True)
class Box:
    """A box of the picture.

    Args:
        kind: how the box looks.
        label: name of the input, embedding or module, or text of the op.
        shape: shape of its first result.
        inputs: positions of the boxes whose results it reads, in increasing order.
        count: number of equal boxes that it stands for.
    """

    kind: Kind
    label: str
    shape: str
    inputs: tuple[int, ...] = ()
    count: int = 1


class ModelTrace:
    """Records the torch functions, modules and lookups of a call of `build`.

    Args:
        values: the values of the batch.
        names: names of the values.
    """

    def __init__(self, values: Sequence[object], names: Iterable[str]):
        self._boxes: list[Box] = []
        self._made: dict[int, tuple[Callable[[], object], int]] = {}
        """{id(value): (reference to the value, position of its box)}."""
        self._outside = -1
        """Position of the box for code that torch's modes do not see; -1 = no such box."""
        for value, name in zip(values, names, strict=True):
            self._learn(value, self._add("input", name, value, ()))

    @contextlib.contextmanager
    def watching(self, root: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Block in which calls of `modules`, which are below `root`, are recorded."""
        self._module_names = {module: name for name, module in root.named_modules()}
        hooks = []
        try:
            for module in modules:
                if module._compiled_call_impl is None and not isinstance(module, torch.jit.ScriptModule):
                    hooks.append(module.register_forward_hook(self.called, with_kwargs=True))
            yield
        finally:
            with signals_deferred:
                for hook in hooks:
                    hook.remove()

    def called(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call of a module."""
        if not torch.compiler.is_compiling():
            kind, name = type(module).__name__, self._module_names.get(module, "")
            self._record("module", f"{name}: {kind}" if name else kind, (args, kwargs), result)

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Record a call of a torch function."""
        name = getattr(func, "__name__", "").strip("_")
        if func is torch.Tensor.backward:
            self._mark(args[0], "loss")
        elif name == "setitem":
            self._record("op", "set items", args, args[0])
        elif name in _VIEWS:
            inputs = self._positions(args[:1] or kwargs)
            if inputs:
                self._learn(result, inputs[0])
            elif self._positions(args):  # Ids choose from a parameter.
                self._record("op", name, args, result)
        else:
            self._record("op", _NAMES.get(name, name), (args, kwargs), result)

    def lookup(self, name: str, asked: Lookup, rows: torch.Tensor) -> None:
        """Record a lookup of the embedding `name`."""
        pooled = asked.offsets is not None
        ids = asked.ids if isinstance(asked.ids, torch.Tensor) else None
        given = asked.ids, asked.table_ids, asked.offsets, asked.per_sample_weights
        each = None if ids is None or not pooled else f"[{ids.numel()}, {rows.shape[-1]}]"
        position = self._add("table", name, rows, self._positions(given), shape=each)
        if pooled:
            position = self._add("pooling", f"{asked.pooling} of each bag", rows, (position,))
        self._learn(rows, position)

    def boxes(self, result: object) -> list[Box]:
        """The recorded boxes: lookups, and what the losses need, or without a loss the result of `build`; each box
        after the boxes that it reads."""
        if not any(box.kind == "loss" for box in self._boxes):
            for value in leaves(result):
                self._mark(value, "result")
        boxes = list(self._boxes)
        if self._outside >= 0:
            read = {i for box in boxes for i in box.inputs}
            ends = [i for i, box in enumerate(boxes) if box.kind in ("table", "pooling") and i not in read]
            boxes[self._outside] = replace(boxes[self._outside], inputs=tuple(i for i in ends if i < self._outside))
        needed: set[int] = set()
        for i in reversed(range(len(boxes))):
            if i in needed or boxes[i].kind in ("table", "pooling", "loss", "result"):
                needed.add(i)
                needed.update(boxes[i].inputs)
        return _joined(_chained(_renumbered(boxes, needed)))

    def _record(self, kind: Kind, label: str, given: object, result: object) -> None:
        if len(self._boxes) >= BOXES_MAX or not any(isinstance(value, torch.Tensor) for value in leaves(result)):
            return
        self._learn(result, self._add(kind, label, result, self._positions(given)))

    def _add(self, kind: Kind, label: str, result: object, inputs: tuple[int, ...], *, shape: str | None = None) -> int:
        first = next((value for value in leaves(result) if isinstance(value, torch.Tensor)), None)
        if shape is None:
            shape = "" if first is None or first.is_nested else str(list(first.shape))
        self._boxes.append(Box(kind, label, shape, inputs))
        return len(self._boxes) - 1

    def _mark(self, value: object, kind: Kind) -> None:
        found = self._position(value)
        if found is not None and self._boxes[found].kind in ("op", "module"):
            self._boxes[found] = replace(self._boxes[found], kind=kind)

    def _learn(self, result: object, position: int) -> None:
        for value in leaves(result):
            with contextlib.suppress(TypeError):  # Values without weak references are known by their parts.
                self._made[id(value)] = weakref.ref(value), position

    def _position(self, value: object) -> int | None:
        made, position = self._made.get(id(value), (None, -1))
        return position if made is not None and made() is value else None

    def _positions(self, given: object) -> tuple[int, ...]:
        found = set()
        for value in leaves(given):
            position = self._position(value)
            if position is None and isinstance(value, torch.Tensor) and value.grad_fn is not None:
                if self._outside < 0:
                    self._outside = self._add("op", "other code", None, ())
                position = self._outside
            if position is not None:
                found.add(position)
        return tuple(sorted(found))


def _renumbered(boxes: Sequence[Box], kept: Collection[int]) -> list[Box]:
    """The boxes at the positions `kept`, with inputs as positions among them."""
    position = {old: new for new, old in enumerate(sorted(kept))}
    return [
        replace(boxes[old], inputs=tuple(sorted({position[i] for i in boxes[old].inputs if i in position})))
        for old in position
    ]


def _users(boxes: Sequence[Box]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in boxes]
    for i, box in enumerate(boxes):
        for used in box.inputs:
            users[used].append(i)
    return users


def _chained(boxes: Sequence[Box]) -> list[Box]:
    """The boxes, with ops that run one after another on one value as one box."""
    chained, users, gone = list(boxes), _users(boxes), set()
    for i, box in enumerate(boxes):
        if box.kind == "op" and len(box.inputs) == 1 and box.label != "concat":
            before = box.inputs[0]
            if chained[before].kind == "op" and users[before] == [i] and chained[before].label != "concat":
                chained[i] = replace(box, label=f"{chained[before].label}, {box.label}", inputs=chained[before].inputs)
                gone.add(before)
    return _renumbered(chained, [i for i in range(len(boxes)) if i not in gone])


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """The boxes, with one box for all that look the same, and read and give the same."""
    while True:
        alike: dict[object, list[int]] = {}
        for i, (box, users) in enumerate(zip(boxes, _users(boxes), strict=True)):
            key = (box.kind, box.label, box.shape, box.inputs, tuple(users)) if box.inputs else i
            alike.setdefault(key, []).append(i)
        joined = list(boxes)
        for group in alike.values():
            joined[group[0]] = replace(boxes[group[0]], count=sum(boxes[i].count for i in group))
        if len(alike) == len(boxes):
            return joined
        boxes = _renumbered(joined, [group[0] for group in alike.values()])
