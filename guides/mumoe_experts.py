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
# In a multilinear mixture of experts (muMoE) nobody is dispatched: every expert takes
# part in every output, with a coefficient of which entmax makes most zero. Experts are
# slices of one factorised tensor, so that there may be many of them, and removing or
# moving one has an effect that can be measured at once. This guide finds experts that
# serve a single class, explains them by pictures and by ablation, and corrects a biased
# model by an edit of its experts, without training.
#
# The paper is *Multilinear Mixture of Experts* (Oldfield et al., 2024).

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

# %% [markdown]
# ## Find: experts of a head
#
# Any classifier takes a muMoE for its head. A task of many classes shows best how
# experts divide the work: numbers from 00 to 99, two scanned digits each. The features
# are those of `vmoe_digits`, which reads one digit: at another `image_shape` its
# weights take both.

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
# The features stay as they are, so that they are computed once, and heads of 2 to 32
# experts are trained on them.

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
# `classifier.routing["head"]` has the coefficients, (images, 1, experts): the feature
# of an image is the head's only token. Each row shows images in which an expert has at
# least half of the weight, with the coefficient above and the number below. These are
# the experts with the largest coefficients over all test images.

# %%
# Picture: a row of eight images for each of seven experts. An image shows two digits,
# with the expert's coefficient above it and its number below; images of a row mostly
# share a digit.
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
# A picture shows correlation. The experts' part in the decision shows where each is
# removed: `ablate_experts` sets its weights to zero, and measures the fraction of its
# accuracy that each class loses. An expert of one class has a polysemanticity of 0, the
# distance of its row from a row with a single 1.

# %%
# Picture: a row of bar charts for each head, of 2 experts at the top to 32 at the
# bottom, and in each chart a bar for each class from 00 to 99 with the accuracy that it
# loses without one expert. Many bars are tall in the upper rows, few in the lower ones.
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
# A row is a head, with its first four experts that matter, and `p` is an expert's
# polysemanticity. The classes stand from 00 to 99, so that ten neighbours share their
# first digit; a bar below zero is a class that gains. With few experts one removal
# costs many classes all that they have; with many it costs a few.

# %%
# Picture: a line of the mean polysemanticity by the number of experts, on a logarithmic
# axis. It falls with every doubling, steeply at first.
picture = folder / "polysemanticity.png"
scores = {
    count: [ablation.mean_polysemanticity]
    for count, ablation in zip(heads, ablations.values())
    if ablation.mean_polysemanticity is not None
}
plots.plot_polysemanticity({"muMoE head": scores}, picture)
display(Image(picture))

# %% [markdown]
# The mean over the experts that matter falls with their number. It would not fall for
# ever: where several experts serve each class, none is needed, and an empty row has a
# distance of 1 from any single class.

# %% [markdown]
# ## Explain: experts inside the network
#
# `mumoe_digits` is an MLP-Mixer whose channel MLPs are muMoE blocks. Its experts see
# patches in the place of images: below each patch is the image that it comes from,
# where a red frame marks it. The number above is the expert's coefficient.

# %%
# Picture: two rows for each of three experts: eight patches of 4 x 4 pixels, with the
# expert's coefficient above each, and below them the digits that they come from, in
# which a red frame marks the patch.
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
# The same ablation works for any block, routed ones too. A residual stream passes
# around a block, so that the loss of one expert costs less than in a head.

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
# Now the experts shall change what a model does. We plant a bias: the model learns
# whether a digit is 5 or above (and four more attributes), from images of which hardly
# any digit of 5 and above is inverted, while half of the others are. Inversion then
# speaks against 5 and above, and the model is wrong where it does.

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
        (16, 16, 1), patch_size=4, hidden_dim=64, num_layers=2, num_heads=4,
        mlp_dim=128, seed=0,
    ),
    num_classes=5,
    multi_label=True,
    head={"num_experts": 32, "rank": 32},
)  # fmt: skip
model.compile(keras.optimizers.AdamW(2e-3, weight_decay=1e-4))
model.fit(*biased, batch_size=64, epochs=BIASED_EPOCHS, verbose=0)


def fairness(classifier, examples):
    """Accuracies of the first attribute by subpopulation, and metrics of fairness."""
    images, attributes = examples
    predicted = classifier.predict(images, verbose=0)[:, 0] > 0
    targets, inverted = attributes[:, 0].astype(int), attributes[:, 4].astype(int)
    return analysis.fairness_metrics(predicted, targets, inverted)


# %% [markdown]
# The edit adds to the logit of "5 and above" a number that is large for images that use
# the same experts as the subpopulation: `strength mean(a)^T a`, with the mean of the
# coefficients over its training images. It needs no attribute when the model is used.
# Validation images choose the strength, by the accuracy of the worst subpopulation; the
# test images then judge. The blind threshold beside it moves the logit of all images
# alike.

# %%
few = biased[0][members]


def best_edit(subpopulation, strengths):
    """The edited model whose worst subpopulation is best on validation images."""
    edits = [
        analysis.edit_expert_logits(model, subpopulation, output=0, strength=strength)
        for strength in strengths
    ]
    worst = [fairness(edit, validation).max_min for edit in edits]
    return edits[int(np.argmax(worst))], strengths[int(np.argmax(worst))]


edited, strength = best_edit(few, [16.0, 32.0, 64.0, 128.0, 256.0])
blind, _ = best_edit(None, [0.5, 1.0, 2.0, 4.0])
results = {
    name: fairness(classifier, balanced)
    for name, classifier in {
        "as trained": model,
        "blind threshold": blind,
        "expert edit": edited,
    }.items()
}
print(f"Validation images chose a strength of {strength:g} for the edit.")
analysis.print_fairness(results, (1, 1), console)

# %%
# Picture: three tables of two rows, digits below 5 and digits of 5 and above, and two
# columns, as scanned and inverted: accuracies before the edit, after it, and their
# difference. A green frame marks inverted digits of 5 and above, which gain most;
# inverted ones below 5 lose.
picture = folder / "subpopulations.png"
plots.plot_subpopulations(
    results["as trained"],
    results["expert edit"],
    picture,
    target_names=["below 5", "5 and above"],
    attribute_names=["as scanned", "inverted"],
    target=(1, 1),
    title="Accuracy before and after one edit, on test images",
)
display(Image(picture))

# %% [markdown]
# The cell with the green frame is the subpopulation that the edit is for; in the third
# table blue is a gain and red a loss. Others may lose by its gain: read all four cells,
# not the mean alone. An edited model is a model of the same class, which
# `save_to_preset` saves as any other.
#
# ## What to do next
#
# - Put a head on a model of your own: `from_preset("vit_b32", num_classes=1000,
#   head={"num_experts": 512, "rank": 512})`.
# - [muMoE](../docs/mumoe.md) has the paper's tables, repeated over seeds, beside
#   alternatives to edits: oversampling and training against an adversary.
# - In a clone, `python -m tools.studies mumoe --parts specialisation editing` runs
#   these on your machine.
# - The recipe `mumoe_celeb_a` is the paper's own setting, on CLIP's ViT-B/32:
#   [Training](../docs/training.md).
