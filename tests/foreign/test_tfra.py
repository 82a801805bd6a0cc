"""Tables of TFRA. The checkpoints in tests/foreign/tfra are TFRA's own; make_tfra.py says how they were made."""

import os
import random
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import oneemb
from oneemb.foreign.tf_bundle import read_bundle
from oneemb.foreign.tfra_files import find_tfra
from oneemb.storage.fs import LocalFileSystem
from tests.support.foreign import assert_same, make_embedding, rows_of

HERE = Path(__file__).parent / "tfra"
CASES = [
    ("adam/model-1", "films", 4, torch.optim.Adam, ("m", "v"), 3),
    ("adam", "users/long", 2, torch.optim.AdamW, ("m", "v"), 3),
    ("files/model-1", "movies", 4, torch.optim.Adam, ("m", "v"), 3),
    ("files/TFRADynamicEmbedding-1", "people/long", 2, torch.optim.SparseAdam, ("m", "v"), None),
    ("adagrad/model-1.index", "items", 4, torch.optim.Adagrad, ("accumulator",), 3),
    ("named/model-12", "films", 4, torch.optim.Adagrad, ("accumulator",), None),
]


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(HERE, tmp_path / "copy"))


def expected(folder, name, slots, new_state):
    """{id: weights and state} by TFRA's own export."""
    with np.load(HERE / folder / "expected.npz") as arrays:
        of_slots = [
            dict(
                zip(arrays[f"{name}/lookup/{slot}:keys"].tolist(), arrays[f"{name}/lookup/{slot}:values"], strict=True)
            )
            for slot in slots
        ]
        weights = zip(arrays[f"{name}:keys"].tolist(), arrays[f"{name}:values"], strict=True)
        return {
            key: np.concatenate([row, *(of.get(key, np.full(len(row), new_state, np.float32)) for of in of_slots)])
            for key, row in weights
        }


@pytest.mark.parametrize(("path", "name", "dim", "optimizer", "slots", "step"), CASES)
@pytest.mark.parametrize("batch_size", [2, 65536])
def test_weights_and_state_are_what_tfra_exports(tmp_path, path, name, dim, optimizer, slots, step, batch_size):
    embedding = make_embedding(tmp_path / "e", dim, optimizer)
    options = {"name": name, "table": 1, "with_state": True, "batch_size": batch_size}
    if step is None and len(slots) == 2:
        with pytest.raises(ValueError, match="step must be given with the state of 'sparse_adam'"):
            oneemb.import_foreign(embedding, HERE / path, "tfra", **options)
        options["step"] = step = 7
    report = oneemb.import_foreign(embedding, HERE / path, "tfra", **options)
    wanted = expected(path.split("/")[0], name, slots, 0.0)
    assert_same(rows_of(embedding, 1), wanted)
    assert report.rows == len(wanted)
    assert report.step == embedding.stats()["step"] == (step or 1)
    assert any("it begins at 1; give step=" in one for one in report.not_carried) == (step is None)
    embedding.close()


def test_rows_without_slots_begin_with_the_state_of_new_rows_and_the_report_says_so(tmp_path):
    def optimizer(parameters):
        return torch.optim.Adagrad(parameters, initial_accumulator_value=0.25)

    embedding = make_embedding(tmp_path / "e", 4, optimizer)
    report = oneemb.import_foreign(embedding, HERE / "adagrad/model-1", "tfra", name="items", with_state=True)
    assert_same(rows_of(embedding), expected("adagrad", "items", ("accumulator",), 0.25))
    assert rows_of(embedding)[99][4:].tolist() == [0.25] * 4
    assert "state of 1 rows, which have none in the source: they begin with new state" in report.not_carried
    assert any("frequencies" in one for one in report.not_carried)
    assert any("dense variables" in one for one in report.not_carried)
    embedding.close()


def test_training_goes_on_as_in_tensorflow(tmp_path):
    """Adam's next step on one row by hand, in float64."""
    embedding = make_embedding(tmp_path / "e", 4)
    optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1, eps=1e-7), [embedding])
    oneemb.import_foreign(embedding, HERE / "adam/model-1", "tfra", name="films", with_state=True)
    w, m, v = np.split(expected("adam", "films", ("m", "v"), 0.0)[7].astype(np.float64), 3)
    embedding(torch.tensor([7]), 0).sum().backward()
    optimizer.step()
    m, v = 0.9 * m + 0.1, 0.999 * v + 0.001
    w = w - 0.1 * (m / (1 - 0.9**4)) / (np.sqrt(v / (1 - 0.999**4)) + 1e-7)
    np.testing.assert_allclose(embedding(torch.tensor([7]), 0)[0].detach().numpy(), w, rtol=1e-6)
    embedding.close()


