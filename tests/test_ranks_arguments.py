"""An argument of a lookup that is wrong on one rank: it raises there, the others say so, and none waits."""

import pytest
import torch

import oneemb

IDS = torch.arange(6).reshape(3, 2)
BAGS = {"ids": IDS.reshape(-1), "offsets": torch.arange(7)}

WRONG = {
    "pooling": ({"ids": IDS, "pooling": "sum"}, "ValueError: ids of bags must be of shape [B, 2, L]"),
    "no bags": ({"ids": IDS[0], "pooling": "sum", "table_ids": IDS[0]}, "ValueError: pooling='sum' is"),
    "unknown pooling": ({**BAGS, "pooling": "avg"}, "ValueError: pooling must be"),
    "columns": ({**BAGS, "columns": 3}, "TypeError: columns must be a list"),
    "columns of ids": ({"ids": IDS, "columns": 3}, "ValueError: columns are the tables of bags"),
    "offsets": ({**BAGS, "offsets": [0, 6]}, "TypeError: offsets must be"),
    "weights": ({"ids": IDS, "per_sample_weights": torch.ones(6)}, "ValueError: per_sample_weights are only for bags"),
}


class Train(oneemb.TrainGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))

    def build(self, arguments):
        loss = self.embedding(**arguments).sum()
        loss.backward()
        return loss


class Score(oneemb.EvalGraph):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, arguments):
        return self.embedding(**arguments)


def looks_up_what_is_wrong(group, path, way):
    embedding = oneemb.MultiTableEmbedding(
        "items", 4, torch.float32, torch.int64, [oneemb.make_table()] * 2,
        oneemb.make_device_mem_store_options(path), num_threads=1, process_group=group,
    )  # fmt: skip
    averaged = oneemb.AveragedEmbedding(embedding, f"{path}-averages")
    graph = Train(embedding) if way in ("graph", "run") else None
    score = Score(embedding)
    look_up = {
        "eager": lambda arguments: embedding(**arguments),
        "eval": lambda arguments: embedding(**arguments),
        "averages": lambda arguments: averaged(**arguments),
        "score": score,
        "graph": graph,
        "run": lambda arguments: list(graph.run([(BAGS,), (arguments,), (BAGS,)])),
    }[way]
    embedding.train(way != "eval")
    right = {"ids": IDS} if way == "averages" else BAGS
    said = []
    for arguments, _ in WRONG.values():
        look_up(right)
        try:
            look_up(arguments if group.rank() == 1 else right)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        look_up(right)
    averaged.close()
    embedding.close()
    return said


@pytest.mark.parametrize("way", ["eager", "eval", "averages", "score", "graph", "run"])
def test_an_argument_that_is_wrong_on_one_rank_is_told_on_all(tmp_path, rank_pool, way):
    others, own = rank_pool(2, looks_up_what_is_wrong, str(tmp_path), way, seconds=60)
    assert len(others) == len(own) == len(WRONG)
    for (_, message), its, theirs in zip(WRONG.values(), own, others, strict=True):
        assert message in its
        assert f"rank 1 has failed ({message}" in theirs
