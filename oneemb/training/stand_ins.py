"""Replaces methods of objects while `build` runs, so that the graph learns of the calls that `build` makes.

    with standing_in([(scheduler, "step", refuse)]):        refuse(scheduler) comes before a call that `build` makes

Invariant: a stand-in that an interrupt has left in place only calls the method that it hides.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from oneemb.graph.building import building_now
from oneemb.storage.locking.undisturbed import undisturbed


class StandIn:
    """Stands in for a method of an object.

    Args:
        owner: the object.
        name: name of the method.
        tell: gets the object before each call that `build` makes; it may raise.
    """

    def __init__(self, owner: Any, name: str, tell: Callable[[Any], None]):
        self._owner, self._name, self._tell = owner, name, tell
        self.own = vars(owner).get(name)
        """Attribute that the user has set on the object; None = the class's method counts."""
        if isinstance(self.own, StandIn):
            self.own = self.own.own

    def hide(self) -> None:
        """Take the method's place."""
        vars(self._owner)[self._name] = self

    def show(self) -> None:
        """Give the method its place back."""
        vars(self._owner).pop(self._name, None)
        if self.own is not None:
            vars(self._owner)[self._name] = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if building_now() is not None:
            self._tell(self._owner)
        method = self.own or getattr(type(self._owner), self._name).__get__(self._owner)
        return method(*args, **kwargs)


@contextmanager
def standing_in(methods: Iterable[tuple[Any, str, Callable[[Any], None]]]) -> Iterator[None]:
    """Replace methods by stand-ins during a block.

    Args:
        methods: arguments of each `StandIn`.
    """
    stand_ins = [StandIn(*method) for method in methods]
    try:
        for one in stand_ins:
            one.hide()
        yield
    finally:
        with undisturbed:
            for one in stand_ins:
                one.show()
