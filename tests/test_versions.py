"""The command that runs a core of the suite with other packages: what it runs, and the table that it writes."""

import configparser
from pathlib import Path

from tests.versions import CORE, PACKAGES, PYTHONS, Outcome, filled

ROOT = Path(__file__).parent.parent

PAGE = """# Install

<!-- versions -->

| Python | packages | torch | numba | numpy | installs from | tests of the core |
| --- | --- | --- | --- | --- | --- | --- |
| 3.12 | newest | 2.14.0 | 0.68.0 | 2.5.0 | wheel | 10 passed |
| 3.11 | oldest | 2.8.0 | 0.61.0 | 1.26.0 | | 9 passed |

<!-- end of versions -->

## CPU
"""


def test_a_table_has_the_rows_that_were_run_and_keeps_the_others():
    versions = {"torch": "2.9.0", "numba": "0.61.0", "numpy": "1.26.0"}
    ran = Outcome("3.11", "oldest", versions, "==== 12 passed, 3 skipped in 4.20s (0:00:04) ====", True, "wheel, sdist")
    page = filled(PAGE, [ran, Outcome("3.13", "newest", {}, "No matching distribution", passed=False)])
    assert page.split("\n")[4:10] == [
        "| Python | packages | torch | numba | numpy | installs from | tests of the core |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 3.11 | oldest | 2.9.0 | 0.61.0 | 1.26.0 | wheel, sdist | 12 passed, 3 skipped |",
        "| 3.12 | newest | 2.14.0 | 0.68.0 | 2.5.0 | wheel | 10 passed |",
        "| 3.13 | newest |  |  |  |  | not installed |",
        "",
    ]
    assert page.endswith("\n\n<!-- end of versions -->\n\n## CPU\n")
    assert filled(page, [ran]) == page
    ran.said = ""  # Archives were installed, and no test of the core ran.
    assert filled(page, [ran]) == page


def test_the_oldest_packages_are_those_that_the_install_accepts_and_the_core_is_there():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = config["options"]["install_requires"].split("\n")
    least = {
        line.split(">=")[0].strip(): line.split(">=")[1].split(",")[0].strip() for line in required if ">=" in line
    }
    assert least.keys() <= PACKAGES["oldest"]["3.11"].keys()
    for name, version in least.items():
        assert f"{PACKAGES['oldest']['3.11'][name]}.".startswith(f"{version}."), name
    classifiers = config["metadata"]["classifiers"]
    assert all(f"Python :: {python}" in classifiers for python in PYTHONS)
    assert all((ROOT / test).exists() for test in CORE)
