"""The rules of the source tree that no linter knows."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import setuptools

import oneemb
import oneemb.kernels
from tests.support.trees import forget_trees, nodes_of, text_of

ROOT = Path(__file__).parent.parent
PACKAGES = ["kernels", "storage", "graph", "oneemb"]  # each may import those before it


@pytest.fixture(scope="module", autouse=True)
def no_trees_stay():
    yield
    forget_trees()


def setup():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path_or_text):
    text = path_or_text if isinstance(path_or_text, str) else text_of(path_or_text)
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "oneemb" else [node.module]
            )


def package_of(module):
    parts = module.split(".")
    if parts[0] != "oneemb":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "oneemb"


def against_direction(package, modules):
    rank = PACKAGES.index(package)
    return [m for m in modules if package_of(m) is not None and PACKAGES.index(package_of(m)) > rank]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package):
    wrong = {str(path): bad for path in sources(package) if (bad := against_direction(package, imported(path)))}
    assert not wrong, f"{package} may import only {PACKAGES[: PACKAGES.index(package) + 1]}: {wrong}"


def test_the_import_rule_finds_an_import_against_the_direction():
    text = "from oneemb.graph import ops\nimport oneemb.storage.fs\nfrom oneemb import nn\n"
    assert against_direction("storage", imported(text)) == ["oneemb.graph", "oneemb.nn"]


def test_adapters_share_one_folder_and_nothing_else_imports_them():
    adapters = {name: sources(f"oneemb/{name}") for name in ("torchrec", "dynamicemb", "tde")}
    shared = {name: [path for path in paths if any(m.startswith("oneemb.adapters") for m in imported(path))]
              for name, paths in adapters.items()}  # fmt: skip
    assert all(shared.values()), shared
    names = tuple(f"oneemb.{name}" for name in adapters)
    others = set(sources(*PACKAGES)).difference(*adapters.values())
    assert not {str(path): bad for path in others if (bad := [m for m in imported(path) if m.startswith(names)])}


def bare_imports(text):
    """Modules of the folders `graph`, `storage` and `kernels` that are imported without `oneemb.` before them."""
    if not re.search(r"^\s*(from\s+|import\s(.*[\s,])?)(graph|storage|kernels)\b", text, re.MULTILINE):
        return []  # Most texts: to parse all takes seconds.
    return [module for module in imported(text) if module.split(".")[0] in ("graph", "storage", "kernels")]


def test_nobody_imports_a_top_level_folder_by_its_bare_name():
    found = {str(path): bare_imports(text_of(path)) for path in sources(*PACKAGES, "tests", "examples", "benchmarks")}
    assert not any(found.values()), {path: modules for path, modules in found.items() if modules}


@pytest.mark.parametrize(
    "text", ["import graph", "import os, storage.fs as fs", "if x:\n    from kernels.jit import cpu"]
)
def test_a_bare_import_is_found(text):
    assert len(bare_imports(text)) == 1
    assert not bare_imports(
        text.replace("graph", "oneemb.graph").replace("storage", "g").replace("kernels", "m.kernels")
    )


def test_only_the_jit_modules_import_numba():
    users = {path.name for path in sources(*PACKAGES) if any(m.split(".")[0] == "numba" for m in imported(path))}
    assert users == {"jit.py", "jit_code.py", "jit_cuda.py", "jit_lanes.py", "jit_team.py"}


def test_every_package_is_found_for_installation():
    found = set(setuptools.find_packages(ROOT, include=[setup()["options.packages.find"]["include"]]))
    inits = [init.parent.relative_to(ROOT) for package in PACKAGES for init in (ROOT / package).rglob("__init__.py")]
    assert found == {".".join(("oneemb", *i.parts[i.parts[0] == "oneemb" :])) for i in inits}


def test_a_folder_beside_oneemb_is_imported_under_one_name():
    twice = [name for name in sys.modules if name.split(".")[0] in ("graph", "storage", "kernels")]
    assert not twice and Path(oneemb.kernels.__file__).parent == ROOT / "oneemb" / "kernels"


TOP_LEVEL = {
    ".ci", ".gitignore", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile",
    "README.md", "benchmarks", "constraints", "docs", "examples", "graph", "kernels", "mkdocs.yml", "oneemb",
    "pyproject.toml", "setup.cfg", "setup.py", "storage", "tests",
}  # fmt: skip


def test_the_top_folder_holds_nothing_that_a_test_has_left():
    git = shutil.which("git")
    done = git and subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if not done or done.returncode or not done.stdout:
        pytest.skip("this tree is no checkout")
    assert {file.partition("/")[0] for file in done.stdout.split("\0") if file} == TOP_LEVEL


@pytest.mark.parametrize("links", ["files", "none"])
def test_a_copy_of_the_tree_without_links_says_what_to_do(links, tmp_path):
    shutil.copytree(ROOT / "oneemb", tmp_path / "oneemb", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("graph", "storage", "kernels"):
        (tmp_path / "oneemb" / folder).unlink()
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        if links == "files":  # as git writes a link where the system has none
            (tmp_path / "oneemb" / folder).write_text(f"../{folder}")
    for file in ("setup.py", "setup.cfg", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    building = [sys.executable, "setup.py", "--name"]
    done = subprocess.run(building, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "ln -s" in done.stderr
    importing = [sys.executable, "-c", "import oneemb.kernels"]
    done = subprocess.run(importing, capture_output=True, text=True, cwd=tmp_path)
    assert "ImportError" in done.stderr and "ln -s" in done.stderr
    subprocess.run(done.stderr.strip().partition("root: ")[2], shell=True, check=True, cwd=tmp_path)
    subprocess.run(importing, check=True, cwd=tmp_path)
    subprocess.run(building, check=True, cwd=tmp_path)


def test_importing_oneemb_loads_neither_torch_nor_numba():
    code = "import sys, oneemb; print([m for m in ('torch', 'numba', 'torchrec', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "[]"


def test_training_on_a_cpu_loads_no_compiler_for_gpus():
    code = """
