"""The page from papers to code: its names and its tests exist."""

import importlib
import re

import pytest

from keras_moe import models, training
from keras_moe.report.sections import SECTIONS
from tests.forks import ROOT

PAGE = (ROOT / "docs" / "paper_to_code.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| in the paper", "|---"))
]


def code(cell: str) -> list[str]:
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_rows_are_whole_and_their_names_tests_and_sections_exist():
    assert len(ROWS) > 50
    assert [row for row in ROWS if len(row) != 4 or "" in row] == []
    for _, names, _, differences in ROWS:
        for name in code(names) + code(differences):
            if re.fullmatch(r"(\w+\.)+\w+", name):
                *modules, last = name.split(".")
                module = importlib.import_module(".".join(["keras_moe", *modules]))
                assert hasattr(module, last), name
    for row in ROWS:
        assert all((ROOT / path).exists() for path in code(row[2])), row
        assert code(row[2]) or row[3].startswith("not made here: "), row
    titles = {section.title for section in SECTIONS}
    named = [x for _, names, *_ in ROWS for x in re.findall(r'"([A-Z][^"]+)"', names)]
    assert len(named) > 5
    assert [title for title in named if title not in titles] == []


@pytest.mark.parametrize(
    ("kind", "known"),
    [("preset", models.list_presets()), ("recipe", training.list_recipes())],
)
def test_every_preset_and_recipe_exists(kind, known):
    for _, names, _, _ in ROWS:
        if match := re.match(rf"{kind}s? ((?:`\w+\*?`(?:, | to )?)+)", names):
            for name in code(match.group(1)):
                pattern = re.compile(name.replace("*", r"\w+"))
                assert any(pattern.fullmatch(x) for x in known), name