def test_frequencies_become_the_scores_of_a_policy(tmp_path):
    policy = oneemb.policies.RowPolicy(evict=oneemb.policies.LFU(), capacity=100)
    embedding = make_embedding(tmp_path / "e", 4, policy=policy)
    report = oneemb.import_foreign(embedding, HERE / "adagrad/model-1", "tfra", name="items", with_scores=True)
    with np.load(HERE / "adagrad/expected.npz") as arrays:
        keys, counts = arrays["items/frequency:keys"], arrays["items/frequency:values"][:, 0]
    assert embedding.scores(torch.from_numpy(keys)).tolist() == counts.tolist()
    assert sorted(counts.tolist()) != counts.tolist() or len(set(counts.tolist())) > 1
    assert report.scores == len(keys)
    embedding.close()
    with pytest.raises(ValueError, match="with_scores=True needs an embedding with a policy"):
        oneemb.import_foreign(tmp_path / "t", HERE / "adagrad", "tfra", name="items", snapshot="s", with_scores=True)


def test_slots_in_another_order_than_the_rows_are_found_by_their_keys(copy, tmp_path):
    folder = copy / "files/TFRADynamicEmbedding-1"
    for kind, dtype, width in (("keys", "<i8", 1), ("values", "<f4", 2)):
        path = folder / f"people_long_lookup_m_mht_2of2_rank0_size1-{kind}"
        np.fromfile(path, dtype).reshape(-1, width)[::-1].tofile(path)
    embedding = make_embedding(tmp_path / "e", 2, torch.optim.Adam)
    oneemb.import_foreign(embedding, folder, "tfra", name="people/long", with_state=True, step=3)
    assert_same(rows_of(embedding), expected("files", "people/long", ("m", "v"), 0.0))
    embedding.close()


@pytest.mark.parametrize(("path", "name", "slots"), [
    ("files", "movies", ("m", "v")), ("files", "people/long", ("m", "v")), ("adagrad", "shops", ("accumulator",)),
])  # fmt: skip
def test_what_was_imported_goes_out_as_files_with_the_bytes_of_tfra(tmp_path, path, name, slots):
    """Files of TFRA, sorted by key, since the order of a hash table is its own."""
    oneemb.import_foreign(tmp_path / "t", HERE / path / "model-1", "tfra", name=name, snapshot="s", with_state=True)
    os.mkdir(tmp_path / "out")
    report = oneemb.export_foreign(
        tmp_path / "t", tmp_path / "out", "tfra", name=name, state=f"{name}/lookup", snapshot="s", with_state=True
    )
    for table, values in [(name, ()), *((f"{name}/lookup/{slot}", (slot,)) for slot in slots)]:
        stem = tmp_path / "out" / f"{table.replace('/', '_')}_mht_1of1_rank0_size1"
        keys = np.fromfile(f"{stem}-keys", "<i8")
        found = dict(zip(keys.tolist(), np.fromfile(f"{stem}-values", "<f4").reshape(len(keys), -1), strict=True))
        with np.load(HERE / path / "expected.npz") as arrays:
            wanted = dict(zip(arrays[f"{table}:keys"].tolist(), arrays[f"{table}:values"], strict=True))
        assert {key: found[key].tobytes() for key in wanted} == {key: row.tobytes() for key, row in wanted.items()}
        assert set(found) - set(wanted) <= ({99} if values else set())
    assert report.rows == len(found)
    assert any("count of optimizer steps, 3" in one for one in report.not_carried)
    again = make_embedding(tmp_path / "e", found[keys[0]].shape[0], torch.optim.Adam if len(slots) == 2 else (
        torch.optim.Adagrad))  # fmt: skip
    oneemb.import_foreign(again, tmp_path / "out", "tfra", with_state=True, step=3)
    assert_same(rows_of(again), expected(path, name, slots, 0.0))
    assert again.stats()["step"] == 3
    again.close()


