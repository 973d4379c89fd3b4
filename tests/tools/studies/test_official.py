"""Training beside the official code, whose form golden numbers of it check."""

import keras
import numpy as np
import pytest
from rich.console import Console

from keras_moe import training
from tests import golden
from tests.compare import assert_close
from tests.flax_weights import flax_name
from tools.studies.experts import MODEL, Task
from tools.studies.study import Study

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="the code is JAX"),
]
# A batch of 32 images is four groups.
SMALL = {"num_layers": 2, "hidden_dim": 16, "num_heads": 2, "mlp_dim": 32}


@pytest.fixture
def task(tmp_path):
    recipe = training.Recipe(
        "tiny",
        data={"batch_size": 32, "augment": ["flip"]},
        model={**MODEL, **SMALL, "image_shape": [16, 16, 1], "patch_size": 4},
        optimizer={"weight_decay": 0.05},
        schedule={"steps": 50, "learning_rate": 4e-3, "warmup_steps": 0.1},
    )
    return Task(Study(tmp_path, {}, Console(width=100)), recipe, 32, 100)


@pytest.fixture
def official():
    # JAX may not be installed.
    from tools.studies import official_training

    return official_training


def official_settings(official, case):
    _, config = golden.load(case)
    model = config["model"]
    encoder, moe = model["encoder"], model["encoder"]["moe"]
    router = moe["router"]
    return official.Settings(
        (32, 32, 3),
        model["patch_size"][0],
        model["hidden_size"],
        *(encoder[x] for x in ("num_layers", "num_heads", "mlp_dim")),
        model["num_classes"],
        tuple(moe["layers"]),
        moe["num_experts"],
        router.get("num_selected_experts"),
        router.get("num_slots"),
        moe["group_size"] // 16,
        router.get("dispatcher", {}).get("capacity_factor", 0.0),
        class_token=model["classifier"] == "token",
    )


@pytest.mark.parametrize("case", ["vmoe_k1_gap_vanilla_drops", "soft_moe_vit_gap"])
def test_the_official_form_has_the_losses_and_gradients_of_the_official_code(
    official, case
):
    import jax

    from tools.studies import official_models

    arrays, _ = golden.load(f"06_vmoe_models/{case}")
    own = official_settings(official, f"06_vmoe_models/{case}")
    # Paths and shapes are those of its initial weights.
    names = {path: flax_name(path) for path in official_models.initial_weights(own, 0)}
    weights = {path: arrays[f"params/{name}"] for path, name in names.items()}
    labels = np.eye(own.num_classes, dtype="float32")[arrays["inputs/labels"]]
    loss = jax.jit(jax.value_and_grad(official_models.loss), static_argnums=3)
    value, gradients = loss(weights, arrays["inputs/images"], labels, own)
    assert_close(value, arrays["outputs/total_loss"], 1e-5)
    # Of the total loss only some gradients are stored; Soft MoE has no other loss.
    kind = "total_loss" if "vmoe" in case else "softmax_xent"
    stored = golden.part(arrays, f"grads/{kind}/params/")
    assert stored
    for path, name in names.items():
        if name in stored:
            assert_close(gradients[path], stored[name], 1e-3, 1e-5, err_msg=path)


@pytest.mark.parametrize("label", ["V-MoE, K=2", "Soft MoE"])
def test_both_codes_draw_the_same_kinds_of_initial_weights(task, official, label):
    own = official.models_of(task)[label]._replace(hidden_dim=64, mlp_dim=128)
    overrides = official.our_model(own).overrides
    model = task.recipe_of(overrides, 0).new_model(own.num_classes)
    ours = official.values_by_path(model)
    theirs = official.initial_weights(own, 0)
    assert {k: v.shape for k, v in ours.items()} == {
        k: v.shape for k, v in theirs.items()
    }
    for path, value in ours.items():
        other = np.asarray(theirs[path])
        # Experts start alike, and are one draw; constants are equal.
        count = len(np.unique(value))
        assert_close(count, len(np.unique(other)), 0.01, err_msg=path)
        # Five standard errors of the difference.
        limit = 5 / np.sqrt(count)
        assert_close(value.std(), other.std(), limit, err_msg=path)
        assert abs(value.mean() - other.mean()) <= limit * other.std() * 2**0.5, path


# LayerNorm's epsilon of 1e-5, no auxiliary loss, no weight decay or no clipping change
# a loss by 3e-2, and optax's epsilon does.
@pytest.mark.parametrize("selected", [1, 2])
def test_50_steps_from_our_weights_have_the_losses_of_the_official_code(
    task, official, selected
):
    own = official.models_of(task)[f"V-MoE, K={selected}"]
    batches = task.load_augmented(0, repeat=True, one_hot=True)
    # Rounded up there are 0.7 slots a choice, so that tokens are dropped.
    own = own._replace(noise_std=0.0, capacity_factor=0.6)
    losses = official.steps_of_both(own, task.recipe, batches)
    assert losses["ours"][-1] < 0.9 * losses["ours"][0]
    assert official.largest_difference(losses, "official") < 1e-4
    assert official.largest_difference(losses, "optax") > 1e-3


def test_steps_with_the_same_noise_have_the_same_losses(task, official):
    own = official.models_of(task)["V-MoE, K=2"]
    batches = task.load_augmented(0, repeat=True, one_hot=True)
    # A rounding of the noise grows to 1e-3 in 50 steps, in either code.
    recipe = task.recipe.replace(**{"schedule.steps": 10})
    losses = official.steps_of_both(own, recipe, batches)
    assert official.largest_difference(losses, "official") < 1e-5


def test_the_part_compares_curves_accuracies_and_steps(task, official):
    task.recipe = task.recipe.replace(**{"schedule.epochs": 2})
    models = {"Soft MoE": official.models_of(task)["Soft MoE"]}
    part = official.Official(task.study, task, models, seeds=1)
    results = part.results()
    (row,) = results.values()
    assert row["steps"]["official"] < 1e-4
    for code in ("ours", "official"):
        first, last = (x["mean"] for x in row["curves"][code])
        assert last < first < 2.31
        assert 0 < row["accuracy"][code]["mean"] < 1
    with task.study.console.capture() as shown:
        part.show(results, task.study.console)
    assert "training loss, epoch 2" in shown.get()
