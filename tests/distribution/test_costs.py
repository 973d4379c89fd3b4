"""The arithmetic of training: counts by hand, and XLA's own account."""

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.distribution import CHIPS, Chip, costs
from keras_moe.distribution.chips import torus_sides
from tests import pair_models
from tests.refusals import refuses

# 9 tokens and a class token; 2 experts of 2 for each token, groups of 2 images.
SMALL = {**pair_models.IMAGE, **pair_models.ONE, "image_shape": (12, 12, 3)}
SMALL |= {"num_experts": 4, "num_selected_experts": 2, "examples_per_group": 2}
SMALL |= {"capacity_factor": 1.0, "capacity_multiple_of": None}


DROPLESS = {"dropless": True, "capacity_factor": None, "capacity_multiple_of": None}


def small(*arguments, **options):
    return costs("vit_s16", *arguments, **{**SMALL, **options})


def test_counts_by_hand():
    chip = Chip("one", 1e9, 1e6, 1e9, 2, 1e6, 0, "made up")
    actual = small(4, 8, chip, model_parallel=1, utilization=0.5)
    model = models.describe("vit_s16", **SMALL)
    # Kernels and biases of 4 experts: 3 are elsewhere.
    expert = 2 * 8 * 16 + 16 + 8
    assert actual.parameters == model.parameters
    assert actual.device_parameters == model.parameters - 3 * expert
    assert actual.memory["weights"] == 4 * actual.device_parameters
    assert actual.memory["optimizer (adam)"] == 8 * actual.device_parameters
    # One group of 20 tokens: 4 experts of 10 slots, in bfloat16, there and back, twice.
    assert actual.traffic["all-to-all (tokens)"] == 4 * (40 * 8 * 2) * 3 // 4
    # The router and two norms are float32, all else bfloat16.
    shared = 2 * (model.parameters - 4 * expert) + 2 * (8 * 4 + 4 * 8)
    assert actual.traffic["all-reduce (gradients)"] == shared * 2 * 3 // 4
    assert actual.traffic["all-reduce (heads, hidden units)"] == 0
    assert actual.flops == 3 * sum(part.flops for part in model.parts) * 2
    assert actual.seconds["compute"] == actual.flops / 0.5e9
    sending = sum(actual.traffic.values()) / 2e6
    np.testing.assert_allclose(
        actual.step_seconds,
        (max(actual.seconds["compute"], sending), actual.seconds["compute"] + sending),
    )
    assert actual.fits
    assert not small(4, 8, chip._replace(memory=1e3)).fits


def test_layouts_change_what_they_should():
    data, experts = small(4, 8, expert_parallel=1), small(4, 8, expert_parallel=2)
    assert data.traffic["all-to-all (tokens)"] == 0
    assert data.device_parameters == data.parameters
    # Gradients of experts are summed over the two devices that have the same.
    sums = [x.traffic["all-reduce (gradients)"] for x in (experts, data)]
    assert 0 < sums[0] < sums[1]
    heads = small(4, 8, expert_parallel=1, model_parallel=2)
    # (10 tokens + 10 slots per image) of D = 8 in bfloat16, forward and backward.
    assert heads.traffic["all-reduce (heads, hidden units)"] == 2 * 4 * (
        (10 + 20) * 8 * 2
    )
    again = small(4, 8, rematerialize=True)
    kept = small(4, 8)
    # The inputs of the one block of 2 images beside all that it keeps.
    assert again.memory["activations"] == kept.memory["activations"] + 2 * 10 * 8 * 2
    assert again.flops > kept.flops
    ratio = again.traffic["all-to-all (tokens)"] / kept.traffic["all-to-all (tokens)"]
    assert ratio == 1.5


def test_rows_without_a_capacity():
    # 4 devices with 2 images of 10 tokens each and 2 choices of a token: 40 rows, and
    # room for 56.
    limited, dropless = small(4, 8), small(4, 8, **DROPLESS)
    name = "all-to-all (tokens)"
    assert dropless.traffic[name] == limited.traffic[name] == 4 * (40 * 8 * 2) * 3 // 4
    # 2.5 numbers of D = 8, and one of each of 16 hidden units, in bfloat16.
    more = dropless.memory["activations"] - limited.memory["activations"]
    assert more == (56 - 40) * (2.5 * 8 + 16) * 2
    # Groups need not be whole.
    three = small(4, 8, **DROPLESS, examples_per_group=3)
    assert three.traffic == dropless.traffic
    one = small(1, 8, **DROPLESS)
    assert one.memory["activations"] == small(1, 8).memory["activations"]


def test_optimizers_and_text():
    def state(optimizer):
        estimate = costs("vit_s16", 1, 8, optimizer=optimizer, num_layers=1)
        return estimate.memory[f"optimizer ({optimizer})"], estimate.parameters

    (none, size), (adam, _), (adafactor, _) = map(state, ("sgd", "adam", "adafactor"))
    assert (none, adam) == (0, 8 * size)
    # Two bytes, and sums of rows and columns.
    assert 2 * size < adafactor < 4 * size
    without, with_text = small(4, 8), small(4, 8, text_tokens=5)
    # Groups of 2 x 15 tokens in the place of 2 x 10.
    assert with_text.traffic["all-to-all (tokens)"] == (
        without.traffic["all-to-all (tokens)"] * 3 // 2
    )
    assert without.flops < with_text.flops < 1.5 * without.flops
    assert with_text.parameters == without.parameters


