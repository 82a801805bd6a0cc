"""Last of all: every line of every CUDA loop has run in the simulator, so that no branch went untested."""

import inspect

import pytest

from tests.cuda.conftest import SIMULATED, lines_left
from tests.cuda.loops import all_loops, lines_of


@pytest.mark.skipif(not SIMULATED, reason="a GPU does not tell which lines it ran")
def test_every_line_of_every_loop_has_run(request):
    folder = request.path.parent
    run = {item.path for item in request.session.items}
    if run < set(folder.glob("test_*.py")) or request.config.option.keyword:
        pytest.skip("only a part of the folder was run")
    missing = []
    for code, lines in lines_left.items():
        source = inspect.getsource(code).splitlines()
        missing += [
            f"{code.co_filename}:{line}: {source[line - code.co_firstlineno].strip()}" for line in sorted(lines)
        ]
    assert not missing, "\n".join(missing)


def test_the_lines_of_a_loop_are_those_of_its_body():
    loop = all_loops()["gather_cuda.gather_loop"]
    source, first = inspect.getsourcelines(loop.function)
    body = {first + i for i, line in enumerate(source) if "out_ND[n, d + i] = 0" in line or "move(" in line}
    assert len(body) == 2 and body <= lines_of(loop.function.__code__)
