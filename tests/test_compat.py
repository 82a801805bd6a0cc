"""Another library's names for modules of oneemb, and scripts for GPUs that run on the CPU.

The package that takes the place of dynamicemb is a stand-in here: these tests are of names and scripts, not of it.
"""

import ast
import importlib
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from oneemb.compat import cuda, install, names
from oneemb.compat.rewrite import rewrite
from tests.support.forks import run_code

STAND_IN = {
    "__init__.py": "class Options: pass\n",
    "planner.py": "class Planner: pass\n",
    "parts/__init__.py": "",
    "parts/inner.py": "from compat_stand_in.planner import Planner\n",
    "broken.py": "import a_module_that_nobody_has\n",
}
# What `python -m oneemb.compat` does, with the stand-in in the table of names.
DRIVER = """
import sys
from oneemb.compat import names, runner
names.MODULES["dynamicemb"] = "compat_stand_in"
if __name__ == "__main__":
    runner.main(sys.argv[1:])
"""
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return folder


@pytest.fixture
def place(tmp_path):
    """A folder with the stand-in in lib/, the driver, and a folder `job` for scripts."""
    write(tmp_path / "lib" / "compat_stand_in", STAND_IN)
    write(tmp_path, {"driver.py": DRIVER})
    (tmp_path / "job").mkdir()
    return tmp_path


