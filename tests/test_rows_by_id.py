"""Which ids have rows, against a set; on one process and on ranks."""

import pytest
import torch

import oneemb
from tests.support.forks import ended_well, in_child
from tests.support.models import STORES, make_embedding
from tests.support.rank_jobs import RankJob

ODD = [0, -1, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max]


@pytest.mark.parametrize("kind", STORES)
def test_rows_are_those_of_the_ids_that_were_looked_up(tmp_path, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    embedding = make_embedding(tmp_path, store=kind, tables=2)
    assert len(embedding) == 0 and embedding
    known = [set(), set()]
    for _ in range(5):
        ids = torch.randint(-500, 500, (40, 2), generator=generator)
        ids[:2, 0], ids[:2, 1] = torch.tensor(ODD[:2]), torch.tensor(ODD[2:])
        embedding(ids)
        for table in range(2):
            known[table] |= set(ids[:, table].tolist())
    asked = torch.cat([torch.randint(-600, 600, (301,), generator=generator), torch.tensor(ODD), torch.tensor(ODD)])
    for table in range(2):
        assert embedding.contains(asked, table).tolist() == [one in known[table] for one in asked.tolist()]
        assert embedding.ids(table).tolist() == sorted(known[table])
    assert len(embedding) == embedding.num_rows == sum(map(len, known))
    embedding.erase(torch.tensor([0]))
    assert embedding.contains(torch.tensor([[0], [-1]])).tolist() == [[False], [True]]
    assert 0 not in embedding.ids().tolist()
    embedding.close()


def test_no_ids_no_rows_and_what_is_refused(tmp_path):
    embedding = make_embedding(tmp_path)
    assert embedding.contains(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)
    assert embedding.contains(torch.arange(3)).tolist() == [False] * 3 and embedding.ids().shape == (0,)
    for call in (embedding.ids, lambda table: embedding.contains(torch.arange(2), table)):
        for table in (-1, embedding.num_tables, True, 0.0):
            with pytest.raises(ValueError, match="table must be an int from 0 to"):
                call(table)
    with pytest.raises(TypeError, match="ids must be a tensor of torch.int64 of any shape, got list"):
        embedding.contains([1, 2])
    embedding.close()
    with pytest.raises(oneemb.StorageError):
        embedding.contains(torch.arange(2))


def test_a_child_of_fork_may_ask(tmp_path):
    embedding = make_embedding(tmp_path, store="host")
    embedding(torch.arange(5))
    child = in_child(
        lambda: embedding.ids().tolist() == list(range(5)) and embedding.contains(torch.arange(5)).all().item()
    )
    assert ended_well(child)
    embedding.close()


def asks(group, report, path):
    embedding = oneemb.MultiTableEmbedding(
        "items", 2, torch.float32, torch.int64, [oneemb.make_table(), oneemb.make_table(replicate=True)],
        oneemb.make_device_mem_store_options(path), process_group=group, num_threads=1,
    )  # fmt: skip
    rank = group.rank()
    ids = torch.arange(10) + 10 * rank
    embedding(torch.stack([ids, ids], 1)).sum().backward()
    torch.optim.SGD(embedding.parameters(), lr=0.1).step()
    asked = [[], range(-5, 25)][rank]
    found = [embedding.contains(torch.tensor(asked, dtype=torch.int64), table).tolist() for table in range(2)]
    report((found, [embedding.ids(table).tolist() for table in range(2)]))
    embedding.close()


def test_ranks_ask_the_owners(tmp_path):
    job = RankJob(2, asks, str(tmp_path), timeout_s=60)
    ended = job.end()
    assert [code for code, _ in ended] == [0, 0], job.texts()
    (first, second) = (reports[0] for _, reports in ended)
    assert first[0] == [[], []] and second[0] == [[0 <= one < 20 for one in range(-5, 25)]] * 2
    for table in range(2):
        assert sorted(first[1][table] + second[1][table]) == list(range(20))
