"""The generated log is what it says: clicks drawn with the probabilities it keeps, over Zipf-distributed ids."""

import numpy as np
import pandas as pd
import pytest
from generated_log import generate_tables
from kuairand import encode
from sklearn.metrics import roc_auc_score


@pytest.fixture(scope="module")
def tables():
    return generate_tables(100_000, seed=3)


def test_clicks_are_drawn_with_the_probabilities_that_are_kept(tables):
    click_E, probability_E = tables.events["is_click"].to_numpy(), tables.probability_E
    for tenth in np.array_split(np.argsort(probability_E), 10):
        drawn, expected = click_E[tenth].mean(), probability_E[tenth].mean()
        assert abs(drawn - expected) < 4 * np.sqrt(expected * (1 - expected) / len(tenth))


def test_the_planted_auc_is_the_best_that_the_probabilities_allow(tables):
    # In expectation over the clicks a positive ranks above a negative with this probability.
    p = np.sort(tables.probability_E)
    above = np.cumsum(1 - p) - (1 - p) / 2
    expected = (p * above).sum() / (p.sum() * (1 - p).sum())
    assert abs(roc_auc_score(tables.events["is_click"], tables.probability_E) - expected) < 0.005
    noisy = tables.probability_E + np.random.default_rng(0).normal(0, 0.2, len(p))
    assert roc_auc_score(tables.events["is_click"], noisy) < expected - 0.01


def test_ids_are_64_bits_wide_and_a_few_make_up_most_events(tables):
    counts = tables.events["video_id"].value_counts()
    assert counts.index.max() > 2**61
    assert counts.iloc[: len(counts) // 10].sum() > 0.4 * len(tables.events)


def test_equal_arguments_draw_an_equal_log_and_another_seed_another():
    one, same, other = generate_tables(1000, 0), generate_tables(1000, 0), generate_tables(1000, 1)
    for name in ("events", "users", "videos", "history"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(same, name))
    assert not one.events.equals(other.events)


def test_it_encodes_as_the_real_log_does(tables):
    log = encode(tables)
    assert len(log.train_days) == 5 and len(log.validation) > 10_000
    assert {"user_id", "video_id", "tab", "hour"} < {field.name for field in log.fields}
    assert [field.name for field in log.fields if field.width > 1] == ["watch_seq", "long_watch_seq", "like_seq", "tag"]
