"""Dumps of models: written by some ranks, loaded by others, and read by a reader that knows the layout alone."""

import json
import os
import pathlib
import re
import struct

import numpy as np
import pytest
import torch

import oneemb
from oneemb.dynamicemb import (
    DynamicEmbDump,
    DynamicEmbInitializerArgs as Begin,
    DynamicEmbInitializerMode as Mode,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy as Score,
    DynamicEmbTableOptions as Options,
    EmbOptimType,
    FrequencyAdmissionStrategy,
)
from oneemb.dynamicemb.dump_load import find_sharded_modules, get_dynamic_emb_module
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError
from tests.dynamicemb.test_sharded import DIM, ROWS, TABLES, batch_of, collection, shard, sharder_of, values_of
from tests.torchrec.test_sharding import of_each, on_ranks

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD, "adam": EmbOptimType.ADAM, "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "row-wise": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}  # fmt: skip
WIDTH = {"sgd": 0, "adam": 2 * DIM, "adagrad": DIM, "row-wise": 1}
PAIR = (Score.LFU, Score.TIMESTAMP)
CASES = [
    # optimizer, strategy, dist_type, layout
    ("adam", Score.STEP, "roundrobin", "today"),
    ("sgd", Score.TIMESTAMP, "hash_roundrobin", "today"),
    ("adagrad", PAIR, "continuous", "today"),
    ("row-wise", Score.LFU, "roundrobin", "today"),
    ("adam", Score.STEP, "roundrobin", "seed"),
    ("row-wise", Score.TIMESTAMP, "roundrobin", "seed"),
]  # fmt: skip


def made(group, optimizer, strategy, dist, threshold=2, rate=0.25, rows=ROWS):
    options = {
        name: Options(
            score_strategy=strategy,
            dist_type=dist,
            initializer_args=Begin(Mode.UNIFORM, lower=-1.0, upper=1.0),
            admit_strategy=FrequencyAdmissionStrategy(threshold) if name == "two" else None,
        )  # fmt: skip
        for name in ("one", "two")
    }
    sharder = sharder_of("ids", optimizer=OPTIMIZERS[optimizer], learning_rate=rate)
    return shard(collection("ids", rows), options, group, sharder)


def shifted(batch, step):
    """The same with ids of any sign in the feature that dynamic tables alone have."""
    values = batch.values().clone()
    begins = batch.offset_per_key()
    for f, feature in enumerate(batch.keys()):
        its = slice(begins[f], begins[f + 1])
        if feature == "h":
            values[its] = values[its] * (2**57) * (1 if step % 2 else -1) + values[its] % 7
    return type(batch)(batch.keys(), values, lengths=batch.lengths())


def train(model, steps, group):
    for step in steps:
        rows = values_of(model(shifted(batch_of(step, group, 40), step)))[1]
        # Ranks divide gradients by their number; what is left does not depend on who has which sample.
        (rows * torch.linspace(-1, 1, DIM) * group.size()).sum().backward()


def tables_of(model):
    for _, _, module in find_sharded_modules(model):
        for tables in get_dynamic_emb_module(module):
            yield from ((tables, t, name) for t, name in enumerate(tables.table_names))


def contents(model):
    """{table: {id: (weights, state, scores)}} of this rank's part, and {table: {id: count}}."""
    found, counts = {}, {}
    for tables, t, name in tables_of(model):
        found[name] = {}
        for keys, weights, state, scores in tables.tables.export_keys_values(torch.device("cpu"), table_id=t):
            for n, key in enumerate(keys.tolist()):
                its = b"" if state is None else state[n].numpy().tobytes()
                found[name][key] = weights[n].numpy().tobytes(), its, scores[n].tolist()
        counts[name] = dict(zip(*(array.tolist() for array in tables.dynamic.sightings(t)), strict=True))
    return found, counts


def dump(group, folder, optimizer, strategy, dist, layout):
    model = made(group, optimizer, strategy, dist)
    train(model, range(5), group)
    path = f"{folder}/{optimizer}-{layout}-{strategy}-{dist}"
    DynamicEmbDump(path, model, optim=True, counter=layout == "today", pg=group, layout=layout)
    its = contents(model)
    train(model, range(5, 8), group)
    return *its, contents(model)[0]


