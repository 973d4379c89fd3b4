import json
import re
from pathlib import Path

import pytest

from keras_moe import models
from keras_moe.checks import argument_names
from keras_moe.models.overrides import override_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def describe(program):
    return lambda *arguments: program("describe", *arguments)


def test_json_is_what_the_function_says(describe):
    status, output, _ = describe(
        "vmoe_b32", "--num-classes", 10, "--json",
        "--set", "num_experts=4", "image_shape=[64,64,3]",
    )  # fmt: skip
    expected = models.describe(
        "vmoe_b32", num_classes=10, num_experts=4, image_shape=(64, 64, 3)
    )
    assert status == 0
    assert json.loads(output) == expected.to_dict()


@pytest.fixture(scope="module")
def listed(tables_and_json):
    """The table of all presets, and its rows by name."""
    table, rows = tables_and_json("describe", "--list")
    return table, {row["name"]: row for row in rows}


def test_tables(describe, listed):
    assert f"{models.describe('vmoe_b32').parameters:,}" in describe("vmoe_b32").output
    assert "vmoe_h14" in listed[0]


def test_the_list_as_json(listed):
    _, rows = listed
    assert {name: row["description"] for name, row in rows.items()} == (
        models.list_presets()
    )
    expected = models.describe("vmoe_b32")
    assert rows["vmoe_b32"]["parameters"] == expected.parameters
    assert rows["vmoe_b32"]["gflops"] == expected.gflops


def test_arguments_of_the_model_alone_are_suggested(mistake):
    backbone, task = models.ViTBackbone, models.ViTImageClassifier
    arguments = {*override_names(backbone), *argument_names(task)} - {"backbone"}
    arguments |= {"name", "trainable", "compile"}
    for wrong in ("nope=1", "backbone=3"):
        errors = mistake("describe", "vmoe_b32", "--set", wrong)
        suggested = re.search(r"\((?:nearest|known): (.*)\)", errors).group(1)
        assert set(suggested.split(", ")) <= arguments


def test_the_table_of_the_zoo_is_true(listed):
    zoo = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", zoo, re.M))
    assert set(rows) == set(models.list_presets())
    for name, row in rows.items():
        costs = listed[1][name]
        assert row == (
            f"{costs['parameters'] / 1e6:,.1f}M | "
            f"{costs['active_parameters'] / 1e6:,.1f}M | {costs['gflops']:,.2f}"
        )
