"""A served snapshot against the training embedding in eval mode, and its files against damage."""

import dataclasses
import os
import pickle
import struct
import threading

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels.checksum import xxh64
from oneemb.kernels.quantize_rows import quantize_rows, quantized_bytes
from oneemb.kernels.threads import Threads
from oneemb.serving.inference import InferenceEmbedding
from oneemb.storage.errors import OtherSnapshotError, StorageError
from oneemb.storage.serving.served_file import SERVED_MAGIC, ServedFile
from oneemb.storage.table.file_header import pack_header
from tests.support.forks import fork_context
from tests.support.inside import file_of
from tests.support.pairwise import covering, diagonal
from tests.support.waits import ended

TABLES = 3
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def trained(folder, dtype=torch.float32, dim=9, steps=2, **options):
    """An embedding whose rows have been trained, in eval mode, with the snapshot `one`."""
    initializers = [oneemb.make_normal_initializer(0, 1), oneemb.make_uniform_initializer(-1, 1), None]
    embedding = oneemb.MultiTableEmbedding(
        "served", dim, dtype, torch.int64, [oneemb.make_table(one) for one in initializers],
        oneemb.make_device_mem_store_options(str(folder)), padding_idx=5, seed=3, **options,
    )  # fmt: skip
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.3)
    for step in range(steps):
        ids = torch.randint(-50, 50, (40, TABLES), generator=torch.Generator().manual_seed(step))
        embedding(ids).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    embedding.save_snapshot("one")
    return embedding.eval()


def some_ids(count=200, seed=9):
    """Known and unknown ids, and the padding."""
    return torch.randint(-90, 90, (count, TABLES), generator=torch.Generator().manual_seed(seed))


def bits(tensor):
    return tensor.view(torch.int16) if tensor.element_size() == 2 else tensor.view(torch.int32)


@pytest.mark.parametrize(("dtype", "dim"), diagonal(DTYPES, [1, 9, 16, 80]))
def test_rows_as_trained_are_those_of_eval_mode_bit_for_bit(tmp_path, dtype, dim):
    embedding = trained(tmp_path, dtype, dim)
    with _opened(tmp_path, "one") as served:
        ids = some_ids()
        flat, tables = ids.reshape(-1), torch.arange(TABLES).repeat(len(ids))
        offsets = torch.arange(0, flat.numel() + 1, 2)  # 300 bags: 100 samples of 3 tables
        with torch.no_grad():
            pairs = [(embedding(ids), served(ids)), (embedding(flat, tables), served(flat, tables))]
            for pooling in ("sum", "mean", "max"):
                options = {"offsets": offsets, "pooling": pooling}
                pairs.append((embedding(flat, **options), served(flat, **options)))
                for columns in ([0, 2], [0, 1, 1, 2], [1]):  # 300 bags are of as many samples of each
                    options["columns"] = columns
                    pairs.append((embedding(flat, **options), served(flat, **options)))
            scaled = {"offsets": offsets, "per_sample_weights": torch.rand(len(flat))}
            pairs.append((embedding(flat, **scaled), served(flat, **scaled)))
            pairs.append((embedding.read(flat, tables), served.read(flat, tables)))
        for want, got in pairs:
            assert want.dtype == got.dtype and torch.equal(bits(want), bits(got))


@pytest.mark.parametrize("absent", ["zeros", oneemb.make_constant_initializer(0.75)])
def test_ids_without_a_row_read_as_the_policy_says_with_which_they_were_trained(tmp_path, absent):
    policies = [oneemb.policies.RowPolicy(absent=absent), oneemb.policies.RowPolicy(), oneemb.policies.RowPolicy()]
    embedding, ids = trained(tmp_path, policy=policies), some_ids()
    for dtype in ("float32", "int8"):
        with _opened(tmp_path, dtype=dtype) as served, torch.no_grad():
            unknown = ids.abs() > 50
            assert torch.equal(served(ids)[unknown], embedding(ids)[unknown])
            assert dtype != "float32" or torch.equal(served(ids), embedding(ids))


