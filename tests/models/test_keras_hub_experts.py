"""Our experts in place of those of KerasHub: same outputs, less work, bad input."""

import keras
import numpy as np
import pytest

from keras_moe import _compat, models
from tests.compare import assert_close, assert_same
from tests.keras_hub_language_models import IDS, PROMPTS, TEXTS, language_model
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("op_by_op")

# With a shared expert.
QWEN = "QwenMoe"


def greedy(model):
    return model.generate(PROMPTS, stop_token_ids=None)["token_ids"]


@pytest.mark.parametrize("name", ["Mixtral", QWEN, "Qwen3Moe"])
def test_the_same_model_with_our_experts(name, tmp_path):
    model = language_model(name)
    parameters = model.count_params()
    mask = np.arange(8) < np.array([[8], [6], [3]])
    inputs = [TEXTS, {**TEXTS, "padding_mask": mask}]
    expected, tokens = [model(x) for x in inputs], greedy(model)
    assert models.replace_moe(model) is model
    assert_close([model(x) for x in inputs], expected, 1e-4, 1e-5)
    assert_same(greedy(model), tokens)
    assert model.count_params() == parameters
    assert len({weight.path for weight in model.weights}) == len(model.weights)
    model.save_weights(tmp_path / "x.weights.h5")
    other = models.replace_moe(language_model(name, seed=2))
    other.load_weights(tmp_path / "x.weights.h5")
    assert_same(other(TEXTS), model(TEXTS))


@pytest.mark.every_backend
@pytest.mark.usefixtures("traced")
def test_training_has_the_same_loss():
    """The balance of the experts counts as KerasHub counts it, padding left out."""
    mask = np.arange(8) < np.array([[8], [6], [3]])
    losses = []
    for replace in (lambda model: model, models.replace_moe):
        model = replace(
            language_model("Mixtral", num_layers=1, router_aux_loss_coef=10.0)
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        x = {"token_ids": IDS, "padding_mask": mask.astype("int32")}
        fit = model.fit(x, IDS, sample_weight=mask, batch_size=3, epochs=2, verbose=0)
        losses.append(fit.history["loss"])
    assert losses[0][1] != losses[0][0] > 10
    assert_close(np.array(losses[1]), np.array(losses[0]), 1e-4)


def test_parameters_of_pytorch_are_those_of_the_new_layers():
    if keras.backend.backend() != "torch":
        pytest.skip("modules are PyTorch's")
    model = language_model("Mixtral")
    model.fit(TEXTS, IDS, verbose=0)
    model.compile("sgd")
    models.replace_moe(model)
    model.fit(TEXTS, IDS, verbose=0)
    own = {id(weight.value) for weight in model.trainable_weights}
    parameters = [x for x in model.parameters() if x.requires_grad]
    assert {id(x) for x in parameters} == own


def test_bad_input():
    with pytest.raises(ValueError, match=r"received: LlamaCausalLM with .*Decoder"):
        models.replace_moe(language_model("Llama"))
    with pytest.raises(ValueError, match="received: Sequential"):
        models.replace_moe(keras.Sequential([keras.layers.Dense(2)]))
    model = language_model("Mixtral")
    refuses("received: MixtralCausalLM", models.replace_moe, models.replace_moe(model))
    model = language_model("Qwen3Moe")
    model.optimizer.build(model.trainable_variables)
    refuses("Qwen3MoeCausalLM with a built optimizer", models.replace_moe, model)


@pytest.mark.every_backend
def test_a_replaced_layer_is_forgotten():
    inner, other = keras.layers.Dense(2), keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.Input((3,)), inner])
    owner = keras.layers.TimeDistributed(inner)
    owner.build((None, 4, 3))
    other.build((None, 3))
    _compat.replace_layer(owner, "layer", other)
    assert len(owner.weights) == 1
    assert owner.layer is other
    assert len(model.weights) == 2