# The driver in a process that has torch loaded, as python would run it.
IN_FORK = """
import os, runpy, sys
sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(place, *arguments, cwd=None, launcher=(), fresh=False, **environment):
    """Output of the driver.

    Args:
        fresh: whether a python of its own runs it, which takes seconds to load torch.
    """
    env = NO_GPU | {"PYTHONPATH": str(place / "lib")} | environment
    if not fresh:
        return run_code(IN_FORK, place / "driver.py", *arguments, cwd=cwd or place, environment=env)
    command = [sys.executable, *launcher, place / "driver.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd or place, env=env, timeout=300)


def run_script(place, text, *arguments, options=(), fresh=False, **files):
    write(place / "job", {"script.py": text} | {f"{name}.py": one for name, one in files.items()})
    return run(place, *options, "dynamicemb", "job/script.py", *arguments, fresh=fresh)


def lines_of(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(place, monkeypatch):
    """The stand-in is importable and has the name dynamicemb in the table; imports are undone."""
    monkeypatch.syspath_prepend(place / "lib")
    monkeypatch.setitem(names.MODULES, "dynamicemb", "compat_stand_in")
    before, finders = set(sys.modules), list(sys.meta_path)
    yield place
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("dynamicemb", "compat_stand_in"):
            del sys.modules[name]


def test_both_names_give_the_same_modules(stand_in):
    install("dynamicemb")
    assert "compat_stand_in" not in sys.modules, "nothing is imported before it is asked for"
    import dynamicemb
    import dynamicemb.parts.inner as inner
    from dynamicemb.planner import Planner

    real = importlib.import_module("compat_stand_in")
    assert "compat_stand_in.broken" not in sys.modules
    assert dynamicemb is real and inner is importlib.import_module("compat_stand_in.parts.inner")
    assert Planner is inner.Planner is real.planner.Planner
    assert Planner.__module__ == "compat_stand_in.planner"
    assert real.__spec__.name == real.__name__ == "compat_stand_in"
    assert importlib.reload(dynamicemb) is real


def test_a_module_that_was_imported_before_is_the_same(stand_in):
    real = importlib.import_module("compat_stand_in.planner")
    install("dynamicemb")
    from dynamicemb import planner

    assert planner is importlib.import_module("dynamicemb.planner") is real


def test_a_second_call_changes_nothing(stand_in):
    install("dynamicemb")
    finders = list(sys.meta_path)
    install("dynamicemb")
    importlib.import_module("dynamicemb")
    install("dynamicemb")
    assert sys.meta_path == finders


def test_a_module_that_is_not_there_is_an_error_in_words(stand_in):
    install("dynamicemb")
    with pytest.raises(ImportError, match=r"dynamicemb\.shards is not there, .* oneemb has no compat_stand_in\.shards"):
        importlib.import_module("dynamicemb.shards")
    with pytest.raises(ImportError, match="a_module_that_nobody_has"):
        importlib.import_module("dynamicemb.broken")


def test_an_unknown_name_is_told_the_known_ones(monkeypatch):
    monkeypatch.setitem(names.MODULES, "another", "oneemb.another")
    with pytest.raises(ValueError, match="one of 'another', 'dynamicemb', 'torchrec_dynamic_embedding', got 'numpy'"):
        install("numpy")


def test_a_library_that_is_imported_already_is_not_replaced(stand_in, monkeypatch):
    write(stand_in / "real", {"dynamicemb/__init__.py": ""})
    monkeypatch.syspath_prepend(stand_in / "real")
    importlib.import_module("dynamicemb")
    for replace in (False, True):
        with pytest.raises(ImportError, match=r"is imported already, from .*real/dynamicemb/__init__\.py"):
            install("dynamicemb", replace=replace)


def test_a_library_that_is_installed_is_replaced_only_when_told_to(stand_in, monkeypatch):
    write(stand_in / "real", {"dynamicemb/__init__.py": "", "dynamicemb/only_there.py": ""})
    monkeypatch.syspath_prepend(stand_in / "real")
    with pytest.raises(ImportError, match=r"installed at .*real/dynamicemb.*replace=True"):
        install("dynamicemb")
    install("dynamicemb", replace=True)
    assert importlib.import_module("dynamicemb").Options.__module__ == "compat_stand_in"
    with pytest.raises(ImportError):
        importlib.import_module("dynamicemb.only_there")


def test_a_bare_folder_of_that_name_is_no_library(stand_in, monkeypatch):
    (stand_in / "bare" / "dynamicemb").mkdir(parents=True)
    monkeypatch.syspath_prepend(stand_in / "bare")
    install("dynamicemb")
    assert importlib.import_module("dynamicemb").Options


def test_names_are_installed_without_torch(place):
    code = "import sys; from oneemb.compat import install; install('dynamicemb'); print('torch' in sys.modules)"
    assert lines_of(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)) == ["False"]


# ---- rewriting ------------------------------------------------------------------------------------------------------

CUDA = "__oneemb_cuda__"
RULES = [
    ("'cuda'", "'cpu'"),
    ("'cuda:13'", "'cpu'"),
    ("f'cuda:{rank}'", "'cpu'"),
    ("f'cuda:{a}{b}'", "'cpu'"),
    ("'cuda:' + str(rank)", "'cpu'"),
    ("'cuda:%d' % rank", "'cpu'"),
    ("'cuda:{}'.format(rank)", "'cpu'"),
    ("backend == 'nccl'", "backend == 'gloo'"),
    ("'cpu:gloo,cuda:nccl'", "'gloo'"),
    ("torch.device('cuda', rank)", "torch.device('cpu')"),
    ("torch.device('cuda', index=1)", "torch.device('cpu')"),
    ("torch.device(rank)", f"torch.device({CUDA}.place(rank))"),
    ("torch.zeros(2, device=rank)", f"torch.zeros(2, device={CUDA}.place(rank))"),
    ("x.to(0)", f"x.to({CUDA}.place(0))"),
    ("x.to(ranks[0], copy=True)", f"x.to({CUDA}.place(ranks[0]), copy=True)"),
    ("x.cuda()", "x.to('cpu')"),
    ("f(x.cuda(rank, non_blocking=True)).cuda()", "f(x.to('cpu')).to('cpu')"),
    ("torch.cuda.synchronize()", f"{CUDA}.synchronize()"),
    ("torch.cuda.device(1)", f"{CUDA}.device(1)"),
    ("f'{torch.cuda.device_count()} GPUs'", f"f'{{{CUDA}.device_count()}} GPUs'"),
    ("dist.barrier(group=g, device_ids=[torch.cuda.current_device()])", "dist.barrier(group=g)"),
    ("init_process_group('nccl', device_id=d)", "init_process_group('gloo')"),
    ("DDP(model, device_ids=[rank], output_device=rank)", "DDP(model)"),
    ("match(device, 'cuda')", "match(device, 'cpu')"),
]  # fmt: skip
KEPT = [
    "'cudagraph'", "'on cuda'", "f'{x}cuda'", "f'cuda:{rank} is ready'", "'cuda: none'", "'nccl_timeout'", "x.cuda",
    "options.cuda.name", "f(device_ids=[0])", "x.to('cpu')", "x.to(None)", "f(device=None)", "torch.cuda_version",
]  # fmt: skip


@pytest.mark.parametrize(("source", "expected"), RULES)
def test_a_gpu_is_replaced(source, expected):
    tree, replaced = rewrite(source, "a.py")
    assert ast.unparse(tree.body[-1]) == expected
    assert replaced.total() > 0 or "place" in expected
    assert (len(tree.body) == 2) == (CUDA in expected), "the stand-in is imported where it is used"


@pytest.mark.parametrize("source", KEPT)
def test_what_names_no_gpu_is_kept(source):
    tree, replaced = rewrite(source, "a.py")
    assert ast.dump(tree) == ast.dump(ast.parse(source)) and not replaced


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.cuda", "import torch"),
        ("import torch.cuda as c", "import oneemb.compat.cuda as c"),
        ("from torch import nn, cuda as c", "from torch import nn\nfrom oneemb.compat import cuda as c"),
        ("from torch import cuda", "from oneemb.compat import cuda"),
        ("from torch.cuda import synchronize", "from oneemb.compat.cuda import synchronize"),
        ("from torch.cuda.amp import autocast", "from torch.cuda.amp import autocast"),
        ("from .torch import cuda", "from .torch import cuda"),
        ("import torch as th\nth.cuda.synchronize()",
         f"import oneemb.compat.cuda as {CUDA}\nimport torch as th\n{CUDA}.synchronize()"),
        ("def f(s: torch.cuda.Stream) -> torch.cuda.Event:\n    t: torch.cuda.Stream = g('cuda')",
         "def f(s: torch.cuda.Stream) -> torch.cuda.Event:\n    t: torch.cuda.Stream = g('cpu')"),
        ("'''Doc.'''\nfrom __future__ import annotations\ntorch.cuda",
         f"'''Doc.'''\nfrom __future__ import annotations\nimport oneemb.compat.cuda as {CUDA}\n{CUDA}"),
    ],
)  # fmt: skip
def test_statements_are_replaced(source, expected):
    assert ast.unparse(rewrite(source, "a.py")[0]).replace('"""', "'''") == expected


