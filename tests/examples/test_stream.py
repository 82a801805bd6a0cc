"""The tutorial's stream: a trainer that is killed prints the losses of one that is not, and a server follows it."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")

import stream as script

import oneemb

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--files", "3", "--clicks", "600", "--batch-size", "50", "--save-every", "2"]
ASKED = "user=u1&item=i1&device=tv&hour=9"
PATIENCE_S = 120
LINE = re.compile(r"^batch (\d+): loss (\S+)\n", re.MULTILINE)


def command(folder, what, arguments):
    return [sys.executable, str(EXAMPLES / "stream.py"), what, "--workdir", str(folder), *arguments]


def losses_in(text):
    """{number of a batch: the loss as it was printed}; a line that was cut off is left out."""
    return {int(batch): loss for batch, loss in LINE.findall(text)}


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def train_with_kills(folder, arguments, kills, saves_between):
    """Text of a trainer that is killed so often, each time when it has saved so often since."""
    text, checkpoint = "", folder / "job" / "model.pt"
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))

    def saves():
        return torch.load(checkpoint)["steps"] // int(options.get("--save-every", 20)) if checkpoint.exists() else 0

    for kill in range(kills + 1):
        trainer = subprocess.Popen(command(folder, "train", arguments), stdout=subprocess.PIPE, text=True)
        lines = []
        reader = threading.Thread(target=lambda out=trainer.stdout, to=lines: to.extend(out))
        reader.start()
        try:
            before, end = saves(), time.monotonic() + PATIENCE_S
            while kill < kills and saves() < before + saves_between:
                assert trainer.poll() is None and time.monotonic() < end
                time.sleep(0.002)
            if kill < kills:
                trainer.kill()
            trainer.wait(600)
        finally:
            trainer.kill()
            reader.join()
        assert trainer.returncode == (-9 if kill < kills else 0)
        again = losses_in("".join(lines))
        seen = losses_in(text)
        assert not seen or min(again) > min(seen), "it has begun anew"
        text += "".join(line for line in lines if line.endswith("\n"))  # The kill may have cut the last one off.
    return text


def follow_and_kill(tmp_path, capsys, arguments, kills, saves_between):
    for folder in ("whole", "killed"):
        script.main(["write", "--workdir", str(tmp_path / folder), *arguments])
    script.main(["train", "--workdir", str(tmp_path / "whole"), *arguments])
    want = losses_in(capsys.readouterr().out)
    text = train_with_kills(tmp_path / "killed", arguments, kills, saves_between)
    found = losses_in(text)
    assert found == want and len(want) > 30
    for batch, loss in LINE.findall(text):
        assert want[int(batch)] == loss  # batches after the last save before a kill are printed twice
    return [torch.load(tmp_path / folder / "job" / "model.pt") for folder in ("whole", "killed")]


def test_a_trainer_that_was_killed_prints_the_losses_of_one_that_was_not(tmp_path, capsys):
    whole, killed = follow_and_kill(tmp_path, capsys, SMALL, 1, 4)
    assert whole["steps"] == killed["steps"] and whole["loader"] == killed["loader"]
    for name, weight in whole["tensors"].items():
        assert torch.equal(weight, killed["tensors"][name])
    assert steps_of_saves(whole) == steps_of_saves(killed)
    assert "oneemb_since" in whole["embeddings"]["model.rows"]


def steps_of_saves(state):
    """Names of the snapshots that a checkpoint names, without their random digits."""
    return [one["model.rows"]["oneemb_snapshot"][:-9] for one in (state["embeddings"], *state["earlier"])]


def test_a_server_answers_from_the_newest_checkpoint_while_the_stream_goes_on(tmp_path, capsys):
    arguments = ["--workdir", str(tmp_path), *SMALL]
    script.main(["write", *arguments])
    script.main(["train", *arguments])
    job, losses = tmp_path / "job", losses_in(capsys.readouterr().out)
    server = script.Server(job, 0, "float32")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/score?"
    try:
        for _ in range(2):
            name, want = expected(job)
            end = time.monotonic() + PATIENCE_S
            while (answer := get(url + ASKED))[1]["version"] != name:
                assert time.monotonic() < end
            assert answer == (200, {"score": want, "version": name})
            script.main(["write", *arguments])  # more files come
            script.main(["train", *arguments])
            more = losses_in(capsys.readouterr().out)
            assert more and not more.keys() & losses.keys()
            losses |= more
        for wrong in ("", "user=u1&item=i1&device=tv", ASKED + ".5", ASKED + "9" * 30):
            status, answer = get(url + wrong)
            assert status == 400 and "ask for user" in answer["error"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_index_has_the_nearest_items_of_the_newest_save_after_a_publisher_that_ended(tmp_path, capsys):
    pytest.importorskip("faiss")
    arguments = ["--workdir", str(tmp_path), *SMALL]
    job = tmp_path / "job"
    job.mkdir()
    with pytest.raises(SystemExit, match="there is no index yet"):
        script.main(["nearest", *arguments])
    for _ in range(2):
        script.main(["write", *arguments])
        script.main(["train", *arguments])
        with script.publisher_of(job, None):
            pass
        capsys.readouterr()
        script.main(["nearest", "--item", "i1", *arguments])
        assert capsys.readouterr().out.split() == nearest(job, "i1")


def nearest(job, item):
    """Names of the five items with a row whose products with the row of an item are largest."""
    graph = script.ClickGraph(job / "rows")
    graph.load(job / "model.pt")
    rows = graph.model.rows
    names = dict(zip(oneemb.hash_ids(script.NAMES).tolist(), script.NAMES, strict=True))
    ids, table = rows.ids(table=1), torch.tensor(1)
    scores = rows.read(ids, table) @ rows.read(oneemb.hash_ids([item]), table)[0]
    best = [names[id] for id in ids[scores.argsort(descending=True)[:5]].tolist()]
    rows.close()
    return best


def expected(job):
    """Name of the newest snapshot and the score of a trained model that has loaded it."""
    graph = script.ClickGraph(job / "rows")
    graph.load(job / "model.pt")
    model, names = graph.model, graph.model.rows.snapshots()
    with torch.no_grad():
        score = model.eval()(script.ids_of(["u1"], ["i1"], ["tv"], [9])).sigmoid().item()
    model.rows.close()
    return names[-1], score


@pytest.mark.slow
def test_the_whole_stream_with_many_kills(tmp_path, capsys):
    follow_and_kill(tmp_path, capsys, [], 8, 4)
