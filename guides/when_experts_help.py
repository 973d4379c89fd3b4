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
# # When experts help and when they do not
#
# Users of V-MoE and Soft MoE ask this first: will experts help *me*? The answer depends
# on what is held equal. A mixture has many more parameters than the dense model whose
# compute it shares, so it can be compared at equal FLOPs, where it should win if
# capacity is missing, or at equal parameters, where it is cheaper and should not lose.
# This guide makes both comparisons on small data, with several seeds and several
# amounts of data, and says what such numbers can and cannot tell.

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

from keras_moe import data, models

console = Console(width=100, force_jupyter=False)

# %% [markdown]
# ## Four models
#
# All are ViTs of two blocks; the second block's feed-forward layer differs.
#
# - *dense*: an MLP.
# - *V-MoE*: eight experts of that MLP's size, of which each token takes one, with
#   batch priority. Its FLOPs are the dense model's, but for the router.
# - *Soft MoE*: the same experts, with as many slots as tokens.
# - *wide dense*: a wider MLP in both blocks, chosen so that the parameters are V-MoE's.
#   It is the control for more capacity, and costs more FLOPs.

# %%
SIZES = {
    "num_classes": 10,
    "num_layers": 2,
    "hidden_dim": 32,
    "num_heads": 2,
    "load_weights": False,
}
EXPERTS = {
    "moe_layers": [1],
    "num_experts": 8,
    "num_selected_experts": 1,
    "mlp_dim": 64,
}


def wide_mlp_dim():
    """The H with which a dense model has as many parameters as V-MoE."""
    wanted = models.describe("vmoe_digits", **SIZES, **EXPERTS).parameters
    counts = {
        mlp_dim: models.describe(
            "vmoe_digits", **SIZES, moe_layers=None, mlp_dim=mlp_dim
        ).parameters
        for mlp_dim in range(64, 640, 8)
    }
    return min(counts, key=lambda mlp_dim: abs(counts[mlp_dim] - wanted))


MODELS = {
    "dense": {"moe_layers": None, "mlp_dim": 64},
    "V-MoE": EXPERTS,
    "Soft MoE": {**EXPERTS, "router": "soft"},
    "wide dense": {"moe_layers": None, "mlp_dim": wide_mlp_dim()},
}
costs = Table(title="what is equal, and what is not")
costs.add_column("model")
for column in ("parameters", "met by a token", "MFLOPs per image"):
    costs.add_column(column, justify="right")
for name, overrides in MODELS.items():
    described = models.describe("vmoe_digits", **SIZES, **overrides)
    costs.add_row(
        name,
        f"{described.parameters:,}",
        f"{described.active_parameters:,}",
        f"{1e3 * described.gflops:.2f}",
    )
console.print(costs)

# %% [markdown]
# ## The experiment
#
# Each model trains from each seed on a tenth, a third and all of the training images,
# for the same number of steps, so that data differ and compute does not. The optimizer,
# its learning rate and the batch are the same for all, and nothing was tuned for any.
# A seed draws the weights, the images of a fraction, and their order. The models with
# one seed and fraction see the same images.

# %%
images, labels = data.load_digits("train", image_shape=(16, 16, 1))
test_images, test_labels = data.load_digits("test", image_shape=(16, 16, 1))
STEPS, BATCH, SEEDS, FRACTIONS = 400, 64, (0, 1, 2), (0.1, 0.33, 1.0)
if SMALL:
    STEPS, BATCH, SEEDS, FRACTIONS = 6, 32, (0, 1), (0.1, 1.0)


def new(overrides):
    """A model of random weights."""
    return models.from_preset("vmoe_digits", **SIZES, **overrides)


