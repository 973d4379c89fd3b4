"""Truncated kernels and pictures that only the papers' studies draw."""

import numpy as np
import pytest
from keras import ops

from keras_moe import analysis, models
from keras_moe.analysis import plots
from tests.small_models import SMALL, images, with_weights

to_numpy = ops.convert_to_numpy
LABELS = np.arange(24) % 3
pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("op_by_op")]


def classifier():
    sizes = {**SMALL, "num_layers": 1, "moe_layers": [0]}
    backbone = models.ViTBackbone.from_config(
        {**sizes, "router": "softmax_token_choice"}
    )
    return with_weights(models.ViTImageClassifier(backbone, 3, pooling="average"))


def test_pictures_are_drawn(tmp_path):
    value = {"mean": 0.5, "std": 0.1}
    row = {"test_accuracy": value, "ffn_experts_per_token": value}
    svd = analysis.TruncatedSVD([0.5, 0.1], [0.9, 0.4], 0.95, [])
    for name, draw in {
        "constants": lambda path: plots.plot_constant_experts(
            {"2": row, "10": row}, path
        ),
        "matched": lambda path: plots.plot_matched_heads(
            {"CP": {2: [0.4, 0.5]}}, {"CP": {2: 3}}, [0.6], path
        ),
        "capacity": lambda path: plots.plot_head_capacity(
            {"CP": {200: [0.4, 0.5]}, "linear": {100: [0.3]}}, path
        ),
        "svd": lambda path: plots.plot_truncated_svd({"vit": svd}, path),
    }.items():
        path = tmp_path / f"{name}.png"
        draw(path)
        assert path.stat().st_size > 5_000, name


def test_truncated_svd_evaluates_the_best_approximation():
    model = classifier()
    model.compile(loss="sparse_categorical_crossentropy")
    inputs = images(24, 16, 8, 2)
    before = [to_numpy(w).copy() for w in model.weights]
    actual = analysis.truncated_svd(
        model, inputs, LABELS, shares=[0.25, 1.0], metric="loss", verbose=0
    )
    for weight, value in zip(model.weights, before):
        np.testing.assert_array_equal(to_numpy(weight), value)
    assert {name.split("/")[-1] for name in actual.kernels} == {
        "hidden_kernel",
        "output_kernel",
    }
    np.testing.assert_allclose(actual.scores[1], actual.full, rtol=1e-4)
    experts = model.backbone.get_layer("block_0").feed_forward.experts
    for kernel in (experts.hidden_kernel, experts.output_kernel):
        value = to_numpy(kernel).copy()
        for matrix in value:
            left, singular, right = np.linalg.svd(matrix, full_matrices=False)
            singular[len(singular) // 4 :] = 0.0
            matrix[:] = left @ np.diag(singular) @ right
        kernel.assign(value)
    loss = model.evaluate(inputs, LABELS, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(actual.scores[0], loss, rtol=1e-4)
    assert abs(actual.scores[0] - actual.full) > 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.plot_constant_experts({}, "x.png"), "rows={}"),
        (lambda: plots.plot_matched_heads({}, {}, [], "x.png"), "losses={}"),
        (lambda: plots.plot_head_capacity({}, "x.png"), "accuracies={}"),
        (lambda: plots.plot_tau_study({"forms": {}}, {"rows": {}}, "x.png"), "none"),
        (lambda: plots.plot_truncated_svd({}, "x"), "results={}"),
        (lambda: analysis.truncate_kernel(np.eye(2), 1.5), "share=1.5"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_models_and_shares_are_refused():
    model = classifier()
    model.compile()
    inputs = images(24, 16, 8, 2)
    for arguments, message in (
        ({"shares": [0.0]}, "0.0"),
        ({"shares": 0.5}, "shares=0.5"),
        ({"metric": "auc"}, "metric='auc'"),
    ):
        with pytest.raises(ValueError, match=message):
            analysis.truncated_svd(model, inputs, LABELS, **arguments)
    model.backbone.enable_lora(2)
    with pytest.raises(ValueError, match="low-rank"):
        analysis.truncated_svd(model, inputs, LABELS)
    for other in (None, 3, "vmoe_digits"):
        with pytest.raises(ValueError, match=type(other).__name__):
            analysis.truncated_svd(other, inputs, LABELS)
