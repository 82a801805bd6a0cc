"""The script, end to end on a small generated log: where rows live changes nothing, nor does a kill."""

import os
import re
import signal

import baselines
import kuairand_dlrm as script
import numpy as np
import pytest
import torch

import oneemb
from oneemb.checkpoints.named_snapshot import decode
from tests.support.forks import run_code

SMALL = ["--generate", "3000", "--batch-size", "64", "--epochs", "2"]
STEPS = 40  # of an epoch, about


def figures(text):
    """What is printed of each epoch and may not depend on the machine; and the cache hits."""
    return re.findall(r"(epoch \d/\d  loss \S+  AUC \S+  logloss \S+)", text), re.findall(r"hits (\S+)%", text)


def run(folder, capsys, *arguments):
    results = script.main([*SMALL, "--workdir", str(folder), *arguments])
    return results, *figures(capsys.readouterr().out)


def test_losses_are_equal_for_every_store_cache_and_number_of_threads(tmp_path, capsys):
    results, lines, _ = run(tmp_path / "a", capsys, "--store", "device", "--threads", "1")
    assert len(lines) == 2 and results[1]["loss"] < results[0]["loss"]
    hits = {}
    for name, arguments in {
        "host": ["--store", "host", "--cache-mb", "1", "--threads", "2"],
        "ssd": ["--store", "ssd", "--cache-mb", "1", "--threads", "1"],
        "roomy ssd": ["--store", "ssd", "--cache-mb", "1024", "--threads", "2"],
    }.items():
        other_results, other_lines, other_hits = run(tmp_path / name, capsys, *arguments)
        assert (other_results, other_lines) == (results, lines), name
        hits[name] = float(other_hits[1])
    # The proof that 1 MiB is too little for all rows: some were read back from below.
    assert max(hits["host"], hits["ssd"]) < hits["roomy ssd"]


def test_the_twin_on_embedding_bags_begins_with_the_same_logits_and_ends_with_the_same_auc(tmp_path, capsys):
    arguments = script.parse([*SMALL, "--workdir", str(tmp_path), "--store", "device"])
    log = script.load(arguments)
    embedding = script.make_embedding(arguments, len(log.fields))
    model = script.DLRM(script.OneEmbLookup(embedding, log.fields), len(log.fields), log.numeric_EX.shape[1], 16)
    twin = baselines.on_embedding_bags(model, log)
    assert np.allclose(script.predict(model, log), script.predict(twin, log), atol=1e-6)
    assert embedding.stats()["rows"] == 0
    embedding.close()
    script.main([*SMALL, "--workdir", str(tmp_path), "--store", "device", "--baselines"])
    auc = re.findall(r"^(.*?) +AUC (\S+)", capsys.readouterr().out, re.MULTILINE)
    auc = {name: float(value) for name, value in auc if not name.startswith("epoch")}
    assert abs(auc["DLRM, oneemb, device store"] - auc["DLRM, nn.EmbeddingBag(sparse=True)"]) < 0.003
    assert auc["a constant"] == 0.5
    assert auc["the planted model: the best there can be"] > max(list(auc.values())[:-1])


