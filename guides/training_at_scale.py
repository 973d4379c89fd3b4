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
# # Training at scale, on paper
#
# Before you rent machines for V-MoE-H/14 or LIMoE-H/14, do the arithmetic: does the
# model fit, what travels between the chips, and how long is a step?
# `keras_moe.distribution.costs` computes it without an accelerator.

# %%
# Installs keras_moe if it is missing (in Colab, for example), from a clone around or
# next to this notebook. Set KERAS_BACKEND before you import Keras.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "jax,plots"
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
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from keras_moe import distribution, models

console = Console(width=120, force_jupyter=False)
GIB = 2**30


def table(title, rows):
    """Prints rows, dicts of one shape, as a table."""
    shown = Table(title=title, title_justify="left")
    for name in rows[0]:
        shown.add_column(name, justify="left" if name == "layout" else "right")
    for row in rows:
        shown.add_row(*map(str, row.values()))
    console.print(shown)


# %% [markdown]
# ## The model
#
# V-MoE-H/14 is a ViT-H/14 in which every other block has 32 experts (MLPs), and a
# router sends each token to two of them.

# %%
D, H, E, MOE_BLOCKS = 1280, 5120, 32, 16
model = models.describe("vmoe_h14")
expert = 2 * D * H + H + D
print(f"one expert:    2 x {D} x {H} + {H} + {D} = {expert / 1e6:.1f}M parameters")
print(
    f"all experts:   {MOE_BLOCKS} blocks x {E} x {expert / 1e6:.1f}M"
    f" = {MOE_BLOCKS * E * expert / 1e9:.2f}B"
)
print(f"everything:    {model.parameters / 1e9:.2f}B")
print(f"for one token: {model.active_parameters / 1e9:.2f}B")
print(f"one image:     {model.num_tokens} tokens, {model.gflops:.0f} GFLOPs forward")

# %% [markdown]
# Nearly all parameters belong to experts, and each token uses few of them. So you split
# the experts over the devices, and the tokens travel.
#
# ## Does it fit?
#
# Training with Adam keeps 12 bytes per parameter: the weight and two moments, all in
# float32. (Only matmuls use bfloat16.) Gradients take the place of activations that the
# backward pass no longer needs.

# %%
need = 12 * model.parameters
chip = distribution.CHIPS["tpu_v4"]
print(f"12 bytes x {model.parameters / 1e9:.2f}B = {need / GIB:.0f} GiB")
print(f"one {chip.name} has {chip.memory / GIB:.0f} GiB")

# %% [markdown]
# It does not fit on one chip. In a pod slice of 256 chips, `expert_parallel=n` divides
# the experts among n chips. There are 256 / n such groups, each with its own part of
# the batch.

# %%
CHIPS, BATCH = 256, 4096


def plan(name, preset, devices, batch_size, **options):
    """One row: what a layout costs."""
    costs = distribution.costs(preset, devices, batch_size, **options)
    fastest, slowest = costs.step_seconds
    return {
        "layout": name,
        "weights": f"{costs.memory['weights'] / GIB:.1f}",
        "activations": f"{costs.memory['activations'] / GIB:.1f}",
        "all GiB": f"{costs.memory_bytes / GIB:.1f}",
        "fits": "yes" if costs.fits else "no",
        "all-to-all": f"{costs.traffic['all-to-all (tokens)'] / 1e9:.2f}",
        "all-reduce GB": f"{costs.traffic['all-reduce (gradients)'] / 1e9:.2f}",
        "step ms": f"{1e3 * fastest:.0f} to {1e3 * slowest:.0f}",
    }


WAYS = (1, 32) if SMALL else (1, 2, 4, 8, 16, 32)
table(
    f"V-MoE-H/14, {CHIPS} x {chip.name}, a batch of {BATCH}: each chip",
    [
        plan(f"expert_parallel={n}", "vmoe_h14", CHIPS, BATCH, expert_parallel=n)
        for n in WAYS
    ],
)

# %% [markdown]
# Memory is in GiB, and data that leave a chip in a step are in GB. The line in the
# picture is a chip's memory.

# %%
# Picture: stacked bars of a chip's memory by the number of devices that share the
# experts, from 1 to 32: weights, gradients, optimizer and activations. The first bars
# rise far above the dashed line of a chip's memory, the last ones stay below it; the
# activations do not change.
rows = [
    distribution.costs("vmoe_h14", CHIPS, BATCH, expert_parallel=n).memory for n in WAYS
]
figure, axis = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
bottom = [0.0] * len(WAYS)
for part, colour in zip(
    rows[0], ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999")
):
    heights = [row[part] / GIB for row in rows]
    axis.bar([str(n) for n in WAYS], heights, bottom=bottom, color=colour, label=part)
    bottom = [below + height for below, height in zip(bottom, heights)]
axis.axhline(chip.memory / GIB, color="black", linestyle="--", label=chip.name)
axis.set(xlabel="devices that share the experts (expert_parallel)", ylabel="GiB a chip")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
plt.show()

