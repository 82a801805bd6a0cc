"""The names of dynamicemb's two versions are there, with their parameters and defaults."""

import dataclasses
import enum
import importlib
import inspect
import pathlib
import re

import pytest

import oneemb.dynamicemb

LISTS = pathlib.Path(__file__).parent
"""names_seed.txt and names_today.txt: names that dynamicemb's two versions have and this library claims to have."""
VERSIONS = ["seed", "today"]

NOT_HERE = {
    # Helpers of the first version's debugging, and of its files, which are one module here.
    "broadcast_string", "debug_check_dynamic_table_is_zero", "debug_dump", "debug_load",
    "export_keys_values", "gather_and_export", "load_from_json", "load_table", "pad_to_length", "save_to_json",
}  # fmt: skip


def listed(version):
    """(module, name, kind, text of what it takes) of each name in the lists of signatures."""
    found, module = [], None
    for line in (LISTS / f"names_{version}.txt").read_text().splitlines():
        if line.startswith("## "):
            module = line.split()[1]
        else:
            match = re.match(r"   (\w+) (enum|dataclass|class|def)?\s*(.*)", line)
            assert match, line
            found.append((module, *match.groups()))
    return found


def module_of(name):
    return importlib.import_module(f"oneemb.{name}")


def parameters_of(text):
    """[(name, text of its default or None)] of a signature in brackets."""
    depth, parts, last = 0, [], ""
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append(last)
            last = ""
        else:
            last += letter
    names = []
    for part in [*parts, last]:
        match = re.match(r"\s*(\w+)\s*(?::.*?)?(?:\s*=\s*(.*))?$", part, re.DOTALL)
        if match and match[1] not in ("self", "args", "kwargs") and "*" not in part.split(":")[0]:
            names.append((match[1], part.rsplit("=", 1)[1].strip() if "=" in part else None))
    return names


def plain(default):
    """A default as the lists write it, where that is a number, a text or None."""
    return (
        repr(default) if isinstance(default, int | float | str | None) and not isinstance(default, enum.Enum) else None
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_is_there_with_its_parameters_and_defaults(version):
    its = listed(version)
    assert len(its) > {"seed": 30, "today": 90}[version]
    for module, name, kind, text in its:
        if name in NOT_HERE or name == "ScoreStrategy":  # which is a type
            continue
        there = getattr(module_of(module), name, None)
        assert there is not None, (module, name)
        if kind == "enum":
            members = re.findall(r"(\w+)=(\d+|'\w+')", text)
            assert members or "EvictStrategy" in name or "=" in text
            for member, value in members:
                assert repr(there[member].value) == value, (name, member)
        elif kind in ("dataclass", "def", "class") and not name.startswith("Sharded"):  # These, sharders make.
            inner = text[text.index("(") :]
            if kind == "class":
                inner = inner[inner.index("(", 1) :] if inner.count("(") > 1 else inner
            inner = inner.split(" methods:")[0].rsplit(")", 1)[0][1:]
            asked = parameters_of(inner)
            methods = re.findall(r"\w+", text.split(" methods:")[1]) if " methods:" in text else []
            missing = [method for method in methods if not callable(getattr(there, method, None))]
            assert not [one for one in missing if not isinstance(getattr(there, one, None), property)], (name, missing)
            own = inspect.signature(there.__init__ if kind == "class" else there).parameters
            takes_any = any(one.kind is one.VAR_KEYWORD for one in own.values())
            for parameter, default in asked:
                if parameter in ("initializer_args", "eval_initializer_args", "dynamicemb_options", "pooling_factors"):
                    continue  # made anew for each
                assert parameter in own or takes_any, (name, parameter)
                if parameter in own and default is not None and plain(own[parameter].default) is not None:
                    assert plain(own[parameter].default) == default or (name, parameter) in CHANGED, (
                        name, parameter, own[parameter].default, default)  # fmt: skip


# Defaults that the versions do not agree on, or that are written otherwise.
CHANGED = {
    ("DynamicEmbTableOptions", "dist_type"), ("DynamicEmbParameterSharding", "dist_type"),
    ("DynamicEmbParameterSharding", "compute_kernel"), ("DynamicEmbDump", "pg"), ("DynamicEmbLoad", "pg"),
    ("FrequencyAdmissionStrategy", "initializer_args"),
}  # fmt: skip


def test_a_name_that_is_missing_would_be_noticed(monkeypatch):
    assert parameters_of("path: str, model: a.B[c, d], optim: Optional[bool] = False") == [
        ("path", None), ("model", None), ("optim", "False")]  # fmt: skip
    monkeypatch.delattr(oneemb.dynamicemb, "DynamicEmbDump")
    with pytest.raises(AssertionError, match="DynamicEmbDump"):
        test_every_name_is_there_with_its_parameters_and_defaults("seed")


def test_what_all_says_is_there():
    modules = {module for module, *_ in listed("today")}
    for module in [*modules, "dynamicemb.optimizer", "dynamicemb.utils", "dynamicemb.key_value_table"]:
        its = module_of(module)
        assert all(hasattr(its, name) for name in its.__all__)


def test_options_are_given_by_keywords():
    with pytest.raises(TypeError, match="positional"):
        oneemb.dynamicemb.DynamicEmbTableOptions(3)
    assert all(one.kw_only for one in dataclasses.fields(oneemb.dynamicemb.DynamicEmbTableOptions))