def test_what_was_replaced_is_counted():
    source = "a = 'cuda', f'cuda:{r}', 'nccl'\nx.cuda()\ntorch.cuda.synchronize()\nbarrier(device_ids=[0])\n"
    counts = {"'cuda'": 2, "'nccl'": 1, ".cuda()": 1, "torch.cuda": 1, "device_ids": 1}
    assert rewrite(source, "a.py")[1] == Counter(counts)


def test_what_is_replaced_stays_at_its_place():
    source = "x = 1\ny = f(a,\n      b.cuda(), torch.cuda, f'cuda:{x}',\n      device=rank)\n"

    def places(tree):
        calls = next(node for node in ast.walk(tree) if isinstance(node, ast.Call))
        arguments = [*calls.args, *(keyword.value for keyword in calls.keywords)]
        return [(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) for node in arguments]

    assert places(rewrite(source, "a.py")[0]) == places(ast.parse(source))


# ---- what stands for torch.cuda -------------------------------------------------------------------------------------


def test_the_stand_in_is_one_device_that_is_the_cpu():
    assert (cuda.is_available(), cuda.device_count(), cuda.current_device()) == (False, 1, 0)
    cuda.set_device(3)
    cuda.set_device("cuda:1")
    with cuda.device(1):
        assert cuda.current_device() == 0
    assert cuda.synchronize() is None and cuda.empty_cache() is None
    properties = cuda.get_device_properties(0)
    assert properties.name == cuda.get_device_name(0) != ""
    kib = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert properties.total_memory == int(kib.split()[1]) * 1024