def test_a_table_must_be_named_where_there_are_several(tmp_path):
    for name in (None, "film", "films/lookup/m/more"):
        with pytest.raises(oneemb.StorageError, match="has 'films', 'users_long'; give name="):
            oneemb.import_foreign(tmp_path, HERE / "adam", "tfra", name=name, snapshot="s")
    with pytest.raises(oneemb.StorageError, match="no checkpoint of TensorFlow: there is no file .*none.index"):
        oneemb.import_foreign(tmp_path, HERE / "adam/none", "tfra", snapshot="s")
    with pytest.raises(oneemb.StorageError, match="must hold one checkpoint of TensorFlow"):
        oneemb.import_foreign(tmp_path, HERE, "tfra", snapshot="s")


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_checkpoint_that_is_used_is_found_and_nothing_is_imported(copy, tmp_path):
    """The index has checksums everywhere but in its footer; of the data the bytes of the table count."""
    prefix = copy / "adam/model-1"
    tensors = read_bundle(LocalFileSystem(), str(prefix))
    used = [one.part for name, one in tensors.items() if "films" in name]
    places = [(f"{prefix}.data-00000-of-00001", offset) for part in used
              for offset in range(part.offset, part.offset + 8 * part.rows, 7)]  # fmt: skip
    places += [(f"{prefix}.index", offset) for offset in range(0, os.path.getsize(f"{prefix}.index") - 48, 23)]
    embedding = make_embedding(tmp_path / "e", 4, torch.optim.Adam)
    for path, offset in places:
        with open(path, "r+b") as file:
            file.seek(offset)
            [byte] = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
        with pytest.raises(oneemb.StorageError, match=rf"{re.escape(path)}.*offset \d+"):
            oneemb.import_foreign(embedding, prefix, "tfra", name="films", with_state=True)
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(bytes([byte]))
    assert len(places) > 60
    assert not rows_of(embedding)
    assert oneemb.import_foreign(embedding, prefix, "tfra", name="films", with_state=True).rows == 6
    embedding.close()


def test_a_file_that_is_cut_short_anywhere_is_an_error_that_names_it(copy, tmp_path):
    tensors = read_bundle(LocalFileSystem(), str(copy / "adam/model-1"))
    end = max(one.part.offset for name, one in tensors.items() if "films" in name and "values" in name) + 4
    for path, name, most in [
        (copy / "adam/model-1.index", "films", 10**6),
        (copy / "adam/model-1.data-00000-of-00001", "films", end),
        (copy / "files/TFRADynamicEmbedding-1/movies_mht_1of1_rank0_size1-values", "movies", 10**6),
        (copy / "files/TFRADynamicEmbedding-1/movies_lookup_m_mht_1of1_rank0_size1-keys", "movies", 10**6),
    ]:
        data = path.read_bytes()
        for size in [*range(0, min(len(data), most), 17), min(len(data), most) - 1]:
            path.write_bytes(data[:size])
            with pytest.raises(oneemb.StorageError, match=rf"{re.escape(path.name)}.*(offset|end)s? .*\d"):
                oneemb.import_foreign(
                    tmp_path / "t", path.parent, "tfra", name=name, snapshot="s", with_state=True
                )  # fmt: skip
        path.write_bytes(data)


def test_an_index_with_wrong_bytes_and_right_checksums_is_an_error_and_takes_no_memory(copy):
    rng = random.Random(5)
    path = copy / "adam/model-1.index"
    whole, seen = path.read_bytes(), set()
    for _ in range(150):
        data = bytearray(whole)
        begin = rng.randrange(*rng.choice([(0, len(data) - 60), (len(data) - 90, len(data) - 40)]))
        data[begin : begin + 4] = rng.randbytes(4)
        sign(data)
        path.write_bytes(data)
        try:
            find_tfra(LocalFileSystem(), str(copy / "adam"), "films", dim=4, key_dtype="int64", state=None)
        except (oneemb.StorageError, ValueError) as error:
            seen.add(type(error).__name__)
    assert "CorruptTableError" in seen


