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
# # The six routers
#
# A router decides which expert works on which token. *Routers in Vision Mixture of
# Experts* compares six. In token choice each token picks its experts, in expert choice
# each expert picks its tokens, and both use a softmax or a transport plan. Soft MoE
# mixes all tokens into slots instead. The released code adds a seventh: token choice
# with the sparsity-constrained plan.
#
# Here you train the same small model with all seven and compare them.

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

from keras_moe import analysis, data, models

console = Console(width=110, force_jupyter=False)
NAMES = {
    "softmax_token_choice": "token choice\nsoftmax",
    "sinkhorn_token_choice": "token choice\nSinkhorn",
    "sparsity_constrained_token_choice": "token choice\nsparse plan",
    "softmax_expert_choice": "expert choice\nsoftmax",
    "sinkhorn_expert_choice": "expert choice\nSinkhorn",
    "sparsity_constrained_expert_choice": "expert choice\nsparse plan",
    "soft": "soft\nslots",
}

# %% [markdown]
# ## One model, seven routers
#
# The model is a ViT of two blocks; the second has eight experts. Tokens are routed in
# groups, here of eight images.
#
# Every router gets the same number of slots, `C = S K c / E` per expert (its capacity),
# for S tokens in a group, K experts per token, capacity factor c and E experts. With K
# = c = 1 that is one slot per token, so all seven models cost about the same.
#
# `evaluation="official"` keeps these groups and capacities at inference, as the paper
# does. By default, each image is routed separately and token choice drops nothing.

# %%
images, labels = data.load_digits("train", image_shape=(16, 16, 1))
test_images, test_labels = data.load_digits("test", image_shape=(16, 16, 1))
# A multiple of eight, so that all groups are full.
test_images, test_labels = test_images[:448], test_labels[:448]
EPOCHS = 12
if SMALL:
    EPOCHS, images, labels = 1, images[:128], labels[:128]
    test_images, test_labels = test_images[:64], test_labels[:64]

E, K, IMAGES_PER_GROUP = 8, 1, 8
classifiers, accuracies = {}, {}
for router in NAMES:
    keras.utils.set_random_seed(0)
    # A soft router mixes the tokens of each image, in training and at inference.
    how = {} if router == "soft" else {"evaluation": "official"}
    model = models.from_preset(
        "vmoe_digits",
        load_weights=False,
        num_classes=10,
        num_layers=2,
        moe_layers=[1],
        router=router,
        num_experts=E,
        num_selected_experts=K,
        capacity_factor=1.0,
        examples_per_group=IMAGES_PER_GROUP,
        **how,
    )
    model.compile(keras.optimizers.Adam(2e-3))
    model.fit(images, labels, batch_size=64, epochs=EPOCHS, verbose=0)
    # One pass over the test images returns both probabilities and routing.
    inspected = keras.Model(model.input, [model.output, model.routing["block_1"]])
    outputs, record = inspected.predict(test_images, batch_size=64, verbose=0)
    classifiers[router] = record
    accuracies[router] = np.mean(outputs.argmax(-1) == test_labels)
tokens = next(iter(classifiers.values())).dispatched.shape[1]
capacity = IMAGES_PER_GROUP * tokens * K // E
print(f"{len(images)} training images, {tokens} tokens each, {EPOCHS} epochs")
print(f"slots of an expert for {IMAGES_PER_GROUP} images: {capacity}")

# %% [markdown]
# ## Accuracy, drops and load
#
# The columns of the table:
#
# - *no expert*: dropped tokens, which pass the block only by its residual connection.
# - *several*: tokens with more than one expert, which expert choice allows.
# - *load entropy*: 1 if all experts serve equally many tokens.
# - *error*: one standard error of the accuracy. Other seeds add to it.

# %%
table = Table(title="The same model, K = 1, capacity factor 1")
table.add_column("router")
for column in ("accuracy", "error", "no expert", "several", "load entropy", "max gate"):
    table.add_column(column, justify="right")
for router, record in classifiers.items():
    numbers = analysis.routing_statistics(record)
    accuracy = accuracies[router]
    error = np.sqrt(accuracy * (1 - accuracy) / len(test_labels))
    # A soft router gives each token a share of every slot.
    served = (record.dispatched > 0).sum(axis=-1)
    several = "-" if router == "soft" else f"{np.mean(served > 1):.1%}"
    table.add_row(
        router,
        f"{accuracy:.1%}",
        f"{error:.1%}",
        f"{numbers.dropped_tokens:.1%}",
        several,
        f"{numbers.load_entropy:.3f}",
        f"{numbers.mean_max_gate:.2f}",
    )
console.print(table)

