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
# # Fine-tune published weights at another resolution
#
# Published weights were trained at one image size, mostly 224 x 224 pixels, and for one
# set of classes. Here you load such weights at another size and aspect ratio and for
# other classes, fine-tune them, and measure the gain.
#
# ## Published weights
#
# The address of the weights is the name of the preset:
#
# - `gs://vmoe_checkpoints/vmoe_b16_imagenet21k_randaug_strong`: V-MoE-B/16 with 8
#   experts, trained on ImageNet-21k;
# - `gs://vit_models/imagenet21k/ViT-B_16.npz`: the dense ViT-B/16 trained on the same
#   data;
# - `hf://timm/vit_base_patch16_224.augreg_in21k`: a ViT-B/16 from timm;
# - `hf://openai/clip-vit-base-patch32`: CLIP, or with `num_classes` its image tower.
#
# [Weights](../docs/weights.md) lists all formats and their licences.

# %%
# Installs keras_moe if it is missing (in Colab, for example), from a clone around or
# next to this notebook. Set KERAS_BACKEND before you import Keras.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,convert,digits,plots"
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
from matplotlib import pyplot as plt

from keras_moe import data, evaluation, models

keras.utils.set_random_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# This cell downloads weights and makes a classifier of ten classes for images of 384 x
# 384 pixels. It only runs if you set `KERAS_MOE_ONLINE`.

# %%
if os.environ.get("KERAS_MOE_ONLINE"):
    photos = models.from_preset(
        "hf://timm/vit_base_patch16_224.augreg_in21k",
        num_classes=10,
        image_shape=(384, 384, 3),
    )
    photos.summary()

# %% [markdown]
# ## An offline stand-in
#
# The rest of the guide works offline, on a file in the format of Google's releases: an
# `.npz` with V-MoE's tensor names. We write it ourselves, from the small V-MoE for
# handwritten digits that ships with keras_moe. It was trained on single digits of 16 x
# 16 pixels.

# %%
RENAMED = {
    "patch_embedding/": "embedding/",
    "class_token/token": "cls",
    "position_embedding/embedding": "Encoder/posembed_input/pos_embedding",
    "final_norm/": "Encoder/encoder_norm/",
    "predictions/": "head/",
    "block_": "Encoder/encoderblock_",
    "feed_forward_norm/": "LayerNorm_1/",
    "mixer_norm/": "LayerNorm_0/",
    "attention/attention_output/": "SelfAttention/out/",
    "attention/": "SelfAttention/",
    "mlp/hidden/": "Mlp/Dense_0/",
    "mlp/output/": "Mlp/Dense_1/",
    "moe/router/kernel": "Moe/Router/dense/kernel",
    "moe/experts/hidden_": "Moe/Mlp/Dense_0/",
    "moe/experts/output_": "Moe/Mlp/Dense_1/",
    "gamma": "scale",
    "beta": "bias",
}


def published_name(path):
    for name, published in RENAMED.items():
        path = path.replace(name, published)
    return path


source = models.from_preset("vmoe_digits")
arrays = {
    published_name(weight.path): keras.ops.convert_to_numpy(weight)
    for weight in source.weights
}
published = folder / "vmoe_digits.npz"
np.savez(published, **arrays)
for name in list(arrays)[-6:]:
    print(name, arrays[name].shape)

# %% [markdown]
# ## Convert
#
# `convert` reads every tensor of the file, and names any that is missing, left over or
# of the wrong shape. `from_preset` with the same arguments does the same without the
# report.
#
# Names and shapes do not reveal how many experts each token uses, so unless the V-MoE
# is a known release, pass that yourself.

# %%
ROUTING = {"num_selected_experts": 2}
model, report = models.convert(published, **ROUTING)
print(f"{report.scheme}, {report.licence}: {len(report.weights)} weights")
same = np.array_equal(
    *(
        m.predict(data.load_digits("test", (16, 16, 1))[0], verbose=0)
        for m in (source, model)
    )
)
print("The predictions are those of the source:", same)

# %% [markdown]
# ## Another resolution
#
# Pass another `image_shape`. The patches keep their size in pixels, so a larger image
# has more of them, and the position embeddings are resized like an image. All other
# weights stay as they are: attention and experts work with any number of tokens.

# %%
larger, report = models.convert(published, image_shape=(24, 24, 1), **ROUTING)
for weight in report.weights:
    if "position" in weight.weight:
        [before] = weight.sources.values()
        print(f"{weight.weight}: {before} -> {weight.shape}, {weight.how}")
print("Patches across and down:", model.backbone.grid, "->", larger.backbone.grid)

# %% [markdown]
# Resizing keeps the map of positions and refines it. The pictures show the three
# directions in which position embeddings differ most, over the grid of patches. Yellow
# is large and dark blue small.


# %%
# Picture: three components of the position embeddings, drawn over the grid of patches
# from dark blue (least) to yellow (greatest): over 4 x 4 patches above, and the same
# patterns over 6 x 6 below.
def position_map(classifier):
    """The three directions in which positions differ most, over the grid of patches."""
    grid = classifier.backbone.grid
    [weight] = [w for w in classifier.weights if "position_embedding" in w.path]
    rows = keras.ops.convert_to_numpy(weight)[0, 1:]
    return (rows @ directions).reshape(*grid, -1)


[weight] = [w for w in model.weights if "position_embedding" in w.path]
rows = keras.ops.convert_to_numpy(weight)[0, 1:]
directions = np.linalg.svd(rows - rows.mean(axis=0))[2][:3].T
figure, axes = plt.subplots(2, 3, figsize=(5, 3.4), dpi=110)
for row, (name, classifier) in zip(
    axes, {"16 x 16 pixels": model, "24 x 24 pixels": larger}.items()
):
    row[0].set_ylabel(name, fontsize=8)
    for number, axis in enumerate(row):
        axis.imshow(position_map(classifier)[..., number], cmap="cividis")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_title(f"component {number + 1}", fontsize=8)