def batches(seed, fraction):
    """The numbers of the images of each step: (steps, batch)."""
    generator = np.random.default_rng(seed)
    subset = generator.permutation(len(images))[: round(fraction * len(images))]
    passes = -(-STEPS * BATCH // len(subset))
    order = np.concatenate([generator.permutation(subset) for _ in range(passes)])
    return order[: STEPS * BATCH]


accuracies = {name: {fraction: [] for fraction in FRACTIONS} for name in MODELS}
for name, overrides in MODELS.items():
    # One model of each kind is compiled, and begins anew for each run.
    model = new(overrides)
    model.compile(keras.optimizers.Adam(2e-3))
    model.optimizer.build(model.trainable_variables)
    fresh_state = [keras.ops.convert_to_numpy(x) for x in model.optimizer.variables]
    for seed in SEEDS:
        keras.utils.set_random_seed(seed)
        start = new(overrides).get_weights()
        for fraction in FRACTIONS:
            model.set_weights(start)
            for variable, value in zip(model.optimizer.variables, fresh_state):
                variable.assign(value)
            chosen = batches(seed, fraction)
            model.fit(
                images[chosen],
                labels[chosen],
                batch_size=BATCH,
                shuffle=False,
                verbose=0,
            )
            outputs = model.predict(test_images, batch_size=450, verbose=0)
            accuracy = np.mean(outputs.argmax(axis=-1) == test_labels)
            accuracies[name][fraction].append(accuracy)
print(f"{len(MODELS)} models x {len(SEEDS)} seeds x {len(FRACTIONS)} amounts of data")
print(f"{STEPS} steps of {BATCH} images, {len(test_labels)} test images")

# %%
# Picture: test accuracy for three amounts of training images, with a column of dots for
# each of four models, a dot for each seed and a black bar for their mean. More images
# lift all models; V-MoE's dots lie furthest apart where images are fewest.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
figure, axis = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
for index, (name, runs) in enumerate(accuracies.items()):
    for place, fraction in enumerate(FRACTIONS):
        values = 100 * np.array(runs[fraction])
        x = place + 0.17 * (index - 1.5)
        label = name if place == 0 else None
        axis.plot([x] * len(values), values, "o", color=COLOURS[index], label=label)
        axis.plot([x - 0.06, x + 0.06], [values.mean()] * 2, color="black", lw=2)
axis.set_xticks(
    range(len(FRACTIONS)), [f"{round(x * len(images))} images" for x in FRACTIONS]
)
axis.set_ylabel("test accuracy (%)")
axis.legend(frameon=False, loc="lower right")
axis.grid(axis="y", alpha=0.3)
plt.show()

# %% [markdown]
# A point is a run, and a bar the mean of its runs. The table has the means with the
# standard deviation over seeds, and the differences that the two questions ask for. A
# difference is paired: the same seed and images on both sides. Its error is the
# standard error of its mean over the seeds, and few seeds make even that a guess.

# %%
table = Table(title="test accuracy, mean ± standard deviation over seeds")
table.add_column("model")
for fraction in FRACTIONS:
    table.add_column(f"{round(fraction * len(images))} images", justify="right")
for name, runs in accuracies.items():
    cells = [
        f"{100 * np.mean(x):.1f} ± {100 * np.std(x, ddof=1):.1f}" for x in runs.values()
    ]
    table.add_row(name, *cells)
console.print(table)

differences = Table(title="difference in points ± its standard error")
differences.add_column("question")
for fraction in FRACTIONS:
    differences.add_column(f"{round(fraction * len(images))} images", justify="right")
for question, first, second in (
    ("equal FLOPs: V-MoE - dense", "V-MoE", "dense"),
    ("equal FLOPs: Soft MoE - dense", "Soft MoE", "dense"),
    ("equal parameters: V-MoE - wide dense", "V-MoE", "wide dense"),
    ("equal parameters: Soft MoE - wide dense", "Soft MoE", "wide dense"),
    ("more capacity: wide dense - dense", "wide dense", "dense"),
):
    cells = []
    for fraction in FRACTIONS:
        pairs = 100 * (
            np.array(accuracies[first][fraction]) - accuracies[second][fraction]
        )
        error = pairs.std(ddof=1) / np.sqrt(len(pairs))
        cells.append(f"{pairs.mean():+.1f} ± {error:.1f}")
    differences.add_row(question, *cells)
console.print(differences)
accuracy = np.mean(accuracies["dense"][FRACTIONS[-1]])
noise = np.sqrt(accuracy * (1 - accuracy) / len(test_labels))
print(f"standard error of one accuracy by {len(test_labels)} images: {noise:.1%}")

# %% [markdown]
# ## What these numbers can tell
#
# Look at the last row first: where a wider MLP does not help a dense model, capacity is
# not what is missing, and experts, which add capacity, cannot be expected to help by
# it. Differences within about two of their errors are no differences. And every
# accuracy above has the test set's own error in it, which seeds do not show.
#
# So nothing here speaks for experts. Soft MoE keeps up with the dense models at every
# amount of data, and gains nothing over them. V-MoE with one expert a token falls
# behind, and its seeds lie furthest apart where data are fewest. A likely cause, which
# this guide does not measure, is that each expert learns from an eighth of the tokens,
# and the router's hard choices from few images.
#
# The digits tell whether a model trains, whether its router works, and what a choice
# costs. They cannot tell which architecture is better at scale: a thousand images of
# ten classes are learned nearly wholly by the smallest model here, with a fixed
# learning rate, and a router has few tokens from which to learn what to send where.
#
# ## What the papers report at scale
#
# In %, with the same number of steps in each row; *GFLOPs* are the whole model's:
#
# | model and measure | dense | experts | source |
# |---|---|---|---|
# | B/16, ImageNet 0-shot, K = 1 | 64.3 | 73.7 | *LIMoE*, Table 4 |
# | L/16, ImageNet 0-shot, K = 1 | 73.5 | 78.6 | *LIMoE*, Table 4 |
# | B/16 on LAION-400M, ImageNet 0-shot | 56.0 | 61.0 | *LIMoE*, Table 8 |
# | B/16, COCO R@1, 41.2 and 54.3 GFLOPs | 44.9 | 52.1 | *CLIP-UP*, Table 2 |
# | B/16, ImageNet, 41.2 and 54.3 GFLOPs | 76.8 | 76.9 | *CLIP-UP*, Table 2 |
# | L/14, ImageNet, 175.5 and 231.7 GFLOPs | 81.6 | 81.2 | *CLIP-UP*, Table 2 |
#
# Even there the answer is not always yes. LIMoE, whose tokens take one expert so that
# its cost is near the dense model's, wins by 5 to 9 points on hundreds of millions of
# pairs and more. CLIP-UP, with a third more FLOPs, gains 7 points of retrieval from
# text to image and nothing in classification, which its authors name as a limit. And
# the router matters: *Routers in Vision Mixture of Experts*, Table 1, has 46.35% for
# softmax token choice and 50.00% for Soft MoE with as many slots, on JFT.
#
# ## A rule of thumb
#
# - **Experts help** where a wider dense model would help, but its FLOPs are too dear:
#   much data, long training, a model that is small for them.
# - **They do not** where data are few and the dense model already fits them, where the
#   memory for all experts is dearer than FLOPs, or where batches are so small that an
#   expert gets a handful of tokens.
# - **Try the cheap control first**: train a wider dense model. If it does not win, do
#   not expect experts to.
#
# ## What to do next
#
# - Repeat the experiment with your own images in the place of the digits, with more
#   seeds and a tuned learning rate for each model. `models.describe` has the costs.
# - Begin from a trained dense model instead: *Upcycle a dense ViT or CLIP*.
# - Compare routers before you decide that experts do not help: *The six routers*.
