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
# # LIMoE: from captions to pruning
#
# LIMoE is one transformer for images and text. Patches and words share its experts, the
# MLPs among which a router distributes tokens. A contrastive loss pulls an image and
# its caption together, and auxiliary losses keep a modality from collapsing onto one
# expert.
#
# Here a LIMoE trained on emoji finds captions and classifies without training. Then you
# see which experts serve which modality, and remove experts until the model is about
# half as large.
#
# The paper is *Multimodal Contrastive Learning with LIMoE* (Mustafa et al., 2022). The
# pictures are from OpenMoji (openmoji.org), under CC BY-SA 4.0.

# %%
# Installs keras_moe if it is missing (in Colab, for example), from a clone around or
# next to this notebook. Set KERAS_BACKEND before you import Keras.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,digits,emoji,plots"
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
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics.pairwise import manhattan_distances

from keras_moe import analysis, data, evaluation, models
from keras_moe.analysis import plots

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A trained image-text model
#
# The test concepts never appear in training in any skin tone. Training may have shown a
# man at work instead of a woman; some things are entirely new.

# %%
model = models.from_preset("limoe_emoji")
emoji = data.load_emoji("test", model.backbone.image_shape)
images = emoji.images.astype("float32") / 127.5 - 1.0
captions = list(emoji.captions)
print(f"{len(captions)} test pairs, such as {captions[0]!r}")
print(f"{model.count_params():,} parameters for both modalities")

# %% [markdown]
# ## Captions for pictures
#
# `encode_images` and `encode_text` return unit vectors, and their dot product is the
# similarity. Below each picture are the three nearest test captions; the correct one,
# if it is among them, is green.

# %%
# Picture: six emoji, each above its three nearest captions, nearest first. The correct
# caption, if it is among them, is in bold green.
image_embeddings = model.encode_images(images)
text_embeddings = model.encode_text(captions)
similarity = image_embeddings @ text_embeddings.T

shown = np.random.default_rng(3).permutation(len(captions))[:6]
figure, axes = plt.subplots(2, 3, figsize=(10.5, 5.4), dpi=100)
for axis, index in zip(axes.flat, shown):
    axis.imshow(emoji.images[index])
    axis.axis("off")
    for line, text in enumerate(np.argsort(-similarity[index])[:3]):
        caption = captions[text]
        is_own = caption == captions[index]
        axis.text(
            0.5,
            -0.06 - 0.11 * line,
            caption if len(caption) < 54 else f"{caption[:50]}...",
            transform=axis.transAxes,
            ha="center",
            fontsize=8,
            color="#007A5A" if is_own else "black",
            weight="bold" if is_own else "normal",
        )
figure.subplots_adjust(left=0.02, right=0.98, top=0.98, bottom=0.15, hspace=0.45)
plt.show()

# %% [markdown]
# Retrieval measures this over all test pairs: how often the right caption, or the right
# picture, is among the nearest one, five or ten. A regression from pixels to parts of
# words is the baseline to beat.

# %%
recalls = evaluation.retrieval(image_embeddings, text_embeddings, ks=(1, 5, 10))
print(f"{'':>16} {'R@1':>7} {'R@5':>7} {'R@10':>7}")
for direction in ("image_to_text", "text_to_image"):
    cells = "".join(f"{recall:>8.1%}" for recall in getattr(recalls, direction))
    print(f"{direction.replace('_', ' '):<16}{cells}")
print(f"Chance at R@1: {1 / len(captions):.1%}")

shape = (16, 16, 3)  # more pixels take longer and do not help
train, small = data.load_emoji("train", shape), data.load_emoji("test", shape)
words = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
words.fit([*train.captions, *small.captions])
pixels, small_pixels = (x.images.reshape(len(x.images), -1) for x in (train, small))
width = 0.3 * np.median(manhattan_distances(pixels))
ridge = KernelRidge(alpha=0.1, kernel="laplacian", gamma=1 / width)
ridge.fit(pixels, words.transform(train.captions).toarray())
predicted, own = ridge.predict(small_pixels), words.transform(small.captions).toarray()
baseline = evaluation.retrieval(predicted, own, ks=(1,))
print(f"Kernel ridge regression at R@1: {baseline.image_to_text[0]:.1%}")

