"""AOTInductor packages, and programs in a process of C++."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.export_models import LOOKUPS, Score, embedding_at, run_alone, train_rows, trained_click

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "serve_cpp"
TORCH = Path(torch.__file__).parent


def some_ids(samples, seed=5):
    return torch.randint(-70, 70, (samples, 3), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """The example, compiled; kept in build/, for a quarter of a minute is long."""
    if not (TORCH / "include" / "torch" / "csrc" / "inductor" / "aoti_package").is_dir():
        pytest.skip("torch has come without its headers")
    include, abi = TORCH / "include", int(torch.compiled_with_cxx11_abi())
    command = ["g++", "-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{include}",
               f"-I{include}/torch/csrc/api/include", EXAMPLE / "main.cpp", f"-L{TORCH}/lib",
               f"-Wl,-rpath,{TORCH}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]  # fmt: skip
    what = repr((command, torch.__version__, (EXAMPLE / "main.cpp").read_bytes()))
    kept = EXAMPLE.parents[1] / "build" / f"serve_cpp-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if not kept.exists():
        made = tmp_path_factory.mktemp("serve_cpp") / "serve"
        subprocess.run([*command, "-o", made], check=True)
        kept.parent.mkdir(exist_ok=True)
        shutil.copy(made, f"{kept}.{os.getpid()}")
        os.replace(f"{kept}.{os.getpid()}", kept)
    return kept


SAME_SUMS = {"MKL_CBWR": os.environ["MKL_CBWR"]}
"""No more of the environment than makes sums as this process makes them; see tests/conftest.py."""


def served(serve, program, ids):
    """What the example prints for ids, and what it says of the program."""
    text = "".join(" ".join(map(str, line)) + "\n" for line in ids.tolist())
    done = subprocess.run([serve, program, "3"], input=text, capture_output=True, text=True, env=SAME_SUMS)
    assert done.returncode == 0, done.stderr
    rows = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    return torch.tensor(rows).reshape(len(ids), -1), json.loads(done.stderr)


def test_a_script_gives_its_graphs_numbers_in_cpp_and_wrong_lines_are_refused(serve, tmp_path):
    graph = Score(trained_click(tmp_path))
    graph.export(tmp_path / "score.pt", some_ids(64), format="torchscript")
    ids = some_ids(20)
    ids[0] = torch.tensor([-(2**63), 2**63 - 1, 5])
    found, said = served(serve, tmp_path / "score.pt", ids)
    assert torch.equal(found.flatten(), graph(ids)) and said["graph"] == "Score"
    for wrong in ("1 2", "1 2 3 4", "1 2 x", "1 2 3.5", f"1 2 {2**63}"):
        done = subprocess.run(
            [serve, tmp_path / "score.pt", "3"], input=f"1 2 3\n{wrong}\n", capture_output=True, text=True
        )
        assert done.returncode == 1 and "line 2" in done.stderr and not done.stdout
    for columns in ("3x", "x", "0", "-3", str(2**63), ""):
        done = subprocess.run([serve, tmp_path / "score.pt", columns], input="1 2 3\n", capture_output=True, text=True)
        assert done.returncode == 1 and "COLUMNS must be an integer, 1 or more" in done.stderr and not done.stdout
    done = subprocess.run([serve, tmp_path / "score.pt", "3"], input="", capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_package_gives_its_graphs_numbers_alone_and_in_cpp(serve, tmp_path, dtype):
    graph, ids = Score(trained_click(tmp_path)), some_ids(20)
    graph.export(tmp_path / "score.pt2", some_ids(64), format="aot_inductor", dtype=dtype)
    graph.export(tmp_path / "score.pt", some_ids(64), format="torchscript", dtype=dtype)
    want = torch.jit.load(tmp_path / "score.pt")(ids)
    assert dtype != "float32" or torch.equal(want, graph(ids))
    (alone,) = run_alone(tmp_path, (tmp_path / "score.pt2", "aot_inductor", [ids]))
    in_cpp, said = served(serve, tmp_path / "score.pt2", ids)
    # The compiler may order the sums of the dense part in another way.
    assert torch.allclose(alone, want, rtol=0, atol=1e-6) and torch.equal(in_cpp.flatten(), alone)
    assert said["dtype"] == dtype


@pytest.mark.slow
def test_every_kind_of_lookup_can_be_compiled_and_keeps_its_bits(tmp_path):
    embedding, programs, wanted = embedding_at(tmp_path, drawn=True), [], []
    train_rows(embedding)
    for name, (make, batch) in LOOKUPS.items():
        graph, path = make(embedding), tmp_path / name.replace(" ", "_")
        graph.export(path, *batch(20, 1), format="aot_inductor")
        for samples in (20, 7, 1, 0):
            programs.append((path, "aot_inductor", batch(samples, samples)))
            wanted.append(graph(*programs[-1][2]))
    for (path, *_), want, got in zip(programs, wanted, run_alone(tmp_path, *programs), strict=True):
        assert torch.equal(want, got), path


@pytest.mark.slow
def test_a_package_ends_a_call_whose_tables_or_offsets_are_wrong(tmp_path):
    embedding = embedding_at(tmp_path)
    for name in ("tables of ids", "sum"):
        make, batch = LOOKUPS[name]
        make(embedding).export(tmp_path / "one.pt2", *batch(20, 1), format="aot_inductor", absent="zeros")
        program, (ids, other) = torch._inductor.aoti_load_package(str(tmp_path / "one.pt2")), batch(6, 2)
        for wrong in (torch.where(other == 1, -1, other), torch.where(other == 1, 3, other)) if "ids" in name else (
            other + 1, other.flip(0), torch.cat([other[:-1], other[-1:] - 1])
        ):  # fmt: skip
            with pytest.raises(RuntimeError):
                program(ids, wrong)


_CHECKED = """
import sys, torch
program, given = torch._inductor.aoti_load_package(sys.argv[1]), torch.load(sys.argv[2])
for ids, want in given["right"]:
    assert torch.allclose(program(ids), want, rtol=0, atol=1e-6), len(ids)
for ids in given["wrong"]:
    try:
        program(ids)
    except RuntimeError:
        continue
    raise AssertionError(f"taken: {ids.dtype} {ids.shape} {ids.stride()}")
"""


@pytest.mark.slow
def test_a_package_that_is_told_to_compares_its_inputs_and_takes_any_number_of_examples(tmp_path):
    graph, ids = Score(trained_click(tmp_path)), some_ids(20)
    graph.export(tmp_path / "score.pt2", some_ids(64), format="aot_inductor")
    right = [(its, graph(its)) for its in (ids, ids[:1], ids[:0])]
    wrong = [ids.int(), ids.float(), ids.t().contiguous().t(), ids[:, :2]]
    torch.save({"right": right, "wrong": wrong}, tmp_path / "given.pt")
    command = [sys.executable, "-c", _CHECKED, tmp_path / "score.pt2", tmp_path / "given.pt"]
    subprocess.run(command, check=True, env={**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1"})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
def test_the_example_is_built_as_its_page_says(tmp_path):
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", EXAMPLE, "-B", tmp_path / "build", prefix], check=True)
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True)
    graph = Score(trained_click(tmp_path))
    graph.export(tmp_path / "score.pt", some_ids(64), format="torchscript")
    found, _ = served(tmp_path / "build" / "serve", tmp_path / "score.pt", some_ids(9))
    assert torch.equal(found.flatten(), graph(some_ids(9)))
