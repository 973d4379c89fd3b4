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
# Experts* compares six: tokens choose experts or experts choose tokens, by a softmax
# or by a transport plan, and Soft MoE mixes tokens into slots. The released code has a
# seventh, tokens that choose by the sparsity-constrained plan. This guide trains the
# same small model with each of them, on the same digits, and looks at what they choose,
# what they drop, how they load the experts, and how well they do.

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
# The model is a ViT of two blocks, whose second block has eight experts. Each router
# gets as many slots, `C = S K c / E` for each expert: with K = 1 and c = 1 one slot for
# each token on average, so that the seven models cost alike. `evaluation="official"`
# measures as the paper does, with the groups and the capacity of training: tokens of
# eight images compete. (The library's default at inference serves each image by itself
# and drops no token of token choice.)

# %%
images, labels = data.load_digits("train", image_shape=(16, 16, 1))
test_images, test_labels = data.load_digits("test", image_shape=(16, 16, 1))
# Whole groups of eight images.
test_images, test_labels = test_images[:448], test_labels[:448]
EPOCHS = 12
if SMALL:
    EPOCHS, images, labels = 1, images[:128], labels[:128]
    test_images, test_labels = test_images[:64], test_labels[:64]

E, K, IMAGES_PER_GROUP = 8, 1, 8
classifiers, accuracies = {}, {}
for router in NAMES:
    keras.utils.set_random_seed(0)
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
        evaluation="official",
    )
    model.compile(keras.optimizers.Adam(2e-3))
    model.fit(images, labels, batch_size=64, epochs=EPOCHS, verbose=0)
    # The probabilities and the routing of one pass over the test images.
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
# *No expert* is the share of tokens that no expert served: they pass the block by its
# residual connection. *Several* is the share that more than one expert served, which
# happens where experts choose. *Load entropy* is 1 where all experts serve as many
# tokens. *Error* is one standard error of the accuracy, by the number of test images
# alone; another seed adds to it.

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
# The accuracies are one seed each of a short training: they show who learns the digits
# quickly as much as who is good at them, and another seed moves each by an error or
# two. After longer training, with several seeds, the routers lie within two points of
# each other (*The router study in one command*). The other columns differ by
# construction.
# Token choice with a softmax fills some experts beyond their capacity and leaves others
# with room; a transport plan spreads tokens first. Where experts choose, every expert
# is full, and a token may go to several experts or to none. Soft routing drops nothing.
#
# ## The load of each expert
#
# A bar is the share of all tokens that an expert served, averaged over groups, and the
# dashed line is what fits: with K c = 1 an eighth of the tokens. (Soft routing's shares
# add up to its slots, whose number is rounded for each image.)

# %%
# Picture: seven bar charts side by side, one for each router, with a bar for the share
# of tokens of each of eight experts and a dashed line where an expert is full. The bars
# of softmax and Sinkhorn token choice differ in height; those of the other routers are
# level.
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
# The dispatch matrix D has a row for each token and a column for each expert. Token
# choice has at most one mark in a row, expert choice about as many in each column of a
# whole group, and soft routing weights everywhere. The first row is the class token.
# Yellow is a mark and violet none; the soft router's colours in between are weights,
# yellow the largest.

# %%
# Picture: the dispatch matrix of one image for each of seven routers, 17 tokens down
# and eight experts across, yellow where an expert serves a token and violet where not.
# Only the soft router has shades in between, in every place.
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
# This is the dispatch over the image. The number of experts that serve a patch is its
# colour: dark blue patches have none, and pass by the residual. Where experts choose,
# they spend more on some patches than on others. The sums of a soft router's shares are
# no whole numbers.

# %%
# Picture: four digits, one in each row, and beside each a map of its 4 x 4 patches for
# each of seven routers. Colours are the number of experts that serve a patch: dark blue
# for none, grey for one, yellow for two.
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
# On JFT with a B/32, *Routers in Vision Mixture of Experts*, Table 1, has these
# accuracies at K c = 1: softmax token choice 46.35%, Sinkhorn token choice 47.37%,
# softmax and Sinkhorn expert choice 48.64% each, the sparsity-constrained plan 48.67%,
# and Soft MoE 50.00%. At twice the slots all but token choice lie between 50.23% and
# 50.53%, token choice at 48.86% (softmax) and 49.80% (Sinkhorn). Its training took
# 116 to 123 TPUv3-days for five of the first six, and 232 for the sparsity-constrained
# plan. A few hundred digits cannot show differences of that size.
#
# ## What to do next
#
# - Compare routers on your own images, with seeds and step times, in a clone:
#   `python -m tools.studies routers --data folder:PHOTOS`. The page *The router study
#   in one command* has its results on digits.
# - Change K and c above: `num_selected_experts=2`, `capacity_factor=2.0`. At twice the
#   slots nearly nothing is dropped.
# - Read *Routers* (`docs/routers.md`) about groups, noise, auxiliary losses and
#   inference by image; and *Write your own router and backbone* for an eighth.