# %% [markdown]
# Plain data parallelism (`expert_parallel=1`) keeps all experts on every chip: too much
# memory, and every gradient is summed over all chips. Each doubling halves the experts
# per chip; everything else stays the same.
#
# **Split over as many devices as the experts allow (32 here), unless you have memory to
# spare.** The experts' gradients are then summed over only 256 / 32 chips, and the
# tokens that travel instead are fewer bytes.
#
# ## What travels
#
# Groups of 8 images are routed together. Each expert has a capacity, a limit on the
# tokens that it accepts from a group: `C = ceil(S K c / E)`, rounded up to a multiple
# of 4. All slots travel, full or not: to the experts and back, and again for the
# gradient. Only those of a chip's own experts stay.

# %%
S = 8 * model.num_tokens
block = models.resolve("vmoe_h14").unbuilt_blocks()[1]
router = block.feed_forward.router
C = router.group_capacity(S, training=True)
groups = BATCH // CHIPS // 8
ways = 32
buffer = groups * E * C * D * 2
sent = 4 * MOE_BLOCKS * buffer * (ways - 1) // ways
print(
    f"C = {S} x {router.num_selected_experts} x {router.capacity_factor} / {E} -> {C}"
)
print(
    f"slots of a chip: {groups} groups x {E} x {C} x {D} numbers x 2 bytes"
    f" = {buffer / 1e6:.1f} MB"
)
print(
    f"a step sends:    4 x {MOE_BLOCKS} blocks x {buffer / 1e6:.1f} MB"
    f" x {ways - 1}/{ways} = {sent / 1e9:.2f} GB from each chip,"
    f" {CHIPS * sent / 1e12:.2f} TB from all"
)
costs = distribution.costs("vmoe_h14", CHIPS, BATCH, expert_parallel=ways)
assert costs.traffic["all-to-all (tokens)"] == sent

# %% [markdown]
# ## How long is a step?
#
# The backward pass costs twice the forward pass, so a step costs three times the
# forward FLOPs. We assume that a chip reaches 40% of its peak; measure yours, and pass
# it as `utilization=`. In a torus most data pass through other chips, so an all-to-all
# gets only part of the links' bandwidth.

# %%
flops = 3 * 1e9 * model.gflops * BATCH / CHIPS
print(f"3 x {model.gflops:.0f} GFLOPs x {BATCH} / {CHIPS} = {flops / 1e12:.1f} TFLOPs")
print(
    f"at 40% of {chip.peak_flops / 1e12:.0f} TFLOP/s:"
    f" {1e3 * flops / (0.4 * chip.peak_flops):.0f} ms"
)
rate = chip.all_to_all_bandwidth(ways, CHIPS)
print(
    f"all-to-all: {sent / 1e9:.2f} GB at {rate / 1e9:.0f} GB/s"
    f" = {1e3 * sent / rate:.0f} ms (all links: {chip.bandwidth / 1e9:.0f} GB/s)"
)
costs.print(console)

# %% [markdown]
# The last two rows are a range: sending overlaps completely with computing, or not at
# all. If a real step is slower than both, look for padding, a slow input pipeline, or
# groups that span several chips.
#
# ## Other pods, and eight H200
#
# If activations are too large, `rematerialize=True` ("again" in the tables) keeps only
# the blocks' inputs and recomputes the rest. This costs a third more compute, and
# tokens travel one and a half times as often. If the optimizer's state is too large,
# Adafactor keeps only a bfloat16 moment and sums of rows and columns.

# %%
for name in ("tpu_v4", "tpu_v5e", "tpu_v5p"):
    table(
        f"V-MoE-H/14, {CHIPS} x {name}, a batch of {BATCH}, expert_parallel=32",
        [
            plan(
                f"{optimizer}{', again' if again else ''}",
                "vmoe_h14",
                CHIPS,
                BATCH,
                chip=name,
                expert_parallel=ways,
                optimizer=optimizer,
                rematerialize=again,
            )
            for optimizer, again in (
                ("adam", False),
                ("adafactor", False),
                ("adafactor", True),
            )
        ],
    )

# %% [markdown]
# Eight H200 in one machine are few chips with a lot of memory. Each holds four experts
# per block and reaches every other directly.

# %%
table(
    "V-MoE-H/14, 8 x h200, adam: each GPU",
    [
        plan(
            f"{size} images, experts/{n}, heads/{m}{', again' if again else ''}",
            "vmoe_h14",
            8,
            size,
            chip="h200",
            expert_parallel=n,
            model_parallel=m,
            rematerialize=again,
        )
        for size, n, m, again in (
            (64, 1, 1, False),
            (512, 8, 1, False),
            (512, 4, 2, False),
            (512, 8, 1, True),
            (2048, 8, 1, True),
        )
    ],
)

