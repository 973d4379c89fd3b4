"""Whole ViT and V-MoE models against the numbers of the reference implementation."""

import functools

import keras
import pytest

from keras_moe.models import ViTBackbone, ViTImageClassifier
from tests import golden
from tests.compare import assert_close, assert_same
from tests.flax_weights import assign_flax_weights, flax_name
from tests.training_gradients import training_gradients

CASES = golden.cases("06_vmoe_models/*")
# The reference's auxiliary loss of these routers is zero.
NO_LOSS = ("soft", "expert_choice")
POOLINGS = {"token": "class_token", "gap": "average", "map": "map"}


def router_arguments(router):
    """The backbone's arguments for the reference's router."""
    if "num_slots" in router:
        return {"router": "soft", "num_slots": router["num_slots"]}
    # The reference evaluates in the groups of training, with their capacity.
    arguments = {"capacity_multiple_of": 4, "evaluation": "official"}
    arguments["capacity_factor"] = router["dispatcher"]["capacity_factor"]
    selected = router.get("num_selected_experts")
    if selected is None:
        choice = {"router": "softmax_expert_choice", "num_selected_experts": 1}
        return arguments | choice
    priority = "max_gate" if router["dispatcher"]["batch_priority"] else "first_come"
    return arguments | {"num_selected_experts": selected, "priority": priority}


def build(case, auxiliary_losses, dispatcher="index", noise_std=0.0):
    arrays, config = golden.load(case)
    model = config["model"]
    encoder = model["encoder"]
    moe = encoder.get("moe")
    kwargs = {}
    if moe:
        num_tokens = 16 + (model["classifier"] == "token")
        kwargs = {
            "moe_layers": moe["layers"],
            "num_experts": moe["num_experts"],
            "examples_per_group": moe["group_size"] // num_tokens,
            "noise_std": noise_std,
            "dispatcher": dispatcher,
            **router_arguments(moe["router"]),
        }
    fields = {
        "image_shape": (32, 32, 3), "patch_size": tuple(model["patch_size"]),
        "hidden_dim": model["hidden_size"],
        **{x: encoder[x] for x in ("num_layers", "num_heads", "mlp_dim")},
        "class_token": model["classifier"] == "token",
        "auxiliary_losses": auxiliary_losses, **kwargs,
    }  # fmt: skip
    classifier = ViTImageClassifier(
        ViTBackbone.from_config(fields),
        model["num_classes"],
        pooling=POOLINGS[model["classifier"]],
    )
    assign_flax_weights(classifier, arrays)
    return classifier, arrays, config


# A mixture of each side of the choice is enough where only Keras's operations differ.
OF_EACH_BACKEND = ("vmoe_k2_token_cap05_bpr_drops", "vmoe_expert_choice_gap")


@pytest.mark.parametrize(
    ("case", "dispatcher"),
    [
        pytest.param(
            case,
            "index",
            marks=[pytest.mark.every_backend] if case.endswith(OF_EACH_BACKEND) else [],
        )
        for case in CASES
    ]
    + [(case, "einsum") for case in CASES if "drops" in case],
)
def test_logits_tokens_and_routing(case, dispatcher):
    classifier, arrays, config = build(case, None, dispatcher)
    backbone = classifier.backbone
    assert classifier.count_params() == config["param_count"]
    images = arrays["inputs/images"]
    outputs = keras.Model(
        classifier.input,
        {"logits": classifier.output, "encoded": backbone.output, **backbone.routing},
    ).predict(images, verbose=0)
    assert_close(outputs["logits"], arrays["outputs/logits"], 1e-4, 1e-5)
    assert_close(outputs["encoded"], arrays["outputs/encoded"], 1e-4, 2e-5)
    for name in backbone.routing:
        index = name.removeprefix("block_")
        if "soft" in case:
            for actual, what in (("dispatched", "dispatch"), ("combined", "combine")):
                weights = arrays[f"outputs/router/{index}/{what}_weights"].sum(axis=-1)
                actual = getattr(outputs[name], actual)
                assert_close(actual, weights, 1e-4, 1e-5)
            continue
        mask = arrays[f"outputs/router/{index}/dispatch_mask"]
        expected = mask.any(axis=-1).reshape(outputs[name].dispatched.shape)
        assert_same(outputs[name].dispatched > 0, expected)
        logits = arrays[f"outputs/router/{index}/logits"].ravel()
        assert_close(outputs[name].logits.ravel(), logits, 1e-4, 1e-5)


@functools.cache
def gradients_of(case, importance):
    auxiliary = None if importance is None else {"importance": importance}
    classifier, arrays, _ = build(case, auxiliary)
    labels = arrays["inputs/labels"]

    def cross_entropy(logits):
        loss = keras.losses.sparse_categorical_crossentropy
        return keras.ops.mean(loss(labels, logits, from_logits=True))

    gradients = training_gradients(classifier, arrays["inputs/images"], cross_entropy)
    return {
        flax_name(weight.path): gradient
        for weight, gradient in zip(classifier.trainable_weights, gradients)
    }


@pytest.mark.parametrize("objective", ["softmax_xent", "total_loss"])
@pytest.mark.parametrize("case", CASES)
def test_gradients(case, objective):
    # The reference's forward pass is deterministic: no noise, hence no load loss.
    importance = 0.005 if objective == "total_loss" else None
    if any(name in case for name in (*NO_LOSS, "dense")):
        importance = None
    arrays, _ = golden.load(case)
    mine = gradients_of(case, importance)
    expected = golden.part(arrays, f"grads/{objective}/params/")
    assert expected or objective == "total_loss"
    for name, value in expected.items():
        assert_close(mine[name], value, 1e-3, 1e-5, err_msg=name)


@pytest.mark.parametrize(
    "case", [x for x in CASES if not any(name in x for name in ("dense", *NO_LOSS))]
)
def test_auxiliary_loss_is_added_in_training_alone(case):
    classifier, arrays, _ = build(case, {"importance": 0.005})
    images, labels = arrays["inputs/images"], arrays["inputs/labels"]
    classifier.compile(optimizer=keras.optimizers.SGD(0.0))
    trained = classifier.train_on_batch(images, labels, return_dict=True)["loss"]
    tested = classifier.test_on_batch(images, labels, return_dict=True)["loss"]
    assert_close(trained, arrays["outputs/total_loss"], 1e-4)
    assert_close(tested, arrays["outputs/softmax_xent"], 1e-4)