class _opened:
    def __init__(self, path, *arguments, **options):
        self.served = InferenceEmbedding.open(str(path), *arguments, **options)

    def __enter__(self):
        return self.served

    def __exit__(self, *error):
        self.served.close()


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
@pytest.mark.parametrize("trained_dtype", DTYPES)
def test_rounded_rows_are_within_the_stated_bound(tmp_path, dtype, trained_dtype):
    embedding = trained(tmp_path, trained_dtype, 16)
    with _opened(tmp_path, dtype=dtype) as served:
        ids = some_ids()
        with torch.no_grad():
            want, got = embedding(ids).double(), served(ids)
        assert got.dtype in (torch.float32, trained_dtype)
        low, high = want.amin(-1, keepdim=True), want.amax(-1, keepdim=True)
        largest = want.abs().amax(-1, keepdim=True)
        bound = {
            "float16": largest * 2**-11 + 2**-25,
            "int8": (high - low) / 510 + largest * 2**-21 + 1e-8,
            "int4": (high - low) / 30 + (low.abs() + high - low) * 2**-10 + 2**-20,
        }[dtype]
        error = (got.double() - want).abs()
        assert (error <= bound).all()
        assert dtype == "float16" and trained_dtype != torch.float32 or served.quantization_error[0] > 0
        assert error.max() <= served.quantization_error[0] * 1.0001


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("dim", [2, 16, 30, 128])
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-3, 1.0, 1e4])
def test_quantized_rows_have_the_bytes_that_torch_gives_them(width, dim, size):
    print("seed 0")
    weights = (np.random.default_rng(0).standard_normal((200, dim)) * size).astype(np.float32)
    weights[0], weights[1], weights[2] = 0, 3 * size, -size
    row_NB = np.zeros((200, quantized_bytes(dim, width)), np.uint8)
    right_N, _ = quantize_rows(weights, width, row_NB, threads=Threads(2))
    ops = torch.ops.quantized
    oracle = ops.embedding_bag_byte_prepack if width == 8 else ops.embedding_bag_4bit_prepack
    assert right_N.all() and (oracle(torch.from_numpy(weights)).numpy() == row_NB).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("dim", [1, 2, 3, 15, 16, 17, 33, 64, 130])
def test_rows_are_what_torch_unpacks(tmp_path, dtype, dim):
    print("seed 1")
    weight_ND = np.random.default_rng(1).standard_normal((300, dim)).astype(np.float32)
    with oneemb.make_persistent_table_writer(tmp_path, "one", torch.int64, torch.float32, dim) as writer:
        writer.write(np.arange(300), weight_ND)
    ops = torch.ops.quantized
    if dtype == "int8":
        packed = ops.embedding_bag_byte_prepack(torch.from_numpy(weight_ND))
        scale_N2 = packed.numpy()[:, dim:].copy().view(np.float32)
        want = torch.from_numpy(packed.numpy()[:, :dim].astype(np.float32) * scale_N2[:, :1] + scale_N2[:, 1:])
        # Torch rounds product and sum in one.
        torch.testing.assert_close(want, ops.embedding_bag_byte_unpack(packed), rtol=0, atol=1e-6)
    else:  # torch takes even widths alone
        even = np.concatenate([weight_ND, weight_ND[:, :1]], 1) if dim % 2 else weight_ND
        want = ops.embedding_bag_4bit_unpack(ops.embedding_bag_4bit_prepack(torch.from_numpy(even)))[:, :dim]
    with _opened(tmp_path, dtype=dtype, absent="zeros") as served:
        assert torch.equal(bits(served(torch.arange(300))), bits(want.contiguous()))


