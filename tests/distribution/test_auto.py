"""Models on 8 virtual devices: the numbers of one device, and what is sent."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from tests.forks import run_python

# Mesh sizes that the layouts promise: (expert parallel, model parallel).
SPLITS = {
    "data": (1, 1),
    "experts on the batch": (8, 1),
    "experts on their own": (2, 1),
    "model": (1, 8),
    "model and data": (1, 2),
    "model and experts": (4, 2),
    "all three": (2, 2),
}
# Every layout, and every kind of model with a layout that differs for it. Affinities
# and priorities are arithmetic within a group, which is whole on a device.
WITH_CAPACITY = ("expert choice, rematerialized", "einsum", "moe++")
CASES = [
    # All three at once splits in each way of the others, too.
    *itertools.product(
        ["token choice"], ["data", "model", "model and experts", "all three"]
    ),
    *itertools.product(WITH_CAPACITY, ["experts on the batch"]),
    ("soft", "experts on their own"),
    *itertools.product(["dropless"], ["data", "all three"]),
    ("whole batch", "experts on the batch"),
    ("mumoe", "model and data"),
    ("mixer", "all three"),
    ("clip", "experts on the batch"),
    ("limoe", "experts on the batch"),
]
PAIRS = ("clip", "limoe")
# With the number of images: those of the last batch of 16 are no multiple of 8.
EVALUATIONS = [
    ("capacity at inference", "all three", 18),
    ("capacity at inference", "all three", 19),
    ("limoe", "experts on the batch", 19),
]
# Why the arithmetic has no answer, by model.
WITHOUT_COSTS = {
    "whole batch": "whole groups on each device",
    "mumoe": "blocks of attention, MLPs and MoE layers",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of all cases, from one process."""
    dumps = tmp_path_factory.mktemp("dumps")
    script = Path(__file__).with_name("eight_devices.py")
    cases = [*CASES, ("large", "experts on the batch")]
    arguments = (script, dumps, json.dumps(cases), json.dumps(EVALUATIONS))
    done = run_python(*arguments, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 0, done.stderr[-4000:]
    line = done.stdout.splitlines()[-1].removeprefix("RESULTS ")
    by_case = {tuple(case): result for *case, result in json.loads(line)}
    by_case["stderr"] = done.stderr
    return by_case


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_is_that_of_one_device(results, case):
    result = results[case]
    assert result["loss"] < 1e-5
    assert result["gradients"] < 1e-5
    assert result["moved"] > 10


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_each_device_has_what_the_layout_promises(results, case):
    result = results[case]
    split = dict(zip(("experts", "model"), SPLITS[case[1]]))
    total = 0
    for weight in result["weights"]:
        assert weight["devices"] == 8
        size, shard = math.prod(weight["shape"]), math.prod(weight["shard"])
        assert shard * parts_of(weight["path"], **split) == size, weight
        total += 4 * shard
    assert result["bytes"] == total
    shards = {str(weight["shape"]): weight["shard"] for weight in result["weights"]}
    for slot in result["slots"]:
        assert shards[str(slot["shape"])] == slot["shard"]


def parts_of(path, experts, model):
    """Into how many parts a weight is cut, said another way than by patterns."""
    *_, layer, name = ["", "", *path.split("/")]
    parents = path.split("/")[:-1]
    if layer == "experts":
        return experts * (1 if name == "output_bias" else model)
    if "attention" in parents:
        return 1 if path.endswith("attention_output/bias") else model
    if "mlp" in parents or "token_mlp" in parents:
        return 1 if path.endswith("output/bias") else model
    return 1


@pytest.mark.parametrize(
    "case",
    [
        (model, layout)
        for model, layout in CASES
        if SPLITS[layout][0] > 1 and model != "whole batch"
    ],
    ids=" ".join,
)
def test_tokens_travel_and_experts_stay(results, case):
    sent = results[case]["collectives"]
    # There and back, and the same for the gradient. The batched tokens alone do: what
    # is gathered has no axis of size D = 16 or H = 32.
    assert "all-to-all" in sent
    gathered = sent.get("all-gather", [])
    # The loss compares all 16 pairs' embeddings of 4 numbers.
    gathered = [x for x in gathered if case[0] not in PAIRS or x != "f32[4,16]"]
    assert not [x for x in gathered if {"16]", "32]"} & {x.split(",")[-1]}]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_costs_on_paper_are_those_measured(results, case):
    model, layout = case
    costs = results[case]["costs"]
    if model in WITHOUT_COSTS:
        assert re.search(WITHOUT_COSTS[model], costs)
        return

    def size(arrays):
        return sum(
            4 * math.prod(array["shard"])
            for array in arrays
            if "seed_generator" not in array["path"]
        )

    assert costs["weights"] == costs["gradients"] == size(results[case]["weights"])
    assert costs["optimizer (momentum)"] == size(results[case]["slots"])
    # A device keeps its own part of what it sends.
    dealt = SPLITS[layout][0]
    if model == "dropless":
        # 4 tokens of an image and 2 choices of each, of D = 16 in float32. Buffers on
        # CPUs are larger than what is in them.
        choices = 16 // (8 // SPLITS[layout][1]) * 4 * 2
        sent = 4 * choices * 16 * 4 * (dealt - 1) // dealt
        assert costs["all-to-all (tokens)"] == sent
        return
    arrays = results[case]["collectives"].get("all-to-all", [])
    buffers = sum(
        4 * math.prod(map(int, re.findall(r"\d+", array.split("[")[1])))
        for array in arrays
    )
    assert costs["all-to-all (tokens)"] == buffers * (dealt - 1) // dealt


def test_no_part_is_made_whole(results):
    assert "rematerialization" not in results["stderr"]
    sent = results["whole batch", "experts on the batch"]["collectives"]
    kernels = {"f32[8,16,32]", "f32[8,32,16]"}
    assert not kernels & set(sent.get("all-gather", []))


def test_a_large_model_is_never_whole(results):
    result = results["large", "experts on the batch"]
    (kernel,) = (
        x for x in result["weights"] if x["path"].endswith("experts/hidden_kernel")
    )
    assert kernel["shape"] == [8, 256, 4096]
    assert kernel["shard"] == [1, 256, 4096]
    # The program that draws it, on each device.
    assert "f32[1,4096,256]" in result["made"]
    assert "f32[8,4096,256]" not in result["made"]


@pytest.mark.parametrize("case", EVALUATIONS, ids=lambda case: " ".join(map(str, case)))
def test_evaluation_is_that_of_one_device(results, case):
    result = results[case]
    if case == ("capacity at inference", "all three", 19):
        # The last image's group of two has a copy of it in it, which competes.
        assert max(result["logits"][:18]) < 1e-4
        return
    assert max(result["logits"]) < 1e-4
    assert max(result["figures"]) < 1e-5


def test_contrastive_losses_are_those_of_one_device(results):
    contrastive, _ = results[("losses",)]
    assert len(contrastive) == 4
    for case, result in contrastive.items():
        # Largest differences of the value and the gradients.
        assert len(result["differences"]) == 5, case
        assert all(difference < 1e-5 for difference in result["differences"]), case
        # A device has the logits of its own images, and of a chunk of texts alone.
        assert result["own_logits"], case
        assert result["others"] == [], case


def test_modalities_are_routed_as_on_one_device(results):
    _, result = results[("losses",)]
    # The value, the gradients of weights and tokens, and the tokens that are served.
    assert len(result["differences"]) == 1 + 5 + 1 + 1
    assert all(difference < 1e-5 for difference in result["differences"])
    # Each group fills most of its six experts' two slots.
    assert result["served"] > 8 * 6
    assert result["in_other_pools"] == 0


def test_rows_without_a_capacity_are_those_of_one_device(results):
    cases = results[("rows",)]
    fit = cases.pop("fit")
    # Two epochs, an evaluation, and predictions of a last batch that is not full.
    assert fit < 1e-5
    for name, result in cases.items():
        # The value, outputs, experts of each token, and gradients.
        assert len(result["differences"]) > 6, name
        assert max(result["differences"]) < 1e-5, name
        # Low-rank updates have no exchange: there every device runs all rows.
        assert bool(result["gathered"]) == (name == "low rank"), name
    rounds = {name: case["rounds"] for name, case in cases.items() if "rounds" in case}
    # 80 rows for one device that takes 16 at a time, and 40 for one that takes 16.
    assert (rounds["one expert"], rounds["one replica's"]) == (5, 3)
    assert "low rank" not in rounds
