"""The helper that chooses which combinations of parameters `make test` runs."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.support.pairwise import covering, diagonal, pairwise


def _pairs(rows):
    """Each two values of two axes that occur in a row together."""
    return {(i, j, row[i], row[j]) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}


def _fast(params):
    return [param.values for param in params if not param.marks]


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_each_pair_of_values_occurs_in_few_rows(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    product = list(itertools.product(*axes))
    rows = pairwise(*axes)
    assert _pairs(rows) == _pairs(product) and rows == pairwise(*axes)
    assert rows == [row for row in product if row in rows], "another order than the product's"
    largest, second = sorted(sizes)[:-3:-1]
    assert len(rows) <= 2 * largest * second


def test_a_covering_has_the_whole_product_and_marks_the_rest_slow():
    axes = ["abc", [1, 2, 3], [False, True], [[], {}]]
    params = covering(*axes)
    assert [param.values for param in params] == list(itertools.product(*axes))
    assert _fast(params) == pairwise(*axes) and len(_fast(params)) < 12
    assert {mark.name for param in params for mark in param.marks} == {"slow"}


def test_illegal_combinations_are_not_there_and_the_legal_ones_are_covered():
    def legal(first, second, third):
        return first != second or third

    axes = [range(3), range(3), [False, True]]
    params = covering(*axes, legal=legal)
    product = [row for row in itertools.product(*axes) if legal(*row)]
    assert [param.values for param in params] == product
    assert _pairs(_fast(params)) == _pairs(product)


@pytest.mark.parametrize("sizes", [(4, 3), (2, 2, 2), (5,)])
def test_of_strength_one_each_value_occurs(sizes):
    rows = _fast(covering(*map(range, sizes), strength=1))
    assert len(rows) == max(sizes)
    assert [{row[axis] for row in rows} for axis in range(len(sizes))] == [set(range(size)) for size in sizes]


@pytest.mark.parametrize("sizes", [(4, 3), (2, 5), (6, 3, 3), (1, 2), (3, 3)])
def test_a_diagonal_has_each_value_and_the_rest_is_slow(sizes):
    params = diagonal(*map(range, sizes))
    assert [param.values for param in params] == list(itertools.product(*map(range, sizes)))
    rows = _fast(params)
    assert len(rows) == max(sizes)
    assert [{row[axis] for row in rows} for axis in range(len(sizes))] == [set(range(size)) for size in sizes]
    assert sizes != (6, 3, 3) or len({row[1:] for row in rows}) > 3, "two short axes keep step"


def test_short_products_are_whole():
    assert pairwise("ab") == [("a",), ("b",)]
    assert pairwise("ab", [1, 2]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert pairwise("ab", []) == []
    assert _fast(covering("ab")) == [("a",), ("b",)]


def test_the_tests_named_in_the_table_of_thinned_tests_are_run(request):
    if request.config.getoption("keyword") or any("::" in name for name in request.config.args):
        pytest.skip("only some tests of each file were asked for")
    kept = [item.nodeid.removeprefix("tests/") for item in request.session.items]  # slow ones are deselected
    files = {nodeid.partition("::")[0] for nodeid in kept}
    table = (Path(__file__).parent / "README.md").read_text().partition("## Thinned tests")[2]
    rows = [line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| ")]
    wrong = []
    for quoted in itertools.chain.from_iterable(re.findall("`([^`]+)`", row) for row in rows):
        if not quoted.startswith("["):
            test = quoted.partition("[")[0] if "::" in quoted else f"{quoted}::..."
        name = test + (quoted[quoted.index("[") :] if "[" in quoted else "")
        pattern = re.compile(re.escape(name).replace(re.escape("..."), ".*") + r"((\[|::).*)?")
        if test.partition("::")[0] in files and not any(map(pattern.fullmatch, kept)):
            wrong.append(name)
    assert not wrong