@pytest.mark.parametrize(
    ("dtype", "trained_dtype", "case"),
    covering(["float32", "float16", "int8", "int4"], DTYPES, [(19, "initial"), (80, "zeros")]),
    ids=str,
)
def test_bags_have_the_bits_of_their_rows_summed_in_order(tmp_path, dtype, trained_dtype, case):
    dim, absent = case
    trained(tmp_path, trained_dtype, dim)
    with _opened(tmp_path, dtype=dtype, absent=absent, tables=[2, 0], num_threads=2) as served:
        id_N = some_ids(700).reshape(-1)
        print("seed 2")
        rng = np.random.default_rng(2)
        offset_P1 = np.sort(np.concatenate([[0, 0, len(id_N)], rng.integers(0, len(id_N), 198)]))
        table_N = np.repeat(np.array([2, 0] * 100), np.diff(offset_P1))
        row_ND = served(id_N, torch.from_numpy(table_N)).float().numpy()
        scale_N = rng.standard_normal(len(id_N)).astype(np.float32)
        is_id_N = (id_N != 5).numpy()
        for pooling, weights in (("sum", None), ("mean", None), ("max", None), ("sum", scale_N)):
            want_PD = np.zeros((200, dim), np.float32)
            for p in range(200):
                its = [n for n in range(offset_P1[p], offset_P1[p + 1]) if is_id_N[n]]
                if pooling == "max" and its:
                    want_PD[p] = row_ND[its].max(0)
                elif pooling != "max":
                    share = np.float32(1) / np.float32(max(1, len(its))) if pooling == "mean" else np.float32(1)
                    for n in its:
                        want_PD[p] += row_ND[n] * (share if weights is None else weights[n])
            got = served(
                id_N, offsets=torch.from_numpy(offset_P1), pooling=pooling,
                per_sample_weights=None if weights is None else torch.from_numpy(weights),
            )  # fmt: skip
            want = torch.from_numpy(want_PD).view(100, 2, dim).to(got.dtype)
            assert torch.equal(bits(got), bits(want)), (pooling, weights is None)


