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
# # muMoE: find, explain and edit experts
#
# A multilinear mixture of experts (muMoE) has no router that sends tokens to some
# experts. Every expert contributes to every output, with a coefficient that entmax, a
# sparse softmax, sets to zero for most. The experts are slices of one factorised
# tensor, so you can have many, and you can remove or change one and measure the effect
# at once.
#
# Here you find experts that serve a single class, explain them, and correct a biased
# model by editing its experts, without training.
#
# The paper is *Multilinear Mixture of Experts* (Oldfield et al., 2024).

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
from matplotlib import pyplot as plt

from keras_moe import analysis, data, models
from keras_moe.analysis import plots

keras.utils.set_random_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Find: experts of a head
#
# Any classifier can have a muMoE head. To see experts divide the work we need many
# classes: numbers from 00 to 99, two scanned digits each. The features come from
# `vmoe_digits`, loaded at twice the width.

# %%
SHAPE, COUNT = (16, 32, 1), (600, 300) if SMALL else (2400, 1500)


def numbers(split, count):
    """Images of numbers from 00 to 99, as many of each, and the numbers."""
    images, digits = data.load_digits(split, (16, 16, 1))
    generator = np.random.default_rng(0)
    labels = generator.permutation(np.arange(count) % 100)
    of_digit = [np.flatnonzero(digits == digit) for digit in range(10)]
    halves = [
        images[[generator.choice(of_digit[digit]) for digit in place]]
        for place in (labels // 10, labels % 10)
    ]
    return np.concatenate(halves, axis=2), labels.astype("int32")


train, test = numbers("train", COUNT[0]), numbers("test", COUNT[1])
source = models.from_preset("vmoe_digits", num_classes=100, image_shape=SHAPE)
extractor = keras.Model(source.input, source.features)
features = extractor.predict(train[0], batch_size=128, verbose=0)

# %% [markdown]
# We compute these features once and train heads of 2 to 32 experts on them.

# %%
EXPERTS = (2, 16) if SMALL else (2, 4, 8, 16, 32)
EPOCHS = 3 if SMALL else 25


def with_head(num_experts):
    """A classifier of numbers with trained features and a trained muMoE head."""
    classifier = models.from_preset(
        "vmoe_digits",
        num_classes=100,
        image_shape=SHAPE,
        head={"num_experts": num_experts, "rank": 64},
    )
    inputs = keras.Input(features.shape[1:])
    outputs, _ = classifier.head(inputs)
    alone = keras.Model(inputs, outputs)
    rate = keras.optimizers.schedules.CosineDecay(1e-2, EPOCHS * len(features) // 64)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    alone.compile(keras.optimizers.Adam(rate), loss)
    alone.fit(features, train[1], batch_size=64, epochs=EPOCHS, verbose=0)
    return classifier


heads = {count: with_head(count) for count in EXPERTS}

# %% [markdown]
# `classifier.routing["head"]` holds the coefficients, of shape (images, 1, experts).
# Each row below is one of the experts with the largest coefficients. It shows images in
# which that expert has at least half the weight, with the coefficient above and the
# number below.

# %%
# Picture: a row of eight images for each of seven experts. An image shows two digits,
# with the expert's coefficient above it and its number below; the images of a row
# mostly share a digit.
images, labels = test
model = heads[16]
routing = keras.Model(model.input, model.routing["head"]).predict(images, verbose=0)
picture = folder / "images.png"
plots.plot_expert_images(
    images,
    routing,
    picture,
    labels=[f"{label:02d}" for label in labels],
    experts=np.sort(np.argsort(-routing.gates.mean(axis=(0, 1)))[:7]).tolist(),
    threshold=None if SMALL else 0.5,
    title="Images of experts of the head",
)
display(Image(picture))

# %% [markdown]
# ## Explain: what is lost without an expert?
#
# A picture only shows correlation. To see what an expert causes, remove it:
# `ablate_experts` sets its weights to zero and measures what fraction of its accuracy
# each class loses.
#
# The polysemanticity of an expert is the distance of these losses from a loss in a
# single class. It is 0 for an expert that serves exactly one class.

# %%
# Picture: a row of bar charts for each head, from 2 experts at the top to 32 at the
# bottom. Each chart has a bar for each class from 00 to 99: the accuracy that it loses
# without one expert. Many bars are tall in the upper rows, few in the lower ones.
ablations = {
    f"{count} experts": analysis.ablate_experts(
        classifier, *test, batch_size=128, verbose=0
    )
    for count, classifier in heads.items()
}
for name, ablation in ablations.items():
    accuracy = np.average(ablation.accuracy, weights=ablation.counts)
    print(f"{name:>10}: {accuracy:.1%} of the test images are right")
picture = folder / "ablation.png"
plots.plot_ablation(ablations, picture)
display(Image(picture))

# %% [markdown]
# Each row is a head, with its first four experts that matter; `p` is an expert's
# polysemanticity. A bar below zero is a class that gains. With few experts, one removal
# costs many classes all their accuracy; with many, it costs a few.

# %%
# Picture: mean polysemanticity by the number of experts, on a logarithmic axis. It
# falls with every doubling, steeply at first.
scores = {
    count: ablation.mean_polysemanticity
    for count, ablation in zip(heads, ablations.values())
    if ablation.mean_polysemanticity is not None
}
figure, axis = plt.subplots(figsize=(5.2, 3.7))
axis.plot(list(scores), list(scores.values()), marker="o")
axis.set_xscale("log", base=2)
axis.set_xticks(list(scores), list(scores))
axis.set_ylim(bottom=0)
axis.set_xlabel("experts")
axis.set_ylabel("mean class-level polysemanticity")
plt.show()

# %% [markdown]
# The more experts, the more specialised each one is. This does not continue forever:
# once several experts serve each class, removing one changes nothing, and an expert
# without effect scores 1.

# %% [markdown]
# ## Explain: experts inside the network
#
# `mumoe_digits` is an MLP-Mixer with muMoE blocks, whose experts see patches instead of
# images. Below each patch is the image it comes from, and above it the expert's
# coefficient.

# %%
# Picture: two rows for each of three experts: eight patches of 4 x 4 pixels, with the
# expert's coefficient above each, and below them the digits that they come from, with a
# red frame around the patch.
mixer = models.from_preset("mumoe_digits")
train = data.load_digits("train", (16, 16, 1))
test = images, labels = data.load_digits("test", (16, 16, 1))
records = keras.Model(mixer.input, mixer.routing).predict(images, verbose=0)
block = [name for name in records if not name.endswith("token_mixer")][-1]
gates = records[block].gates.mean(axis=(0, 1))
most = np.argsort(-gates)[:3].tolist()
picture = folder / "patches.png"
plots.plot_expert_patches(
    images,
    records[block],
    mixer.backbone.grid,
    picture,
    experts=most,
    title=f"Patches that use the experts of {block} most",
)
display(Image(picture))

# %% [markdown]
# The same ablation works for any block, including routed ones. A residual connection
# bypasses each block, so losing an expert costs less than in a head.

# %%
within = analysis.ablate_experts(mixer, *test, layer=block, verbose=0)
for expert in np.argsort(-within.changes.max(axis=1))[:3]:
    loss = within.changes[expert]
    print(
        f"{block} without expert {expert}: digit {loss.argmax()} loses {loss.max():.1%}"
        " of its accuracy"
    )

# %% [markdown]
# ## Edit: correct a bias without training
#
# First we plant a bias. The model learns whether a digit is 5 or above (and four more
# attributes), but almost none of the digits 5 and above are inverted in training, while
# half of the others are. So it gets inverted digits of 5 and above wrong.

# %%
BIASED_EPOCHS = 2 if SMALL else 40


def with_attributes(images, digits, inverted):
    """Images, some of them inverted, and their five attributes."""
    images = np.where(inverted[:, None, None, None], -images, images)
    attributes = [digits >= 5, digits % 2 == 0, np.isin(digits, [0, 6, 8, 9])]
    attributes += [np.isin(digits, [2, 3, 5, 7]), inverted]
    return images, np.stack(attributes, axis=1).astype("float32")


def both_ways(images, digits):
    """Every image as it is and inverted, with its attributes."""
    twice = np.concatenate([images, images]), np.concatenate([digits, digits])
    return with_attributes(*twice, np.repeat([False, True], len(digits)))


generator = np.random.default_rng(0)
held = generator.permutation(len(train[0])) < 300
validation, balanced = both_ways(*(x[held] for x in train)), both_ways(*test)
rest = [x[~held] for x in train]
rare = generator.random(len(rest[1])) < np.where(rest[1] >= 5, 0.03, 0.5)
biased = with_attributes(*rest, rare)
members = (biased[1][:, 0] == 1) & (biased[1][:, 4] == 1)
print(f"{members.sum()} of {len(members)} images are inverted and 5 or above.")

model = models.ViTImageClassifier(
    models.ViTBackbone(
        image_shape=(16, 16, 1), patch_size=4, hidden_dim=64, num_layers=2,
        num_heads=4, mlp_dim=128, seed=0,
    ),
    num_classes=5,
    multi_label=True,
    head={"num_experts": 32, "rank": 32},
)  # fmt: skip
model.compile(keras.optimizers.AdamW(2e-3, weight_decay=1e-4))
model.fit(*biased, batch_size=64, epochs=BIASED_EPOCHS, verbose=0)


def accuracies(classifier, examples):
    """Accuracy by subpopulation: below 5 or from 5 on, as scanned or inverted."""
    images, attributes = examples
    targets, inverted = attributes[:, 0], attributes[:, 4]
    right = (classifier.predict(images, verbose=0)[:, 0] > 0) == targets
    parts = [[(targets == t) & (inverted == i) for i in (0, 1)] for t in (0, 1)]
    return np.array([[right[part].mean() for part in row] for row in parts])


# %% [markdown]
# The edit raises the logit of "5 and above" for images that use the same experts as
# this subpopulation. It adds `strength mean(a)^T a`, with the mean over the
# subpopulation's training images. At inference it needs no attribute.
#
# Validation images choose the strength, and test images judge. The baseline is a blind
# threshold, which shifts the logit of all images alike.

# %%
few = biased[0][members]


def best_edit(subpopulation, strengths):
    """The edited model whose worst subpopulation is best on validation images."""
    edits = [
        analysis.edit_expert_logits(model, subpopulation, output=0, strength=strength)
        for strength in strengths
    ]
    worst = [accuracies(edit, validation).min() for edit in edits]
    return edits[int(np.argmax(worst))], strengths[int(np.argmax(worst))]


edited, strength = best_edit(few, [16.0, 32.0, 64.0, 128.0, 256.0])
blind, _ = best_edit(None, [0.5, 1.0, 2.0, 4.0])
results = {
    name: accuracies(classifier, balanced)
    for name, classifier in {
        "as trained": model,
        "blind threshold": blind,
        "expert edit": edited,
    }.items()
}
print(f"Validation images chose a strength of {strength:g} for the edit.")
print(f"{'':<16}{'inverted, 5 on':>16}{'true positive gap':>19}{'worst':>8}")
for name, table in results.items():
    gap = abs(table[1, 0] - table[1, 1])  # equality of opportunity: 0 is fair
    print(f"{name:<16}{table[1, 1]:>16.3f}{gap:>19.3f}{table.min():>8.3f}")

# %%
# Picture: three tables of two rows, digits below 5 and digits of 5 and above, and two
# columns, as scanned and inverted: accuracies before the edit, after it, and their
# difference. A green frame marks inverted digits of 5 and above, which gain most;
# inverted ones below 5 lose.
before, after = results["as trained"], results["expert edit"]
figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.9), layout="tight")
for axis, name, table in zip(
    axes, ("before", "after", "difference"), (before, after, after - before)
):
    colours = {"cmap": "RdBu", "vmin": -1} if name == "difference" else {"vmin": 0}
    axis.imshow(table, vmax=1, aspect="auto", alpha=0.7, **colours)
    axis.set_title(name)
    axis.set_xticks([0, 1], ["as scanned", "inverted"])
    axis.set_yticks([0, 1], ["below 5", "5 and above"])
    for (row, column), value in np.ndenumerate(table):
        axis.text(column, row, f"{value:.3f}", ha="center", va="center")
    frame = plt.Rectangle((0.52, 0.52), 0.96, 0.96, fill=False, color="lime", lw=3)
    axis.add_patch(frame)
plt.show()

# %% [markdown]
# The green frame marks the subpopulation that the edit is for. In the third table blue
# is a gain and red a loss. Other subpopulations may lose, so read all four cells, not
# only the mean.
#
# ## What to do next
#
# - Put such a head on your own model: `from_preset("vit_b32", num_classes=1000,
#   head={"num_experts": 512, "rank": 512})`.
# - Compare edits with oversampling and adversarial training, over several seeds:
#   [muMoE](../docs/mumoe.md). In a clone, `python -m tools.studies mumoe --parts
#   specialisation editing` repeats this.
# - Use the paper's own setting on CLIP's ViT-B/32, the recipe `mumoe_celeb_a`:
#   [Training](../docs/training.md).
