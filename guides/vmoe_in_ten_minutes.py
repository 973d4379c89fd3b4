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
# # A V-MoE in ten minutes
#
# V-MoE is a vision transformer in which some blocks have several MLPs, called experts.
# A router, a small learned layer, sends each patch of an image to a few of them.
#
# Here you load a trained V-MoE, classify pictures of clothes, see what each expert
# does, then train, evaluate and save a V-MoE of your own that reads handwritten digits.
# Nothing is downloaded.

# %%
# Installs keras_moe if it is missing (in Colab, for example), from a clone around or
# next to this notebook. Set KERAS_BACKEND before you import Keras.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,digits,report"
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
from rich.console import Console

from keras_moe import analysis, data, evaluation, models, report
from keras_moe.analysis import plots

keras.utils.set_random_seed(0)
folder = Path(tempfile.mkdtemp())
console = Console(width=88, force_jupyter=False)

# %% [markdown]
# ## Predict
#
# A preset with trained weights is ready to predict. `classify` accepts integer pixels
# of any size and returns names and probabilities.

# %%
# Picture: ten grey photos of 28 x 28 pixels in a row, shoes, a pullover, trousers and
# others, each with the predicted class and its probability above it.
model = models.from_preset("vmoe_fashion")
shape = model.backbone.image_shape
sample = data.load("fashion_mnist", "sample", shape, batch_size=100)
images, labels = next(sample.as_numpy_iterator())
photos = np.uint8(127.5 * (images + 1))
answers = model.classify(photos, top=1)

figure, axes = plt.subplots(1, 10, figsize=(10, 1.4), dpi=110)
for axis, photo, [best] in zip(axes, photos, answers):
    axis.imshow(photo, cmap="gray")
    axis.set_title(f"{best.name}\n{best.probability:.0%}", fontsize=8)
    axis.axis("off")
plt.show()
right = np.mean([best.index == label for [best], label in zip(answers, labels)])
print(f"{right:.0%} of {len(labels)} test images are right.")

# %% [markdown]
# These hundred test images of Fashion-MNIST ship with the package. `predict`,
# `evaluate` and `fit` are Keras's own. They expect prepared images, as `data.load`
# gives them: float32 in [-1, 1], at the model's size.

# %%
loss, accuracy = model.evaluate(images, labels, verbose=0)
print(f"Images of shape {shape}: loss {loss:.3f}, accuracy {accuracy:.0%}")

# %% [markdown]
# ## The cost of a mixture of experts
#
# In a dense block every token uses all the weights; in an MoE block it uses only those
# of its K experts. So the model has many parameters but the cost of a much smaller one.
# `describe` counts both without building the model.

# %%
models.describe("vmoe_fashion", num_classes=10).print(console)

# %% [markdown]
# ## Look at the routing
#
# `model.routing` is an output of the model, on every backend. It has one record per MoE
# block, with arrays of shape (images, tokens, experts). `gates` are the router's
# probabilities, `dispatched` marks the experts that served a token, and `combined`
# holds their weights. Each image has 49 patches and a class token.

# %%
routing = keras.Model(model.input, model.routing).predict(images, verbose=0)
selected = model.backbone.moe.router_arguments["num_selected_experts"]
for block, record in routing.items():
    print(block, "gates", record.gates.shape)
analysis.print_statistics(
    {
        block: analysis.routing_statistics(record, selected)
        for block, record in routing.items()
    },
    console,
)

# %% [markdown]
# A load entropy of 1 means that all experts serve equally many tokens. Auxiliary losses
# encourage this during training, because an expert without tokens learns nothing.
#
# Which patches does each expert get? Each row below is an expert of the last MoE block.
# The first column shows where in the image it works, from violet (in no image) to
# yellow (in most). The others show the images in which it works most, with other
# experts' patches tinted blue.

# %%
# Picture: one row for each of eight experts. First a heat map of where the expert
# works, from violet (in no image) to yellow (in most), then the eight clothes on which
# it works most, with the patches of other experts tinted blue.
last = list(routing)[-1]
picture = folder / "experts.png"
plots.plot_expert_views(
    images,
    routing[last],
    model.backbone.grid,
    picture,
    title=f"The patches of each expert of {last}",
)
display(Image(picture))