def test_a_first_lookup_does_not_load_the_compiler_of_torch(tmp_path):
    import subprocess
    import sys

    trained(tmp_path).close()
    code = f"""
import oneemb, sys, torch
served = oneemb.InferenceEmbedding.open({str(tmp_path)!r})
ids = torch.zeros(2, 3, dtype=torch.int64)
served(ids)
assert "torch._dynamo" not in sys.modules
assert torch.equal(torch.compile(lambda ids: served(ids) + 1, backend="eager")(ids), served(ids) + 1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_a_row_that_does_not_fit_is_named(tmp_path, bad, dtype):
    with oneemb.make_persistent_table_writer(tmp_path, "one", torch.int64, torch.float32, 2) as writer:
        writer.write(np.array([7, 8]), np.array([[1, 2], [bad, 1]], np.float32))
    with pytest.raises(StorageError, match="id 8 in table 0"):
        InferenceEmbedding.open(str(tmp_path), dtype=dtype, absent="zeros")
    with pytest.raises(StorageError, match="does not say how rows begin"):
        InferenceEmbedding.open(str(tmp_path))
    with _opened(tmp_path, absent="zeros") as served:
        assert torch.equal(served(torch.tensor([7, 99])), torch.tensor([[1.0, 2.0], [0.0, 0.0]]))


def test_some_tables_are_served_in_the_order_that_was_given(tmp_path):
    embedding = trained(tmp_path)
    with _opened(tmp_path, tables=[2, 0]) as served:
        ids = some_ids()
        with torch.no_grad():
            assert torch.equal(served(ids[:, [2, 0]]), embedding(ids)[:, [2, 0]])
            tables = torch.tensor([2, 0] * 10)
            assert torch.equal(served(ids[:20, 0], tables), embedding(ids[:20, 0], tables))
            bags = {"offsets": torch.arange(0, 201, 5), "columns": [0, 2]}
            assert torch.equal(served(ids[:, 0], **bags), embedding(ids[:, 0], **bags))
        with pytest.raises(ValueError, match="numbers of served tables"):
            served(ids[:, 0], torch.ones(len(ids), dtype=torch.int64))
        with pytest.raises(ValueError, match="numbers of served tables"):
            served(ids[:, 0], offsets=torch.arange(0, 201, 5), columns=[0, 1])


def test_arguments_that_are_wrong_are_refused_in_words(tmp_path):
    trained(tmp_path)
    with _opened(tmp_path) as served:
        with pytest.raises(TypeError, match="int64"):
            served(some_ids().int())
        with pytest.raises(ValueError, match=r"\[B, 3\]"):
            served(some_ids()[:, :2])
        with pytest.raises(ValueError, match="pooling"):
            served(some_ids(), pooling="median")
        with pytest.raises(ValueError, match=r"ids of bags must be of shape \[B, 3, L\]"):
            served(some_ids(), pooling="sum")
        with pytest.raises(ValueError, match="columns.*need offsets"):
            served(some_ids(), columns=[0])
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(served)
    with pytest.raises(StorageError, match="closed"):
        served(some_ids())
    with pytest.raises(ValueError, match="dtype"):
        InferenceEmbedding.open(str(tmp_path), dtype="int2")
    with pytest.raises(ValueError, match="one path or more"):
        InferenceEmbedding.open([])
    for tables in ([0.0], ["0"], [None], "0"):
        with pytest.raises(ValueError, match="integers"):
            InferenceEmbedding.open(str(tmp_path), tables=tables)
    for seconds in (0.0, float("nan"), float("inf"), 1e12):  # more than a thread can wait
        with _opened(tmp_path) as served, pytest.raises(ValueError, match="seconds must be"):
            served.follow(seconds)


@pytest.mark.parametrize("as_given", [list, tuple, np.array])
def test_tables_may_be_any_integers_and_are_those_of_a_file(tmp_path, as_given):
    trained(tmp_path)
    with _opened(tmp_path, tables=as_given([2, 0])) as served:
        want, file = served(some_ids()[:, :2]), file_of(served)
    with _opened(file, tables=as_given([2, 0])) as served:
        assert torch.equal(bits(served(some_ids()[:, :2])), bits(want))
    with pytest.raises(ValueError, match="leave these arguments out"):
        InferenceEmbedding.open(file, tables=as_given([0, 2]))


def test_a_file_of_another_snapshot_under_the_name_of_this_one_is_refused(tmp_path):
    trained(tmp_path / "job")
    trained(tmp_path / "other")
    with _opened(tmp_path / "job") as served, _opened(tmp_path / "other") as other:
        path = file_of(served)
        os.replace(file_of(other), path)
    with pytest.raises(StorageError, match="identity.*offset.*remove") as error:
        InferenceEmbedding.open(str(tmp_path / "job"))
    assert path in str(error.value)


def test_a_newer_snapshot_or_delta_is_taken_over_and_a_named_one_brought_back(tmp_path):
    embedding = trained(tmp_path)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.3)
    ids = some_ids()

    def train():
        embedding.train()
        embedding(ids[:20]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        embedding.eval()

    with _opened(tmp_path) as served, torch.no_grad():
        first = served(ids)
        assert not served.refresh()
        with torch.enable_grad():
            train()
        embedding.save_delta("two", since="one")
        assert torch.equal(served(ids), first)
        assert served.refresh() and served.version.name == "two"
        assert torch.equal(served(ids), embedding(ids)) and not torch.equal(served(ids), first)
        served.rollback("one")
        assert torch.equal(served(ids), first) and served.version.name == "one"
        with pytest.raises(StorageError, match="no snapshot named"):
            served.rollback("three")
        assert served.version.name == "one"


def test_lookups_of_threads_are_each_of_one_version_while_following(tmp_path):
    embedding = oneemb.MultiTableEmbedding(
        "served", 4, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(0.0))],
        oneemb.make_device_mem_store_options(str(tmp_path)),
    )  # fmt: skip
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.arange(3000)

    def save(step):
        embedding(ids).sum().mul(-1).backward()  # every weight of every row is the number of the step
        optimizer.step()
        optimizer.zero_grad()
        embedding.save_snapshot(f"step {step}")

    save(1)
    seen, wrong, ends = set(), [], threading.Event()
    with _opened(tmp_path, num_threads=2) as served:

        def look():
            last = 0.0
            while not ends.is_set():
                rows = served(ids)
                if rows.min() != rows.max() or rows.min() < last:
                    wrong.append(rows)
                last = float(rows.min())
                seen.add(last)

        served.follow(0.01)
        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(2, 6):
            save(step)
        for _ in range(60_000):
            if served.version.name == "step 5" and 5.0 in seen:
                break
            ends.wait(0.01)
        ends.set()
        ended(*threads)
        assert not wrong and {5.0} <= seen
    assert len([name for name in os.listdir(tmp_path / "serving") if name.endswith(".serving")]) <= 2


def test_an_error_of_following_fails_no_lookup_and_is_told(tmp_path, caplog):
    trained(tmp_path).close()
    with _opened(tmp_path) as served:
        expected = served(some_ids())
        file, away = tmp_path / "snapshots" / "one.snapshot", tmp_path / "away"
        file.rename(away)
        served.follow(0.001)
        for is_there in (False, True):
            for _ in range(600_000):
                if (served.error is None) == is_there:
                    break
                assert torch.equal(served(some_ids()), expected)
                threading.Event().wait(0.001)
            assert (served.error is None) == is_there and (is_there or "no snapshot" in str(served.error))
            away.rename(file) if not is_there else None
        assert torch.equal(served(some_ids()), expected) and served.version.name == "one"
        with pytest.raises(StorageError, match="no snapshot"):
            file.rename(away)
            served.refresh()
    told = [one.getMessage() for one in caplog.records if one.name == "oneemb" and one.levelname == "WARNING"]
    assert told and all("is not served: SnapshotNotFoundError: no snapshot" in one for one in told)


def test_a_state_dict_chooses_the_snapshot_that_is_served(tmp_path):
    embedding, ids = trained(tmp_path), some_ids()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.3)
    states = [{"0._extra_state": embedding.state_dict()["_extra_state"].clone()}]
    rows = [embedding(ids).detach().clone()]
    embedding.train()
    embedding(ids[:20]).sum().backward()
    optimizer.step()
    embedding.eval()
    states.append({"0._extra_state": embedding.state_dict()["_extra_state"].clone()})
    rows.append(embedding(ids).detach().clone())
    with _opened(tmp_path) as served:
        model = torch.nn.Sequential(served)
        for state, expected in [*zip(states, rows, strict=True)] * 2:
            model.load_state_dict(state)
            assert torch.equal(model(ids), expected) and served.version.name == oneemb.snapshot_name(
                state["0._extra_state"]
            )
        model.load_state_dict({})
        entry = bytes(states[0]["0._extra_state"].tolist()).replace(b'identity": "', b'identity": "f')
        other = torch.frombuffer(bytearray(entry[:1024]), dtype=torch.uint8)
        with pytest.raises(OtherSnapshotError, match="another run"):
            model.load_state_dict({"0._extra_state": other})
        with pytest.raises(RuntimeError, match="Unexpected key.*0.weights"):
            model.load_state_dict({"0.weights": torch.zeros(1)})
        assert torch.equal(model(ids), rows[1])


def only_file(folder):
    (name,) = [name for name in os.listdir(folder / "serving") if name.endswith(".serving")]
    return folder / "serving" / name


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_flipped_bit_anywhere_is_an_error_or_in_bytes_that_are_never_read(tmp_path, dtype):
    trained(tmp_path, dim=64).close()
    with _opened(tmp_path, dtype=dtype) as served:
        want = served(some_ids(1))
    path = only_file(tmp_path)
    good = path.read_bytes()
    offsets = [*range(0, 128, 7), 4096, 4096 + 333, *range(4096, len(good), len(good) // 200), len(good) - 1]
    unread = 0
    for offset in offsets:
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 16]) + good[offset + 1 :])
        try:
            with _opened(path) as served:
                got = served(some_ids(1))
        except StorageError as error:
            assert str(path) in str(error)
        else:
            assert torch.equal(got, want)  # the damaged block was not read
            unread += 1
        # Without its magic it is taken for a folder, which it is not.
        with pytest.raises(StorageError, match="offset" if offset >= 8 else "is no table"):
            InferenceEmbedding.open(str(path), verify=True)
    assert 0 < unread < len(offsets)


@pytest.mark.parametrize("left", [0, 7, 100, 4096, 5000, -1])
def test_a_file_that_was_cut_short_is_refused(tmp_path, left):
    trained(tmp_path).close()
    _opened(tmp_path).served.close()
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(StorageError):
        InferenceEmbedding.open(str(tmp_path), "one")


def test_the_command_line_makes_checks_and_shows_a_file(tmp_path):
    embedding = trained(tmp_path / "job")
    out = tmp_path / "one.int8"

    def run(*arguments):
        from click.testing import CliRunner

        from oneemb.cli.commands import oneemb as command

        return CliRunner().invoke(command, [str(one) for one in arguments])

    done = run("quantize", tmp_path / "job", "--dtype", "int8", "--out", out)
    assert done.exit_code == 0 and "rms" in done.output, done.output
    assert run("quantize", tmp_path / "job", "--out", out).exit_code == 2
    with _opened(out) as served, torch.no_grad():
        error = (served(some_ids()) - embedding(some_ids())).abs().max()
        assert 0 < error <= served.quantization_error[0]
    assert run("check", out).exit_code == 0 and "int8" in run("inspect", out).output
    good = out.read_bytes()
    out.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    done = run("check", out)
    assert done.exit_code == 1 and "offset 4096" in done.output


def _opens(path, said):
    with open(said, "w") as file:
        file.write(oneemb.InferenceEmbedding.open(path).version.name)


def test_processes_that_open_at_once_make_one_file_and_a_killed_one_disturbs_none(tmp_path):
    trained(tmp_path).close()
    context, said = fork_context(), [tmp_path / f"said-{n}" for n in range(3)]
    children = [context.Process(target=_opens, args=(str(tmp_path), str(path))) for path in said]
    for child in children:
        child.start()
    children[0].kill()
    ended(*children)
    assert [path.read_text() for path in said[1:]] == ["one", "one"]
    only_file(tmp_path)
    assert not [name for name in os.listdir(tmp_path / "serving") if name.endswith(".tmp")]


def test_a_snapshot_of_ranks_is_served_whole(tmp_path):
    from oneemb.rows.reshard import reshard

    embedding = trained(tmp_path / "job")
    with torch.no_grad():
        want = embedding(some_ids())
    embedding.close()
    reshard([str(tmp_path / "job")], "one", 3, [str(tmp_path / "ranks")])
    with _opened(tmp_path / "ranks", "one") as served:
        assert torch.equal(served(some_ids()), want)


def test_what_a_killed_builder_has_left_goes_and_the_file_is_made(tmp_path):
    trained(tmp_path).close()
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "half.serving.0123456789ab.tmp").write_bytes(b"half")
    with _opened(tmp_path) as served:
        assert served.version.name == "one"
    assert sorted(name.split(".")[-1] for name in os.listdir(tmp_path / "serving")) == ["LOCK", "serving"]


@pytest.mark.parametrize("pilots", ["zeros", "random", "ones"])
def test_a_file_whose_pilots_are_hostile_gives_rows_of_their_ids_or_none(tmp_path, pilots):
    trained(tmp_path, dim=16).close()
    with _opened(tmp_path, absent="zeros") as served:
        want = served(some_ids())
    path = only_file(tmp_path)
    data = bytearray(path.read_bytes())
    info = ServedFile(path, threads=Threads(1)).info
    numbers = np.random.default_rng(0).integers(0, 1 << 16, info.buckets)
    pilot_B = {"zeros": numbers * 0, "random": numbers, "ones": numbers * 0 + 0xFFFF}[pilots].astype("<u2")
    data[info.pilots_begin : info.pilots_begin + 2 * info.buckets] = pilot_B.tobytes()
    sealed(path, data, info)
    with _opened(path, absent="zeros") as served:
        got = served(some_ids())
    found = (got != 0).any(2)
    assert torch.equal(got[found], want[found]) and found.sum() < (want != 0).any(2).sum()
    with pytest.raises(StorageError, match="lookups find .* rows of table"):
        InferenceEmbedding.open(str(path), verify=True)


def sealed(path, data, info):
    """Write a file whose bytes have changed, with right checksums."""
    for block in range(info.blocks):
        begin = 4096 * (1 + block)
        struct.pack_into("<I", data, info.sums_begin + 4 * block, xxh64(bytes(data[begin : begin + 4096])) & 0xFFFFFFFF)
    packed = dataclasses.replace(
        info, sums=f"{xxh64(bytes(data[info.pilots_begin : info.manifest_begin])):016x}"
    ).packed()
    data[info.manifest_begin :] = packed
    header = (info.manifest_begin, len(packed) - 8, info.manifest_begin + len(packed), 0)
    data[:128] = pack_header(SERVED_MAGIC, header)
    path.write_bytes(bytes(data))
