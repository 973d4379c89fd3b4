# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write your own router and backbone
#
# A router decides which expert (one of several MLPs in a block) works on which token. A
# backbone is the network around it. Write either in your own package, and it works with
# presets, recipes and all the rest like a built-in one.
#
# Our router ignores what a patch shows and picks the expert by the patch's position,
# which makes a good baseline for learned routers. Our backbone replaces attention by
# averages over neighbours (*MetaFormer Is Actually What You Need for Vision*).

# %%
# Installs keras_moe if it is missing (in Colab, for example), from a clone around or
# next to this notebook. Set KERAS_BACKEND before you import Keras.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,data,plots"
if getattr(find_spec("keras_moe"), "origin", None) is None:
    clones = [x for x in ("..", "./keras_moe") if os.path.isdir(f"{x}/keras_moe/cli")]
    if not clones:
        raise ImportError("Clone the repository of keras_moe next to this notebook")
    target = f"{clones[0]}[{EXTRAS}]"
    command = [sys.executable, "-m", "pip", "install", "-q", target]
    subprocess.run(command, check=True)
backend = "jax"  # uses a TPU or GPU if there is one
if shutil.which("nvidia-smi") and find_spec("torch"):
    import jax

    backend = "torch" if jax.default_backend() == "cpu" else "jax"
os.environ.setdefault("KERAS_BACKEND", backend)
# Tests set this for smaller and shorter runs.
SMALL = os.environ.get("KERAS_MOE_GUIDE_SMALL") == "1"

# %%
import dataclasses
import tempfile

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

from keras_moe import data, models, routers, training
from keras_moe.ops import Cost

console = Console(width=100, force_jupyter=False)

# %% [markdown]
# ## A router
#
# Token choice works from an *affinity* matrix, how much each token wants each expert,
# and *gates*, the weights for combining outputs. Our router passes token choice another
# affinity: minus the distance between the expert's number and the token's position.
# Capacity (how many tokens an expert accepts), dropped tokens (those that find their
# experts full) and the record work as before.
#
# It needs three things:
#
# - `register_router` gives it a name that every preset accepts.
# - Its constructor argument becomes an override of presets: here the number of tokens
#   per image, because training routes tokens of several images together, as a group.
# - `get_config` includes the argument, so saved models keep it.


# %%
@routers.register_router("places")
@keras.saving.register_keras_serializable("my_package")
class PlaceRouter(routers.TokenChoiceRouter):
    """Each token goes to the experts of its place in the image."""

    # 17: the 4 x 4 patches of a digit and the class token.
    def __init__(self, num_experts, tokens_per_image=17, **kwargs):
        super().__init__(num_experts, **kwargs)
        self.tokens_per_image = tokens_per_image

    def allocate(self, affinity, gates, **kwargs):
        tokens = ops.arange(ops.shape(affinity)[1]) % self.tokens_per_image
        place = (ops.cast(tokens, "float32") + 0.5) / self.tokens_per_image
        expert = ops.arange(self.num_experts, dtype="float32")
        distance = ops.abs(self.num_experts * place[:, None] - expert - 0.5)
        affinity = ops.broadcast_to(-distance[None], ops.shape(affinity))
        return super().allocate(affinity, gates, **kwargs)

    def get_config(self):
        return {**super().get_config(), "tokens_per_image": self.tokens_per_image}


# %% [markdown]
# You can call a router directly on tokens of shape (groups, tokens, dim); it returns a
# plan and a record. Here eight tokens share four experts, two tokens each.

# %%
router = PlaceRouter(4, tokens_per_image=8, num_selected_experts=1)
_, routing = router(np.random.default_rng(0).normal(size=(1, 8, 16)).astype("float32"))
print(ops.convert_to_numpy(routing.dispatched)[0].astype(int))

# %% [markdown]
# ## The router in a preset
#
# The new name works wherever a router's name does. We train the digits model with our
# router and with softmax token choice, from the same seed.

# %%
images, labels = data.load_digits("train", image_shape=(16, 16, 1))
test_images, test_labels = data.load_digits("test", image_shape=(16, 16, 1))
EPOCHS = 15
if SMALL:
    EPOCHS, images, labels = 1, images[:128], labels[:128]


def trained(preset, **overrides):
    """A model of a preset without its weights, trained on the digits."""
    keras.utils.set_random_seed(0)
    model = models.from_preset(preset, num_classes=10, load_weights=False, **overrides)
    model.compile(keras.optimizers.Adam(2e-3))
    model.fit(images, labels, batch_size=64, epochs=EPOCHS, verbose=0)
    return model


SMALLER = {"num_layers": 2, "moe_layers": [1], "num_selected_experts": 1}
classifiers = {
    name: trained("vmoe_digits", router=name, **SMALLER)
    for name in ("places", "softmax_token_choice")
}
for name, model in classifiers.items():
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"{name:<21} test accuracy {accuracy:.1%} of {len(test_labels)} images")

# %% [markdown]
# The error of these accuracies is about a point. Digits are centred in their images, so
# position alone says a lot about a patch, and this baseline is hard to beat.
#
# In the records, each colour is an expert (unrelated between the two routers). Ours
# makes the same bands in every image; the learned router follows what the patches show.

# %%
# Picture: six digits in the first row, and below each two maps of its 4 x 4 patches in
# which each colour is an expert. The router by position has the same bands in all
# images; the learned router follows the strokes.
SHOWN = 6
figure, axes = plt.subplots(3, SHOWN, figsize=(7.2, 3.8), layout="constrained")
for axis, image in zip(axes[0], test_images):
    axis.imshow(image[..., 0], cmap="gray")