import sys, torch, oneemb
embedding = oneemb.MultiTableEmbedding("e", 4, torch.float32, torch.int64, [oneemb.make_table()],
    oneemb.make_device_mem_store_options())
optimizer = torch.optim.Adam(embedding.parameters())
embedding(torch.tensor([1, 2, 1])).sum().backward()
optimizer.step()
print(embedding.stats()["rows"], [m for m in ("oneemb.kernels.jit_cuda", "numba.cuda") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "2 []"


def test_every_public_name_can_be_loaded():
    import oneemb

    assert sorted(oneemb.__all__) == sorted(name for name in oneemb.__all__ if getattr(oneemb, name) is not None)


def test_editors_see_the_names_that_the_package_has():
    stub = ast.parse((ROOT / "oneemb" / "__init__.pyi").read_text())
    seen = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == oneemb._WHERE | dict.fromkeys(oneemb._SUBMODULES, "oneemb")


# ---- what each file may know of others -------------------------------------------------------------------------------


def module_name(path):
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "oneemb" else ["oneemb", *parts])


MODULES = {module_name(path): path for path in sources(*PACKAGES)}


def test_no_private_name_is_imported_from_another_file():
    wrong = [
        (str(path), alias.name)
        for path in sources(*PACKAGES)
        for node in nodes_of(text_of(path))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("oneemb")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not wrong


# Of other packages, what has no public name; of ours, what is one thing in two files.
FOREIGN = {"torch", "fx", "sys", "autocast", "block", "context", "tensor", "grad", "scaler", "module", "kernel", "base"}
FOREIGN |= {"aten", "ddp", "op", "dispatcher", "caching", "compiling", "lock", "_ONE_AT_A_TIME", "super", "optimizer"}
FOREIGN |= {"group", "executor", "os"}  # os._exit is public, whatever its name
OURS = {("graph/inputs.py", "other")}


def reach_ins(text, path):
    """Private attributes of others, as `line: expression`."""
    for node in nodes_of(text):
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not private or node.attr == "_replace":  # of a NamedTuple
            continue
        owner = node.value
        while isinstance(owner, ast.Attribute | ast.Call | ast.Subscript):
            owner = owner.func if isinstance(owner, ast.Call) else owner.value
        name = owner.id if isinstance(owner, ast.Name) else ""
        own = isinstance(node.value, ast.Name) and name in ("self", "cls")
        if own or name in FOREIGN:
            continue
        where = {(path, ast.unparse(node.value).removeprefix("self._")), (path, name)}
        if not where & OURS:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_nobody_reaches_into_the_private_parts_of_others():
    found = {path: list(reach_ins(text_of(path), str(path.relative_to(ROOT)))) for path in sources(*PACKAGES)}
    assert not any(found.values()), {path: lines for path, lines in found.items() if lines}


def test_a_reach_into_private_parts_is_found():
    text = "self._own\nself.store._tiers\nstore.store_lock._torn\n"
    assert list(reach_ins(text, "storage/planted.py")) == ["2: self.store._tiers", "3: store.store_lock._torn"]


def imported_modules(text):
    """Modules of the packages that a text imports: within functions, and those that only types need, included."""
    found = set()
    for node in nodes_of(text):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found.update(whole or {node.module} & MODULES.keys())
        elif isinstance(node, ast.Import):
            found.update({alias.name for alias in node.names} & MODULES.keys())
    return found


def circle_in(imports):
    """Some modules that import each other in a circle, [] if there are none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            path.append(module)
            for other in imports[module]:
                if circle := visit(other):
                    return circle
            done.add(path.pop())
        return []

    return next((circle for module in imports if (circle := visit(module))), [])


def test_no_modules_import_each_other_in_a_circle():
    assert not circle_in({module: imported_modules(text_of(path)) for module, path in MODULES.items()})


def test_a_circle_is_found_within_functions_too():
    text = "import oneemb.storage.fs\ndef call():\n    from oneemb.kernels import jit\n"
    assert imported_modules(text) == {"oneemb.storage.fs", "oneemb.kernels.jit"}
    assert circle_in({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]


def test_nothing_is_defined_that_no_file_of_the_packages_names():
    texts = [re.sub(r"^__all__ = \[.*?\]", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
             for path in sources(*PACKAGES)]  # fmt: skip
    words = Counter(re.findall(r"\w+", "\n".join(texts)))
    public = {name for names in oneemb._MODULES.values() for name in names}
    unused = []
    for path in sources(*PACKAGES):
        for node in nodes_of(text_of(path))[0].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and words[node.name] < 2:
                decorated = any("command" in ast.unparse(one) or "register" in ast.unparse(one)
                                for one in node.decorator_list)  # fmt: skip
                if not decorated and node.name not in public | NAMED_BY_OTHERS:
                    unused.append(f"{path}:{node.lineno}: {node.name}")
    assert not unused, "\n".join(unused)


# By Python; by dynamicemb's users.
NAMED_BY_OTHERS = {
    "__dir__", "ConstructTwinModule", "RwSparseFeaturesDist", "ScoreArg", "assert_tensors_equal",
    "check_emb_collection_modules", "encode_checkpoint_file_path", "encode_counter_checkpoint_file_path",
    "encode_meta_json_file_path", "generate_sparse_feature", "get_loading_files", "get_required_arg",
    "string_to_opt_type",
}  # fmt: skip

# ---- what a new optimizer touches ------------------------------------------------------------------------------------

OPTIMIZERS = {path.stem.removeprefix("update_") for path in (ROOT / "kernels").glob("update_*.py")}

# Files that may name any optimizer, beside its own: they are where one is added.
REGISTRIES = {"graph/row_optimizers.py", "oneemb/optim.py"}

# Code that names some, since another library has that name or since one stands for all. This list may only shrink.
NAMES_OPTIMIZERS = {
    "kernels/update_nadam.py": {"adam"},
    "kernels/update_radam.py": {"adam"},
    "graph/ops/late_check.py": {"sgd"},
    "oneemb/cli/plan.py": {"sgd"},
    "oneemb/dynamicemb/batched_dynamicemb_tables.py": {"sgd"},
    "oneemb/dynamicemb/construct_twin_module.py": {"sgd"},
    "oneemb/dynamicemb/optimizer.py": {"adagrad", "adam"},
    "oneemb/dynamicemb/shard/sharded.py": {"adagrad", "row_wise_adagrad", "sgd"},
    "oneemb/dynamicemb/table_dumps.py": {"adagrad", "adam", "row_wise_adagrad", "sgd"},
    "oneemb/planning/machine.py": {"adagrad"},
    "oneemb/planning/planned_embedding.py": {"sgd"},
    "oneemb/tde/__init__.py": {"adam"},
    "oneemb/tde/row_adam.py": {"adam"},
    "oneemb/tde/table_tensors.py": {"adagrad", "adam", "sgd"},
    "oneemb/torchrec/optimizers.py": {"adagrad", "row_wise_adagrad", "sgd"},
    "oneemb/training/step_hooks.py": {"adagrad"},
    "oneemb/training/warm_up.py": {"adagrad", "adam", "row_wise_adagrad", "sgd"},
}


def optimizers_named(text):
    """Optimizers whose names are part of a name in the code, or of a string that is no sentence."""
    words = []
    for node in nodes_of(text):
        words += [
            name
            for field in ("id", "attr", "name", "arg", "module")
            if isinstance(name := getattr(node, field, None), str)
        ]
        words += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    snake = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower() for word in words if " " not in word}
    longest_first = sorted(OPTIMIZERS, key=len, reverse=True)
    return set(re.findall(rf"(?<![a-z])(?:{'|'.join(longest_first)})(?![a-z])", " ".join(snake)))


def test_an_optimizer_is_named_by_its_own_file_and_the_registries():
    found = {str(path.relative_to(ROOT)): optimizers_named(text_of(path)) for path in sources(*PACKAGES)}
    for path in list(found):
        own = Path(path).stem.removeprefix("update_") if path.startswith("kernels/update_") else ""
        found[path] -= OPTIMIZERS if path in REGISTRIES else {own}
    assert {path: names for path, names in found.items() if names} == NAMES_OPTIMIZERS


def test_a_name_of_an_optimizer_is_found():
    text = "from oneemb.kernels.update_lion import a\nRowWiseAdagrad\nb = ['a sentence on adam', 'torch.optim.SGD']\n"
    assert optimizers_named(text) == {"lion", "row_wise_adagrad", "sgd"}


# Names of other libraries, which have them in several modules too; and the contract of gradients to sum, with what the
# host and a GPU make of it.
NAMED_TWICE = {
    "ConstantInitializer", "EmbeddingBagCollection", "EmbeddingCollection", "NormalInitializer", "Segments",
    "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection", "Storage", "UniformInitializer",
}  # fmt: skip


def classes_named_twice(texts):
    names = Counter(node.name for text in texts for node in nodes_of(text) if isinstance(node, ast.ClassDef))
    return {name for name, times in names.items() if times > 1 and not name.startswith("_")}


def test_no_two_classes_have_one_name():
    assert classes_named_twice(text_of(path) for path in sources(*PACKAGES)) == NAMED_TWICE
    assert classes_named_twice(["class A: ...\nclass _B: ...", "def f():\n    class A: ...", "class _B: ..."]) == {"A"}


FILE_LINES_MAX, CLASS_LINES_MAX = 500, 400


def lines_of_classes(text):
    classes = [node for node in nodes_of(text) if isinstance(node, ast.ClassDef)]
    return {node.name: node.end_lineno - node.lineno + 1 for node in classes}


def test_files_and_classes_are_read_at_one_go():
    texts = {path: text_of(path) for path in sources(*PACKAGES)}
    long = [path for path, text in texts.items() if text.count("\n") > FILE_LINES_MAX]
    long += [one for text in texts.values() for one, lines in lines_of_classes(text).items() if lines > CLASS_LINES_MAX]
    assert not long, "part it by responsibility"
    assert lines_of_classes("class A:\n    b = 1\n    c = 2\n\n\nclass B:\n    pass\n") == {"A": 3, "B": 2}


FILE_CALLS = set("open read pread write pwrite rename replace remove unlink sync fsync listdir scandir stat".split())
FILE_CALLS |= {"truncate", "ftruncate", "mkdir", "makedirs", "rmdir"}


def file_calls(text):
    for node in nodes_of(text):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "open" or called.startswith("os.") and called[3:] in FILE_CALLS:
                yield f"{node.lineno}: {called}"


def test_every_file_call_of_the_persistent_table_goes_through_the_file_system():
    found = {path: list(file_calls(text_of(path))) for path in sources("storage/table")}
    assert not any(found.values()), "a test cannot fail, tear or lose what these do to files"
    assert list(file_calls("import os\nopen('a')\nfs.open('a')\nos.fsync(1)\n")) == ["2: open", "4: os.fsync"]


# ---- what tests may know of the packages -----------------------------------------------------------------------------

# Private parts of the packages that a single test reads or replaces, since no public call shows them. What several
# tests need has a public name, or a function in tests/support/inside.py. This list may only shrink.
REACHED_INTO = {
    "tests/benchmarks/test_turns.py": {"_process"},
    "tests/changed.py": {"_WHERE"},
    "tests/cuda/test_device_tier.py": {"_enlarged", "_index"},
    "tests/cuda/test_launches.py": {"_compute_prepared", "_prepare"},
    "tests/cuda/test_prefetched_rows.py": {"_release_in_order"},
    "tests/dynamicemb/test_tables.py": {"_admission_counter"},
    "tests/remote/test_plugin_server.py": {"_plugins"},
    "tests/remote/test_redis_faults.py": {"_keys"},
    "tests/remote/test_remote_tier.py": {"_values"},
    "tests/storage/test_block_readers.py": {"_byte_N", "_context", "_kept"},
    "tests/storage/test_compact_snapshots.py": {"_contents"},
    "tests/storage/test_embedding_store.py": {"_grants"},
    "tests/storage/test_hot_tier.py": {"_below"},
    "tests/storage/test_json_lists.py": {"_known"},
    "tests/storage/test_memory.py": {"_lock"},
    "tests/storage/test_persistent_table.py": {"_contents"},
    "tests/storage/test_persistent_table_damage.py": {"_keys_of"},
    "tests/storage/test_persistent_table_interrupts.py": {"_LockFile"},
    "tests/tde/test_dataloader.py": {"_pins_S"},
    "tests/test_deltas.py": {"_held"},
    "tests/test_layout.py": {"_MODULES", "_SUBMODULES", "_WHERE"},
    "tests/test_persistent_table_io.py": {"_sinks"},
    "tests/test_ranks.py": {"_owned"},
    "tests/test_train_graph.py": {"_plans"},
    "tests/torchrec/test_modules.py": {"_feature_names"},
    "tests/torchrec/test_sharding.py": {"_sender"},
}
REACHED_INTO_MAX = 36
# Names that the packages have too, of a NamedTuple, of torch's GradScaler, Tensor and Module, and of notebooks.
NOT_OURS = {"_replace", "_scale", "_version", "_compiled_call_impl", "_repr_html_", "_repr_svg_"}


def private_names(text):
    """Private names that a file defines or assigns, as variables, attributes, functions or classes."""
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and name not in NOT_OURS:
            yield name


def reached_into(text, private):
    """Names of `private` that are read or set of another object than `self`, or imported from the packages."""
    found = set()
    private = private.intersection(re.findall(r"\b_\w+", text))
    for node in nodes_of(text) if private else ():
        if isinstance(node, ast.Attribute) and node.attr in private:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()") and owner.partition(".")[0] not in ("torch", "sys"):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oneemb"):
            found.update(alias.name for alias in node.names)
    return found & private


def test_tests_reach_into_no_private_part_of_the_packages_but_those_listed():
    private = {name for path in sources(*PACKAGES) for name in private_names(text_of(path))}
    found = {
        str(path.relative_to(ROOT)): names
        for path in sources("tests")
        if path.parent.name != "support" and (names := reached_into(text_of(path), private))
    }
    assert found == REACHED_INTO
    assert sum(map(len, REACHED_INTO.values())) <= REACHED_INTO_MAX, "use a public call, or tests/support/inside.py"


def test_a_private_part_that_a_test_reaches_into_is_found():
    private = set(private_names("_LIMIT = 1\nclass _Held:\n    def _end(self):\n        self._rows, self.own = 1, 2\n"))
    assert private == {"_LIMIT", "_Held", "_end", "_rows"}
    text = "store._rows\nself._end()\nx.y(z)._end = 1\nmodule._LIMIT\nother._name\nfrom oneemb.a import _Held as b\n"
    assert reached_into(text, private) == {"_rows", "_end", "_LIMIT", "_Held"}
    assert not reached_into("self._rows\nsuper()._end()\ntorch._rows\nsys._LIMIT\nb.own\n", private)


# ---- the Pythons it runs on ------------------------------------------------------------------------------------------


# Tensors that torch makes on the default device, and those whose dtype is the default one unless it is said.
MAKE = set("empty zeros ones full tensor as_tensor asarray arange linspace eye rand randn randint randperm".split())
MAKE_FLOATS = set("empty zeros ones full linspace eye rand randn".split())


def by_default(text):
    """Calls that make a tensor of whatever dtype or on whatever device is torch's default when they run."""
    for node in nodes_of(text):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKE:
            named, of = {keyword.arg for keyword in node.keywords}, ast.unparse(node.func.value)
            call = ast.unparse(node)
            floats = node.func.attr in MAKE_FLOATS or re.search(r"\bfloat\(|\d\.\d", call)
            if of == "torch" and ("device" not in named or floats and "dtype" not in named):
                yield call


def test_no_tensor_follows_the_default_dtype_or_device_of_torch():
    found = {str(path): calls for path in sources(*PACKAGES) if (calls := list(by_default(text_of(path))))}
    assert not found, "say dtype= and device=: users set torch's defaults"


def test_a_tensor_that_follows_the_defaults_of_torch_is_found():
    assert list(by_default("torch.empty(3, device=x)\ntorch.tensor([1])\ntorch.tensor(0.5, device=x)")) == [
        "torch.empty(3, device=x)", "torch.tensor([1])", "torch.tensor(0.5, device=x)",
    ]  # fmt: skip
    assert not list(by_default("torch.empty(3, dtype=d, device=x)\ntorch.tensor([1], device=x)\nnp.empty(3)"))


def minors(text):
    """What stands behind the dot of every 3.x."""
    return [int(minor) for minor in re.findall(r"3\.(\d+)", text)]


def test_every_tool_knows_the_same_oldest_python():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    classified = minors(setup()["metadata"]["classifiers"])
    oldest = min(classified)
    assert classified == list(range(oldest, max(classified) + 1))
    assert setup()["options"]["python_requires"] == f">=3.{oldest}, <3.{max(classified) + 1}"
    assert tools["ruff"]["target-version"] == f"py3{oldest}"
    assert tools["mypy"]["python_version"] == f"3.{oldest}"
    assert setup()["vermin"]["targets"] == f"3.{oldest}-"
    for name in ["Makefile", "README.md"]:
        written = re.findall(r"Python 3\.\d+ to 3\.\d+", (ROOT / name).read_text())
        assert written == [f"Python 3.{oldest} to 3.{max(classified)}"], name


@pytest.mark.parametrize(
    ("text", "newer"),
    [
        ("import itertools\n\nitertools.pairwise('ab')\n", False),
        ("import torch\n\ntorch.ones(1).long()\n", False),
        ("import itertools\n\nitertools.batched('ab', 1)\n", True),
        ("from typing import override\n", True),
        ("from pathlib import Path\n\nPath('a').walk()\n", True),
        ("import warnings\n\n\n@warnings.deprecated('')\ndef f(): ...\n", True),
    ],
)
def test_names_newer_than_the_oldest_python_are_found(text, newer, tmp_path):
    (tmp_path / "planted.py").write_text(text)
    check = "import vermin; vermin.main()"
    command = [sys.executable, "-c", check, "--config-file", ROOT / "setup.cfg", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "planted.py" in done.stdout) == (int(newer), newer), done.stdout


# ---- what make does --------------------------------------------------------------------------------------------------


def dry_make(*arguments):
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}  # the make that runs this test
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=outside).stdout


