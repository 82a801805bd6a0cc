"""Dynamic tables looked up by ids and offsets: scores, admission, eviction, incremental dumps."""

import warnings

import numpy as np
import pytest
import torch

import oneemb
from oneemb.dynamicemb import (
    AdmissionStrategy,
    DynamicEmbCheckMode as Check,
    DynamicEmbInitializerArgs as Begin,
    DynamicEmbInitializerMode as Mode,
    DynamicEmbPoolingMode as Pooling,
    DynamicEmbScoreStrategy as Score,
    DynamicEmbTableOptions as Options,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from oneemb.dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTables, BatchedDynamicEmbeddingTablesV2
from oneemb.dynamicemb.embedding_admission import MultiTableKVCounter
from oneemb.dynamicemb.key_value_table import DynamicEmbStorage, HybridStorage

DIM, RATE = 4, 0.5
ONES = Begin(Mode.CONSTANT, value=1.0)
BY_ID = Begin(Mode.DEBUG)


def made(*options, features=None, pooling=Pooling.NONE, names=None, **more):
    return BatchedDynamicEmbeddingTablesV2(
        [Options(**{"dim": DIM, "initializer_args": ONES, **its}) for its in options], names, features,
        pooling_mode=pooling, learning_rate=RATE, **more,
    )  # fmt: skip


def look_up(tables, *ids_of_features):
    ids = [n for ids in ids_of_features for n in ids]
    samples = max(len(ids) for ids in ids_of_features)
    assert all(len(ids) == samples for ids in ids_of_features)
    return tables(torch.tensor(ids, dtype=torch.int64), torch.arange(len(ids) + 1))


def step(tables, *ids_of_features):
    rows = look_up(tables, *ids_of_features)
    rows.sum().backward()
    return rows.detach()


def read(tables, *ids_of_features):
    """First weights, as in eval mode."""
    tables.eval()
    try:
        with torch.no_grad():
            return look_up(tables, *ids_of_features)[:, 0].tolist()
    finally:
        tables.train()


def scores(tables, t=0):
    """{id: score} of a table."""
    found = {}
    for keys, _, _, its in tables.tables.export_keys_values(torch.device("cpu"), table_id=t):
        found |= dict(zip(keys.tolist(), its.tolist(), strict=True))
    return found


# ---- lookups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", Pooling)
def test_lookups_and_steps_are_those_of_torchs_module(pooling):
    rng = np.random.default_rng(0)
    features, samples, size = [0, 1, 1], 5, 20
    tables = made({}, {}, features=features, pooling=pooling, optimizer=EmbOptimType.EXACT_ADAGRAD, eps=1e-8)
    plain = [torch.nn.Embedding.from_pretrained(torch.ones(size, DIM), freeze=False) for _ in range(2)]
    optimizer = torch.optim.Adagrad([one.weight for one in plain], lr=RATE, eps=1e-8)
    for _ in range(4):
        lengths = rng.integers(0, 4, len(features) * samples)
        ids = torch.from_numpy(rng.integers(0, size, lengths.sum()))
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        rows = tables(ids, offsets)
        bags = [ids[begin:end] for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
        found = [plain[features[b // samples]](bag) for b, bag in enumerate(bags)]
        if pooling == Pooling.NONE:
            expected = torch.cat(found)
        else:
            pooled = [
                one.sum(0) / (max(1, len(one)) if pooling == Pooling.MEAN else 1) for one in found
            ]  # fmt: skip
            expected = torch.stack(pooled).view(len(features), samples, DIM).transpose(0, 1).flatten(1)
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)
        weight = torch.linspace(-1, 1, rows.numel()).view_as(rows)
        (rows * weight).sum().backward()
        optimizer.zero_grad()
        (expected * weight).sum().backward()
        optimizer.step()


def test_weights_of_samples_multiply_what_is_summed():
    tables = made({"initializer_args": BY_ID}, pooling=Pooling.SUM)
    weights = torch.tensor([1.0, 0.5, 3.0])
    pooled = tables(torch.tensor([3, 4, 10]), torch.tensor([0, 2, 3]), weights)
    assert pooled[:, 0].tolist() == [5.0, 30.0]


def test_nothing_of_the_rows_is_a_parameter_that_another_optimizer_would_step():
    tables = made({})
    step(tables, [1])
    assert not list(tables.parameters()) and not tables.state_dict()
    assert BatchedDynamicEmbeddingTables is BatchedDynamicEmbeddingTablesV2


def test_the_learning_rate_is_that_of_the_moment():
    tables = made({})
    step(tables, [7])
    tables.set_learning_rate(0.25)
    step(tables, [7])
    assert read(tables, [7]) == [1 - RATE - 0.25]


@pytest.mark.parametrize(
    "begins, expected",
    [(Begin(Mode.CONSTANT, value=2.5), 2.5), (BY_ID, 7.0), (Begin(Mode.UNIFORM, lower=3.0, upper=3.5), 3.25)],
)
def test_rows_begin_as_their_options_say(begins, expected):
    row = look_up(made({"initializer_args": begins}), [100_007])[0]
    assert (row - expected).abs().max() <= (0.25 if begins.mode is Mode.UNIFORM else 0)


@pytest.mark.parametrize("mode", [Mode.NORMAL, Mode.TRUNCATED_NORMAL, Mode.UNIFORM])
def test_many_rows_have_the_distribution(mode):
    tables = made({"initializer_args": Begin(mode, mean=0.5, std_dev=0.25), "dim": 16})
    rows = look_up(tables, list(range(2000)))
    deviation = {Mode.NORMAL: 0.25, Mode.TRUNCATED_NORMAL: 0.2198, Mode.UNIFORM: 12**-0.5}[mode]
    assert abs(rows.mean() - 0.5) < 0.01 and abs(rows.std() - deviation) < 0.01
    if mode is not Mode.NORMAL:
        assert rows.min() >= 0 and rows.max() <= 1


@pytest.mark.parametrize("value", [0.0, 3.5])
def test_ids_without_a_row_read_as_a_constant_in_eval_mode_and_get_none(value):
    tables = made({"eval_initializer_args": Begin(Mode.CONSTANT, value=value)} if value else {})
    step(tables, [1, 2])
    assert read(tables, [1, 9]) == [1 - RATE, value] and tables.tables.size() == 2


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_strategy():
    strategies = [Score.STEP, Score.LFU, Score.CUSTOMIZED, Score.NO_EVICTION, Score.TIMESTAMP]
    tables = made(*({"score_strategy": its} for its in strategies))
    with pytest.raises(RuntimeError, match="table 't_2' must have a score before the lookup"):
        look_up(tables, *[[1]] * 5)
    assert tables.tables.size() == 0
    tables.set_score({"t_2": 40})
    before = tables.get_score()
    assert [before[f"t_{t}"] for t in range(4)] == [1, 1, 40, 0]
    step(tables, *[[5, 5]] * 5)
    tables.set_score({"t_2": 41})
    between = tables.get_score()
    step(tables, *[[6, 5]] * 5)
    step(tables, *[[6, 6]] * 5)
    assert scores(tables, 0) == {5: 2, 6: 3} and scores(tables, 1) == {5: 3, 6: 3}
    assert scores(tables, 2) == {5: 41, 6: 41} and scores(tables, 3) == {5: 0, 6: 1}
    times = scores(tables, 4)
    assert before["t_4"] < between["t_4"] < times[5] < times[6] < tables.get_score()["t_4"]
    assert tables.get_score()["t_0"] == 4


@pytest.mark.parametrize("order", [(Score.TIMESTAMP, Score.LFU), (Score.LFU, Score.TIMESTAMP)])
def test_two_scores_come_in_the_order_of_the_tuple(order):
    tables = made({"score_strategy": order})
    step(tables, [5, 5])
    time = tables.get_score()["t_0"]
    step(tables, [6, 5])
    column = order.index(Score.LFU)
    its = scores(tables)
    assert {n: row[column] for n, row in its.items()} == {5: 3, 6: 1}
    assert all(row[1 - column] > time for row in its.values())


def test_eval_mode_is_no_use():
    tables = made({"score_strategy": Score.LFU}, {"score_strategy": Score.STEP})
    step(tables, [5], [5])
    read(tables, [5], [5])
    assert scores(tables) == {5: 1} and tables.get_score()["t_1"] == 2


def test_rows_of_least_score_leave_a_full_table():
    tables = made({"score_strategy": Score.LFU, "max_capacity": 3}, {"score_strategy": Score.STEP, "max_capacity": 3})
    step(tables, [1, 1, 2], [1, 2, 3])
    step(tables, [3, 1, 2], [1, 3, 1])
    step(tables, [4, 1, 2], [4, 4, 4])
    assert set(scores(tables)) == {1, 2, 4} and set(scores(tables, 1)) == {1, 3, 4}


def test_a_table_without_eviction_has_no_capacity():
    tables = made({"score_strategy": Score.NO_EVICTION, "max_capacity": 2})
    step(tables, list(range(100)))
    assert tables.tables.size() == 100


def test_scores_are_set_where_they_are_customized():
    tables = made({"score_strategy": Score.CUSTOMIZED}, {"score_strategy": Score.STEP})
    for given, error, message in [
        ({"t_1": 3}, ValueError, "CUSTOMIZED, table 't_1' has STEP"),
        ({"t_0": 0}, ValueError, "from 1 to"),
        ({"t_0": 2.0}, TypeError, "must be an int"),
        ({"t_9": 2}, ValueError, "no table 't_9'; there are: t_0, t_1"),
    ]:
        with pytest.raises(error, match=message):
            tables.set_score({"t_0": 7} | given)
        assert tables.get_score()["t_0"] == 0
    tables.set_score({"t_0": 7})
    with pytest.warns(UserWarning, match="falls from 7 to 6"):
        tables.set_score({"t_0": 6})


# ---- incremental dumps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Score.TIMESTAMP, Score.STEP, Score.CUSTOMIZED, (Score.TIMESTAMP, Score.LFU)])
def test_rows_used_since_a_score_are_dumped(strategy):
    tables, rng, number = made({"score_strategy": strategy}), np.random.default_rng(1), 0
    if strategy is Score.CUSTOMIZED:
        tables.set_score({"t_0": 1})
    since = tables.get_score()
    for window in range(5):
        used = set()
        for _ in range(window):
            ids = rng.integers(-(2**63), 2**63 - 1, 6).tolist() + [3, 4][: window % 3]
            step(tables, ids)
            used |= set(ids)
        if strategy is Score.CUSTOMIZED:
            number = since["t_0"] + 1
            tables.set_score({"t_0": number})
        rows, since = tables.incremental_dump(since)
        keys, values = rows["t_0"]
        assert set(keys.tolist()) == used and len(keys) == len(used)
        assert values[:, 0].tolist() == read(tables, keys.tolist()) if used else values.shape == (0, DIM)


def test_scores_of_counts_are_compared_as_numbers():
    tables = made({"score_strategy": Score.LFU})
    step(tables, [1, 1, 1, 2, 2, 3])
    assert sorted(tables.incremental_dump({"t_0": 2})[0]["t_0"][0].tolist()) == [1, 2]
    with pytest.warns(UserWarning, match=r"got also \['t_7'\]"):
        assert tables.incremental_dump({"t_7": 1}) == ({}, {})


# ---- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins, refused", [(None, 1.0), (Begin(Mode.CONSTANT, value=0.0), 0.0), (BY_ID, 5.0)])
def test_an_id_gets_a_row_when_it_was_seen_often_enough(begins, refused):
    strategy = FrequencyAdmissionStrategy(3, begins)
    tables = made({"admit_strategy": strategy, "admission_counter": KVCounter(100)})
    assert step(tables, [5, 5])[:, 0].tolist() == [refused] * 2 and tables.tables.size() == 0
    counter = tables._admission_counter
    assert isinstance(counter, MultiTableKVCounter) and counter.size() == 1
    counts, founds, _ = counter.lookup(torch.tensor([5, 6]), torch.tensor([0, 0]))
    assert counts.tolist() == [2, 0] and founds.tolist() == [True, False]
    assert step(tables, [5])[:, 0].tolist() == [1.0] and read(tables, [5]) == [1 - RATE]
    assert counter.size() == 0 and tables.tables.size() == 1


def test_counts_may_be_added_forgotten_and_kept_in_files(tmp_path):
    options = {"admit_strategy": FrequencyAdmissionStrategy(3), "admission_counter": KVCounter(100)}
    counter = made(options, options)._admission_counter
    keys, of = torch.tensor([5, -6, 5]), torch.tensor([0, 0, 1])
    assert counter.add(keys, of, torch.tensor([1, 2, 7])).tolist() == [1, 2, 7]
    assert counter.add(keys[:1], of[:1], torch.tensor([4])).tolist() == [5]
    files = str(tmp_path / "keys"), str(tmp_path / "counts")
    counter.dump(*files, 0)
    assert np.fromfile(files[0], "<i8").tolist() == [-6, 5] and np.fromfile(files[1], "<i8").tolist() == [2, 5]
    counter.erase(keys[:2], of[:2])
    assert counter.size(0) == 0 and counter.size() == 1
    counter.load(*files, 0)
    assert counter.lookup(keys, of)[0].tolist() == [5, 2, 7]
    (tmp_path / "counts").write_bytes(b"1234")
    with pytest.raises(ValueError, match="the same number of int64 values"):
        counter.load(*files, 0)


def test_a_strategy_of_the_users_is_asked():
    class Even(AdmissionStrategy):
        def admit(self, keys, frequencies):
            return (keys % 2 == 0) & (frequencies > 1)

    tables = made({"admit_strategy": Even()})
    step(tables, [2, 3, 4, 4])
    step(tables, [2, 3, 5, 7])
    assert set(scores(tables)) == {2, 4}


# ---- tables that are full --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Check)
def test_no_id_reads_as_anothers_row_where_there_is_no_room(mode):
    tables = made({"max_capacity": 3, "safe_check_mode": mode, "initializer_args": BY_ID})
    if mode is Check.ERROR:
        with pytest.raises(oneemb.StoreFullError, match="capacity of table 0 is 3 rows.*at least 5"):
            look_up(tables, [1, 2, 3, 4, 5])
        assert tables.tables.size() == 0
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rows = step(tables, [1, 2, 3, 4, 5])
    assert rows[:, 0].tolist() == [1, 2, 3, 0, 0] and set(scores(tables)) == {1, 2, 3}
    words = [str(one.message) for one in told if "got no row" in str(one.message)]
    assert len(words) == (mode is Check.WARNING) and all("2 ids of a lookup" in text for text in words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(tables, [1, 2, 3])


# ---- options ---------------------------------------------------------------------------------------------------------


def test_what_the_storage_is_called_follows_from_the_options():
    row = 4 * DIM
    assert type(made({"max_capacity": 16, "local_hbm_for_values": 16 * row}).tables) is DynamicEmbStorage
    assert type(made({"max_capacity": 16, "local_hbm_for_values": 15 * row}).tables) is HybridStorage
    assert type(made({"max_capacity": 16, "caching": True}).tables) is DynamicEmbStorage


@pytest.mark.parametrize("index_memory_mb", [None, 1])
def test_rows_may_live_in_a_store_of_this_library(tmp_path, index_memory_mb):
    store = oneemb.make_cached_ssd_store_options(1, str(tmp_path), index_memory_mb=index_memory_mb)
    tables = made({"external_storage": store, "score_strategy": Score.STEP})
    for begin in range(0, 60_000, 6_000):
        step(tables, list(range(begin, begin + 6_000)))
    assert tables.rows.stats()["rows"] == 60_000 and tables.rows.stats()["device"]["rows"] < 30_000
    assert read(tables, [5, 59_999]) == [1 - RATE] * 2
    keys = [batch[0] for batch in tables.tables.export_keys_values(torch.device("cpu"), 10_000)]
    assert torch.cat(keys).tolist() == list(range(60_000)) and max(map(len, keys)) <= 10_000
    assert (tables.rows.stats()["persistent"]["index_blocks_read"] > 0) == (index_memory_mb is not None)


def test_rows_are_put_with_state_and_scores():
    tables = made(
        {"score_strategy": Score.LFU}, {}, optimizer=EmbOptimType.EXACT_ADAGRAD, initial_accumulator_value=0.5
    )
    storage = tables.tables
    assert storage.value_dim(0) == 2 * DIM and storage.max_embedding_dim() == DIM and storage.num_tables() == 2
    assert storage.init_optimizer_state() == 0.5
    values = torch.arange(16.0).view(2, 8)
    storage.insert(torch.tensor([3, -4]), torch.tensor([0, 1]), values, torch.tensor([9, 9]))
    [(keys, weights, state, its)] = storage.export_keys_values(torch.device("cpu"), table_id=0)
    assert keys.tolist() == [3] and its.tolist() == [9]
    assert torch.equal(torch.cat([weights, state], 1), values[:1])
    assert read(tables, [3], [-4]) == [0.0, 8.0]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"dist_type": "random"}, ValueError, "dist_type must be one of continuous, roundrobin, hash_roundrobin"),
        ({"score_strategy": 3}, TypeError, "score_strategy must be a DynamicEmbScoreStrategy"),
        ({"score_strategy": (Score.STEP, Score.LFU)}, NotImplementedError, r"\(TIMESTAMP, LFU\), in any order"),
        ({"score_strategy": ()}, NotImplementedError, "in any order"),
        ({"external_storage": dict}, TypeError, r"made by one of oneemb.make_\*_store_options"),
        ({"admit_strategy": 3}, TypeError, "must be an AdmissionStrategy"),
        ({"dim": None}, ValueError, "dim must be given for table 't_0'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        made(options)


def test_what_is_refused_of_a_lookup_and_of_a_module():
    tables = made({}, {})
    with pytest.raises(ValueError, match="the same number of bags for each of 2 features, got 3 bags"):
        tables(torch.tensor([1, 2, 3]), torch.arange(4))
    with pytest.raises(ValueError, match="feature_table_map must be numbers of tables, 0 to 1"):
        made({}, {}, features=[0, 2])
    with pytest.raises(ValueError, match="each with a name of its own"):
        made({}, {}, names=["a", "a"])
    with pytest.raises(ValueError, match="have one dim"):
        made({}, {"dim": 8})
    with pytest.raises(ValueError, match="gradient_clipping=True is not supported"):
        made({}, gradient_clipping=True)
    trained = made({"training": False})
    with pytest.raises(RuntimeError, match=r"not for training \(training=False\); call eval"):
        look_up(trained, [1])
    assert read(trained, [1]) == [0.0]


def test_options_of_older_versions_are_accepted():
    older = {"score_type": torch.uint64, "block_size": 64, "io_by_cpu": True, "reserved_key_start_bit": 3}
    made(older | {"num_of_buckets_per_alloc": 4, "init_capacity": 5, "max_load_factor": 0.9, "bucket_capacity": 32})


# ---- dumps of more rows than there is room for -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Score.LFU, Score.STEP, Score.TIMESTAMP, (Score.TIMESTAMP, Score.LFU)])
@pytest.mark.parametrize("mode", [Check.IGNORE, Check.ERROR])
def test_of_a_dump_the_rows_of_the_best_scores_are_loaded_where_there_is_no_room_for_all(tmp_path, strategy, mode):
    its = {"initializer_args": Begin(Mode.UNIFORM, lower=-1.0, upper=1.0), "score_strategy": strategy}
    whole = made(its | {"max_capacity": 2048})
    kept = made(its | {"max_capacity": 64, "safe_check_mode": mode})
    for every in range(1, 21):
        look_up(whole, (np.arange(-200, 200, every) * 2**54).tolist())
    whole.dump(str(tmp_path))
    with pytest.warns(UserWarning, match="has room for 64 of 400 rows"):
        kept.load(str(tmp_path))
    rows, its = rows_of(whole), rows_of(kept)
    best = sorted(rows, key=lambda key: (rows[key][1], key))[-64:]
    assert sorted(its) == sorted(best) and all(its[key][0] == rows[key][0] for key in best)


def rows_of(tables):
    """{id: (weights, the score by which rows leave)}"""
    [(keys, values, _, scores)] = tables.tables.export_keys_values(torch.device("cpu"))
    if scores.dim() == 2:
        scores = scores[:, 1]  # of LFU
    return {key: (values[n].tolist(), int(scores[n])) for n, key in enumerate(keys.tolist())}