@pytest.mark.parametrize("seed", [cuda.manual_seed, cuda.manual_seed_all])
def test_seeds_are_those_of_the_cpu(seed):
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    seed(5)
    assert torch.rand(3).equal(expected)


def test_a_gpus_name_is_told_with_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "_pretended", None)
    cuda.pretend("NVIDIA A100")
    assert cuda.is_available() and cuda.get_device_name(None) == cuda.get_device_properties().name == "NVIDIA A100"


def test_what_the_stand_in_lacks_is_an_error_in_words():
    with pytest.raises(AttributeError, match=r"torch\.cuda\.Stream is not there, since this machine has no GPU"):
        cuda.Stream()
    with pytest.raises(AttributeError, match=r"get_device_properties\(...\)\.major is not there"):
        _ = cuda.get_device_properties().major


@pytest.mark.parametrize("value", [None, True, "meta", torch.float64, torch.device("cpu")])
def test_only_a_number_is_taken_for_a_gpu(value):
    assert cuda.place(value) is value and cuda.place(0) == cuda.place(1) == "cpu"


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_a_script_runs_as_python_runs_it(place):
    write(place / "job", {"beside.py": "import torch\nwhere = torch.ones(1, device='cuda').device\n"})
    text = """
        import pickle, sys
        import beside
        from dynamicemb.planner import Planner
        class Mine: pass
        print(__name__, __file__, sys.path[0], sys.argv, __spec__, sys.modules["__main__"].Mine is Mine)
        assert __builtins__.len([]) == 0
        print(beside.where, Planner.__module__, type(pickle.loads(pickle.dumps(Mine()))) is Mine)
    """
    done = run_script(place, text, "--train", "-m", "--help", fresh=True)
    path, folder = str(place / "job" / "script.py"), str(place / "job")
    arguments = ["job/script.py", "--train", "-m", "--help"]
    assert lines_of(done) == [
        f"__main__ {path} {folder} {arguments} None True",
        "cpu compat_stand_in.planner True",
    ]
    assert not (place / "job" / "__pycache__").exists(), "rewritten code is not kept for others"


def test_what_is_replaced_is_said_once(place):
    done = run_script(place, "import torch\nprint(torch.ones(1).cuda().device, torch.device('cuda'))\n")
    assert lines_of(done) == ["cpu cpu"]
    (said,) = done.stderr.splitlines()
    assert f"no GPU; in modules of {place / 'job'} (script.py: 1 x .cuda(), 1 x 'cuda') 'cuda' is 'cpu'" in said
    assert "--keep-devices" in said


def test_devices_are_kept_on_demand(place):
    text = "import beside, dynamicemb\nprint('cuda', 'nccl', beside.name, dynamicemb.Options)\n"
    done = run_script(place, text, options=["--keep-devices"], beside="name = 'cuda:0'\n")
    assert lines_of(done)[0].startswith("cuda nccl cuda:0 <class") and done.stderr == ""


def test_nothing_is_replaced_where_torch_has_a_gpu(place):
    write(place, {"driver.py": "import torch\ntorch.cuda.is_available = lambda: True\n" + DRIVER})
    done = run_script(place, "print('cuda')")
    assert (lines_of(done), done.stderr) == (["cuda"], "")


def test_torch_itself_and_other_folders_stay_as_they_are(place):
    write(place / "lib", {"elsewhere.py": "name = 'cuda'\n"})
    write(place / "job", {"env/site-packages/installed.py": "name = 'cuda'\n", "package/part.py": "name = 'cuda'\n"})
    text = """
        import sys, os
        sys.path.append(os.path.dirname(__file__) + "/env/site-packages")
        import torch, elsewhere, installed, package.part
        print(elsewhere.name, installed.name, package.part.name, vars(torch)["cu" + "da"].__name__)
    """
    assert lines_of(run_script(place, text)) == ["cuda cuda cpu torch.cuda"]