for row, model in zip(axes[1:], classifiers.values()):
    records = keras.Model(model.input, model.routing).predict(
        test_images[:SHOWN], verbose=0
    )
    # The first token is the class token, not a patch.
    experts = records["block_1"].dispatched[:, 1:].argmax(axis=-1)
    for axis, chosen in zip(row, experts.reshape(-1, *model.backbone.grid)):
        axis.imshow(chosen, cmap="Set2", vmin=0, vmax=7)
for axis, name in zip(axes[:, 0], ("image", *classifiers)):
    axis.set_ylabel(name.replace("_", "\n"), rotation=0, ha="right", va="center")
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## A backbone
#
# You write only the layer that mixes the tokens of a block. `MoEConfig` decides which
# blocks have experts, and of what type. `weight_shapes` and `cost` let `describe` work
# without allocating anything.


# %%
@keras.saving.register_keras_serializable("my_package")
class NeighbourAverage(keras.layers.Layer):
    """The average over the 3 x 3 patches around a token, less the token."""

    def __init__(self, grid, **kwargs):
        super().__init__(**kwargs)
        self.grid = tuple(grid)

    def call(self, tokens, training=None):
        dim = tokens.shape[-1]
        patches = ops.reshape(tokens, (-1, *self.grid, dim))
        around = ops.average_pool(patches, 3, 1, "same", data_format="channels_last")
        return ops.reshape(around, (-1, self.grid[0] * self.grid[1], dim)) - tokens

    def weight_shapes(self, shape):
        return {}

    def cost(self, shape):
        return Cost()

    def get_config(self):
        return {**super().get_config(), "grid": self.grid}


# %% [markdown]
# A dataclass adds the backbone's arguments to those that all image encoders have, and
# `tower` makes the layers from that config, without building them. The task is one
# line, and the preset is a named architecture.

# %%
PRESET = {
    "description": "A PoolFormer with experts for 16 x 16 digits",
    "config": {
        "image_shape": [16, 16, 1],
        "patch_size": 2,
        "hidden_dim": 48,
        "num_layers": 3,
        "mlp_dim": 96,
        "moe_layers": [2],
        "num_experts": 8,
        "num_selected_experts": 1,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolConfig(models.ImageConfig):
    """The arguments of `PoolBackbone`: those of all encoders of images, and ours."""

    patch_size: int = 16
    hidden_dim: int = 192
    mlp_dim: int = 768
    position_embedding: str | None = "learned"


@models.register_backbone
@keras.saving.register_keras_serializable("my_package")
class PoolBackbone(models.ImageBackbone):
    """Blocks of averages over neighbours, and dense MLPs or experts."""

    config_class = PoolConfig

    @classmethod
    def tower(cls, config, dtype=None):
        height, width, _ = config.image_shape
        grid = height // config.patch_size, width // config.patch_size

        def token_mixer(spec, index):
            return NeighbourAverage(grid, dtype=dtype, name="average")

        return models.image_tower(
            config, dtype, token_mixer, position_embedding=config.position_embedding
        )


@models.register_task
@keras.saving.register_keras_serializable("my_package")
class PoolClassifier(models.ImageClassifier):
    backbone_cls = PoolBackbone


models.register_presets({"pool_digits": {"backbone": PoolBackbone, **PRESET}})
models.describe("pool_digits", num_classes=10).print(console)

# %% [markdown]
# Every router is one override away, and so are experts in other blocks, LoRA, int8 and
# the rest.

# %%
OURS = {"router": "places", "tokens_per_image": 8 * 8}
pools = {"places": trained("pool_digits", **OURS)}
for name in ("softmax_token_choice", "soft"):
    pools[name] = trained("pool_digits", router=name)
results = Table("router", "test accuracy", title="pool_digits")
for name, model in pools.items():
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    results.add_row(name, f"{accuracy:.1%}")
console.print(results)

# %% [markdown]
# ## Saving, and recipes
#
# A saved preset refers to both classes by their registered names and holds no code, so
# import your package before you load one.

# %%
with tempfile.TemporaryDirectory() as folder:
    pools["places"].save_to_preset(folder)
    again = models.from_preset(folder)
same = np.array_equal(
    again.predict(test_images, verbose=0),
    pools["places"].predict(test_images, verbose=0),
)
loaded_router = again.backbone.get_layer("block_2").feed_forward.router
print(type(again).__name__, type(again.backbone).__name__, type(loaded_router).__name__)
print(f"tokens_per_image={loaded_router.tokens_per_image}, same predictions: {same}")

# %% [markdown]
# A recipe also refers to both by name. To use the `keras-moe` command, start it from a
# program that imports your package.

# %%
recipe = training.Recipe(
    "pool_digits_places",
    data={"source": "digits", "batch_size": 64},
    model={"preset": "pool_digits", **OURS},
    schedule={"epochs": 1 if SMALL else 6, "learning_rate": 3e-3, "warmup_steps": 10},
)
history = training.train(recipe, verbose=0).history
print("validation accuracy by epoch:", *(f"{x:.1%}" for x in history["val_accuracy"]))

# %% [markdown]
# ## What to do next
#
# - Try another idea: a new affinity is a function of the logits
#   (`keras_moe.routers.Affinity`), and a new allocation fills a plan of
#   `keras_moe.ops`. See [Routers](../docs/routers.md).
# - Compare it with other routers: [The six routers](../guides/six_routers.ipynb).
# - Ask whether it helps: [When experts help and when they do
#   not](../guides/when_experts_help.ipynb).
