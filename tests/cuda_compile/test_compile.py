"""Every CUDA loop compiles for sm_80 and sm_90, with no spill and no stack, and no worse than resources.json says.

One form of each loop for sm_90 is compiled by `make test`, all for both by `make test-slow`.

After a change that is worth more registers: ONEEMB_TEST_COMPILE=1 python -m tests.cuda_compile.write_resources
"""

import json
import re
from pathlib import Path

import pytest

from oneemb.kernels import jit_cuda
from tests.cuda.loops import all_loops
from tests.cuda_compile.ptx import TARGETS, measure, ptxas
from tests.cuda_compile.signatures import CASES, OF_ADAM

RESOURCES = json.loads((Path(__file__).parent / "resources.json").read_text())
for kept in RESOURCES.values():  # An update that has no line of its own is held to Adam's.
    kept.update({name: kept[like] for name, like in OF_ADAM.items() if name not in kept})

# Loops that read cells of an index, of 16 bytes each, and no rows.
OF_CELLS = "acquire", "erase", "find"

# ptxas of another version may need some registers more for the same code.
REGISTERS_SLACK = 8

# A load or store that has to find out at run time which memory an address is of.
GENERIC = re.compile(r"(?m)^.*\b(?:ld|st)(?:\.volatile)?(?:\.v[248])?\.[bfsu]\d+\b.*$")
PRODUCTS_OF_32_BITS = re.compile(r"(?m)^\s*(?:mul|mad)\.lo\.[su]32.*$")


def one_form_of_each_loop():
    """A name in CASES for each loop and optimizer, in another form (dtype, width, fused) from loop to loop."""
    forms = {}
    for name in CASES:
        loop = re.sub(r"^fused(, scaled)? | (float32|float16|bfloat16)( x\d)?$", "", name)
        forms.setdefault(loop, []).append(name)
    return {names[n % len(names)] for n, names in enumerate(forms.values())}


QUICK = one_form_of_each_loop()
TARGETS_OF_CASES = [
    pytest.param(
        name, target, id=f"{name}-sm_{target[0]}{target[1]}",
        marks=() if name in QUICK and target == TARGETS[-1] else pytest.mark.slow,
    )
    for name in CASES for target in TARGETS
]  # fmt: skip


@pytest.mark.parametrize("name, target", TARGETS_OF_CASES)
def test_a_loop_compiles_and_is_no_worse(name, target):
    loop, signature = CASES[name]
    ptx, found = measure(loop, signature, target)
    kept = RESOURCES[f"sm_{target[0]}{target[1]}"][name]
    assert f".target sm_{target[0]}{target[1]}" in ptx
    # Those there are stand in the libraries' own pow, log and the like.
    assert found["merged"] <= kept["merged"], "a product is merged into a sum: bits differ from the CPU's"
    assert ".local " not in ptx, "a vector lies in memory, not in registers"
    assert found["wide"] >= min(1, kept["wide"]), "no access of 16 bytes is left"
    assert not GENERIC.search(ptx), "an array is not known to be in global memory"
    # A slab may hold more than 2^31 elements. Loops that begin new rows multiply words of 32 bits in Philox.
    assert name.startswith(("init", "admit")) or not PRODUCTS_OF_32_BITS.search(ptx), "a place is a product of 32 bits"
    if ptxas() is not None:
        assert found["spills"] == found["stack"] == 0
        assert found["registers"] <= kept["registers"] + REGISTERS_SLACK, f"{found['registers']} registers"


def test_vector_forms_move_16_bytes_at_a_time():
    for name in CASES:
        wide = RESOURCES["sm_90"][name]["wide"]
        if name in OF_CELLS or name.endswith((" x4", " x8")) or name.startswith(("copy", "look up")):
            assert wide > 0, name
        elif name.endswith(" x1"):
            assert wide == 0, name


def test_only_powers_of_float32_hold_merged_products():
    for name, row in RESOURCES["sm_90"].items():
        assert (row["merged"] > 0) == ("another power" in name), name


def test_a_launched_loop_is_compiled_without_link_time_optimization():
    # The linker contracts products with sums in LTO-IR, whatever libNVVM was told.
    loop, _ = CASES["adagrad float32 x4"]
    assert jit_cuda.kernel_of(loop).targetoptions["lto"] is False


@pytest.mark.parametrize("name", ["adagrad float32 x4", "sgd float32 x1"])
def test_products_and_sums_say_that_they_are_rounded(name):
    # ptxas merges a `mul.f32` into an `add.f32`, and no `mul.rn.f32`.
    loop, signature = CASES[name]
    assert not re.search(r"\b(?:mul|add|sub)\.f32", jit_cuda.compile_ptx(loop, signature, (9, 0)))


def test_every_loop_is_compiled():
    compiled = {CASES[name][0].function for name in QUICK}
    missing = [name for name, loop in all_loops().items() if not loop.inner and loop.function not in compiled]
    assert not missing
    forms = {form for name in QUICK for form in re.findall("^fused, scaled|^fused|b?float16|float32|x[148]", name)}
    assert forms == {"fused, scaled", "fused", "float32", "float16", "bfloat16", "x1", "x4", "x8"}


def test_resources_are_those_of_the_cases_there_are():
    assert all(set(kept) == set(CASES) for kept in RESOURCES.values())