def load(group, folder, optimizer, strategy, dist, layout):
    # The tables have grown, and with them the blocks of "continuous".
    model = made(group, optimizer, strategy, dist, rate=0.125, rows=ROWS + 30)
    path = f"{folder}/{optimizer}-{layout}-{strategy}-{dist}"
    DynamicEmbLoad(path, model, optim=True, counter=layout == "today", pg=group)
    its = contents(model)
    train(model, range(5, 8), group)
    return *its, contents(model)[0]


def joined(results, case, which):
    """What all ranks have of a case, {table: {key: value}}."""
    found = {"one": {}, "two": {}}
    for of_cases in results:
        for name, its in of_cases[case][which].items():
            assert not found[name].keys() & its.keys()
            found[name] |= its
    return found


def close(own, other):
    assert own.keys() == other.keys()
    for name, its in own.items():
        assert its.keys() == other[name].keys()
        for key, (weights, state, _) in its.items():
            theirs = other[name][key]
            for one, two in ((weights, theirs[0]), (state, theirs[1])):
                np.testing.assert_allclose(
                    *(np.frombuffer(data, np.float32) for data in (one, two)), rtol=2e-5, atol=2e-6
                )


def without_scores(found):
    return {name: {key: row[:2] for key, row in its.items()} for name, its in found.items()}


@pytest.mark.parametrize(
    "dumping, loading", [(3, 2), *(pytest.param(*its, marks=pytest.mark.slow) for its in [(1, 3), (2, 1), (4, 4)])]
)
def test_a_dump_of_some_ranks_is_loaded_by_others(tmp_path, dumping, loading):
    dumped = on_ranks(dumping, of_each, dump, [(str(tmp_path), *case) for case in CASES])
    loaded = on_ranks(loading, of_each, load, [(str(tmp_path), *case) for case in CASES])
    for n, (optimizer, strategy, dist, layout) in enumerate(CASES):
        before, after = joined(dumped, n, 0), joined(loaded, n, 0)
        assert without_scores(before) == without_scores(after) and all(before.values())
        keys = list(before["two"])
        assert min(keys) < -(2**61) and max(keys) > 2**61
        for name, its in before.items():
            scores = [(its[key][2], after[name][key][2]) for key in its]
            if strategy is Score.TIMESTAMP and layout == "today":  # ages are kept, to within the time of the calls
                order = [sorted(range(len(scores)), key=lambda i, c=c: (scores[i][c], i)) for c in (0, 1)]
                assert order[0] == order[1]
            elif strategy is not Score.TIMESTAMP:
                assert all(one == two for one, two in scores)
        if layout == "today":
            counts = [joined(its, n, 1) for its in (dumped, loaded)]
            assert counts[0] == counts[1] and counts[0]["two"]
        ended = [joined(its, n, 2) for its in (dumped, loaded)]
        if layout == "seed":  # which has no counts of ids without a row
            ended = [{"one": its["one"]} for its in ended]
        close(*ended)  # It goes on as the job does that has dumped it.
        check_files(tmp_path / f"{optimizer}-{layout}-{strategy}-{dist}" / "model", before, dumping, CASES[n])


