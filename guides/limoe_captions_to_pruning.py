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
# LIMoE is one transformer for images and texts. Its experts are shared by patches and
# words, a contrastive loss brings an image and its caption together, and auxiliary
# losses on the routers' entropies keep each modality from taking one expert alone. This
# guide uses a trained LIMoE on emoji and their names: it finds captions for pictures,
# classifies without training, shows which experts serve which modality, and takes
# experts away until the text encoder is half as large.
#
# The paper is *Multimodal Contrastive Learning with LIMoE* (Mustafa et al., 2022). The
# pictures are OpenMoji's (openmoji.org), under CC BY-SA 4.0.

# %%
# Where keras_moe is missing, such as in Colab, pip installs it: a checkout beside this
# notebook, or the package. Keras reads KERAS_BACKEND when it is imported.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,emoji,plots"
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

from keras_moe import analysis, data, evaluation, models
from keras_moe.analysis import plots

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A trained model of pairs
#
# The test emoji are of concepts that training never shows in any skin tone: it may have
# seen a man at work where the test has a woman, and of some things nothing at all.

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
# `encode_images` and `encode_text` give unit vectors, which are compared by their
# products. Below each picture are the three nearest of all test captions, and its own
# one, where it is among them, is in green.

# %%
# Picture: six emoji, each above the three captions that are nearest to it, the nearest
# first. Its own caption, where it is among them, is in bold green
# letters.
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
# Retrieval measures that for all test pairs: how often the right caption is among the
# nearest one, five or ten, and how often the right picture. A regression from pixels to
# parts of words, which is fitted in seconds, is a model to beat.

# %%
recalls = evaluation.retrieval(image_embeddings, text_embeddings, ks=(1, 5, 10))
print(f"{'':>16} {'R@1':>7} {'R@5':>7} {'R@10':>7}")
for direction in ("image_to_text", "text_to_image"):
    cells = "".join(f"{recall:>8.1%}" for recall in getattr(recalls, direction))
    print(f"{direction.replace('_', ' '):<16}{cells}")
print(f"Chance at R@1: {1 / len(captions):.1%}")

shape = (16, 16, 3)  # more pixels take longer, and do no better
train, small = data.load_emoji("train", shape), data.load_emoji("test", shape)
baseline = evaluation.retrieval(
    *evaluation.kernel_ridge_embeddings(
        train.images, train.captions, small.images, small.captions, 0.3, 0.1
    ),
    ks=(1,),
)
print(f"Kernel ridge regression at R@1: {baseline.image_to_text[0]:.1%}")

# %% [markdown]
# ## Zero-shot classification
#
# A class is a text. To ask for the skin tone of people, we write a caption for each
# tone, with several people in the place of `{}`'s other words, and take the tone whose
# captions are nearest to the image.

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
    model, images[rows], np.array(tones), TONES, TEMPLATES, ks=(1,)
)
accuracy = result.figures()["top_1"]
print(f"{accuracy:.1%} of {len(rows)} emoji, chance is {1 / len(TONES):.0%}")

# %% [markdown]
# ## Experts by modality
#
# Nobody tells an expert what to serve. `expert_usage` counts the tokens of each
# modality, here of the validation emoji, by which experts are chosen below; padding of
# captions does not count. The dashed line is an equal share.

# %%
# Picture: two bar charts, for block_1 and block_3, with two bars for each expert: its
# share of image tokens in blue and of text tokens in orange. Some experts serve images
# nearly alone, others mostly text; a dashed line marks an equal share.
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
# Each patch below has the number of the expert that serves it in a block; the tint
# repeats the number, so that one sees areas. Below the picture each piece of the
# caption has its expert's number behind the slash.

# %%
# Picture: three emoji in a row for each of two blocks, divided into 4 x 4 patches, each
# with the number of its expert in a white circle and a tint for it. Plain background
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
        # Without the marks of the caption's start and end.
        inner = list(zip(pieces, experts))[1:-1]
        print(f"  {block}", *(f"{piece}/{expert}" for piece, expert in inner))

# %% [markdown]
# ## Prune: how many experts does text need?
#
# A program that only embeds texts, such as a search engine whose pictures are embedded
# already, can do without the experts of images. The curves have the share of the tokens
# that the most used experts serve, for each block and as a black mean: where a curve is
# still high after several experts are gone, few serve nearly all.

# %%
# Picture: two charts, of image tokens and of text tokens, with the share of tokens that
# the remaining experts cover by the number of pruned experts: thin lines for blocks and
# a thick black one for their mean. The curve of texts falls later than that of images.
curves = {name: analysis.coverage_curves(usage, groups=name) for name in usage.groups}
picture = folder / "coverage.png"
plots.plot_coverage(curves, picture)
display(Image(picture))

# %% [markdown]
# `select_experts` ranks the experts by their tokens of text, `prune_experts` makes a
# smaller model of the same class, and retrieval of the validation emoji says what is
# lost. Texts are embedded by the pruned model, images by the whole one.
# With `router_drop` the gates of the experts that are left are renormalised. With
# `router_pred` they stay as they were, and a token whose expert is gone takes the best
# of the others, with its small gate.

# %%
# Picture: R@1 by the number of text experts left, from eight to two, with a line for
# router_drop and a dashed one for router_pred, on the validation emoji.
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
# The best on validation is tested once. A pruned model saves, loads and fine-tunes as
# any other.

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
# - Train it yourself: `keras-moe train limoe_emoji` takes minutes, and
#   [Studies](../docs/studies.md) compares it with its dense twin and
#   with regressions, over several seeds.
# - The entropy thresholds decide how many experts a modality takes:
#   [Image-text models](../docs/image_text.md) has the auxiliary losses.
# - Your own pairs can come from folders, tar files and records: [Data](../docs/data.md)
#   and [Image-text models](../docs/image_text.md).
# - More criteria and methods are in [Pruning](../docs/analysis.md), with classes in the
#   place of modalities, too.
