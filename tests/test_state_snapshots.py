"""Snapshots that state dicts make: as many are kept as were asked for."""

import pytest
import torch

import oneemb
from tests.support.models import make_embedding, rows_of
from tests.support.rank_jobs import RankJob


def train(embedding, times=1):
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    for _ in range(times):
        embedding(torch.arange(5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_newest_state_dicts_are_kept_and_nothing_else_is_deleted(tmp_path):
    embedding = make_embedding(tmp_path, keep_state_snapshots=2)
    embedding.save_snapshot("mine")
    states = []
    for _ in range(4):
        train(embedding)
        states.append(embedding.state_dict())
        states.append(embedding.state_dict())  # No rows have changed: the same snapshot.
    names = [oneemb.snapshot_name(state["_extra_state"]) for state in states]
    assert embedding.snapshots() == ["mine", names[2], names[4], names[6]]
    rows = rows_of(embedding, torch.arange(5))
    train(embedding)
    embedding.load_state_dict(states[-1])
    assert torch.equal(rows_of(embedding, torch.arange(5)), rows)
    with pytest.raises(oneemb.StorageError):
        embedding.load_state_dict(states[0])
    embedding.close()


def test_a_state_that_a_delta_goes_on_from_stays(tmp_path):
    embedding = make_embedding(tmp_path, keep_state_snapshots=1)
    train(embedding)
    parent = oneemb.snapshot_name(embedding.state_dict()["_extra_state"])
    train(embedding)
    embedding.save_delta("delta", since=parent)
    states = []
    for _ in range(3):
        train(embedding)
        states.append(oneemb.snapshot_name(embedding.state_dict()["_extra_state"]))
    assert embedding.snapshots() == [parent, "delta", *states[1:]]
    embedding.close()


def test_all_are_kept_by_default(tmp_path):
    embedding = make_embedding(tmp_path)
    for _ in range(3):
        train(embedding)
        embedding.state_dict()
    assert len(embedding.snapshots()) == 3
    embedding.close()


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "2"])
def test_other_numbers_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="keep_state_snapshots must be an int of at least 1, or None"):
        make_embedding(tmp_path, keep_state_snapshots=wrong)


def saves(group, report, path):
    embedding = oneemb.MultiTableEmbedding(
        "items", 2, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options(path),
        process_group=group, num_threads=1, keep_state_snapshots=1,
    )  # fmt: skip
    for _ in range(3):
        train(embedding)
        state = embedding.state_dict()
    report((oneemb.snapshot_name(state["_extra_state"]), embedding.snapshots()))
    embedding.close()


def test_ranks_keep_the_same(tmp_path):
    job = RankJob(2, saves, str(tmp_path), timeout_s=60)
    ended = job.end()
    assert [code for code, _ in ended] == [0, 0], job.texts()
    (first,), (second,) = (reports for _, reports in ended)
    assert first == second and len(first[1]) == 2 and first[1][-1] == first[0]


def test_a_copy_keeps_as_many(tmp_path):
    embedding = make_embedding(tmp_path / "one", keep_state_snapshots=3)
    copy = embedding.copy_to(tmp_path / "copy")
    assert copy.keep_state_snapshots == 3
    copy.close()
    embedding.close()


def test_a_deletion_that_fails_is_a_warning_and_the_state_dict_is_whole(tmp_path, monkeypatch):
    embedding = make_embedding(tmp_path, keep_state_snapshots=1)
    for _ in range(2):
        train(embedding)
        embedding.state_dict()
    train(embedding)
    delete = embedding.delete_snapshot

    def fails(name):
        raise oneemb.StorageError("no such disk")

    monkeypatch.setattr(embedding, "delete_snapshot", fails)
    with pytest.warns(UserWarning, match=r"could not delete the old snapshot 'state-.*no such disk"):
        state = embedding.state_dict()
    monkeypatch.setattr(embedding, "delete_snapshot", delete)
    assert oneemb.snapshot_name(state["_extra_state"]) in embedding.snapshots()
    assert len(embedding.snapshots()) == 3
    train(embedding)
    embedding.state_dict()
    assert len(embedding.snapshots()) == 2
    embedding.close()


def saves_with_another_number(group, report, path):
    embedding = oneemb.MultiTableEmbedding(
        "items", 2, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options(path),
        process_group=group, num_threads=1, keep_state_snapshots=group.rank() + 1,
    )  # fmt: skip
    try:
        embedding(torch.arange(5))
    except RuntimeError as error:
        report(str(error))
    embedding.close()


def test_ranks_must_keep_the_same_number(tmp_path):
    job = RankJob(2, saves_with_another_number, str(tmp_path), timeout_s=60)
    ended = job.end()
    assert [code for code, _ in ended] == [0, 0], job.texts()
    assert all("keep_state_snapshots=1" in str(reports) for _, reports in ended), ended