def test_a_traceback_has_the_lines_of_the_script(place):
    beside = "import torch\n\n\ndef fail(x):\n    torch.cuda.synchronize(); x.cuda().no_such_method()\n"
    text = '"""Doc."""\nimport torch\nimport beside\n\n\ntorch.cuda.synchronize()\nbeside.fail(torch.ones(1).cuda())\n'
    done = run_script(place, text, beside=beside)
    assert done.returncode == 1
    assert f'{place}/job/script.py", line 7, in <module>\n    beside.fail(torch.ones(1).cuda())\n' in done.stderr
    assert f'{place}/job/beside.py", line 5, in fail\n' in done.stderr
    assert done.stderr.endswith("AttributeError: 'Tensor' object has no attribute 'no_such_method'\n")


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("1 / 0", 1), ("sys.exit('x')", 1)]
)
def test_the_exit_code_is_the_scripts(place, ending, code):
    assert run_script(place, f"import sys\n{ending}\n").returncode == code


def test_a_gpus_name_is_passed_on(place):
    text = "import torch\nprint(torch.cuda.is_available(), torch.cuda.get_device_name(0))\n"
    assert lines_of(run_script(place, text))[0].startswith("False ")
    for options in (["--gpu-name", "NVIDIA A100"], ["--gpu-name=NVIDIA A100"]):
        assert lines_of(run_script(place, text, options=options)) == ["True NVIDIA A100"]


def test_a_library_that_lies_beside_the_script(place):
    write(place / "job", {"dynamicemb/__init__.py": "mine = True\n"})
    done = run_script(place, "import dynamicemb\nprint(dynamicemb.__name__)\n")
    assert done.returncode == 2 and "or pass --replace to import compat_stand_in" in done.stderr
    done = run_script(place, "import dynamicemb\nprint(dynamicemb.__name__)\n", options=["--replace"])
    assert lines_of(done) == ["compat_stand_in"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no name of a library"),
        (["dynamicemb"], "there is no script to run"),
        (["dynamicemb", "none.py"], "the script must be a file, got none.py"),
        (["dynamicemb", "-m"], "-m needs the name of a module"),
        (["dynamicemb", "-m", "no_such_module"], "there is no module no_such_module"),
        (["dynamicemb", "--gpu-name"], "--gpu-name needs the name"),
        (["--fast", "dynamicemb"], "--fast is no option"),
        (["numpy", "driver.py"], "name must be one of 'dynamicemb', 'torchrec_dynamic_embedding', got 'numpy'"),
        (["dynamicemb", "-m", "pytest", "--assert=rewrite"], "leave out --assert"),
    ],
)
def test_a_wrong_command_line_is_refused_in_words(place, words, said):
    done = run(place, *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_the_runner_is_a_module_of_its_own(place):
    """As users call it, with the real table: no module of the library is imported here."""
    write(place / "job", {"script.py": "import sys\nprint('cuda', sys.argv[1:])\n"})
    command = [sys.executable, "-m", "oneemb.compat", "dynamicemb", place / "job" / "script.py", "--train"]
    done = subprocess.run(command, capture_output=True, text=True, env=NO_GPU, cwd=place)
    assert lines_of(done) == ["cpu ['--train']"]
    done = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, cwd=place)
    assert "--keep-devices" in "\n".join(lines_of(done))


# ---- processes that a script starts ---------------------------------------------------------------------------------