# %% [markdown]
# `model_parallel=2` splits heads and hidden units. It saves weights outside the
# experts, which are few, and sums activations in every block. **Use it only if one
# image's share of a block does not fit otherwise**; for these models it is not worth
# its cost.
#
# ## LIMoE-H/14
#
# LIMoE's single tower reads images and text, and routes both together. The paper's H/14
# (A.3 and Table 4) has 32 experts in 12 of 32 blocks, one per token, images of 288
# pixels, 16 text tokens, a batch of 21,502, and Adafactor.
#
# It is not in the zoo, so we describe it as `vmoe_h14` with other arguments, and
# approximate three things:
#
# - 288 is not a multiple of 14. We use 294, which gives 27.6 patches per text token
#   (the paper: about 27).
# - The batch is rounded up to a multiple of the chips. A chip's examples form one
#   group, as in the paper; the capacity factor is V-MoE's.
# - We leave out the text embedding, the contrastive head, the attention mask, and the
#   modalities' different positions.

# %%
LIMOE = {
    "image_shape": (294, 294, 3),
    # Appendix A.3's blocks 3, 7, 11, ..., counted from 0.
    "moe_layers": [2, 6, 10, 14, 17, 20, 23, 25, 27, 29, 30, 31],
    "num_selected_experts": 1,
    "class_token": False,
}
limoe = models.describe("vmoe_h14", **LIMOE)
VOCABULARY = 32_000 * D  # T5's usual vocabulary
print(f"{limoe.num_tokens} patches, {limoe.num_tokens / 16:.1f} for each text token")
print(f"parameters: {(limoe.parameters + VOCABULARY) / 1e9:.2f}B (paper: 5.6B)")
print(f"for a token: {(limoe.active_parameters + VOCABULARY) / 1e6:.0f}M (paper: 675M)")


def limoe_plan(name, chips, chip, batch_size=21_502, **options):
    images = -(-batch_size // chips)
    return plan(
        name.format(images * chips),
        "vmoe_h14",
        chips,
        images * chips,
        chip=chip,
        expert_parallel=min(chips, 32),
        optimizer="adafactor",
        text_tokens=16,
        examples_per_group=images,
        **{"rematerialize": True, **LIMOE, **options},
    )


for name in ("tpu_v4",) if SMALL else ("tpu_v4", "tpu_v5e", "tpu_v5p"):
    table(
        f"LIMoE-H/14 on {name}, adafactor, rematerialised, expert_parallel=32",
        [limoe_plan(f"{n} chips, {{}} pairs", n, name) for n in (256, 1024)],
    )
table(
    "LIMoE-H/14, 8 x h200, adafactor, expert_parallel=8",
    [
        limoe_plan("{} pairs, again", 8, "h200"),
        limoe_plan("{} pairs, again", 8, "h200", batch_size=8192),
        limoe_plan("{} pairs", 8, "h200", batch_size=512, rematerialize=False),
    ],
)

# %% [markdown]
# The published batch is too large for eight GPUs. A contrastive loss needs the whole
# batch at once, so gradient accumulation does not help; you need rematerialisation or
# more chips.
#
# ## The command
#
# Run one process per host. Each reads its own part of the data.


# %%
def command(preset, batch_size, expert_parallel, hosts=1, model=(), model_parallel=1):
    """The shell command on the first host."""
    parts = [
        "keras-moe train vmoe_b16_i21k",
        f"--preset {preset} --set {' '.join(['dtype=mixed_bfloat16', *model])}",
        f"--recipe-set data.batch_size={batch_size} schedule.learning_rate=3e-4",
        f"--devices all --expert-parallel {expert_parallel}",
        f"--model-parallel {model_parallel}" if model_parallel > 1 else "",
        f"--coordinator HOST:PORT --num-processes {hosts} --process-id 0"
        if hosts > 1
        else "",
    ]
    return " \\\n    ".join(part for part in parts if part)


print(f"# {CHIPS} chips of a v4 pod, four on a host; on host n, --process-id n")
print(command("vmoe_h14", BATCH, ways, hosts=CHIPS // 4))
print("\n# eight H200")
print(command("vmoe_h14", 512, "batch", model=["rematerialize=true"]))

# %% [markdown]
# `keras-moe estimate` prints the same arithmetic for any preset, chip and layout:
#
# ```shell
# keras-moe estimate vmoe_h14 --chip tpu_v4 --devices 256 --batch-size 4096
# ```
#
# ## If it does not fit
#
# Try these in order; each costs more than the one before:
#
# 1. split the experts over more devices (`expert_parallel="batch"` if it divides);
# 2. use Adafactor instead of Adam;
# 3. `rematerialize=True`;
# 4. a smaller batch, with gradient accumulation if the loss allows it;
# 5. `model_parallel=2`;
# 6. more chips.
#
# Bytes of weights and of the all-to-all are exact. Activations are an upper estimate: a
# pod fuses more. Measure the utilisation over ten steps.
#
# ## What to do next
#
# - Try your own model and machine: `keras-moe estimate --help`.
# - See the equations and the layout of every weight in [Many
#   devices](../docs/devices.md).
# - Rehearse the command on one machine: `keras-moe train vmoe_digits --data digits`
#   accepts the same arguments, even on a CPU's virtual devices.