# %% [markdown]
# Expert 3 has bags, expert 5 T-shirts, expert 7 sandals and expert 2 sleeves; 4 and 6
# keep the empty corners. The experts and the router learned this division together,
# without being told. In a later block attention has already spread information about
# the whole image, so an expert may specialise in a kind of clothes as well as in a
# position or a texture.
#
# `report.write_report` puts this and more on one page, `report.html`, which you can
# open offline. It starts with the findings.

# %%
written = report.write_report(
    model, (images, labels), folder / "report", name="clothes", verbose=0
)
for finding in written.findings:
    print(f"{finding.level:>8}: {finding.text}")

# %% [markdown]
# ## Train one from scratch
#
# `load_weights=False` gives you only the architecture, and you can override any
# argument of the model: `num_experts=4`, `router="soft"`, `capacity_factor=2.0`.
#
# The model compiles itself with a suitable loss and metrics. The default learning rate
# is meant for fine-tuning, so for random weights we choose a larger one. The images are
# the handwritten digits that come with scikit-learn, 1,347 for training.

# %%
# Picture: accuracy by epoch, a blue line for training images and an orange one for test
# images. Both rise steeply at first and level off, and training ends above test.
EPOCHS = 2 if SMALL else 12

train, test = (data.load_digits(split, (16, 16, 1)) for split in ("train", "test"))
fresh = models.from_preset("vmoe_digits", num_classes=10, load_weights=False, seed=0)
steps = EPOCHS * -(-len(train[0]) // 64)
rate = keras.optimizers.schedules.CosineDecay(3e-3, steps)
fresh.compile(keras.optimizers.AdamW(rate, global_clipnorm=1.0))
history = fresh.fit(
    *train, validation_data=test, batch_size=64, epochs=EPOCHS, verbose=0
).history

figure, axis = plt.subplots(figsize=(5, 2.8), dpi=110)
epochs = range(1, EPOCHS + 1)
axis.plot(epochs, history["accuracy"], marker=".", label="training images")
axis.plot(epochs, history["val_accuracy"], marker=".", label="test images")
axis.set_xlabel("epoch")
axis.set_ylabel("accuracy")
axis.grid(alpha=0.3)
axis.legend()
plt.show()
print(f"Test accuracy after {EPOCHS} epochs: {history['val_accuracy'][-1]:.1%}")

# %% [markdown]
# ## Evaluate the features with few-shot probes
#
# Are the features useful for another task? A few-shot probe freezes the features, fits
# a linear map to k images per class by ridge regression, and measures its accuracy on
# all test images.

# %%
untrained = models.from_preset(
    "vmoe_digits", num_classes=10, load_weights=False, seed=0
)
preset = models.from_preset("vmoe_digits")
candidates = {"untrained": untrained, f"{EPOCHS} epochs": fresh, "the preset": preset}
SHOTS = (1, 5, 10)
print(f"{'':14}" + "".join(f"{k:>4}-shot" for k in SHOTS))
for name, candidate in candidates.items():
    features = keras.Model(candidate.input, candidate.features)
    sets = [evaluation.extract_features(features, x, verbose=0) for x in (train, test)]
    result = evaluation.few_shot(*sets[0], *sets[1], SHOTS)
    print(f"{name:14}" + "".join(f"{mean:>9.1%}" for mean in result.mean))

# %% [markdown]
# ## Save and load
#
# A saved preset is a folder with weights, configuration, preprocessing and a model
# card. It loads on any backend, and loading never runs code from it.

# %%
fresh.save_to_preset(folder / "my_digits")
print(*sorted(path.name for path in (folder / "my_digits").iterdir()), sep="\n")
loaded = models.from_preset(str(folder / "my_digits"))
before, after = (m.predict(test[0], verbose=0) for m in (fresh, loaded))
print("The predictions are identical:", np.array_equal(before, after))

# %% [markdown]
# ## What to do next
#
# - Train on your own images: `data.load("folder:PHOTOS", "train")` reads a folder with
#   one subfolder per class. See [Data](../docs/data.md) and
#   [Training](../docs/training.md).
# - Start from published weights, at your resolution: [Fine-tune published
#   weights](../guides/fine_tune_another_resolution.ipynb).
# - Try another router, such as `router="soft"`, and compare the pictures.
#   [Routers](../docs/routers.md) lists them all.
