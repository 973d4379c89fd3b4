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
# # Upcycle a dense ViT or CLIP
#
# A trained dense model is a good beginning for a mixture of experts. *Sparse Upcycling*
# copies the MLP of some blocks into every expert, adds fresh routers, and trains on:
# the mixture starts where the dense model stopped. This guide trains a small ViT on
# digits, upcycles it, checks that nothing changed, and trains on beside the dense
# model. Then it does the same to a CLIP, with the settings of *CLIP-UP*.

# %%
# Where keras_moe is missing, such as in Colab, pip installs it: a checkout beside this
# notebook, or the package. Keras reads KERAS_BACKEND when it is imported.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,digits,plots"
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
import keras
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import data, models, training

console = Console(width=100, force_jupyter=False)
images, labels = data.load_digits("train", image_shape=(16, 16, 1))
test_images, test_labels = data.load_digits("test", image_shape=(16, 16, 1))
BEFORE, AFTER, SEEDS = 5, 8, (0, 1)
if SMALL:
    BEFORE, AFTER, SEEDS, images, labels = 1, 1, (0,), images[:128], labels[:128]

# %% [markdown]
# ## A dense model
#
# The preset of the digits with `moe_layers=None` is a plain ViT. Here it trains from
# scratch, and briefly, so that there is something left to learn. With published
# weights this part is one line, such as
# `models.from_preset("hf://timm/vit_base_patch16_224.augreg_in21k")`.

# %%
ARCHITECTURE = {"num_classes": 10, "num_layers": 3, "load_weights": False}


def fit(model, epochs, seed):
    """Trains a model, and returns its test accuracy behind each epoch."""
    keras.utils.set_random_seed(seed)
    model.compile(keras.optimizers.Adam(1e-3))
    history = model.fit(
        images,
        labels,
        batch_size=64,
        epochs=epochs,
        validation_data=(test_images, test_labels),
        verbose=0,
    )
    return history.history["val_accuracy"]


keras.utils.set_random_seed(0)
dense = models.from_preset("vmoe_digits", moe_layers=None, **ARCHITECTURE)
curve = fit(dense, BEFORE, seed=0)
print("dense, test accuracy by epoch:", *(f"{x:.1%}" for x in curve))

# %% [markdown]
# ## Upcycled
#
# The last block becomes a mixture of eight experts, of which each token takes two.
# Each expert is a copy of the MLP in its place; a token's two gates are divided by
# their sum, and no token is dropped at inference. So the mixture computes what the
# MLP did, whichever experts the fresh router takes, and the report says how nearly.

# %%
sparse, report = training.upcycle(
    dense, num_experts=8, moe_layers=[2], images=test_images[:64]
)
report.print(console)
before, after = (x.predict(test_images, verbose=0) for x in (dense, sparse))
print(
    f"same classes for {np.mean(before.argmax(-1) == after.argmax(-1)):.1%} of images"
)

# %% [markdown]
# More parameters, more FLOPs: a token now passes two experts in this block instead of
# one MLP. Comparisons at equal steps, like the next one, therefore favour the mixture,
# and should say so.

# %%
costs = Table(title="costs")
costs.add_column("model")
for column in ("parameters", "met by a token", "MFLOPs per image"):
    costs.add_column(column, justify="right")
shape = {"num_classes": 10, "num_layers": 3}
for name, overrides in (
    ("dense", {"moe_layers": None}),
    ("upcycled", {"moe_layers": [2]}),
):
    described = models.describe("vmoe_digits", **shape, **overrides)
    costs.add_row(
        name,
        f"{described.parameters:,}",
        f"{described.active_parameters:,}",
        f"{1e3 * described.gflops:.2f}",
    )
console.print(costs)

# %% [markdown]
# ## Trained on, at equal steps
#
# Three models train for the same further steps with the same learning rate, each with a
# fresh optimizer: the dense model, the upcycled one, and a mixture from scratch, which
# never was a dense model. Seeds change the order of images, the routers, and the
# mixture from scratch. A line is the mean over the seeds, and its band reaches from the
# worst to the best one. (`carry_optimizer=True` would hand Adam's moments on as well.)

# %%
# Picture: test accuracy by epoch of three models. The dense model's line and the
# upcycled model's begin at the same height and stay close together; the line from
# scratch begins far below them. Bands around the lines reach from the worst to the best
# seed.
curves = {"dense, continued": [], "upcycled": [], "from scratch": []}
for seed in SEEDS:
    keras.utils.set_random_seed(seed)
    continued = keras.models.clone_model(dense)
    continued.set_weights(dense.get_weights())
    upcycled, _ = training.upcycle(dense, num_experts=8, moe_layers=[2])
    scratch = models.from_preset("vmoe_digits", moe_layers=[2], **ARCHITECTURE)
    for name, model in zip(curves, (continued, upcycled, scratch)):
        outputs = model.predict(test_images, verbose=0)
        start = np.mean(outputs.argmax(axis=-1) == test_labels)
        curves[name].append([start, *fit(model, AFTER, seed)])

figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
styles = (("#0072B2", "o"), ("#D55E00", "s"), ("#999999", "^"))
for (name, runs), (colour, marker) in zip(curves.items(), styles):
    epochs = np.arange(BEFORE, BEFORE + AFTER + 1)
    runs = 100 * np.array(runs)
    axis.plot(epochs, runs.mean(axis=0), color=colour, marker=marker, label=name)
    axis.fill_between(
        epochs, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.2
    )
axis.set(xlabel="epochs of the dense model and after it", ylabel="test accuracy (%)")
axis.legend(frameon=False)
axis.grid(alpha=0.3)
plt.show()

# %%
for name, runs in curves.items():
    runs = np.array(runs)
    print(
        f"{name:<17} {runs[:, 0].mean():6.1%} -> {runs[:, -1].mean():.1%}"
        f" (seeds: {', '.join(f'{x:.1%}' for x in runs[:, -1])})"
    )
one = 1 / len(test_labels)
print(f"one of the {len(test_labels)} test images is {one:.2%}")

# %% [markdown]
# The upcycled model starts on the dense model's curve, and the one from scratch far
# below: that is the gain of upcycling. Whether the experts then pull ahead of the dense
# model is another question, which the digits do not answer: where two lines differ by
# less than their seeds do, neither is ahead. At scale *CLIP-UP*, Table 2, has for a
# B/16 at 790k steps 52.1% instead of 44.9% in retrieval from text to image (COCO, R@1)
# and 76.9% instead of 76.8% in classification (ImageNet), with a third more FLOPs.
#
# ## CLIP-UP
#
# A pair of towers is upcycled in one call. `preset="clip_up"` takes *CLIP-UP*'s main
# settings: eight experts in every other block of both towers, K = 2, load balance and z
# losses, and gates that are *not* divided by their sum. Two of eight softmax gates sum
# to less than one, so that the function changes at first. The paper prefers that for
# the training that follows (appendix B.3); `normalize_gates=True` preserves the
# function. The model here is the small CLIP for emoji, without weights: the equality is
# one of functions, whatever the weights are.

# %%
keras.utils.set_random_seed(0)
clip = models.from_preset("clip_emoji", load_weights=False)
_, changed = training.upcycle(clip, preset="clip_up")
_, preserved = training.upcycle(clip, preset="clip_up", normalize_gates=True)
gates = Table(title="clip_emoji, upcycled")
gates.add_column("gates")
for column in ("blocks", "parameters", "largest difference, image", "text"):
    gates.add_column(column, justify="right")
for name, result in (("as they are", changed), ("divided by their sum", preserved)):
    differences = [x.largest_difference for x in result.modalities.values()]
    gates.add_row(
        name,
        str(len(result.blocks)),
        f"{result.dense_parameters:,} -> {result.parameters:,}",
        *(f"{x:.0e}" for x in differences),
    )
console.print(gates)

# %% [markdown]
# With published weights it reads the same, and needs network and memory:
#
# ```python
# clip = models.from_preset("hf://openai/clip-vit-base-patch16")
# sparse, report = training.upcycle(clip, preset="clip_up")
# sparse.save_to_preset("clip_up_b16")
# ```
#
# The costs of the results are known before: `describe` allocates nothing.

# %%
sizes = Table(title="CLIP and CLIP-UP")
sizes.add_column("preset")
for column in ("parameters", "met by a token", "GFLOPs a pair"):
    sizes.add_column(column, justify="right")
for preset in ("clip_b32", "clip_up_b32", "clip_b16", "clip_up_b16"):
    described = models.describe(preset)
    sizes.add_row(
        preset,
        f"{described.parameters / 1e6:.0f}M",
        f"{described.active_parameters / 1e6:.0f}M",
        f"{described.gflops:.1f}",
    )
console.print(sizes)

# %% [markdown]
# ## What to do next
#
# - Train the pair on emoji, minutes in all: `keras-moe train clip_emoji`, `keras-moe
#   upcycle runs/clip_emoji/preset runs/up --settings clip_up`, `keras-moe train
#   clip_up_emoji --preset runs/up`. *LIMoE on emoji and clip art* has the data.
# - Repeat the paper's comparison at equal steps, in a clone:
#   `python -m tools.studies clip-up --parts upcycling gates`.
# - Try `noise=0.01`, by which experts differ at once, `router="soft"`, or
#   `router="mumoe"`, whose experts approximate the MLP as well as their ranks allow.
# - Look at the experts afterwards: `keras_moe.analysis` and *When experts help and when
#   they do not*.