def check_files(folder, rows, ranks, case):
    """That the files of a dump are what the layout says, by a reader of the layout alone."""
    optimizer, strategy, dist, layout = case
    for name, its in rows.items():
        meta = json.loads((folder / f"{name}_opt_args.json").read_text())
        assert meta["lr"] == 0.25 and (layout == "seed" or meta["dist_type"] == dist)
        found = {}
        if layout == "seed":
            found = read_seed(folder, name, optimizer, None if strategy is Score.TIMESTAMP else its)
        for r in range(ranks if layout == "today" else 0):
            end = f".rank_{r}.world_size_{ranks}"
            keys = of_file(folder / f"{name}_emb_keys{end}", "q")
            values = (folder / f"{name}_emb_values{end}").read_bytes()
            states = (folder / f"{name}_opt_values{end}").read_bytes()
            words = 2 if strategy == PAIR else 1
            scores = of_file(folder / f"{name}_emb_scores{end}", "q")
            assert len(scores) == words * len(keys)
            for n, key in enumerate(keys):
                if dist == "roundrobin":
                    assert key % 2**64 % ranks == r
                if dist == "continuous":
                    block = -(-ROWS // ranks)
                    key = key + r * block if 0 <= key < block else key % 2**64 * ranks + r
                    key = (key + 2**63) % 2**64 - 2**63
                width = 4 * WIDTH[optimizer]
                found[key] = values[4 * DIM * n : 4 * DIM * (n + 1)], states[width * n : width * (n + 1)]
                if strategy is Score.STEP or strategy is Score.LFU:
                    assert scores[n] == its[key][2]
        assert found == {key: row[:2] for key, row in its.items()}


def of_file(path, kind):
    data = path.read_bytes()
    return list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))


def read_seed(folder, name, optimizer, scored):
    """As {key: (weights, state)}. scored: what has the scores of rows; None = there are no files of scores."""
    keys, values = of_file(folder / f"{name}_keys", "q"), (folder / f"{name}_values").read_bytes()
    states = {"adam": ["m", "v"], "row-wise": ["Gt"]}[optimizer]
    kinds = ["", *(f"opt_state_{one}_" for one in states)]
    for kind in kinds:
        path = folder / f"{name}_{kind}scores"
        if scored is None:
            assert not path.exists()
        else:
            its_keys = of_file(folder / f"{name}_{kind}keys", "q")
            assert dict(zip(its_keys, of_file(path, "Q"), strict=True)) == {key: row[2] for key, row in scored.items()}
    its = {"adam": ["lr", "iters", "beta1", "beta2", "eps", "weight_decay"], "row-wise": ["lr", "eps"]}[optimizer]
    assert list(json.loads((folder / f"{name}_opt_args.json").read_text())) == its
    parts = [(of_file(folder / f"{name}_opt_state_{one}_keys", "q"),
              (folder / f"{name}_opt_state_{one}_values").read_bytes()) for one in states]  # fmt: skip
    found = {}
    for n, key in enumerate(keys):
        state = b""
        for its_keys, data in parts:
            at, width = its_keys.index(key), len(data) // len(its_keys)
            state += data[width * at : width * (at + 1)]
        found[key] = values[4 * DIM * n : 4 * DIM * (n + 1)], state
    return found


# ---- what is refused -------------------------------------------------------------------------------------------------


