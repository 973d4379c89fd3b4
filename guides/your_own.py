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
# A router and a backbone of your own live in your own package, and still have all that
# the library's have: presets, overrides, descriptions, recipes, saved presets and
# routing records. This guide writes one of each. The router looks at nothing: it sends
# each patch to the expert of its place in the image: a baseline to compare a learned
# router with. The backbone mixes tokens by averages over neighbours
# (*MetaFormer Is Actually What You Need for Vision*), without attention.

# %%
# Where keras_moe is missing, such as in Colab, pip installs it: a checkout beside this
# notebook, or the package. Keras reads KERAS_BACKEND when it is imported.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,data,plots"
if getattr(find_spec("keras_moe"), "origin", None) is None:
    package = "./keras_moe" if os.path.isdir("keras_moe") else "keras-moe"
    command = [sys.executable, "-m", "pip", "install", "-q", f"{package}[{EXTRAS}]"]
    subprocess.run(command, check=True)
backend = "jax"  # takes a TPU or a GPU where it sees one
if shutil.which("nvidia-smi") and find_spec("torch"):
    import jax

    backend = "torch" if jax.default_backend() == "cpu" else "jax"
os.environ.setdefault("KERAS_BACKEND", backend)
# The settings of the tests: fewer and smaller of everything, to the same end.
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
# Token choice takes an *affinity*, the matrix that says which expert a token wants, and
# *gates*, the weights with which outputs are combined. Our router hands another
# affinity to token choice: minus the distance between an expert's number and the place
# of the token. Capacity, drops, groups and the record then work as before.
#
# Three things make it a citizen of the library:
#
# - `register_router` gives it a name, which every preset takes;
# - its constructor has its argument, which works as an override of a preset, here the
#   number of tokens of an image: while training, a group has tokens of several images;
# - `get_config` has the argument, too, so that saved models know it.


# %%
@routers.register_router("places")
@keras.saving.register_keras_serializable("my_package")
class PlaceRouter(routers.TokenChoiceRouter):
    """Each token goes to the experts of its place in the image."""

    # 17: the 4 x 4 patches of a digit, and the class token.
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
# A router by itself takes tokens (groups, tokens, dim), and gives a plan and a record.
# Eight tokens and four experts: each expert has two.

# %%
router = PlaceRouter(4, tokens_per_image=8, num_selected_experts=1)
_, routing = router(np.random.default_rng(0).normal(size=(1, 8, 16)).astype("float32"))
print(ops.convert_to_numpy(routing.dispatched)[0].astype(int))

# %% [markdown]
# ## The router in a preset
#
# By its name it works wherever a router's name does. We train the digits' model twice,
# with our router and with softmax token choice, from the same seed.

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
# Compare the two with care: on so many test images an accuracy has an error of about a
# point. Digits lie in the middle of their image, so that places alone say much about
# patches, and a baseline like this one is hard to beat here.
#
# The record says what each of them did. A colour is an expert of that row's router, and
# no expert of one row is one of another. Ours gives bands, whatever the image shows;
# the learned one follows what is in the patch.

# %%
# Picture: six digits in the first row, and below each two maps of its 4 x 4 patches in
# which a colour is an expert. The router by places has the same bands in all images;
# those of the learned router follow the strokes.
SHOWN = 6
figure, axes = plt.subplots(3, SHOWN, figsize=(7.2, 3.8), layout="constrained")
for axis, image in zip(axes[0], test_images):
    axis.imshow(image[..., 0], cmap="gray")
for row, model in zip(axes[1:], classifiers.values()):
    records = keras.Model(model.input, model.routing).predict(
        test_images[:SHOWN], verbose=0
    )
    # The class token comes first; it is no patch.
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
# What a family writes is the layer through which the tokens of a block see each other.
# Which blocks are mixtures of experts, and of what, is the business of `MoEConfig`, for
# every family alike. `weight_shapes` and `cost` are for `describe`, which allocates
# nothing.


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
# A dataclass names the backbone's arguments in addition to those that all encoders of
# images have, `moe` among them; `tower` makes the layers of such a config, not built. A
# task is one line. The preset is an architecture by name.

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


@models.register_backbone(presets={"pool_digits": PRESET})
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


models.describe("pool_digits", num_classes=10).print(console)

# %% [markdown]
# Every router is one override away, ours and the library's, and so are experts in other
# blocks, LoRA, int8 and the rest.

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
# ## Saved, and in a recipe
#
# A saved preset names both classes by their registered names. Whoever loads it imports
# your package first: a preset is data, and holds no code.

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
# A recipe takes the preset and the router by name, too. `keras-moe` does the same from
# the command line in a program that imports your package.

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
# - Give the router a new idea: a new affinity is a function of the logits
#   (`keras_moe.routers.Affinity`), a new allocation fills one of the plans of
#   `keras_moe.ops`. *Contributing* lists what the library's own tests check for each.
# - See what your router does to a real model: `keras_moe.analysis.routing_statistics`,
#   and the guide *The six routers* for how to compare it.
# - Ask whether it helps: *When experts help and when they do not* has the comparisons
#   that a reviewer will ask for.
