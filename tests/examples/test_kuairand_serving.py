"""The script on a small generated log: as trained there is no loss, in fewer bytes there is little."""

import kuairand_serving as script
import pytest
import torch

SMALL = ["--generate", "2000", "--batch-size", "64", "--epochs", "1"]


def test_rows_as_trained_have_the_figures_of_training_and_smaller_ones_nearly(tmp_path):
    found = script.main([*SMALL, "--workdir", str(tmp_path)])
    trained = torch.load(tmp_path / "checkpoint.pt")["results"][-1]
    assert {name: found["float32"][name] for name in ("auc", "logloss")} == {
        name: trained[name] for name in ("auc", "logloss")
    }
    for its in found.values():
        assert its["auc"] == pytest.approx(trained["auc"], abs=0.005)
        assert its["logloss"] == pytest.approx(trained["logloss"], abs=0.005)
    assert [its["row_bytes"] for its in found.values()] == [64, 32, 24, 12]
    sizes = [its["file_bytes"] for its in found.values()]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert len({its["logloss"] for its in found.values()}) == 4  # each dtype is read as it is