TARGETS = [
    "demo",
    "test",
    "test-changed",
    "test-slow",
    "test-nightly",
    "check",
    "docs",
    "bench",
    "bench-compare",
    "bench-tables",
    "gpu-test",
    "gpu-bench",
    "gpu-sanitize",
    "gpu-sanitize-quick",
    "gpu-all",
]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_in_an_environment_that_is_there_makes_and_installs_nothing(target, tmp_path):
    here = dry_make(target, "RUN=some-python", f"VENV={tmp_path}")
    assert not re.search(rf"\b(pip|venv)\b|{tmp_path}", here), here
    assert "some-python " in here
    fresh = dry_make(target, f"VENV={tmp_path}")
    assert "-m venv" in fresh and "pip install" in fresh, "without RUN it does both"


@pytest.mark.parametrize(
    ("df", "options", "in_memory"),
    [
        ("echo Avail; echo 9000000", "rw,nosuid", True),
        ("echo Avail; echo 64000", "rw,nosuid", False),
        ("echo Avail; echo 9000000", "rw,nosuid,noexec", False),
        ("exit 127", "rw,nosuid", False),
    ],
)
def test_folders_of_tests_are_in_memory_where_there_is_room_and_libraries_load(
    tmp_path, monkeypatch, df, options, in_memory
):
    (tmp_path / "df").write_text(f"#!/bin/sh\n{df}\n")
    (tmp_path / "df").chmod(0o755)
    (tmp_path / "mounts").write_text(f"proc /proc proc rw,noexec 0 0\nshm /dev/shm tmpfs {options} 0 0\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    commands = dry_make("test", "RUN=python3", f"MOUNTS={tmp_path}/mounts")
    assert commands.count("TMPDIR=/dev/shm") == (3 if in_memory else 0)


@pytest.mark.slow
def test_gpu_tests_say_once_that_there_is_no_gpu():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/test_copies.py"]
    unseen = os.environ | {"ONEEMB_TEST_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=unseen)
    assert done.returncode == 1 and done.stdout.count("there is no GPU to test on: ") == 1, done.stdout


def test_every_target_is_tried_in_an_environment_that_is_there():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    # `test-versions` and `test-s3` make environments of their own.
    assert sorted(TARGETS) == sorted(set(phony) - {"clean", "test-versions", "test-s3"})


def test_the_least_torch_has_the_arguments_that_exports_pass():
    least = re.search(r"torch >= (\d+)\.(\d+)", setup()["options"]["install_requires"])
    # torch.export's prefer_deferred_runtime_asserts_over_guards, without which programs fix the number of examples.
    assert tuple(map(int, least.groups())) >= (2, 9)


@pytest.mark.parametrize("constraints", ["demo.txt", "test.txt", "bench.txt", "s3.txt"])
def test_everything_is_pinned_once_and_exactly(constraints):
    lines = (ROOT / "constraints" / constraints).read_text().splitlines()
    pins = [line for line in lines if not line.startswith(("#", "-c "))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len({pin.split("==")[0].lower().replace("_", "-") for pin in pins}) == len(pins)
