"""The documentation site, as far as it can be tested without Sphinx."""

import ast
import importlib.util
import json
import re

import pytest

from tests.forks import ROOT

DOCS = ROOT / "docs"


def module_of(name):
    """A module of the documentation, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def restructured():
    module = module_of("docstrings")
    return lambda text: "\n".join(module.restructured(text.splitlines()))


def test_every_page_and_public_folder_is_listed():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\{toctree\}(.*?)```", text, re.S)
    listed = {word.strip("<>") for block in blocks for word in block.split()}
    # The left column has the pages below others.
    tree = ast.parse((DOCS / "conf.py").read_text(encoding="utf-8"))
    (sections,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SECTIONS"
    )
    assert set(sections) <= listed
    listed |= {page for pages in sections.values() for page in pages}
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages - listed == set()
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


def test_guides_of_the_site_hide_what_is_no_code_of_the_library():
    module = module_of("notebooks")
    tags = set()
    for path in (ROOT / "guides").glob("*.ipynb"):
        guide = json.loads(path.read_text("utf-8"))
        pictures = sum("# Picture: " in "".join(x["source"]) for x in guide["cells"])
        guide = module.for_site(guide, path.name, "https://github.com/a/b/")
        code = [x for x in guide["cells"] if x["cell_type"] == "code"]
        assert code[0]["metadata"]["tags"] == ["remove-input"]
        assert not any("# Picture: " in "".join(x["source"]) for x in code)
        alternatives = [x for x in code if "mystnb" in x["metadata"]]
        assert len(alternatives) == pictures
        tags |= {tag for x in code for tag in x["metadata"]["tags"]}
        link = f"github/a/b/blob/main/guides/{path.name}"
        assert link in guide["cells"][0]["source"][-1]
    assert tags == {"remove-input", "hide-input"}
