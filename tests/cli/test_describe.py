import re
from pathlib import Path

import pytest

from keras_moe import models

ROOT = Path(__file__).resolve().parents[2]


def test_table_and_json_are_what_the_function_says(tables_and_json):
    table, values = tables_and_json(
        "describe", "vmoe_b32", "--num-classes", 10,
        "--set", "num_experts=4", "image_shape=[64,64,3]",
    )  # fmt: skip
    expected = models.describe(
        "vmoe_b32", num_classes=10, num_experts=4, image_shape=(64, 64, 3)
    )
    assert values == expected.to_dict()
    assert f"{expected.parameters:,}" in table


@pytest.fixture(scope="module")
def listed(tables_and_json):
    """The table of all presets, and its rows by name."""
    table, rows = tables_and_json("describe", "--list")
    return table, {row["name"]: row for row in rows}


def test_the_list_and_the_table_of_the_zoo(listed):
    table, rows = listed
    assert "vmoe_h14" in table
    assert {name: row["description"] for name, row in rows.items()} == (
        models.list_presets()
    )
    expected = models.describe("vmoe_b32")
    assert rows["vmoe_b32"]["parameters"] == expected.parameters
    assert rows["vmoe_b32"]["gflops"] == expected.gflops
    zoo = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", zoo, re.M))
    assert set(rows) == set(models.list_presets())
    for name, row in rows.items():
        costs = listed[1][name]
        assert row == (
            f"{costs['parameters'] / 1e6:,.1f}M | "
            f"{costs['active_parameters'] / 1e6:,.1f}M | {costs['gflops']:,.2f}"
        )


def test_a_part_of_the_list(tables_and_json):
    _, rows = tables_and_json("describe", "--list", "*_digits")
    names = ["moepp_digits", "mumoe_digits", "vmoe_digits"]
    assert [row["name"] for row in rows] == names == [*models.list_presets("_digits")]
    assert not models.list_presets("_digits", trained=False)
    trained = {*names, "limoe_emoji", "moepp_lm_python", "vmoe_fashion"}
    assert trained == {*models.list_presets(trained=True)}