plt.show()

# %% [markdown]
# Can the model still read digits? At another size, strokes are thinner or thicker than
# in training, and accuracy falls.

# %%
SIZES = (12, 16, 20, 24, 32)
for size in SIZES[1:4] if SMALL else SIZES:
    resized = models.from_preset(published, image_shape=(size, size, 1), **ROUTING)
    images, labels = data.load_digits("test", (size, size, 1))
    accuracy = np.mean(resized.predict(images, verbose=0).argmax(axis=-1) == labels)
    print(f"{size} x {size} pixels, {resized.backbone.grid} patches: {accuracy:.1%}")

# %% [markdown]
# So fine-tune after you change the resolution.
#
# ## A new task
#
# The new task is to read numbers from 00 to 99, two scans side by side. Resolution,
# aspect ratio and classes all change: 20 x 40 pixels, 5 x 10 patches, 100 classes.
# `num_classes` gives the model a new head; everything else comes from the file.

# %%
# Picture: twelve images of two handwritten digits side by side, white on black, each
# with its number above it.
SHAPE, COUNT = (20, 40, 1), (500, 200) if SMALL else (1500, 800)
SHOTS = (2, 5) if SMALL else (5, 10)


def numbers(split, count):
    """Images of numbers from 00 to 99, as many of each, and the numbers."""
    images, digits = data.load_digits(split, (20, 20, 1))
    generator = np.random.default_rng(0)
    labels = generator.permutation(np.arange(count) % 100)
    of_digit = [np.flatnonzero(digits == digit) for digit in range(10)]
    halves = [
        images[[generator.choice(of_digit[digit]) for digit in place]]
        for place in (labels // 10, labels % 10)
    ]
    return np.concatenate(halves, axis=2), labels.astype("int32")


train, test = numbers("train", COUNT[0]), numbers("test", COUNT[1])
figure, axes = plt.subplots(2, 6, figsize=(8, 1.9), dpi=110)
for axis, image, label in zip(axes.flat, *train):
    axis.imshow(image, cmap="gray")
    axis.set_title(f"{label:02d}", fontsize=8, pad=2)
    axis.axis("off")
plt.show()

# %%
arguments = {"num_classes": 100, "image_shape": SHAPE, "seed": 0, **ROUTING}
tuned, report = models.convert(published, **arguments)
print("New:", *report.new)
for name, reason in report.ignored.items():
    print(f"Left out: {name}, {reason}")
scratch = models.from_preset(published, load_weights=False, **arguments)


def few_shot(classifier):
    """Accuracies of linear probes of `SHOTS` images of each number."""
    features = keras.Model(classifier.input, classifier.features)
    sets = [evaluation.extract_features(features, x, verbose=0) for x in (train, test)]
    return evaluation.few_shot(*sets[0], *sets[1], SHOTS)


before = {"published weights": few_shot(tuned), "random weights": few_shot(scratch)}

# %% [markdown]
# ## Fine-tune
#
# Fine-tune for a few epochs, with a lower learning rate than from scratch, clipped
# gradients, and a short warm-up because the new head is random. For comparison, the
# same recipe trains the same architecture from random weights.

# %%
# Picture: accuracy on test numbers by epoch. The blue line, from published weights,
# rises far above the orange one, from random weights, which stays near the bottom.
EPOCHS = 1 if SMALL else 6
histories = {}
for name, classifier in {"published weights": tuned, "random weights": scratch}.items():
    steps = EPOCHS * -(-len(train[0]) // 32)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=1e-3, warmup_steps=steps // 10
    )
    classifier.compile(keras.optimizers.AdamW(rate, global_clipnorm=1.0))
    histories[name] = classifier.fit(
        *train, validation_data=test, batch_size=32, epochs=EPOCHS, verbose=0
    ).history

figure, axis = plt.subplots(figsize=(5, 2.8), dpi=110)
for name, history in histories.items():
    axis.plot(range(1, EPOCHS + 1), history["val_accuracy"], marker=".", label=name)
axis.set_xlabel("epoch")
axis.set_ylabel("accuracy on test numbers")
axis.set_ylim(0, 1)
axis.grid(alpha=0.3)
axis.legend()
plt.show()

# %% [markdown]
# Few-shot probes measure the features without the head: a ridge regression on the
# frozen features of 5 or 10 images per number, before and after.

# %%
after = {"published weights": few_shot(tuned), "random weights": few_shot(scratch)}
shots = "".join(f"{f'{k}-shot':>9}" for k in SHOTS)
print(f"{'':24}{shots}{'head':>9}")
for name, history in histories.items():
    for when, results in {"before": before, "after": after}.items():
        cells = "".join(f"{mean:>9.1%}" for mean in results[name].mean)
        head = f"{history['val_accuracy'][-1]:>9.1%}" if when == "after" else ""
        print(f"{name:<17} {when:<6}{cells}{head}")

# %% [markdown]
# The model could already read the digits in these numbers, so the new task is as close
# as it gets. Expect smaller gains on data that are less alike, and measure both rows.
#
# ## What to do next
#
# - Save the result with `tuned.save_to_preset("numbers")`, and load it anywhere with
#   `from_preset`.
# - Choose the published weights closest to your task: [Weights](../docs/weights.md).
# - Start from a dense ViT or CLIP and add experts before you fine-tune: [Upcycle a
#   dense ViT or CLIP](../guides/upcycling.ipynb).
# - Use recipes, resume interrupted runs and average several fine-tunings:
#   [Training](../docs/training.md).