SPAWNING = """
    import sys
    import torch
    import torch.multiprocessing as mp
    import beside
    from dynamicemb.planner import Planner
    from torch.utils.data import DataLoader

    MODULE_LEVEL = torch.ones(1, device="cuda")

    class Data:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.full((1,), index, device=f"cuda:{index}")

    class Answer:
        def __init__(self, *of):
            self.of = of

    def grandchild(queue):
        queue.put(Answer("grandchild", str(torch.ones(1).cuda().device), beside.name))

    def child(rank, queue):
        queue.put(Answer(rank, torch.device("cuda", rank).type, beside.name, torch.cuda.get_device_name(), Planner()))
        process = mp.get_context("spawn").Process(target=grandchild, args=(queue,))
        process.start()
        process.join()

    if __name__ == "__main__":
        loader = DataLoader(Data(), num_workers=1, multiprocessing_context=sys.argv[1])
        print([batch.item() for batch in loader])
        queue = mp.get_context(sys.argv[1]).SimpleQueue()
        mp.start_processes(child, (queue,), nprocs=1, start_method=sys.argv[1])
        for _ in range(2):
            answer = queue.get()
            said = [one if isinstance(one, int | str) else type(one) is Planner for one in answer.of]
            print(type(answer) is Answer, *said)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_processes_and_theirs_run_the_rewritten_script(place, method):
    done = run_script(place, SPAWNING, method, options=["--gpu-name", "A100"], beside="name = 'cuda'\n", fresh=True)
    assert lines_of(done) == ["[0, 1]", "True 0 cpu cpu A100 True", "True grandchild cpu cpu"]
    assert done.stderr.count("torch finds no GPU") == 1, "processes that are spawned do not say it again"


def test_spawned_processes_of_a_script_that_keeps_its_devices_have_the_names(place):
    text = """
        import multiprocessing as mp
        import dynamicemb
        NAME = "cuda"
        def child(queue):
            queue.put((NAME, dynamicemb.Options()))
        if __name__ == "__main__":
            queue = mp.get_context("spawn").SimpleQueue()
            process = mp.get_context("spawn").Process(target=child, args=(queue,))
            process.start()
            name, options = queue.get()
            process.join()
            print(name, type(options) is dynamicemb.Options)
    """
    assert lines_of(run_script(place, text, options=["--keep-devices"], fresh=True)) == ["cuda True"]


ONE_CHILD = """
    import torch
    import torch.multiprocessing as mp
    import beside

    MODULE_LEVEL = torch.ones(1, device="cuda")

    def child(rank, queue):
        queue.put([rank, torch.device("cuda", rank).type, beside.name, torch.cuda.get_device_name()])

    if __name__ == "__main__":
        queue = mp.get_context("spawn").SimpleQueue()
        mp.start_processes(child, (queue,), nprocs=1, start_method="spawn")
        print(*queue.get())
