"""Which snapshot is the newest, while a job saves and deletes."""

import torch

import oneemb
from oneemb.storage.snapshots.snapshot_looks import SnapshotLooks
from oneemb.storage.snapshots.snapshot_parts import look_at


def test_a_look_that_the_job_has_overtaken_is_made_again(tmp_path, monkeypatch):
    embedding = oneemb.MultiTableEmbedding(
        "rows", 4, torch.float32, torch.int64, [oneemb.make_table()],
        oneemb.make_device_mem_store_options(str(tmp_path)),
    )  # fmt: skip
    embedding(torch.arange(5))
    embedding.save_snapshot("kept")
    look, overtaken = SnapshotLooks.look, [look_at([str(tmp_path)])]  # all that is newer was deleted meanwhile
    embedding.save_snapshot("newest")
    monkeypatch.setattr(SnapshotLooks, "look", lambda looks: overtaken.pop() if overtaken else look(looks))
    served = oneemb.InferenceEmbedding.open(str(tmp_path))
    assert served.version.name == "newest"
    served.close()
    embedding.close()
