"""README's first example runs, and runs again where it has run before."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_first_example_runs_and_runs_again(tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    (code, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code.count("/nvme/my_embedding") == 1
    code = code.replace("/nvme/my_embedding", str(tmp_path / "my_embedding"))
    for run in range(2):
        names = {}
        exec(compile(code, str(README), "exec"), names)
        assert names["loss"].isfinite() and names["graph"].steps == 1
        assert names["embedding"].snapshots() == ["first-step"] and names["embedding"].stats()["rows"] == 3 * 4096
        names["embedding"].close()
        said = [str(one.message) for one in recwarn if "oneemb" in one.filename or "starts empty" in str(one.message)]
        assert len(said) == run and all("load_snapshot(name) goes on from one" in one for one in said)