# %% [markdown]
# Do not rank the routers by these accuracies, which are one seed of a short training.
# With longer training and several seeds they end within two points of each other
# ([Studies](../docs/studies.md)).
#
# The other columns differ by construction. Token choice with a softmax overfills some
# experts and leaves room in others; a transport plan spreads the tokens first. In
# expert choice every expert is full, and a token may get several experts or none. Soft
# routing drops nothing.
#
# ## The load of each expert
#
# Each bar is the share of all tokens that an expert served. The dashed line is the
# capacity, an eighth of the tokens. (Soft routing rounds its slots per image.)

# %%
# Picture: seven bar charts side by side, one per router, with a bar for each of eight
# experts showing its share of tokens and a dashed line at capacity. The bars of softmax
# and Sinkhorn token choice vary in height; those of the other routers are level.
figure, axes = plt.subplots(
    1, 7, figsize=(10.5, 2.2), sharey=True, layout="constrained"
)
for axis, (router, record) in zip(axes, classifiers.items()):
    loads = record.dispatched.sum(axis=(0, 1)) / record.dispatched[..., 0].size
    axis.bar(range(E), 100 * loads, color="#0072B2")
    axis.axhline(100 * K / E, color="#D55E00", linestyle="--")
    axis.set_title(NAMES[router], fontsize=9)
    axis.set(xticks=[0, E - 1], xlabel="expert")
axes[0].set_ylabel("% of tokens")
plt.show()

# %% [markdown]
# ## The dispatch of one image
#
# The dispatch matrix D has a row per token and a column per expert; the first row is
# the class token. Yellow is a mark and violet none. Token choice marks at most one
# expert per row. Expert choice fills every column equally over a group. Soft routing
# has weights everywhere, with yellow the largest.

# %%
# Picture: the dispatch matrix of one image for each of seven routers, 17 tokens down
# and eight experts across, yellow where an expert serves a token and violet elsewhere.
# Only the soft router has intermediate shades, in every cell.
figure, axes = plt.subplots(
    1, 7, figsize=(10.5, 3.1), sharey=True, layout="constrained"
)
IMAGE = 3
for axis, (router, record) in zip(axes, classifiers.items()):
    dispatch = record.dispatched[IMAGE]
    axis.imshow(dispatch, cmap="viridis", vmin=0, vmax=dispatch.max(), aspect="auto")
    axis.set_title(NAMES[router], fontsize=9)
    axis.set(xticks=[0, E - 1], xlabel="expert")
axes[0].set(ylabel="token", yticks=[0, 8, 16])
plt.show()

# %% [markdown]
# ## Patches with and without an expert
#
# Here is the same dispatch laid out over the image. The colour is the number of experts
# that serve a patch; dark blue patches were dropped. Expert choice spends more on some
# patches than on others.

# %%
# Picture: four digits, one per row, each followed by a map of its 4 x 4 patches for
# each of seven routers. The colour is the number of experts that serve a patch: dark
# blue for none, grey for one, yellow for two.
SHOWN = 4
grid = (4, 4)
figure, axes = plt.subplots(
    SHOWN, 8, figsize=(10.5, 5.2), layout="constrained", squeeze=False
)
largest = max(r.dispatched[:SHOWN, 1:].sum(-1).max() for r in classifiers.values())
for row, image in zip(axes, test_images):
    row[0].imshow(image[..., 0], cmap="gray")
axes[0, 0].set_title("image\n", fontsize=9)
for column, (router, record) in zip(axes.T[1:], classifiers.items()):
    column[0].set_title(NAMES[router], fontsize=9)
    for axis, served in zip(column, record.dispatched[:, 1:].sum(axis=-1)):
        drawn = axis.imshow(served.reshape(grid), cmap="cividis", vmin=0, vmax=largest)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
figure.colorbar(drawn, ax=axes[:, -1], label="experts that serve the patch", shrink=0.6)
plt.show()

# %% [markdown]
# ## What the paper reports
#
# Table 1 of *Routers in Vision Mixture of Experts*, on JFT with a B/32 and K c = 1:
#
# | router | accuracy |
# |---|---|
# | softmax token choice | 46.35% |
# | Sinkhorn token choice | 47.37% |
# | softmax or Sinkhorn expert choice | 48.64% |
# | sparsity-constrained expert choice | 48.67% |
# | Soft MoE | 50.00% |
#
# With twice the slots, token choice reaches 48.86% (softmax) and 49.80% (Sinkhorn), and
# the others 50.23% to 50.53%. A few hundred digits cannot show differences of that
# size.
#
# ## What to do next
#
# - Compare routers on your own images, in a clone: `python -m tools.studies routers
#   --data folder:PHOTOS`.
# - Double the slots with `num_selected_experts=2` or `capacity_factor=2.0`: almost
#   nothing is dropped.
# - Read on in [Routers](../docs/routers.md), or write an eighth: [Write your own router
#   and backbone](../guides/your_own.ipynb).
