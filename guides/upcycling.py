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
# A trained dense model is a good starting point for a mixture of experts. *Sparse
# Upcycling* copies the MLP of some blocks into several experts, adds new routers (small
# layers that send each token to a few experts), and continues training from there.
#
# Here you upcycle a small ViT for digits, check that its outputs stay the same, and
# train it further next to the dense model. Then you upcycle a CLIP with the settings of
# *CLIP-UP*.

# %%
# Installs keras_moe if it is missing (in Colab, for example), from a clone around or
# next to this notebook. Set KERAS_BACKEND before you import Keras.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,digits,plots"
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
# With `moe_layers=None` the digits preset is a plain ViT. We train it only briefly, so
# that there is something left to learn. With published weights this step is one line,
# such as `models.from_preset("hf://timm/vit_base_patch16_224.augreg_in21k")`.

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
# The last block becomes a mixture of eight experts, all copies of its MLP, of which
# each token uses two. The two gates (the weights of the experts) sum to one, and no
# token is dropped at inference, so the mixture computes what the MLP did, no matter
# which experts the new router picks. The report shows how closely.

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
# Two experts cost more FLOPs than one MLP, so comparisons at equal steps, like the next
# one, favour the mixture.

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
# ## Train further, at equal steps
#
# Three models train for the same number of steps with the same learning rate and fresh
# optimizers: the dense model, the upcycled one, and a mixture from scratch. Each line
# is the mean over seeds, and its band goes from the worst to the best. (To keep Adam's
# moments, pass `carry_optimizer=True`.)

# %%
# Picture: test accuracy by epoch of three models. The dense and upcycled lines start at
# the same height and stay close together; the line from scratch starts far below. Bands
# around the lines span the worst to the best seed.
curves = {"dense, continued": [], "upcycled": [], "from scratch": []}
for seed in SEEDS:
    keras.utils.set_random_seed(seed)
    continued = dense.copy()
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
# The upcycled model starts where the dense one stopped, and the one from scratch far
# below: that is what upcycling gains. Digits cannot tell whether the experts then pull
# ahead: the two models differ by less than their seeds do.
#
# At scale, Table 2 of *CLIP-UP* reports for a B/16 at 790k steps 52.1% instead of 44.9%
# in text-to-image retrieval (COCO, R@1) and 76.9% instead of 76.8% in classification
# (ImageNet), with a third more FLOPs.
#
# ## CLIP-UP
#
# One call upcycles both towers of a CLIP. `preset="clip_up"` selects the paper's main
# settings: eight experts in every other block, K = 2, load balance and z losses, and
# gates that are *not* normalised.
#
# Two of eight softmax gates sum to less than one, so the outputs change at first. The
# paper found this better for the training that follows (appendix B.3). To preserve the
# outputs, pass `normalize_gates=True`.

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
# With published weights the code is the same, but needs a network and memory:
#
# ```python
# clip = models.from_preset("hf://openai/clip-vit-base-patch16")
# sparse, report = training.upcycle(clip, preset="clip_up")
# sparse.save_to_preset("clip_up_b16")
# ```
#
# You can look up the costs first, since `describe` allocates nothing.

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
# - Train the CLIP pair on emoji, in minutes: `keras-moe train clip_emoji`, `keras-moe
#   upcycle runs/clip_emoji/preset runs/up --settings clip_up`, then `keras-moe train
#   clip_up_emoji --preset runs/up`.
# - Repeat the paper's comparison in a clone: `python -m tools.studies clip-up --parts
#   upcycling gates`.
# - Try `noise=0.01`, so that the experts differ from the start, or another router such
#   as `router="soft"`.
# - Ask whether experts are worth it: [When experts help and when they do
#   not](../guides/when_experts_help.ipynb).
