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
# # MoE++: where compute goes
#
# An MoE layer has several MLPs, called feed-forward (FFN) experts, and a router that
# sends each token to K of them. MoE++ adds three types of expert that cost almost
# nothing: zero experts return nothing, copy experts return the token, and constant
# experts mix the token with a trained vector. A token that needs little work can choose
# one of these.
#
# Here you see where a trained model spends its compute and what steers it. The paper is
# *MoE++: Accelerating Mixture-of-Experts Methods with Zero-Computation Experts* (Jin et
# al., 2025).

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
import tempfile
from pathlib import Path

import keras
import numpy as np
from IPython.display import Image, display
from rich.console import Console

from keras_moe import analysis, data, models
from keras_moe.analysis import plots

keras.utils.set_random_seed(0)
folder = Path(tempfile.mkdtemp())
console = Console(width=88, force_jupyter=False)
train = data.load_digits("train", (16, 16, 1))
test = images, labels = data.load_digits("test", (16, 16, 1))

# %% [markdown]
# ## A trained MoE++
#
# `moepp_digits` is a small vision transformer with an MoE layer in every block. Every
# token chooses K experts of any type.

# %%
model = models.from_preset("moepp_digits")
kinds, moe = model.backbone.expert_types, model.backbone.moe
K, tau = (moe.router_arguments[name] for name in ("num_selected_experts", "tau"))
for kind, count in kinds._asdict().items():
    print(f"{kind:>8}: {count} experts")
_, accuracy = model.evaluate(*test, verbose=0)
print(f"K = {K}, tau = {tau}, test accuracy {accuracy:.1%}")

# %% [markdown]
# ## Compute maps
#
# At inference no token is dropped, so the compute of a token is its number of FFN
# experts: none, one or K in each block. Each image below is followed by the map of its
# patches, averaged over the blocks. The number above is the mean over patches.

# %%
# Picture: eight digits, each followed by the same digit under a map of its patches,
# from black (no FFN expert) through violet to white (two in every block), with the mean
# over the patches above.
routing = keras.Model(model.input, model.routing).predict(images, verbose=0)
shown = [int(np.flatnonzero(labels == digit)[0]) for digit in range(8)]
maps = analysis.compute_map(routing, kinds, model.backbone.grid)
picture = folder / "compute.png"
plots.plot_compute_maps(images[shown], maps[shown], picture, K)
display(Image(picture))

# %% [markdown]
# Which experts serve the rest? The next picture has one row per type, each with its own
# scale. The number on the left is the row's mean.

# %%
# Picture: five digits in the first row, and below each a map of its 4 x 4 patches for
# each type of expert: FFN, constant, copy and zero. Light patches use more experts of
# that type; each row has its own scale.
picture = folder / "kinds.png"
few = shown[:5]
plots.plot_type_maps(
    images[few],
    {
        kind: analysis.compute_map(routing, kinds, model.backbone.grid, kind)[few]
        for kind in ("ffn", "constant", "copy", "zero")
    },
    picture,
)
display(Image(picture))

# %% [markdown]
# A few images can mislead, so we check them all. A patch is plain if its pixels hardly
# differ from their mean.

# %%
rows, columns = model.backbone.grid
patches = images.reshape(len(images), rows, 4, columns, 4).std(axis=(2, 4))
groups = {"plain": patches < 0.1, "with an edge": patches >= 0.1}
print(f"{'patches':<14}{'share':>7}" + "".join(f"{kind:>10}" for kind in kinds._fields))
for name, chosen in groups.items():
    counts = [
        analysis.compute_map(routing, kinds, model.backbone.grid, kind)[chosen].mean()
        for kind in kinds._fields
    ]
    print(f"{name:<14}{chosen.mean():>7.0%}" + "".join(f"{x:>10.2f}" for x in counts))

# %% [markdown]
# In this model plain patches get hardly less compute than the others. A likely reason
# is attention: after a block or two a token knows about the whole image, so its own
# pixels say little about it.
#
# ## Loads by type
#
# Each bar shows the types' shares of all choices in a block, and the number next to it
# the FFN experts per token.

# %%
# Picture: a horizontal bar for each of four blocks, divided into the shares of the
# types of experts: FFN in blue, constant in green, copy in orange, zero in grey. The
# share of FFN grows from the first block to the last.
loads = analysis.load_by_type(routing, kinds, K)
analysis.print_load_by_type(loads, console)
picture = folder / "loads.png"
plots.plot_load_by_type(loads, picture)
display(Image(picture))

# %% [markdown]
# ## The cost at inference
#
# FFN experts account for nearly all the FLOPs of a layer. A vanilla twin without the
# cheap experts runs K of them for every token. The measured loads tell you how much of
# that remains.

