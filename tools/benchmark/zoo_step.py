"""Forward pass and training step of dense backbones: here, in KerasHub and in timm.

    KERAS_BACKEND=jax python tools/benchmark/zoo_step.py
    KERAS_BACKEND=torch python tools/benchmark/zoo_step.py

On JAX compiled, on PyTorch eager, as each is used. timm takes part on PyTorch where it
is installed. Every candidate has one linear head on its features, the same
optimizer (plain gradient descent: its cost is nobody's) and the same images.
"""

import argparse
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
from row import peer
from runner import Report, run

from keras_moe.models import VARIANTS, MixerBackbone, ViTBackbone, from_preset

MODELS = {
    "ViT-S/32": ("vit/S", 32, None, "vit_small_patch32_224"),
    "ViT-B/16, 4 blocks": ("vit/B", 16, 4, "vit_base_patch16_224"),
    "Mixer-S/32": ("mixer/S", 32, None, "mixer_s32_224"),
}
WORKS = ("forward", "training step")
BACKENDS = ("jax", "torch")


class _Anything(type):
    """The type of a class with every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Nothing(types.ModuleType):
    """A module in which every name is there, and is an empty class."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _TorchvisionFinder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Nothing(spec.name)

    def exec_module(self, module):
        pass


def import_timm() -> Any:
    """timm, or None. Its models need no torchvision, which its import asks for."""
    # Installed for another build of PyTorch it does not import.
    if peer("torchvision") is None:
        sys.meta_path.insert(0, _TorchvisionFinder())
    return peer("timm")


def keras_models(variant: str, patch_size: int, num_layers: int | None) -> dict:
    """Models of the size by library, with a linear head on the pooled feature."""
    sizes = VARIANTS[variant].config()
    sizes.update(image_shape=(224, 224, 3), patch_size=patch_size)
    if num_layers:
        sizes["num_layers"] = num_layers
    # The exact form, which KerasHub and timm have: the tanh form costs twice as much
    # on PyTorch.
    exact = {**sizes, "activation": "gelu"}
    if variant.startswith("mixer"):
        backbones = {"keras_moe": MixerBackbone.from_config(exact)}
    else:
        backbones = {
            "keras_moe": ViTBackbone.from_config(exact),
            "keras_hub": keras_hub.models.ViTBackbone.from_config(sizes),
        }
    return {
        name: keras.Model(
            backbone.input, keras.layers.Dense(1000)(backbone.output[:, 0])
        )
        for name, backbone in backbones.items()
    }


def jax_functions(model: keras.Model, images, labels) -> tuple[Callable, Callable]:
    """The compiled forward pass and training step."""
    import jax

    weights = [v.value for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]

    def loss(weights):
        logits, _ = model.stateless_call(weights, state, images, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )
        return keras.ops.mean(losses)

    @jax.jit
    def step(weights):
        value, gradients = jax.value_and_grad(loss)(weights)
        return value, [w - 1e-4 * g for w, g in zip(weights, gradients)]

    @jax.jit
    def forward(weights):
        return model.stateless_call(weights, state, images, training=False)[0]

    return lambda: forward(weights), lambda: step(weights)


def torch_functions(model: Any, images, labels) -> tuple[Callable, Callable]:
    """The forward pass without gradients, and a training step."""
    import torch

    images, labels = torch.tensor(images), torch.tensor(labels)
    # What `torch.compile` returns wraps a model.
    if not isinstance(getattr(model, "_orig_mod", model), keras.Model):
        images = images.permute(0, 3, 1, 2).contiguous()
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1e-4)

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    def forward():
        with torch.no_grad():
            return model(images)

    return forward, step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=16)


def candidates(
    title: str, work: str, batch_size: int = 16, compiled: bool = False
) -> dict[str, Callable[[], Any]]:
    """One of the two functions of a model, by library.

    Args:
        title: name among `MODELS`.
        work: `"forward"` or `"training step"`.
        batch_size: number of images.
        compiled: on PyTorch, whether this library's model is compiled, beside timm's
            as it is and compiled.
    """
    backend = keras.backend.backend()
    functions = {"jax": jax_functions, "torch": torch_functions}[backend]
    # Before KerasHub's models, which import TensorFlow.
    timm = import_timm() if backend == "torch" else None
    generator = np.random.default_rng(0)
    images = generator.normal(size=(batch_size, 224, 224, 3)).astype("float32")
    labels = generator.integers(1000, size=batch_size)
    *sizes, timm_name = MODELS[title]
    models = keras_models(*sizes)
    if timm is not None:
        depth = {} if sizes[2] is None else {"depth": sizes[2]}
        models["timm"] = timm.create_model(timm_name, num_classes=1000, **depth)
    if compiled:
        import torch

        variant, patch_size, num_layers = sizes
        ours = from_preset(
            f"{variant.replace('/', '_').lower()}{patch_size}",
            num_classes=1000,
            load_weights=False,
            activation="gelu",
            **({"num_layers": num_layers} if num_layers else {}),
        )
        # Keras makes them PyTorch's parameters when it is asked for them.
        list(ours.parameters())
        models["keras_moe"] = torch.compile(ours, fullgraph=True)
        del models["keras_hub"]
        if timm is not None:
            models["timm compiled"] = torch.compile(models["timm"])
    return {
        name: functions(model, images, labels)[WORKS.index(work)]
        for name, model in models.items()
    }


def measure(args: argparse.Namespace, report: Report) -> None:
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise SystemExit(
            f"Expected KERAS_BACKEND to be one of {BACKENDS}; received: {backend}"
        )
    for title in args.models:
        for work in WORKS:
            report.compare(
                f"{title}, batch {args.batch_size}: {work}",
                candidates(title, work, args.batch_size),
                "keras_moe",
            )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