"""


def test_a_module_is_run_and_spawns(place):
    write(place / "job", {"package/__init__.py": "", "package/job.py": ONE_CHILD, "beside.py": "name = 'cuda'\n"})
    done = run(place, "--gpu-name=H100", "dynamicemb", "-m", "package.job", cwd=place / "job", fresh=True)
    assert lines_of(done) == ["0 cpu cpu H100"]


@pytest.mark.slow
def test_a_module_is_run_and_spawns_processes_that_spawn(place):
    write(place / "job", {"package/__init__.py": "", "package/job.py": SPAWNING, "beside.py": "name = 'cuda'\n"})
    done = run(place, "--gpu-name=H100", "dynamicemb", "-m", "package.job", "spawn", cwd=place / "job", fresh=True)
    assert lines_of(done) == ["[0, 1]", "True 0 cpu cpu H100 True", "True grandchild cpu cpu"]


# ---- pytest ---------------------------------------------------------------------------------------------------------

TESTS = {
    "suite/conftest.py": """
        import pytest
        @pytest.fixture
        def device():
            return "cuda:0"
    """,
    "suite/beside.py": "backend = 'nccl'\n",
    "suite/test_gpu.py": """
        import pytest
        import torch
        from dynamicemb.planner import Planner
        from beside import backend

        @pytest.mark.parametrize("kind", ["cuda"])
        def test_passes(device, kind, request):
            assert (torch.ones(1).cuda().device.type, device, kind, backend) == ("cpu", "cpu", "cpu", "gloo"[:])
            assert device[0] == "c" and device[1] == "p"

        @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        def test_is_skipped():
            torch.cuda.Stream()

        def test_fails():
            x = torch.ones(1).cuda()
            assert x.device.type == "mps"
    """,
}


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_pytest_runs_rewritten_tests(place, mode):
    write(place / "job", TESTS)
    python_path = f"{place}/lib{os.pathsep}{place}/job/suite"
    arguments = ["-q", "-rs", f"--import-mode={mode}", "suite"]
    done = run(place, "dynamicemb", "-m", "pytest", *arguments, cwd=place / "job", PYTHONPATH=python_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 1 skipped" in done.stdout and "no GPU" in done.stdout
    assert "suite/test_gpu.py:18: AssertionError" in done.stdout
    done = run(
        place, "dynamicemb", "-m", "pytest", *arguments, "-k", "passes", cwd=place / "job", PYTHONPATH=python_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_without_rewriting_explains_assertions(place):
    write(place / "job", {"test_it.py": "def test_it():\n    assert 'cuda' == 'cp' + 'u'\n"})
    done = run(place, "--keep-devices", "dynamicemb", "-m", "pytest", "-q", "test_it.py", cwd=place / "job")
    assert "assert 'cuda' == 'cpu'" in done.stdout


# ---- ranks, and scripts as people write them ------------------------------------------------------------------------

RANKS = """
    import argparse
    import os
    import torch
    import torch.distributed as dist
    from dynamicemb import Options

    BACKEND = "nccl"

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--train", action="store_true")
        args = parser.parse_args()
        dist.init_process_group(backend=BACKEND)
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        device = torch.device(f"cuda:{rank}")
        torch.cuda.manual_seed(7)
        noise = torch.rand(2, device=device)
        dist.barrier(device_ids=[rank])
        total = torch.full((1,), float(rank + 1), device=torch.cuda.current_device())
        dist.all_reduce(total)
        gathered = [torch.empty(2, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, noise.cuda())
        torch.cuda.synchronize()
        memory = torch.cuda.get_device_properties(0).total_memory
        equal = all(one.equal(noise) for one in gathered)
        path = f"{os.path.dirname(__file__)}/rank{rank}"
        with open(path, "w") as file:
            print(args.train, device.type, total.item(), equal, memory > 0, Options.__module__, file=file)
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


def by_torchrun(place, *arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run(place, *arguments, launcher=launcher, fresh=True)
    return done.returncode, done.stderr


def in_forks(place, *arguments):
    """Two processes with the variables that torchrun sets."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as ranks:
        ended = list(ranks.map(lambda rank: run(place, *arguments, **job, RANK=rank, LOCAL_RANK=rank), "01"))
    return max(done.returncode for done in ended), "".join(done.stderr for done in ended)


@pytest.mark.parametrize("launch", [in_forks, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_a_script_runs_on_two_ranks(place, launch):
    write(place / "job", {"script.py": RANKS})
    code, said = launch(place, "dynamicemb", "job/script.py", "--train")
    assert code == 0, said
    for rank in range(2):
        assert (place / "job" / f"rank{rank}").read_text() == "True cpu 3.0 True True compat_stand_in\n"
    assert said.count("torch finds no GPU") == 1, "the first rank says it for all"


PLATFORM_TEST = {
    "test_tables.py": """
        import os
        import pytest
        import torch
        import torch.distributed as dist
        from dynamicemb.planner import Planner

        class Platform:
            def __init__(self, device):
                name = torch.cuda.get_device_name(device.index)
                if "A100" not in name:
                    raise RuntimeError(f"not made for {name}")

        @pytest.fixture
        def current_device():
            assert torch.cuda.is_available()
            return torch.cuda.current_device()

        @pytest.fixture(scope="session", autouse=True)
        def group(tmp_path_factory):
            where = tmp_path_factory.mktemp("store") / "file"
            dist.init_process_group("nccl", init_method=f"file://{where}", rank=0, world_size=1)
            yield dist.group.WORLD
            dist.destroy_process_group()

        def test_lookup(current_device, group):
            device = torch.device(f"cuda:{current_device}")
            Platform(device)
            keys = torch.arange(3, device=current_device)
            values = torch.tensor([1.0, 2.0, 3.0]).cuda()
            assert values[keys].sum().item() == 6 and keys.device == values.device == device
            dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
    """
}


def test_tests_that_demand_a_known_gpu_run_with_its_name(place):
    write(place / "job", PLATFORM_TEST)
    words = ["dynamicemb", "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = run(place, "--gpu-name", "A100", *words, cwd=place / "job")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert run(place, *words, cwd=place / "job").returncode == 1
