"""`torch.compile` reads each kind of model as one graph, and `fit` can be compiled."""

import functools

import keras
import numpy as np
import pytest

from keras_moe import routers, training
from tests.compare import assert_close
from tests.models.test_language_models import IDS, language_model
from tests.pair_models import PAIRS, one_block
from tests.small_models import (
    ONE_BLOCK,
    images,
    mixer,
    small_classifier,
    vit,
    with_weights,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Dynamo reads PyTorch's models alone"
)

# Each tests one graph of a model that other tests run as it is.
FAMILIES = {
    "V-MoE": lambda: vit(**ONE_BLOCK, noise_std=0.5, auxiliary_losses="auto"),
    "without a capacity": lambda: vit(**ONE_BLOCK, dropless=True),
    "Soft MoE": lambda: vit(**ONE_BLOCK, router="soft"),
    # In two blocks, the second of which gets the logits of the first.
    "MoE++": lambda: vit(moe_layers=[0, 1], **IN_PLACE),
    "muMoE": lambda: mixer(**ONE_BLOCK, router="mumoe"),
    "CLIP": lambda: one_block("clip"),
    "LIMoE": lambda: one_block("limoe"),
}
IN_PLACE = {"copy_experts": 1, "constant_experts": 1, "gating_residual": True}
SHAPE = (16, 8, 2)


@pytest.fixture
def quickly(monkeypatch):
    """Compiles without code for machines, which takes most of the time."""
    compile = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile)