def refuse(group, folder):
    model = made(group, "adagrad", Score.LFU, "roundrobin")
    train(model, range(2), group)
    DynamicEmbDump(f"{folder}/a", model, {"model": ["one"]}, True, group)  # the group in the place it had at first
    DynamicEmbDump(f"{folder}/b", model, optim=False, pg=group)
    said = []

    def refused(kind, call):
        with pytest.raises(kind) as error:
            call()
        said.append(str(error.value))

    refused(FileExistsError, lambda: DynamicEmbDump(f"{folder}/a", model, pg=group))
    DynamicEmbDump(f"{folder}/a", model, {"model": ["one"]}, optim=True, pg=group, allow_overwrite=True)
    before = contents(model)
    refused(SnapshotNotFoundError, lambda: DynamicEmbLoad(f"{folder}/a", model, pg=group))
    refused(SnapshotNotFoundError, lambda: DynamicEmbLoad(f"{folder}/none", model, pg=group))
    refused(ValueError, lambda: DynamicEmbLoad(f"{folder}/b", model, optim=True, pg=group))
    refused(ValueError, lambda: DynamicEmbLoad(f"{folder}/a", model, {"other": ["one"]}, pg=group))
    refused(ValueError, lambda: DynamicEmbDump(f"{folder}/c", model, {"model": ["three"]}, pg=group))
    refused(TypeError, lambda: DynamicEmbLoad(f"{folder}/a", model, ["one"], pg=group))
    refused(ValueError, lambda: DynamicEmbDump(f"{folder}/c", model, pg=group, layout="new"))
    other = made(group, "adagrad", Score.STEP, "roundrobin")
    refused(ValueError, lambda: DynamicEmbLoad(f"{folder}/b", other, pg=group))
    other = made(group, "adam", Score.LFU, "continuous")
    refused(ValueError, lambda: DynamicEmbLoad(f"{folder}/a", other, {"model": ["one"]}, True, group))
    DynamicEmbLoad(f"{folder}/a", other, {"model": ["one"]}, False, group)
    assert without_scores(contents(other)[0])["one"].keys() == before[0]["one"].keys()
    refused(ValueError, lambda: DynamicEmbDump(f"{folder}/d", model, counter=True, pg=group, layout="seed"))
    DynamicEmbDump(f"{folder}/e", model, pg=group, layout="seed")
    assert not pathlib.Path(folder, "e", "model", "one_opt_args.json").exists()
    refused(ValueError, lambda: DynamicEmbLoad(f"{folder}/e", model, optim=True, pg=group))
    refused(ValueError, lambda: DynamicEmbLoad(f"{folder}/e", model, counter=True, pg=group))
    pathlib.Path(folder, "e", "model", "two_scores").unlink()
    refused(CorruptTableError, lambda: DynamicEmbLoad(f"{folder}/e", model, pg=group))
    pair = made(group, "adagrad", PAIR, "roundrobin")
    refused(ValueError, lambda: DynamicEmbDump(f"{folder}/d", pair, pg=group, layout="seed"))
    assert not os.listdir(f"{folder}/d/model")
    path = pathlib.Path(folder, "b", "model", "two_emb_values.rank_0.world_size_1")
    path.write_bytes(path.read_bytes()[:-4])
    refused(CorruptTableError, lambda: DynamicEmbLoad(f"{folder}/b", other, pg=group))
    assert contents(model) == before, "what is refused has changed nothing"
    assert not os.path.exists(f"{folder}/c/model/three_opt_args.json")
    return said


def test_what_cannot_be_dumped_or_loaded_is_said(tmp_path):
    [said] = on_ranks(1, refuse, str(tmp_path))
    for text, words in zip(
        said,
        [
            "has files already", "no dump of table 'two'", "no folder of dumps", "0 state values a row",
            "table_names must name collections with dynamic tables, \\['model'\\], got \\['other'\\]",
            "must be dynamic tables, \\['one', 'two'\\], got \\['three'\\]", "must be lists of tables by the path",
            'layout must be "today" or "seed"', "was dumped, EvictStrategy.KLfu, got EvictStrategy.KCustomized",
            "must be trained by exact_adagrad .4 state values a row., as its dump was, got adam .8 values.",
            'files of layout "seed" have no counts', "'one' must have optimizer state, got none; load",
            "table 'two' has no counts of ids without a row",
            "table 'two' must have files of scores", "'one' has two; dump it with layout",
            "two_emb_values.rank_0.world_size_1 must be float32",
        ],
        strict=True,
    ):  # fmt: skip
        assert re.search(words, text), (words, text)


def snapshots(group, folder):
    """With a store of its own a table is in state dicts, by a snapshot."""

    def model():
        store = oneemb.make_cached_ssd_store_options(1, f"{folder}/rows-{group.rank()}")
        if group.size() > 1:
            store = oneemb.make_cached_ssd_store_options(1, f"{folder}/rows")
        options = {name: Options(score_strategy=Score.LFU, external_storage=store) for name in TABLES}
        return shard(collection("ids"), options, group, sharder_of("ids"))

    one = model()
    train(one, range(3), group)
    state, before = one.state_dict(), contents(one)
    one.module.close()
    two = model()
    two.load_state_dict(state)
    after = contents(two)
    two.module.close()
    return before == after, {name: len(its) for name, its in before[0].items()}, [len(its) for its in state.values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_dicts_name_a_snapshot_where_there_is_a_path(tmp_path, ranks):
    for same, sizes, lengths in on_ranks(ranks, snapshots, str(tmp_path)):
        assert same and all(sizes.values()) and min(lengths) > 10