KILLED = """
import os, signal, sys
import kuairand_dlrm as script

def kill_at(owner, name, call):
    real, calls = getattr(owner, name), 0
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(owner, name, wrapped)

kill_at(*{where})
script.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing stopped, and its figures."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, script.main([*SMALL, "--epochs", "3", "--workdir", str(folder), "--store", "device"])


@pytest.mark.parametrize(
    ("store", "where", "finished", "more", "snapshots"),
    [
        ("ssd", f"(script.ClickLog, 'batch', {STEPS + 12})", 1, [], []),  # in the middle of epoch 2
        # in the first epoch: there is nothing to resume
        pytest.param("host", "(script.ClickLog, 'batch', 7)", 0, [], [], marks=pytest.mark.slow),
        # step 27 has a snapshot that no checkpoint names
        ("device", "(script, 'save_checkpoint', 3)", 0, ["--save-every", "9"], ["step-9", "step-18", "step-27"]),
        pytest.param("device", "(script, 'save_checkpoint', 2)", 1, [], [], marks=pytest.mark.slow),
        pytest.param(
            "ssd", f"(script.ClickLog, 'batch', {STEPS + 17})", 1, ["--save-every", "9"], ["step-45", "step-54"],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_killed_run_resumes_to_the_bits_of_one_that_was_not(
    whole, tmp_path, capsys, store, where, finished, more, snapshots
):
    arguments = ["--store", store, "--epochs", "3", "--cache-mb", "1", *more]
    killed = run_code(
        KILLED.format(where=where), *SMALL, *arguments, "--workdir", tmp_path, cwd=script.REPOSITORY / "examples"
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(figures(killed.stdout)[0]) == finished
    left = os.listdir(tmp_path / script.TABLES / "snapshots") if more else []
    assert {f"{name}.snapshot" for name in snapshots} <= set(left)
    resumed, lines, _ = run(tmp_path, capsys, *arguments, "--resume")
    folder, results = whole
    assert resumed == results and len(lines) == 3 - finished
    states = [torch.load(path / "checkpoint.pt") for path in (folder, tmp_path)]
    identities = []
    for state in states:
        for name in extra_states(state):
            named = decode(state["model"][name])
            identities.append(named.pop("oneemb_identity"))
            state["model"][name] = named
    assert len(set(identities)) == len(identities) > 0  # two runs' snapshots of one name are two
    assert_equal_bits(*states)
    between = [name for name in os.listdir(tmp_path / script.TABLES / "snapshots") if name.startswith("step-")]
    assert len(between) == (script.KEPT if more else 0)
    rows = read_rows(folder)
    assert rows == read_rows(tmp_path) and len(rows) > 5000


def extra_states(state):
    return [name for name in state["model"] if name.endswith("_extra_state")]


def test_a_resumed_run_that_is_done_prints_its_figures_again(tmp_path, capsys):
    results, *_ = run(tmp_path, capsys)
    assert script.main([*SMALL, "--workdir", str(tmp_path), "--resume"]) == results
    assert f"AUC {results[-1]['auc']:.4f}" in capsys.readouterr().out


def test_a_checkpoint_of_other_settings_is_refused(tmp_path, capsys):
    run(tmp_path, capsys, "--epochs", "1")
    with pytest.raises(SystemExit, match="'seed': 0.*'seed': 5"):
        run(tmp_path, capsys, "--seed", "5", "--resume")


def test_data_is_the_folder_that_is_named_else_the_one_beside_the_repository_else_generated(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("ONEEMB_DATA", raising=False)
    monkeypatch.setattr(script, "REPOSITORY", tmp_path / "clone")
    few = script.generate_tables(500, 0)
    monkeypatch.setattr(script, "read_tables", lambda folder: few)
    monkeypatch.setattr(script, "generate_tables", lambda events, seed: few)
    script.load(script.parse([]))
    assert "a generated click log of 120,000 events" in capsys.readouterr().out
    beside = tmp_path / "shared/data/kuairand"
    beside.mkdir(parents=True)
    script.load(script.parse([]))
    assert f"KuaiRand-Pure in {beside}\n" in capsys.readouterr().out
    monkeypatch.setenv("ONEEMB_DATA", "/named/by/environment")
    script.load(script.parse([]))
    assert "KuaiRand-Pure in /named/by/environment\n" in capsys.readouterr().out
    script.load(script.parse(["--data", "/named"]))
    assert "KuaiRand-Pure in /named\n" in capsys.readouterr().out
    script.load(script.parse(["--data", "/named", "--generate", "500"]))
    assert "a generated click log of 500 events" in capsys.readouterr().out


def test_two_runs_do_not_share_a_work_folder(tmp_path, capsys):
    with script.hold(tmp_path), pytest.raises(SystemExit, match="another run is at work"):
        run(tmp_path, capsys)
    assert run(tmp_path, capsys, "--epochs", "1")


def read_rows(folder):
    """{(table, id): the bytes of weights and optimizer state} of the last snapshot."""
    reader = oneemb.make_persistent_table_reader(
        str(folder / script.TABLES), "epoch-3", torch.int64, torch.float32, with_tables=True
    )
    rows = {}
    for table_n, key_n, value_nW in reader:
        rows |= {(t, k): v.tobytes() for t, k, v in zip(table_n.tolist(), key_n.tolist(), value_nW, strict=True)}
    return rows


def assert_equal_bits(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_bits(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal_bits(one, other)
    else:
        assert a == b
