"""Coverings of products of parameters: each value of one axis meets each value of every other axis.

    @pytest.mark.parametrize(("store", "threads", "bags"), covering(STORES, (1, 2), (False, True)))

runs a covering in `make test`; the rest of the product is marked slow.
"""

import itertools
import random

import pytest


def pairwise(*axes):
    """A list of tuples, one value of each axis a tuple, in which each two values of two axes occur together.

    Greedy and deterministic: equal axes give equal lists, in the order of the product. Values need not be hashable.

    Example:
        >>> pairwise("ab", [1, 2], [False, True])
        [('a', 1, False), ('a', 2, True), ('b', 1, True), ('b', 2, False)]
    """
    return [_values(axes, places) for places in _covering(_product(axes), 2)]


def covering(*axes, strength=2, legal=lambda *values: True):
    """A list of pytest params: the whole product, of which all but a covering is marked slow.

    Args:
        axes: Sequences of values.
        strength: 2 where each two values of two axes are to occur together, 1 where each value is to occur.
        legal: Whether a combination is there, called with its values. Pairs that no legal combination has are not
            asked for.
    """
    product = [places for places in _product(axes) if legal(*_values(axes, places))]
    return _params(axes, product, set(_covering(product, strength)))


def diagonal(*axes):
    """A list of pytest params: the whole product, of which all but a diagonal is marked slow.

    The diagonal has each value of the longest axis once. Values of a shorter axis come equally often, in an order that
    is drawn for each axis by itself, so that no two axes keep step. Equal axes give equal lists.

    Example:
        >>> [param.values for param in diagonal("abcd", [1, 2]) if not param.marks]
        [('a', 1), ('b', 1), ('c', 2), ('d', 2)]
    """
    count = max(map(len, axes))
    rng = random.Random(len(axes))
    places = []
    for axis in axes:
        its = [place for begin in range(0, count, len(axis)) for place in rng.sample(range(len(axis)), len(axis))]
        places.append(its[:count])
    return _params(axes, _product(axes), set(zip(*places, strict=True)))


def _params(axes, product, kept):
    return [
        pytest.param(*_values(axes, places), marks=() if places in kept else pytest.mark.slow) for places in product
    ]


def _covering(product, strength):
    """The rows of `product` that a greedy covering of its pairs (`strength` 2) or values (1) takes, in its order."""
    numbers = {}
    masks = []
    for row in product:
        parts = itertools.combinations(enumerate(row), min(strength, len(row)))
        masks.append(sum(1 << numbers.setdefault(part, len(numbers)) for part in parts))
    missing = (1 << len(numbers)) - 1
    kept = set()
    while missing:
        # The first of equals.
        best = max(range(len(product)), key=lambda row: (masks[row] & missing).bit_count())
        kept.add(best)
        missing &= ~masks[best]
    return [product[row] for row in sorted(kept)]


def _product(axes):
    """Places of values on their axes, a tuple for each combination: values themselves may not be hashable."""
    return list(itertools.product(*(range(len(axis)) for axis in axes)))


def _values(axes, places):
    return tuple(axis[place] for axis, place in zip(axes, places, strict=True))
