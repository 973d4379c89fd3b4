"""The arithmetic of training as a command."""

import pytest

from keras_moe import distribution, training

FOUND = distribution.CompiledCosts(
    "vmoe_b16", "v5e:2x2", 4, "train", 64, {"weights": 2**30}, 2**34, 2e12, 1e12,
    {"experts": 0.25, "collectives": 0.75}, 0.5, {"all-to-all": (4, 1e9)},
    [{"part": "experts", "operation": "moe/dot", "source": None, "runs": 32,
      "seconds": 1}],
    2, {"rematerialize": True}, 9.0, 3,
)  # fmt: skip
HUGE = ("vmoe_h14", "--devices", 256, "--batch-size", 4096)


def test_a_layout(done):
    output = done(
        "estimate", *HUGE, "--expert-parallel", 32, "--optimizer", "adafactor",
        "--num-classes", 9, "--utilization", 0.5, "--set", "rematerialize=true",
    )  # fmt: skip
    expected = distribution.costs(
        "vmoe_h14", 256, 4096, "tpu_v4", 32, optimizer="adafactor", utilization=0.5,
        num_classes=9, rematerialize=True,
    )  # fmt: skip
    assert f"{expected.memory_bytes / 2**30:.2f}" in output
    assert f"{expected.traffic['all-to-all (tokens)'] / 1e9:,.3f} GB" in output
    assert "(fits)" in output
    assert "50% of peak" in output


def few_blocks(expert_parallel):
    return distribution.costs(
        "vmoe_h14", 256, 4096, expert_parallel=expert_parallel, num_layers=4
    )


def test_the_chosen_layout_and_all_others(tables_and_json):
    output, values = tables_and_json("estimate", *HUGE, "--set", "num_layers=4")
    rows = output.split("memory of a device")[0]
    for parallel in (1, 2, 4, 8, 16, 32):
        assert f"{few_blocks(parallel).memory_bytes / 2**30:.1f}" in rows
    assert "experts over 32" in output
    assert list(values["layouts"]) == ["1", "2", "4", "8", "16", "32"]
    expected = few_blocks(32)
    assert values["costs"] == values["layouts"]["32"]
    assert values["costs"]["memory"] == expected.memory
    assert values["costs"]["memory_bytes"] == expected.memory_bytes
    assert values["costs"]["step_seconds"] == list(expected.step_seconds)
    assert values["costs"]["chip"]["name"] == "tpu_v4"


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the compiler, which finds the same each time."""
    asked = []

    def compiled_costs(*arguments, **options):
        asked.append((arguments, options))
        return FOUND

    monkeypatch.setattr(distribution, "compiled_costs", compiled_costs)
    return asked


def test_what_the_compiler_finds(tables_and_json, asked):
    output, values = tables_and_json(
        "estimate", "vmoe_b16", "--compile", "v5e:2x2", "--batch-size", 64, "--fit",
        "--model-parallel", 2, "--set", "num_layers=2",
    )  # fmt: skip
    options = {"dtype": "mixed_bfloat16", "num_classes": None, "fit": True}
    options["num_layers"] = 2
    assert asked == [(("vmoe_b16", "v5e:2x2", 64, "train", None, 2), options)]
    for text in ("1.00", "250.00", "25%", "750.00", "50%", "moe/dot"):
        assert text in output
    for text in ("2 grouped", "3 loops", "rematerialize=True"):
        assert text in output
    assert values["memory_bytes"] == 2**30
    assert values["step_seconds"] == [0.75, 1.0]


def test_a_recipe_sets_the_arguments(tables_and_json, asked):
    recipe = ("--recipe", "vmoe_digits", "--set", "num_layers=2")
    _, values = tables_and_json("estimate", *recipe, "--devices", 4)
    settings = training.load_recipe("vmoe_digits", **{"model.num_layers": 2})
    batch = settings.data.batch_size // settings.optimizer.gradient_accumulation_steps
    expected = distribution.costs(
        "vmoe_digits", 4, batch, optimizer="adafactor", num_classes=10, dtype="float32",
        expert_parallel=4, **settings.model.overrides,
        load_weights=settings.model.load_weights,
    )  # fmt: skip
    assert values["costs"]["memory"] == expected.memory
    tables_and_json("estimate", *recipe, "--compile", "v5e:1x1", "--batch-size", 4)
    (model, *arguments), options = asked[0]
    assert arguments == ["v5e:1x1", 4, "train", None, 1]
    assert options == {"fit": False}
    assert model.backbone.get_config()["num_layers"] == 2
    assert model.optimizer.name == "vitg_adafactor"
