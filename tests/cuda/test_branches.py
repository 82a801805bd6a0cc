"""What is said of branches of loops that were not taken; `conftest.py` asks for all of them in the end."""

from tests.cuda.branches import untaken


def test_what_was_not_taken_is_told(tmp_path):
    path = tmp_path / "some.py"
    path.write_text("def loop(x):\n    if x:\n        x = 1\n    return x\n")
    functions = {"loop": {"missing_lines": [3], "missing_branches": [[2, 3]]}, "other": {"missing_lines": [1]}}
    report = {"files": {str(path): {"functions": functions}}}
    assert untaken(report, {"some.loop": None}) == [f"{path}:3: x = 1", f"{path}:2: if x: -> line 3"]
