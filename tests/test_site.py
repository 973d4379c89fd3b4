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


def test_code_becomes_a_block(restructured):
    assert restructured("So:\n\n```python\nx = 1\n\ny = 2\n```\nEnd.") == (
        "So:\n\n\n.. code-block:: python\n\n   x = 1\n\n   y = 2\n\nEnd."
    )


def test_names_that_share_a_description_come_on_one_line(restructured):
    text = "Args:\n    a, b,\n        c: arguments of others.\n    d: one, two,\n"
    assert restructured(text) == (
        "Args:\n    a, b, c: arguments of others.\n    d: one, two,"
    )


def test_a_letter_is_no_item_of_a_list(restructured):
    text = "Args:\n    num_experts: E.\n    size: S. The size.\n    name: Any one."
    assert restructured(text) == (
        "Args:\n    num_experts: \\E.\n    size: \\S. The size.\n    name: Any one."
    )
