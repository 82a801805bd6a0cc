"""The script on a small generated log: rows are as many as the policies say."""

import kuairand_policies as script

SMALL = ["--generate", "2000", "--batch-size", "16", "--share", "0.4"]


def test_policies_keep_what_they_say(tmp_path):
    found = script.main([*SMALL, "--workdir", str(tmp_path / "a")])
    every, second, fifth, lru, lfu, both = found.values()
    assert every["rows"] > second["rows"] > fifth["rows"] > 0
    for its in (lru, lfu, both):
        assert 0.3 * every["rows"] < its["rows"] <= 0.4 * every["rows"]
    # Counters of 44 tables that have seen little weigh less than the rows that they save.
    assert max(lru["bytes"], lfu["bytes"]) < both["bytes"] < every["bytes"]
    assert all(0.5 < its["auc"] < 1 for its in found.values())