# %%
vanilla = models.describe(
    "moepp_digits",
    load_weights=False,
    zero_experts=0,
    copy_experts=0,
    constant_experts=0,
    gating_residual=False,
    auxiliary_losses="auto",
)
spent = np.mean([load.experts_per_token["ffn"] for load in loads.values()])
dim, hidden = model.backbone.hidden_dim, 2 * model.backbone.hidden_dim
one_expert = 2 * 2 * dim * hidden * vanilla.num_tokens * len(loads)
print(f"vanilla twin: {K} FFN experts per token, {vanilla.gflops * 1e3:.2f} MFLOPs")
less = vanilla.gflops * 1e3 - (K - spent) * one_expert / 1e6
print(f"this model: {spent:.2f} FFN experts per token, {less:.2f} MFLOPs an image")

# %% [markdown]
# FLOPs are not time: in small models attention and routing dominate.
# [MoE++](../docs/moe_plus_plus.md) has measured throughputs.
#
# ## The worth of each type
#
# You can remove zero, copy and constant experts after training: their tokens go to the
# next best expert. The paper does this in Table C.

# %%
removals = ["zero", "copy", "constant", ("zero", "copy", "constant")]
ablation = analysis.ablate_experts(model, *test, "all", removals, verbose=0)
share = ablation.counts / ablation.counts.sum()
print(f"{'with all experts':<32}{ablation.accuracy @ share:>7.1%}")
for name, accuracies in zip(ablation.experts, ablation.ablated):
    print(f"without {name:<24}{accuracies @ share:>7.1%}")

# %% [markdown]
# ## `tau` moves the balance
#
# `tau` controls how many tokens an FFN expert gets compared to a cheap one. It acts
# during training, through the balance loss and the capacities (how many tokens an
# expert accepts).
#
# A few more epochs with another `tau` move the loads. The control is the same training
# with the model's own `tau`; compare the accuracies only with each other, since the
# recipe trains longer and with augmentation.

# %%
TAUS, EPOCHS = ((0.1,), 1) if SMALL else ((0.1, 0.75, 3.0), 5)
print(f"{'tau':>5}{'FFN experts per token':>24}{'test accuracy':>16}")
print(f"{tau:>5g}{spent:>24.2f}{accuracy:>16.1%}, as it comes")
for tau in TAUS:
    other = models.from_preset("moepp_digits", tau=tau)
    other.compile(keras.optimizers.Adam(2e-3))
    other.fit(*train, batch_size=64, epochs=EPOCHS, verbose=0)
    record = keras.Model(other.input, other.routing).predict(images, verbose=0)
    per_token = analysis.experts_per_token(record, kinds).mean()
    _, reached = other.evaluate(*test, verbose=0)
    print(f"{tau:>5g}{per_token:>24.2f}{reached:>16.1%}, {EPOCHS} epochs later")

# %% [markdown]
# ## Gating residuals
#
# From the second MoE block on, the router adds a learned map of the previous block's
# logits to its own, so a token remembers which experts it chose. To see the effect, we
# set this map to zero in a copy of the model.

# %%
# Picture: two histograms of gates over all tokens, with gating residuals and with the
# maps set to zero: the highest gate in blue and the second-highest in orange, which is
# narrower and lower. The two charts are nearly the same.
forgetful = models.from_preset("moepp_digits")
for weight in forgetful.weights:
    if weight.path.endswith("residual_kernel"):
        weight.assign(np.zeros(weight.shape))
without = keras.Model(forgetful.input, forgetful.routing).predict(images, verbose=0)
_, reached = forgetful.evaluate(*test, verbose=0)
print(f"Test accuracy {accuracy:.1%}, without the maps {reached:.1%}")
for block in routing:
    both = routing[block].dispatched * without[block].dispatched
    print(
        f"{block}: {both.sum(axis=-1).mean() / K:.0%} of all choices stay as they were"
    )
last = list(routing)[-1]
picture = folder / "scores.png"
plots.plot_routing_scores(
    {
        "with gating residuals": analysis.routing_scores(routing[last]),
        "the maps set to zero": analysis.routing_scores(without[last]),
    },
    picture,
    title=f"The two highest gates of each token in {last}",
)
display(Image(picture))

# %% [markdown]
# This model was trained with the maps. To train one without, pass
# `gating_residual=False`.
#
# ## What to do next
#
# - Use the paper's sizes: `from_preset("moepp_vit_b16", num_classes=1000, tau=0.5)`.
# - Add cheap experts to your own layer or to any preset with the arguments
#   `zero_experts`, `copy_experts` and `constant_experts`:
#   [MoE++](../docs/moe_plus_plus.md).
# - Repeat the paper's experiments on digits, in a clone: `python -m tools.studies
#   moepp`.
