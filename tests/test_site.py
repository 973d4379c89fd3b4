"""The documentation site, as far as it can be tested without Sphinx."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def restructured():
    path = DOCS / "docstrings.py"
    spec = importlib.util.spec_from_file_location("docstrings", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda text: "\n".join(module.restructured(text.splitlines()))


def test_every_page_is_in_the_contents():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\{toctree\}(.*?)```", text, re.S)
    listed = {line for block in blocks for line in block.split()}
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages - listed == set()


def test_every_public_folder_has_its_pages():
    text = (DOCS / "api" / "index.rst").read_text(encoding="utf-8")
    folders = {
        f"keras_moe.{path.parent.name}"
        for path in (ROOT / "keras_moe").glob("*/__init__.py")
        if "__all__" in path.read_text(encoding="utf-8")
    }
    assert folders - set(text.split()) == set()


def test_tables_become_lists(restructured):
    table = "  | name | of |\n  |---|---|\n  | `a` | |\n  | b | c d |\nNext."
    assert restructured(table) == (
        "\n  .. list-table::\n     :header-rows: 1\n\n"
        "     * - name\n       - of\n     * - `a`\n       -\n"
        "     * - b\n       - c d\n\nNext."
    )
