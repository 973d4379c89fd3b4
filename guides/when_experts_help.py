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
# Will experts help *you*? In a mixture of experts a router sends each token to only
# some of many MLPs, so the model has many more parameters than a dense one of the same
# cost. The answer depends on what you hold equal. At equal FLOPs the mixture should win
# if capacity is missing. At equal parameters it is cheaper, and should not lose.
#
# On pictures of clothes experts pay, as a longer study shows. On few digits they do
# not, as you can see here in minutes, with both comparisons and several seeds.

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

from keras_moe import data, models

console = Console(width=100, force_jupyter=False)

# %% [markdown]
# ## Where capacity is missing
#
# `python -m tools.studies experts --parts models` trains ViTs of four blocks of width
# 32 on the 55,000 training images of Fashion-MNIST, V-MoEs with 8 experts. Test
# accuracy less that of the dense model (85.2% and 87.7%), in points ± the standard
# error:
#
# | dense = 1 | FLOPs | time of a step | 15 epochs, 5 seeds | 40 epochs, 3 seeds |
# |---|---:|---:|---:|---:|
# | wide dense, as many parameters as K=1 | 2.48 | 1.57 | 0.5 ± 0.1 | 0.3 ± 0.2 |
# | V-MoE, K=1, every other block | 1.01 | 1.09 | 0.5 ± 0.2 | 0.5 ± 0.3 |
# | V-MoE, K=2, all blocks | 1.45 | 1.41 | 1.4 ± 0.1 | 1.0 ± 0.3 |
#
# Two experts per token in all blocks beat the dense and the wide model with every seed.
# One in every other block gains as much as the wide model at the dense model's cost,
# but not with every seed. With three seeds and 15 epochs, a second expert per token
# there or one expert in every block gain 1.1 ± 0.2 and 0.9 ± 0.1, and other routers no
# more than V-MoE's. With a tenth of the images no model differs from the dense one. At
# twice the width the wide model and one expert per token gain nothing, and two per
# token in all blocks 0.8 and 0.2 points (two seeds).
# `keras-moe twins RECIPE` makes this comparison on your data.
#
# ## Five models for few images
#
# All are ViTs of two blocks that differ in their feed-forward layers.
#
# - *dense*: an MLP.
# - *V-MoE, K=1*: eight experts of that size in the second block, of which each token
#   uses one. Its FLOPs are the dense model's, plus the router.
# - *V-MoE, K=2*: eight experts in both blocks, of which each token uses two.
# - *Soft MoE*: the experts of K=1, with as many slots as tokens.
# - *wide dense*: a wider MLP in both blocks, with as many parameters as K=1. It is the
#   control for more capacity, and costs more FLOPs.

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
    """The H with which a dense model has as many parameters as V-MoE, K=1."""
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
    "V-MoE, K=1": EXPERTS,
    "V-MoE, K=2": {**EXPERTS, "moe_layers": [0, 1], "num_selected_experts": 2},
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
# Each model trains on a tenth, a third and all of the training images, always for the
# same number of steps. Optimizer, learning rate and batch size are the same for all,
# and nothing was tuned. The seed determines the weights, the images and their order, so
# all models see the same images.

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
    # Compile each model once and reset it for each run.
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
# each of five models, one dot per seed, and a black bar for their mean. More images
# lift all models.
COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7")
figure, axis = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
for index, (name, runs) in enumerate(accuracies.items()):
    for place, fraction in enumerate(FRACTIONS):
        values = 100 * np.array(runs[fraction])
        x = place + 0.17 * (index - 2)
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
# Each point is a run and each bar a mean. The first table has the means over seeds. The
# second has the differences that answer the questions, paired by seed and images. With
# so few seeds even their error is a guess.

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
    ("equal FLOPs: K=1 - dense", "V-MoE, K=1", "dense"),
    ("equal FLOPs: Soft MoE - dense", "Soft MoE", "dense"),
    ("equal parameters: K=1 - wide dense", "V-MoE, K=1", "wide dense"),
    ("equal parameters: Soft MoE - wide dense", "Soft MoE", "wide dense"),
    ("more FLOPs: K=2 - dense", "V-MoE, K=2", "dense"),
    ("about equal FLOPs: K=2 - wide dense", "V-MoE, K=2", "wide dense"),
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
# ## What these numbers can tell you
#
# Look at the last row first. If a wider MLP does not help the dense model, capacity is
# not what is missing, and you cannot expect experts to help by adding it. With three
# seeds, ignore differences within 4.3 of their errors (the 95% interval of Student's
# t). Of 21 differences one may lie outside by chance, and one does: the wide model with
# the fewest images.
#
# Nothing here speaks for experts, whether a token uses one or two of them, and whether
# they are in one block or in both. Digits cannot tell you which architecture is better
# at scale: even the smallest model here learns ten classes almost completely.
#
# ## What the papers report at scale
#
# In %, with the same number of steps in each row; *GFLOPs* are for the whole model:
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
# Even at scale the answer is not always yes. LIMoE, with one expert per token and
# nearly the dense model's cost, wins by 5 to 9 points on hundreds of millions of pairs
# and more. CLIP-UP, with a third more FLOPs, gains 7 points in text-to-image retrieval
# and nothing in classification.
#
# The router matters, too: on JFT, softmax token choice reaches 46.35% and Soft MoE
# 50.00% with as many slots (*Routers in Vision Mixture of Experts*, Table 1).
#
# ## A rule of thumb
#
# - **Experts help** if a wider dense model would help but costs too many FLOPs: a lot
#   of data, long training, and a model that is small for them.
# - **They do not** if data are few and the dense model already fits them, if memory for
#   all experts costs more than FLOPs, or if an expert gets only a handful of tokens per
#   batch.
# - **Begin with two experts per token in all blocks** if you can pay for them: the
#   share of the FLOPs that experts do should be large. `keras-moe describe` prints it.
#   One in every other block gains less and costs almost nothing.
# - **Try the cheap control, too**: train a wider dense model. On digits neither wins,
#   and on Fashion-MNIST two experts per token in all blocks gain three times as much.
# - **Use several seeds.** With one seed, the same model may gain a point or nothing.
#
# ## What to do next
#
# - Repeat the experiment on your own images, with more seeds and a tuned learning rate
#   for each model: `keras-moe twins`.
# - Start from a trained dense model instead: [Upcycle a dense ViT or
#   CLIP](../guides/upcycling.ipynb).
# - Compare routers before you give up on experts: [The six
#   routers](../guides/six_routers.ipynb).