def sign(data):
    """Give the blocks of an index their checksums, by a CRC-32C of this file's own, if the footer names blocks."""
    numbers, value, shift = [], 0, 0
    for byte in data[-48:-8]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(value)
            value = shift = 0
    blocks = [(0, numbers[0] - 5), (numbers[2], numbers[3])] if len(numbers) > 3 else []
    for offset, size in blocks:
        if size < 0 or offset + size + 5 > len(data):
            continue
        crc = 0xFFFFFFFF
        for byte in data[offset : offset + size + 1]:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (crc & 1) * 0x82F63B78
        crc ^= 0xFFFFFFFF
        struct.pack_into("<I", data, offset + size + 1, ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_an_id_that_comes_twice_is_an_error_before_a_row_is_imported(copy, tmp_path):
    path = copy / "files/TFRADynamicEmbedding-1/people_long_mht_2of2_rank0_size1-keys"
    keys = np.fromfile(path, "<i8")
    first = np.fromfile(str(path).replace("2of2", "1of2"), "<i8")
    embedding = make_embedding(tmp_path / "e", 2)
    for twice in (keys[0], first[0]):
        np.array([keys[0], keys[1], twice]).tofile(path)
        with pytest.raises(oneemb.StorageError, match=f"each id must come once, but id {twice} of row 4"):
            oneemb.import_foreign(embedding, path.parent, "tfra", name="people/long")
    assert not rows_of(embedding)
    embedding.close()


def test_files_of_other_ranks_that_are_missing_and_of_two_saves_are_errors(copy, tmp_path):
    folder = copy / "files/TFRADynamicEmbedding-1"

    def load():
        return oneemb.import_foreign(tmp_path / "t", folder, "tfra", name="people/long", snapshot="s")

    gone = folder / "people_long_mht_1of2_rank0_size1-values"
    data = gone.read_bytes()
    gone.unlink()
    with pytest.raises(oneemb.StorageError, match=f"{gone.name} is not there"):
        load()
    gone.write_bytes(data)
    (folder / "people_long_mht_1of99999999999_rank0_size88888888888-keys").write_bytes(b"")
    with pytest.raises(oneemb.StorageError, match="files of one save"):
        load()


def test_files_of_two_ranks_are_one_table(copy, tmp_path):
    folder = copy / "files/TFRADynamicEmbedding-1"
    wanted = expected("files", "people/long", (), 0.0)
    for file in list(folder.glob("people_long_mht*")):
        v = int(re.search(r"mht_(\d)of2", file.name)[1])
        file.rename(folder / re.sub(r"mht_\dof2_rank0_size1", f"mht_1of1_rank{v - 1}_size2", file.name))
    oneemb.import_foreign(tmp_path / "t", folder, "tfra", name="people/long", snapshot="s")
    embedding = make_embedding(tmp_path / "t", 2)
    embedding.load_snapshot("s")
    assert_same(rows_of(embedding), wanted)
    embedding.close()


def test_rows_that_are_not_finite_are_refused_or_counted(copy, tmp_path):
    path = copy / "files/TFRADynamicEmbedding-1/movies_mht_1of1_rank0_size1-values"
    values = np.fromfile(path, "<f4")
    values[5] = np.nan
    values.tofile(path)
    with pytest.raises(ValueError, match="weights must be finite"):
        oneemb.import_foreign(tmp_path / "t", path.parent, "tfra", name="movies", snapshot="s")
    report = oneemb.import_foreign(tmp_path / "t", path.parent, "tfra", name="movies", snapshot="s",
                                   allow_nonfinite=True)  # fmt: skip
    assert report.nonfinite == 1
    assert "1 rows have numbers that are infinite or NaN" in str(report)
    os.mkdir(tmp_path / "out")
    report = oneemb.export_foreign(tmp_path / "t", tmp_path / "out", "hugectr", snapshot="s")
    assert report.nonfinite == 1


def test_keys_of_32_bits_are_read_only_where_they_are_named(copy, tmp_path):
    folder = copy / "files/TFRADynamicEmbedding-1"
    np.array([1, -2, 3, 4, 5, 6], "<i4").tofile(folder / "movies_mht_1of1_rank0_size1-keys")
    for options in ({"embedding_dim": 4}, {"key_type": "int32", "embedding_dim": 3}):
        with pytest.raises(oneemb.StorageError, match="give the right embedding_dim=... and key_type="):
            oneemb.import_foreign(tmp_path / "t", folder, "tfra", name="movies", snapshot="s", **options)
    oneemb.import_foreign(tmp_path / "t", folder, "tfra", name="movies", snapshot="s", key_type="int32")
    with oneemb.make_persistent_table_reader(tmp_path / "t", "s", "int64", "float32") as reader:
        assert sorted(np.concatenate([keys for keys, _ in reader]).tolist()) == [-2, 1, 3, 4, 5, 6]


def test_an_export_that_fails_or_would_replace_files_changes_none(tmp_path):
    oneemb.import_foreign(tmp_path / "t", HERE / "adam", "tfra", name="films", snapshot="s", with_state=True)
    os.mkdir(tmp_path / "out")

    def export(**options):
        return oneemb.export_foreign(tmp_path / "t", tmp_path / "out", "tfra", name="films", snapshot="s", **options)

    export(with_state=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(FileExistsError, match="films_mht_1of1_rank0_size1-keys exists; give overwrite=True"):
        export(with_state=True)
    with pytest.raises(ValueError, match="films_m_mht.* must not lie beside new rows"):
        export(overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    export(with_state=True, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
