"""The documents are built as a site, strictly, and the site needs no other host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).resolve().parents[2]


def build(folder, config="mkdocs.yml"):
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_loads_nothing_from_other_hosts(site):
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert not {found for page in pages for found in loaded.findall(page.read_text())}
    styles = [style.read_text() for style in site.rglob("*.css")]
    assert styles and not any(re.search(r"url\([\"']?(?:https?:)?//", style) for style in styles)


def test_each_public_name_has_an_entry(site):
    import oneemb

    text = "".join((site / "reference" / f"{page}.html").read_text() for page in ("api", "errors", "options"))
    named = set(re.findall(r"id=\"oneemb\.[\w.]*?(\w+)\"", text))
    others = {
        "StepCost",
        "Machine",
        "Plan",
        "PlannedEmbedding",
        "unique_share",
        "data",
        "make_table",
        "optim",
        "nn",
        "options",
        "policies",
        "sinks",
    }
    assert set(oneemb.__all__) - named <= others
    assert len(re.findall(r"<h2 id=\"oneemb-", (site / "reference" / "cli.html").read_text())) >= 10


def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    documents = tmp_path / "docs"
    documents.mkdir()
    (documents / "index.md").write_text("# Page\n\n[gone](gone.md)\n")
    config = ROOT.joinpath("mkdocs.yml").read_text()
    config = re.sub(r"^(nav|plugins|hooks):.*?(?=^\w|\Z)", "", config, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(config.replace("docs_dir: docs", f"docs_dir: {documents}"))
    done = build(tmp_path / "site", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0 and "gone.md" in done.stdout + done.stderr


def test_examples_of_docstrings_are_code(site):
    for page in (site / "reference").glob("*.html"):
        text = page.read_text()
        assert "<blockquote>" not in text and "&gt;&gt;&gt; " not in re.sub(
            r"<pre>.*?</pre>", "", text, flags=re.DOTALL
        )
