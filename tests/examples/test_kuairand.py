"""Reading and encoding a click log: every id is where it belongs, and no label leaks."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kuairand import PADDING, VALIDATION_DATE, Tables, encode, read_tables

REAL = Path(__file__).resolve().parents[3] / "shared/data/kuairand"

FILES = {
    "events_0425_0430": """is_click,long_view,is_like,user_id,video_id,tab,date,hourmin,time_ms,duration_ms
1,1,0,7,50,1,20220425,0,1650812741436,1000
0,0,0,7,51,0,20220426,2300,1650912741436,2000
0,1,0,8,50,1,20220426,1200,1650912741437,4000
1,0,1,9,99,1,20220430,1200,1651212741436,8000
0,0,0,7,51,2,20220430,1300,1651212741437,9000
""",
    "users": """user_id,user_active_degree,fans_user_num_range,register_days,onehot_feat4
7,full_active,"[100,1k)",799,1.0
8,low_active,0,20,
""",
    "videos": """video_id,author_id,video_type,upload_dt,video_duration,music_id,music_type,tag
50,70,NORMAL,2022-04-20,1000.0,5,9.0,3
51,71,AD,2022-04-10,,6,,12 3
""",
    "history_to_0424": """user_id,watch_seq,long_watch_seq,like_seq
7,50 51 50,50,
8,9007199254740993,,
""",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        pd.read_csv(pd.io.common.StringIO(text), dtype=str, keep_default_na=False).to_csv(
            tmp_path / f"{name}.csv.gz", index=False
        )
    return tmp_path


@pytest.fixture
def tables(folder):
    return read_tables(folder)


def ids_of(log, name):
    """[E, width] of one field."""
    return next(id_RK[row_E] for field, id_RK, row_E in log.each_field() if field.name == name)


def test_columns_that_follow_the_click_are_not_even_read(tables):
    assert {"long_view", "is_like", "time_ms"}.isdisjoint(tables.events)


def test_integers_are_ids_as_they_are(tables):
    log = encode(tables)
    assert ids_of(log, "user_id").ravel().tolist() == [7, 7, 8, 9, 7]
    assert ids_of(log, "author_id").ravel().tolist() == [70, 71, 70, PADDING, 71]  # video 99 is in no table
    assert ids_of(log, "hour").ravel().tolist() == [0, 23, 12, 12, 13]


def test_multi_hot_ids_are_padded_and_no_bit_of_them_is_lost(tables):
    log = encode(tables)
    assert ids_of(log, "watch_seq")[:3].tolist() == [[50, 51, 50], [50, 51, 50], [2**53 + 1, PADDING, PADDING]]
    assert ids_of(log, "watch_seq")[3].tolist() == [PADDING] * 3
    assert ids_of(log, "like_seq").tolist() == [[PADDING]] * 5
    assert ids_of(log, "tag").tolist() == [[3, PADDING], [12, 3], [3, PADDING], [PADDING] * 2, [12, 3]]


def test_equal_text_is_an_equal_id_on_every_day_and_in_every_log(tables):
    log = encode(tables)
    degree = ids_of(log, "user_active_degree").ravel()
    assert degree[0] == degree[1] == degree[4] != degree[2]
    later = Tables(tables.events.iloc[2:].reset_index(drop=True), tables.users, tables.videos, tables.history)
    assert ids_of(encode(later), "user_active_degree").ravel().tolist() == degree[2:].tolist()


def test_a_batch_holds_the_fields_in_their_order_one_hot_ones_first(tables):
    log = encode(tables)
    events = np.array([4, 0])
    numeric_BX, id_BL, label_B = log.batch(events)
    together = np.concatenate([ids_of(log, field.name)[events] for field in log.fields], 1)
    assert np.array_equal(id_BL, together)
    assert label_B.tolist() == [0, 1] and np.array_equal(numeric_BX, log.numeric_EX[events])
    widths = [field.width == 1 and field.name not in ("long_watch_seq", "like_seq") for field in log.fields]
    assert widths == sorted(widths, reverse=True)


def test_the_last_day_of_april_validates_and_no_day_is_trained_twice(tables):
    log = encode(tables)
    assert [day.tolist() for day in log.train_days] == [[0], [1, 2]]
    assert log.validation.tolist() == [3, 4]


def test_numbers_are_standardised_without_a_look_at_the_validation_events(tables):
    log = encode(tables)
    assert np.allclose(log.numeric_EX[log.train].mean(0), 0, atol=1e-5)
    changed = tables.events.copy()
    changed.loc[changed["date"] == VALIDATION_DATE, "duration_ms"] = 10**7
    again = encode(Tables(changed, tables.users, tables.videos, tables.history))
    assert np.array_equal(again.numeric_EX[again.train], log.numeric_EX[log.train])


def test_no_feature_depends_on_any_label(tables):
    log = encode(tables)
    flipped = tables.events.assign(is_click=1 - tables.events["is_click"])
    other = encode(Tables(flipped, tables.users, tables.videos, tables.history))
    assert np.array_equal(other.numeric_EX, log.numeric_EX) and not np.array_equal(other.label_E, log.label_E)
    for (_, id_RK, row_E), (_, other_RK, other_E) in zip(log.each_field(), other.each_field(), strict=True):
        assert np.array_equal(id_RK[row_E], other_RK[other_E])


@pytest.mark.skipif(not REAL.is_dir(), reason="KuaiRand-Pure is not here")
def test_the_real_log_reads_as_its_readme_says():
    tables = read_tables(REAL)
    log = encode(tables)
    assert len(log.label_E) == 91_805 and abs(log.label_E.mean() - 0.448) < 0.001
    assert [len(day) for day in log.train_days] == [14_655, 14_146, 13_802, 13_430, 15_259]
    assert len(log.validation) == 20_513
    assert len(np.unique(ids_of(log, "user_id"))) == 21_184 and len(np.unique(ids_of(log, "video_id"))) == 5_564
    assert {field.name: field.width for field in log.fields if field.width > 1} == {
        "watch_seq": 50, "long_watch_seq": 50, "like_seq": 50, "tag": 3,
    }  # fmt: skip
    assert np.isfinite(log.numeric_EX).all()