def test_pairs():
    """One tower costs what a ViT with texts costs, and two what both do."""
    text = {"vocabulary_size": 20, "max_length": 5}
    one = {**SMALL, **text, "projection_dim": 4, "auxiliary_losses": None}
    limoe = costs("limoe_s32", 4, 8, **one)
    image = small(4, 8, class_token=False, text_tokens=5)
    for name in ("all-to-all (tokens)", "all-reduce (heads, hidden units)"):
        assert limoe.traffic[name] == image.traffic[name]
    assert limoe.memory["activations"] == image.memory["activations"]
    model = models.describe("limoe_s32", **one)
    assert limoe.flops == 3 * sum(part.flops for part in model.parts) * 2

    blocks = {k: x for k, x in SMALL.items() if k not in ("image_shape", "patch_size")}
    of_text = {**blocks, "hidden_dim": 4, "mlp_dim": 6, **text}
    clip = {"image": SMALL, "text": of_text, "projection_dim": 4}
    clip = costs("clip_b32", 4, 8, **clip)
    towers = small(4, 8), costs(models.TextBackbone.from_config(of_text), 4, 8)
    assert clip.memory["activations"] == sum(x.memory["activations"] for x in towers)
    name = "all-to-all (tokens)"
    assert clip.traffic[name] == sum(tower.traffic[name] for tower in towers)
    rest = clip.parameters - sum(tower.parameters for tower in towers)
    assert clip.device_parameters == rest + sum(x.device_parameters for x in towers)
    refuses("text_tokens=5", costs, "limoe_s32", 4, 8, **one, text_tokens=5)


def test_a_torus_passes_data_on():
    assert torus_sides(24, 3) == (2, 3, 4)
    assert torus_sides(7, 2) == (1, 7)
    chip = CHIPS["tpu_v4"]
    # Half of a ring of 16 sends half of its data over the two cuts, each way.
    ring = chip._replace(torus=1, links=2)
    crossing = 8 / 2
    assert ring.all_to_all_bandwidth(16) == 2 * chip.link_bandwidth / crossing
    # Part of a longer ring is a line, with one cut.
    assert ring.all_to_all_bandwidth(16, 64) == chip.link_bandwidth / crossing
    assert chip.all_to_all_bandwidth(2) <= chip.bandwidth
    # A v5e of 8x8 has no links from its end to its beginning, one of 16x16 does.
    flat = CHIPS["tpu_v5e"]
    assert flat.all_to_all_bandwidth(64) == flat.all_to_all_bandwidth(256)
    assert CHIPS["h200"].all_to_all_bandwidth(8) == CHIPS["h200"].bandwidth


@pytest.mark.parametrize(("arguments", "options", "message"), [
    ((4, 8, "tpu_v9"), {}, "'tpu_v9'"),
    ((4, 9), {}, "such as 12; received: batch_size=9"),
    ((4, 4), {}, "batch_size=8 or examples_per_group=1; received: batch_size=4, 1"),
    ((4, 8), {"examples_per_group": None}, "such as by examples_per_group=2;"),
    ((8, 16, "h200", 8), {}, r"parallel=8, num_experts=\[4\]"),
    ((4, 8), {"optimizer": "lion"}, "'lion'"),
    ((4, 8), {"utilization": 0}, "utilization=0"),
    ((4, 8), {**DROPLESS, "expert_dropout": 0.1}, "runs all rows"),
    ((4, 8), {"router": "mumoe", "num_selected_experts": None}, "MuMoE"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, options, message):
    refuses(message, small, *arguments, **options)


@pytest.mark.every_backend
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="XLA's account")
def test_memory_is_what_xla_says():
    import jax

    arguments = {"image_shape": (64, 64, 3), "patch_size": 8, "hidden_dim": 64}
    arguments |= {"num_layers": 2, "num_heads": 4, "mlp_dim": 256, "num_experts": 8}
    arguments |= {"moe_layers": "every_2", "num_selected_experts": 1}
    arguments["examples_per_group"] = 4
    model = models.from_preset("vit_s16", num_classes=10, **arguments)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def loss(trainable, state, images):
        logits, state, losses = model.stateless_call(
            trainable, state, images, training=True, return_losses=True
        )
        return keras.ops.mean(logits**2) + sum(losses), state

    def step(trainable, state, slots, images):
        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(
            trainable, state, images
        )
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return value, trainable, state, slots

    held = (model.trainable_variables, model.non_trainable_variables)
    held = [
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        for variables in (*held, optimizer.variables)
    ]
    images = jax.ShapeDtypeStruct((16, *arguments["image_shape"]), "float32")
    program = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*held, images)
    actual = program.compile().memory_analysis()
    mine = costs("vit_s16", 1, 16, dtype="float32", num_classes=10, **arguments)
    kept = mine.memory["weights"] + mine.memory["optimizer (adam)"]
    expected = actual.argument_size_in_bytes - 4 * np.prod(images.shape)
    np.testing.assert_allclose(kept, expected, rtol=1e-3)
    # XLA's peak follows from its own order of operations.
    used = mine.memory["gradients"] + mine.memory["activations"]
    np.testing.assert_allclose(used, actual.temp_size_in_bytes, rtol=0.15)