# %% [markdown]
# ## Zero-shot classification
#
# Describe each class in words, and the model classifies without training. Here we write
# three captions per skin tone and pick the tone nearest to the image.

# %%
TONES = ["light", "medium-light", "medium", "medium-dark", "dark"]
TEMPLATES = ["man: {} skin tone", "woman: {} skin tone", "person: {} skin tone"]
of_tone = {f"{tone} skin tone": number for number, tone in enumerate(TONES)}
rows, tones = [], []
for row, modifiers in enumerate(emoji.modifiers):
    own = {of_tone[modifier] for modifier in modifiers if modifier in of_tone}
    if len(own) == 1:
        rows.append(row)
        tones.append(own.pop())
result = evaluation.zero_shot_from_model(
    model, images[rows], np.array(tones), TONES, TEMPLATES, ks=(1,), verbose=0
)
accuracy = result.figures()["top_1"]
print(f"{accuracy:.1%} of {len(rows)} emoji, chance is {1 / len(TONES):.0%}")

# %% [markdown]
# ## Experts by modality
#
# `expert_usage` counts the tokens of each modality that reach each expert. We count on
# validation emoji, since these counts choose the experts to keep below. The dashed line
# is an equal share.

# %%
# Picture: two bar charts, for block_1 and block_3, with two bars per expert: its share
# of image tokens in blue and of text tokens in orange. Some experts serve almost only
# images, others mostly text; a dashed line marks an equal share.
inputs = {"images": images, **model.preprocessor(captions)}
validation = data.load_emoji("validation", model.backbone.image_shape)
chosen_by = {
    "images": validation.images.astype("float32") / 127.5 - 1.0,
    **model.preprocessor(list(validation.captions)),
}
usage = analysis.expert_usage(
    model, chosen_by, mask={"text": "padding_mask"}, verbose=0
)
picture = folder / "usage.png"
plots.plot_expert_usage(usage, picture, title="Tokens that each expert serves")
display(Image(picture))

# %% [markdown]
# ## One pair, patch by patch and word by word
#
# Each patch shows the number of its expert. Below, the number after the slash is the
# expert of that piece of the caption.