@pytest.fixture(autouse=True)
def programs():
    """Forgets the programs of other tests, of which a process may have eight."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def as_tensors(inputs):
    return keras.tree.map_structure(torch.tensor, inputs)


def inputs_of(name):
    return as_tensors(PAIRS if name in ("CLIP", "LIMoE") else images(2, *SHAPE))


class Compiled:
    """A model compiled without code for machines, which takes most of the time."""

    def __init__(self, model):
        self.programs = 0
        self.call = torch.compile(model, backend=self._program, fullgraph=True)

    def _program(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.programs += 1
        return aot_eager(graph, inputs)


def step(model, call, inputs):
    """The outputs, the gradients and the changed variables of a call in training."""
    seeds = [(v, v.value.clone()) for v in model.non_trainable_variables]
    model.zero_grad()
    outputs = keras.tree.flatten(call(inputs, training=True))
    loss = torch.stack([(x * x).sum() for x in outputs] + model.losses).sum()
    loss.backward()
    gradients = [v.value.grad for v in model.trainable_variables]
    changed = [v.value.clone() for v, _ in seeds]
    for variable, value in seeds:
        variable.assign(value)
    present = [x.clone() for x in gradients if x is not None]
    return [x.detach() for x in (loss, *outputs)], present, changed


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_and_backward_are_one_graph(name):
    model = with_weights(FAMILIES[name]())
    inputs, compiled = inputs_of(name), Compiled(model)
    actual = step(model, compiled.call, inputs)
    expected = step(model, model, inputs)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, 1e-4, 1e-5)
    assert compiled.programs == 1


def test_batches_of_any_size_are_two_programs():
    model = small_classifier(**ONE_BLOCK)
    compiled = Compiled(model)
    for size in (1, 3, 7):
        inputs = torch.tensor(images(size, 16, 8, 3))
        with torch.no_grad():
            actual, expected = compiled.call(inputs), model(inputs)
        assert_close(actual, expected, 1e-5, 1e-5)
    assert compiled.programs == 2


def test_what_reads_a_value_is_no_graph(monkeypatch):
    model = small_classifier(**ONE_BLOCK)
    gates_of = routers.TokenChoiceRouter.gates_of

    def reading(router, logits):
        return gates_of(router, logits / float(logits.max()))

    monkeypatch.setattr(routers.TokenChoiceRouter, "gates_of", reading)
    inputs = torch.tensor(images(2, 16, 8, 3))
    # The page on values that only the data tell.
    with pytest.raises(torch._dynamo.exc.UserError, match="constrain-as-size"):
        Compiled(model).call(inputs)


def schedule():
    """Its warm-up ends within three steps."""
    return keras.optimizers.schedules.CosineDecay(
        0.0, 4, warmup_target=0.01, warmup_steps=2
    )


OPTIMIZERS = {
    "a recipe's": lambda: training.optimizer_class("adamw")(
        schedule(), weight_decay=0.05, peak_learning_rate=0.01, global_clipnorm=1.0
    ),
    "Muon": lambda: training.optimizer_class("muon")(schedule()),
    "a function": lambda: keras.optimizers.RMSprop(lambda: 1e-3),
    # Keras's forms of these for PyTorch read numbers.
    "SGD": lambda: keras.optimizers.SGD(schedule(), momentum=0.9),
    "Nadam": lambda: keras.optimizers.Nadam(1e-3),
}


def fitted(optimizer, **arguments):
    """The weights and the losses after two epochs of three steps."""
    keras.utils.set_random_seed(0)
    model = small_classifier(**ONE_BLOCK)
    model.compile(optimizer, **arguments)
    x, y = images(6, 16, 8, 3), np.arange(6) % 3
    options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, **options).history
    weights = [np.array(v.value.detach()) for v in model.variables]
    return weights, [history[key] for key in sorted(history)]


# PyTorch's compiler imports what PyTorch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [*OPTIMIZERS, "auto"])
def test_fit_compiled_is_fit(name, request):
    make = OPTIMIZERS.get(name, lambda: name)
    expected, its_history = fitted(make(), jit_compile=False)
    if name != "auto":
        request.getfixturevalue("quickly")
    weights, history = fitted(make(), jit_compile=True)
    # Adam divides gradients that are zero but for rounding by their size.
    for one, other in zip(weights, expected, strict=True):
        assert np.abs(one - other).mean() < 1e-4
    assert_close(history, its_history, 1e-4)


@pytest.mark.filterwarnings("ignore:.*array__:DeprecationWarning")
def test_what_a_step_does_by_values_runs_uncompiled():
    arguments = {"learning_rate": schedule(), "gradient_accumulation_steps": 2}
    expected, _ = fitted(keras.optimizers.AdamW(**arguments), jit_compile=False)
    with pytest.warns(UserWarning, match="gradient_accumulation_steps, so a step is"):
        weights, _ = fitted(keras.optimizers.AdamW(**arguments), jit_compile=True)
    for one, other in zip(weights, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [("moepp", "greedy"), ("mumoe", "beam"), ("mumoe", "contrastive")],
)
def test_generate_compiled_is_generate(kind, sampler, quickly):
    model = language_model(kind)

    def generated(rows, **arguments):
        model.compile(sampler=sampler, **arguments)
        mask = np.arange(8)[None] < np.array([3, 2, 4])[:, None]
        prompts = {"token_ids": IDS[:rows], "padding_mask": mask[:rows]}
        return model.generate(prompts, stop_token_ids=None)["token_ids"]

    for rows in (1, 3):
        expected = generated(rows)
        assert (generated(rows, jit_compile=True) == expected).all()


def test_generate_compiled_knows_later_adapters(quickly):
    model = language_model("moepp")
    is_prompt = np.arange(8)[None] < np.full((3, 1), 2)
    prompts = {"token_ids": IDS, "padding_mask": is_prompt}
    model.compile(sampler="greedy", jit_compile=True)
    before = model.generate(prompts, stop_token_ids=None)["token_ids"]
    model.backbone.enable_lora(2)
    for variable in model.trainable_variables:
        if "lora" in variable.path:
            variable.assign(np.random.default_rng(0).normal(size=variable.shape))
    after = model.generate(prompts, stop_token_ids=None)["token_ids"]
    model.compile(sampler="greedy")
    expected = model.generate(prompts, stop_token_ids=None)["token_ids"]
    assert (after == expected).all()
    assert (after != before).any()
