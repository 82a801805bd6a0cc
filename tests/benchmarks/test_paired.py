"""Statistics of comparisons: what they find in samples of which it is known how much slower one side is."""

import numpy as np
import pytest
from _paired import SLOWER, compare, enough, order, slower


def pairs(ratio, rounds, seed, noise=0.1):
    """Samples of a noisy machine: drift that both share, noise of each, and now and then a sample of twice its time."""
    rng = np.random.default_rng(seed)
    drift_R = 1 + 0.5 * rng.random() * np.sin(np.arange(rounds) / 5)
    both = []
    for cost in (1.0, ratio):
        disturbed_R = np.where(rng.random(rounds) < 0.15, 2.0, 1.0)
        both.append(list(cost * drift_R * np.exp(noise * rng.standard_normal(rounds)) * disturbed_R))
    return both


def test_medians_and_the_median_of_ratios_of_rounds():
    its = compare([1.0, 2.0, 4.0], [1.1, 2.0, 4.8])
    assert (its.base, its.new, its.rounds) == (2.0, 2.0, 3)
    assert its.ratio == pytest.approx(1.1)
    assert its.low == pytest.approx(1.0) and its.high == pytest.approx(1.2)


def test_the_same_samples_give_the_same_interval():
    assert compare(*pairs(1.1, 20, 0)) == compare(*pairs(1.1, 20, 0))


@pytest.mark.parametrize("base, new", [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_samples_that_are_no_pairs_are_refused(base, new):
    with pytest.raises(ValueError, match="sample"):
        compare(base, new)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says():
    held = [its.low <= 1.1 <= its.high for its in (compare(*pairs(1.1, 40, seed)) for seed in range(200))]
    assert 0.90 <= np.mean(held) <= 0.99


@pytest.mark.parametrize("draws", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_equal_revisions_are_not_slower_and_a_tenth_is(draws):
    equal = [slower(compare(*pairs(1.0, 60, seed)), lambda: compare(*pairs(1.0, 60, 999))) for seed in range(draws)]
    tenth = [
        slower(compare(*pairs(1.1, 80, s, 0.04)), lambda s=s: compare(*pairs(1.1, 80, s + 500, 0.04)))
        for s in range(draws)
    ]
    assert sum(equal) == 0
    assert np.mean(tenth) > 0.9


def test_a_drift_that_both_share_moves_no_ratio():
    drift = np.linspace(1, 10, 12)
    its = compare(list(drift), list(1.02 * drift))
    assert its.low == pytest.approx(1.02) and its.high == pytest.approx(1.02)


@pytest.mark.parametrize(
    "first, again, is_slower",
    [
        (1.02, "", False),
        (SLOWER, "", False),
        (1.1, "ss", True),
        (1.1, "ff", False),
        (1.1, "sfs", True),
        (1.1, "fsf", False),
    ],
)
def test_a_suspect_is_measured_again_until_two_of_three_agree(first, again, is_slower):
    ratios = {"s": compare([1.0] * 12, [1.1] * 12), "f": compare([1.0] * 12, [1.02] * 12)}
    left = [ratios[one] for one in reversed(again)]
    assert slower(compare([1.0] * 12, [first] * 12), left.pop) is is_slower
    assert not left


def test_rounds_end_where_the_interval_is_narrow_wherever_it_lies():
    narrow, wide = compare([1.0] * 12, [1.2] * 12), compare([1.0] * 12, [0.8, 1.2] * 6)
    assert enough(narrow, 12, 60, 0.04) and not enough(narrow, 13, 60, 0.04)
    assert not enough(wide, 12, 60, 0.04) and enough(wide, 12, 12, 0.04)


def test_neither_revision_always_follows_the_other():
    assert [order(turn) for turn in range(4)] == [(0, 1), (1, 0), (0, 1), (1, 0)]