# %%
# Picture: three emoji in a row for each of two blocks, divided into 4 x 4 patches, each
# with its expert's number in a white circle and that expert's tint. Plain background
# mostly goes to one expert.
routing = keras.Model(model.input, model.routing).predict(
    {name: array[shown[:3]] for name, array in inputs.items()}, verbose=0
)
blocks = [name.removeprefix("image/") for name in routing if name.startswith("image/")]
num_experts = routing[f"image/{blocks[0]}"].dispatched.shape[-1]
colours = plt.get_cmap("tab10")(np.arange(num_experts))
rows, columns = model.backbone.grid
height, width = (x // n for x, n in zip(images.shape[1:3], (rows, columns)))

figure, axes = plt.subplots(
    len(blocks), 3, figsize=(8, 2.7 * len(blocks)), dpi=100, squeeze=False
)
for line, block in zip(axes, blocks):
    experts = routing[f"image/{block}"].dispatched[:, -rows * columns :].argmax(-1)
    for column, (axis, index) in enumerate(zip(line, shown)):
        axis.imshow(emoji.images[index])
        numbers = experts[column].reshape(rows, columns)
        for (row, across), expert in np.ndenumerate(numbers):
            place = (across * width - 0.5, row * height - 0.5)
            axis.add_patch(
                plt.Rectangle(place, width, height, color=colours[expert], alpha=0.35)
            )
            x, y = place[0] + width / 2, place[1] + height / 2
            behind = {"boxstyle": "circle", "facecolor": "white", "linewidth": 0}
            axis.text(
                x, y, str(expert), ha="center", va="center", fontsize=8, bbox=behind
            )
        axis.set_xticks([])
        axis.set_yticks([])
    line[0].set_ylabel(block)
plt.show()

tokenizer = model.preprocessor.tokenizer
for column, index in enumerate(shown[:3]):
    print(captions[index])
    token_ids = inputs["token_ids"][index][inputs["padding_mask"][index]]
    pieces = [
        tokenizer.id_to_token(int(token)).removesuffix("</w>") for token in token_ids
    ]
    for block in blocks:
        experts = routing[f"text/{block}"].dispatched[column].argmax(axis=-1)
        # Without the start and end tokens.
        inner = list(zip(pieces, experts))[1:-1]
        print(f"  {block}", *(f"{piece}/{expert}" for piece, expert in inner))

# %% [markdown]
# ## Prune: how many experts does text need?
#
# If you only embed texts, for example to search pictures that are already embedded, you
# do not need the image experts.
#
# The curves show what share of tokens the most used experts serve. If a curve stays
# high as experts are removed, a few experts serve nearly everything.

# %%
# Picture: two charts, for image and text tokens, with the share of tokens that the
# remaining experts cover by the number of pruned experts. Thin lines are blocks and a
# thick black one is their mean. The text curve falls later than the image curve.
curves = {name: analysis.coverage_curves(usage, groups=name) for name in usage.groups}
picture = folder / "coverage.png"
plots.plot_coverage(curves, picture)
display(Image(picture))

# %% [markdown]
# `select_experts` ranks the experts by their text tokens and `prune_experts` makes a
# smaller model. Retrieval on validation emoji measures the loss, with texts from the
# pruned model and images from the full one.
#
# `router_drop` renormalises the gates (the weights of the experts' outputs) over the
# remaining experts. `router_pred` leaves them as they are: a token that loses its
# expert goes to the next best, with that one's small gate.

# %%
# Picture: R@1 on the validation emoji by the number of text experts left, from eight to
# two, with a solid line for router_drop and a dashed one for router_pred.
COUNTS = (8, 4) if SMALL else (8, 6, 4, 3, 2)
METHODS = ("router_drop", "router_pred")
validation_images = model.encode_images(chosen_by["images"])
scores = {method: {} for method in METHODS}
for count in COUNTS:
    keep = analysis.select_experts(usage, count, groups="text")
    for method in METHODS:
        pruned = analysis.prune_experts(model, keep, method)
        texts = pruned.encode_text(list(validation.captions), batch_size=64)
        result = evaluation.retrieval(validation_images, texts, ks=(1,))
        scores[method][count] = (result.image_to_text[0] + result.text_to_image[0]) / 2
    cells = "".join(f", {method} {scores[method][count]:.1%}" for method in METHODS)
    print(f"{count} experts, {pruned.count_params():,} parameters: R@1{cells}")

figure, axis = plt.subplots(figsize=(5, 2.9), dpi=110)
for method, style in zip(METHODS, ("-", "--")):
    recalls = [100 * scores[method][n] for n in COUNTS]
    axis.plot(COUNTS, recalls, style, marker="o", label=method)
axis.set_xticks(COUNTS)
axis.invert_xaxis()
axis.set_ylim(bottom=0)
axis.set_xlabel("text experts left in each block")
axis.set_ylabel("R@1, mean of both ways (%)")
axis.grid(alpha=0.3)
axis.legend(loc="lower left")
plt.show()

# %% [markdown]
# Only the setting that is best on validation is tested. A pruned model saves, loads and
# fine-tunes like any other.

# %%
method, count = max(
    ((method, count) for method in METHODS for count in COUNTS[1:]),
    key=lambda pair: scores[pair[0]][pair[1]],
)
keep = analysis.select_experts(usage, count, groups="text")
pruned = analysis.prune_experts(model, keep, method)
texts = pruned.encode_text(captions, batch_size=64)
result = evaluation.retrieval(image_embeddings, texts, ks=(1,))
print(f"{count} text experts, {method}: R@1 {result.image_to_text[0]:.1%} on test")
pruned.save_to_preset(folder / "text_encoder")
loaded = models.from_preset(str(folder / "text_encoder"))
same = np.allclose(
    loaded.encode_text(captions[:8]), pruned.encode_text(captions[:8]), atol=1e-6
)
print("Kept:", {block: np.sort(experts).tolist() for block, experts in keep.items()})
print("The saved encoder embeds as before:", same)

# %% [markdown]
# ## What to do next
#
# - Train it yourself: `keras-moe train limoe_emoji` takes minutes.
#   [Studies](../docs/studies.md) compares it with its dense twin over several seeds.
# - Control how many experts a modality uses with the entropy thresholds: [Image-text
#   models](../docs/image_text.md).
# - Use your own pairs, from folders, tar files or records: [Data](../docs/data.md).
# - Prune by class instead of modality: [Analysis](../docs/analysis.md).
