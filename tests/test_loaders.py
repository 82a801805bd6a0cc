"""Jobs over loaders of other libraries and our own are killed and go on: each row is trained once, in the same order.

A kill is a job that is left as it is: its objects are dropped, and new ones go on from the checkpoint.
`tests/examples/test_stream.py` kills processes.
"""

import pytest
import torch

import oneemb

ROWS, BATCH, EVERY = 40, 4, 3


class Graph(oneemb.TrainGraph):
    """A graph that notes the rows of each step."""

    def __init__(self, folder, group=None):
        super().__init__()
        options = oneemb.make_device_mem_store_options(str(folder))
        self.embedding = oneemb.MultiTableEmbedding(
            "rows", 4, torch.float32, torch.int64, [oneemb.make_table()], options, process_group=group
        )
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))
        self.seen = []

    def build(self, ids):
        self.embedding(ids).sum().backward()
        self.seen.append(ids.flatten().tolist())
        return ids


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, n):
        return {"ids": torch.tensor([n])}


def of_torchdata(tmp_path, workers, shuffle):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    order = torch.Generator().manual_seed(5)
    return loaders.StatefulDataLoader(
        Numbers(), batch_size=BATCH, num_workers=workers, shuffle=shuffle, generator=order
    )


def of_hugging_face(tmp_path, streamed_by):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"ids": [[n] for n in range(ROWS)]})
    stream = rows.to_iterable_dataset(num_shards=4).with_format("torch")
    if streamed_by is None:
        return stream.batch(BATCH)
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(stream, batch_size=BATCH, num_workers=streamed_by)


def of_oneemb(tmp_path, workers, shuffle, rank=0, world_size=1):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "rows.parquet"
    if not path.exists():
        parquet.write_table(pyarrow.table({"ids": list(range(ROWS))}), path, row_group_size=5)
    return oneemb.data.Loader(
        oneemb.data.Files(str(path)), BATCH, {"ids": oneemb.data.Ids("ids")}, workers=workers, shuffle=shuffle,
        seed=3, rank=rank, world_size=world_size,
    )  # fmt: skip


LOADERS = {
    "torchdata": lambda path: of_torchdata(path, 0, False),
    "torchdata, shuffled": lambda path: of_torchdata(path, 0, True),
    "torchdata, 2 workers": lambda path: of_torchdata(path, 2, True),
    "datasets": lambda path: of_hugging_face(path, None),
    "datasets by torchdata": lambda path: of_hugging_face(path, 0),
    "datasets by torchdata, 2 workers": lambda path: of_hugging_face(path, 2),
    "oneemb": lambda path: of_oneemb(path, 0, 0),
    "oneemb, shuffled": lambda path: of_oneemb(path, 2, 16),
}


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("name", LOADERS)
def test_each_row_is_trained_once_whenever_the_job_is_killed(tmp_path, name):
    make = LOADERS[name]
    whole = Graph(tmp_path / "whole")
    for _ in whole.run(make(tmp_path)):
        pass
    assert sorted(sum(whole.seen, [])) == list(range(ROWS)) and len(whole.seen) == ROWS // BATCH
    kept, path = [], tmp_path / "job.pt"
    for ends in (2, 4, 8, 8, 100):  # steps after which the jobs are killed, the first one before it has saved
        graph, loader = Graph(tmp_path / "killed"), make(tmp_path)
        if path.exists():
            graph.load(path)
            loader.load_state_dict(graph.loader_state)
        kept = kept[: graph.steps]
        assert len(kept) == graph.steps
        for _ in graph.run(loader, prefetch_depth=2, save=oneemb.SaveEvery(graph, path, steps=EVERY)):
            if graph.steps == ends:
                break
        kept += graph.seen
        graph.embedding.close()
    assert kept == whole.seen


def trains(group, root, loads, batches):
    """Rows that this rank trains; the job is killed after so many batches, or ends with the loader."""
    graph, path = Graph(f"{root}/rows", group), f"{root}/job.pt"
    loader = of_oneemb(root, 0, 8, group.rank(), group.size())
    if loads:
        graph.load(path)
        loader.load_state_dict(graph.loader_states)
    begin, save = graph.steps, oneemb.SaveEvery(graph, path, steps=1)
    for _ in graph.run(loader, save=save):
        if graph.steps - begin == batches:
            break  # the last batch is not saved
    graph.embedding.close()
    saved = batches - 1 if batches else len(graph.seen)
    return sum(graph.seen[:saved], [])


def test_each_row_is_trained_once_by_jobs_of_other_numbers_of_ranks(tmp_path, rank_pool):
    of_oneemb(tmp_path, 0, 0)  # writes the file
    trained = []
    for loads, (size, batches) in enumerate([(2, 2), (3, 2), (2, None)]):
        of_ranks = rank_pool(size, trains, tmp_path, bool(loads), batches)
        assert all(of_ranks)
        trained += sum(of_ranks, [])
    assert sorted(trained) == list(range(ROWS))
