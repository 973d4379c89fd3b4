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
# V-MoE is a vision transformer in which some blocks have several MLPs, the experts, and
# a router that sends each patch of an image to a few of them. This guide loads a
# trained one, classifies handwritten digits with it, looks at who does which work,
# trains the same architecture from random weights, evaluates it by few-shot probes, and
# saves it. Nothing is downloaded: the weights come with keras_moe, the digits with
# scikit-learn.

# %%
# Where keras_moe is missing, such as in Colab, pip installs it: a checkout beside this
# notebook, or the package. Keras reads KERAS_BACKEND when it is imported.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,digits,report"
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
# A preset with trained weights is a model that predicts at once. `classify` takes
# integer pixels of any size, resizes them, and gives names and probabilities, which
# stand above the images.

# %%
# Picture: ten scans of 8 x 8 pixels in a row, white strokes on black, each with the
# digit that the model reads and its probability above it.
model = models.from_preset("vmoe_digits")
scans, labels = data.load_digits("test", image_shape=(8, 8, 1))
scans = np.uint8(127.5 * (scans + 1))
answers = model.classify(scans, top=1)

figure, axes = plt.subplots(1, 10, figsize=(9, 1.3), dpi=110)
for axis, scan, [best] in zip(axes, scans, answers):
    axis.imshow(scan, cmap="gray")
    axis.set_title(f"{best.name}: {best.probability:.0%}", fontsize=9)
    axis.axis("off")
plt.show()
right = np.mean([best.index == label for [best], label in zip(answers, labels)])
print(f"{right:.1%} of {len(labels)} test images are right.")

# %% [markdown]
# `predict`, `evaluate` and `fit` are Keras's own. They take images that are prepared
# already: float32 in [-1, 1], at the model's size.

# %%
shape = model.backbone.image_shape
train = data.load_digits("train", shape)
test = data.load_digits("test", shape)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"Images of shape {shape}: loss {loss:.3f}, accuracy {accuracy:.1%}")

# %% [markdown]
# ## The cost of a mixture of experts
#
# `describe` counts parameters and floating-point operations without building the model.
# A token meets all weights of a dense block, and those of K experts of an MoE block.
# Parameters are therefore many, and the work for an image is that of a smaller model.

# %%
models.describe("vmoe_digits", num_classes=10).print(console)

# %% [markdown]
# ## Look at the routing
#
# The routing is an output of the model, on every backend. `model.routing` has a record
# for each MoE block, with arrays of shape (images, tokens, experts): `gates` are the
# router's probabilities, `dispatched` says which expert served a token, and `combined`
# with which weight. Each image has 16 patches and a class token.

# %%
images = test[0]
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
# The entropy of the load is 1 where all experts serve equally many tokens. Auxiliary
# losses ask for that while the model trains, since an expert without tokens learns
# nothing.
#
# Which patches does each expert take? Each row is an expert of the last MoE block. The
# first column has the places where it works, from violet (in no image) to yellow (in
# most). The others have the images in which it works most, where patches of other
# experts are tinted blue.

# %%
# Picture: a row for each of eight experts. First a heat map of the places where the
# expert works, from violet (in no image) to yellow (in most), then the eight digits in
# which it works most; the patches of other experts are tinted blue there.
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
# Nobody assigned this work to the experts: they have learned it with the router. In a
# later block a token knows its whole image from attention, so that an expert may
# prefer a digit as well as a place or a stroke.
#
# `report.write_report` collects this and more in one page, `report.html`, with its
# figures as PNG files and its numbers as JSON beside it. The page needs no network and
# no server: open it in a browser. It begins with findings in plain words.

# %%
written = report.write_report(model, test, folder / "report", name="digits", verbose=0)
for finding in written.findings:
    print(f"{finding.level:>8}: {finding.text}")

# %% [markdown]
# ## Train one from random weights
#
# `load_weights=False` gives the architecture alone, and any argument of the model goes
# by name: `num_experts=4`, `router="soft"`, `capacity_factor=2.0`. The model compiles
# itself with a loss and metrics for its labels. The default learning rate is made for
# fine-tuning, and this model begins at random, so that we choose a larger one, which
# decays to zero.

# %%
# Picture: accuracy by epoch, a blue line for training images and an orange one for test
# images. Both rise steeply at first and level out; at the end the training images' line
# is above.
EPOCHS = 2 if SMALL else 12

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
# ## Evaluate the features by few-shot probes
#
# Accuracy of the head says little about features that shall serve another task. The
# vision transformers' papers fit a linear map to the frozen features of k images of
# each class, by ridge regression, and report its accuracy on all test images. Here the
# trained model, the one from above and one that nobody trained stand side by side.

# %%
untrained = models.from_preset(
    "vmoe_digits", num_classes=10, load_weights=False, seed=0
)
candidates = {"untrained": untrained, f"{EPOCHS} epochs": fresh, "the preset": model}
SHOTS = (1, 5, 10)
print(f"{'':14}" + "".join(f"{k:>4}-shot" for k in SHOTS))
for name, candidate in candidates.items():
    features = keras.Model(candidate.input, candidate.features)
    result = evaluation.few_shot_from_model(features, train, test, SHOTS, verbose=0)
    print(f"{name:14}" + "".join(f"{mean:>9.1%}" for mean in result.mean))

# %% [markdown]
# ## Save and load
#
# A preset is a folder: weights, configuration, preprocessing, and a `README.md` in the
# format of Hugging Face's cards. It loads on any backend, whatever backend wrote it,
# and loading runs no code from it.

# %%
fresh.save_to_preset(folder / "my_digits")
print(*sorted(path.name for path in (folder / "my_digits").iterdir()), sep="\n")
loaded = models.from_preset(str(folder / "my_digits"))
before, after = (m.predict(images, verbose=0) for m in (fresh, loaded))
print("The predictions are identical:", np.array_equal(before, after))

# %% [markdown]
# ## What to do next
#
# - Train on your own images: `data.load("folder:PHOTOS", "train")` reads a folder with
#   a subfolder for each class; see [Data](../docs/data.md) and
#   [Training](../docs/training.md).
# - Begin with weights that others have published, at the resolution of your images:
#   [Fine-tune published weights](../guides/fine_tune_another_resolution.ipynb).
# - Try another router, `router="soft"` or `"softmax_expert_choice"`, and compare the
#   pictures; [Routers](../docs/routers.md) has all of them.
