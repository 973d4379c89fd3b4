"""Training steps of pairs: LIMoE, its groups, and CLIP beside other libraries.

    KERAS_BACKEND=jax python tools/benchmark/pair_step.py
    KERAS_BACKEND=jax python tools/benchmark/pair_step.py --clip
    KERAS_BACKEND=jax python tools/benchmark/pair_step.py --recipes limoe_emoji

The first compares a LIMoE's step with the sum of the steps of its two dense
one-modality models, and LIMoE's steps by the number of groups whose tokens are routed
together. With `--clip` it compares the two-tower step with the steps of its towers,
each trained alone, with that of KerasHub's CLIP of the same size and, on PyTorch,
with that of OpenCLIP's where this is installed. A step
is `train_on_batch` with SGD (OpenCLIP: its own forward and PyTorch's SGD). With
`--recipes` it takes the steps of recipes as they are: model, batch, loss, optimizer.
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops
from runner import Report, run

from keras_moe.losses import SoftmaxContrastiveLoss, softmax_contrastive_loss
from keras_moe.models import from_preset
from keras_moe.training import load_recipe

RATE = 1e-3
# CLIP, Table 20: the text towers' heads and sizes.
TEXT_HEADS = {"clip_b32": 8, "clip_b16": 8, "clip_l14": 12}


class HubPairs(keras.Model):
    """KerasHub's CLIP with the same loss on its logits."""

    def __init__(self, clip: keras.Model):
        super().__init__()
        self.clip = clip

    def call(self, inputs):
        return self.clip(inputs)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        logits = y_pred["vision_logits"]
        diagonal = ops.diagonal(logits)
        return 0.5 * sum(
            ops.mean(ops.logsumexp(one, axis=1) - diagonal)
            for one in (logits, ops.transpose(logits))
        )


class OneModality(keras.Model):
    """One encoder, trained towards a fixed vector for each example of a batch."""

    def __init__(self, encoder: keras.Model, size: int):
        super().__init__()
        self.encoder = encoder
        self.targets = np.eye(size, encoder.output.shape[-1], dtype="float32")

    def call(self, inputs):
        return self.encoder(inputs)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return softmax_contrastive_loss(y_pred, self.targets, 10.0)


def compiled(model: keras.Model, **kwargs: Any) -> keras.Model:
    """The model with SGD, whose steps are compiled where the backend compiles."""
    model.compile(keras.optimizers.SGD(RATE), **kwargs)
    return model


def step_of(model: keras.Model, inputs: Any) -> Callable[[], Any]:
    """One step of training."""
    return lambda: model.train_on_batch(inputs)


def pairs(backbone: keras.Model, batch_size: int) -> dict[str, np.ndarray]:
    """A batch for a backbone: noise, and texts of the longest length."""
    generator = np.random.default_rng(0)
    shape = (batch_size, backbone.max_length)
    token_ids = generator.integers(1, backbone.vocabulary_size, size=shape)
    images = generator.normal(size=(batch_size, *backbone.image_shape))
    return {
        "images": images.astype("float32"),
        "token_ids": token_ids.astype("int32"),
        "padding_mask": np.ones(shape, bool),
    }


def contrastive(preset: str, **overrides: Any) -> keras.Model:
    """A model of a preset, compiled."""
    model = from_preset(preset, task="contrastive", load_weights=False, **overrides)
    return compiled(model, loss=SoftmaxContrastiveLoss())


def hub_clip(backbone: keras.Model, heads: int) -> keras.Model:
    """KerasHub's CLIP of the sizes of a `CLIPBackbone`."""
    image, text = (backbone.get_config()[name] for name in ("image", "text"))
    vision = keras_hub.models.CLIPVisionEncoder(
        patch_size=image["patch_size"],
        hidden_dim=image["hidden_dim"],
        num_layers=image["num_layers"],
        num_heads=image["num_heads"],
        intermediate_dim=image["mlp_dim"],
        intermediate_activation="quick_gelu",
        image_shape=image["image_shape"],
    )
    texts = keras_hub.models.CLIPTextEncoder(
        vocabulary_size=text["vocabulary_size"],
        embedding_dim=text["hidden_dim"],
        hidden_dim=text["hidden_dim"],
        num_layers=text["num_layers"],
        num_heads=heads,
        intermediate_dim=text["mlp_dim"],
        intermediate_activation="quick_gelu",
        max_sequence_length=text["max_length"],
    )
    size = backbone.get_config()["projection_dim"]
    clip = keras_hub.models.CLIPBackbone(vision, texts, size)
    return compiled(HubPairs(clip))


def open_clip_step(preset: str, batch: dict) -> Callable[[], Any] | None:
    """A step of OpenCLIP's model of the same size, or None where it does not import."""
    try:
        import open_clip
    except ImportError:
        return None
    import torch

    size = preset.removeprefix("clip_").upper()
    model = open_clip.create_model(f"ViT-{size[0]}-{size[1:]}-quickgelu").train()
    images = torch.tensor(batch["images"].transpose(0, 3, 1, 2).copy())
    token_ids = torch.tensor(batch["token_ids"], dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    labels = torch.arange(len(images))

    def step():
        optimizer.zero_grad()
        image, text, scale = model(images, token_ids)
        logits = scale * image @ text.T
        loss = torch.nn.functional.cross_entropy
        value = (loss(logits, labels) + loss(logits.T, labels)) / 2
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def two_towers(
    backbone: keras.Model, batch: dict[str, np.ndarray]
) -> Callable[[], Any]:
    """A step of each encoder of a backbone, trained by itself."""
    texts = {name: batch[name] for name in ("token_ids", "padding_mask")}
    steps = []
    for name, inputs in (("image", batch["images"]), ("text", texts)):
        model = OneModality(backbone.encoder(name), len(batch["images"]))
        steps.append(step_of(compiled(model), inputs))
    return lambda: [step() for step in steps]


def clip_steps(
    preset: str = "clip_b32", num_layers: int = 12, batch_size: int = 8
) -> dict[str, Callable[[], Any]]:
    """A two-tower model's step, its towers' alone, and other libraries'.

    Args:
        preset: name among `TEXT_HEADS`.
        num_layers: number of blocks of each tower.
        batch_size: number of pairs.
    """
    model, alone = (contrastive(preset, num_layers=num_layers) for _ in range(2))
    batch = pairs(model.backbone, batch_size)
    hub = hub_clip(model.backbone, TEXT_HEADS[preset])
    candidates = {
        "keras_moe": step_of(model, batch),
        "two towers": two_towers(alone.backbone, batch),
        "keras_hub": step_of(hub, {k: batch[k] for k in ("images", "token_ids")}),
    }
    if keras.backend.backend() == "torch" and num_layers == 12:
        step = open_clip_step(preset, batch)
        if step is not None:
            candidates["open_clip"] = step
    return candidates


def limoe_steps(
    num_layers: int = 12,
    num_experts: int = 8,
    batch_size: int = 8,
    group_sizes: tuple[int, ...] = (),
) -> dict[str, Callable[[], Any]]:
    """LIMoE's step, and those of its two dense models of one modality.

    Args:
        num_layers: number of blocks, every other one a mixture.
        num_experts: number of experts.
        batch_size: number of pairs.
        group_sizes: numbers of pairs whose tokens are routed together, for further
            candidates; by default all of the batch are.
    """
    sizes = {"num_layers": num_layers, "num_experts": num_experts}
    limoe = contrastive("limoe_b32", **sizes)
    batch = pairs(limoe.backbone, batch_size)
    dense = from_preset("limoe_b32", num_layers=num_layers, moe=None)
    candidates = {
        "two dense models": two_towers(dense, batch),
        "limoe": step_of(limoe, batch),
    }
    for size in group_sizes:
        model = contrastive("limoe_b32", examples_per_group=size, **sizes)
        candidates[f"limoe, {size} pairs a group"] = step_of(model, batch)
    return candidates


def measure_clip(args: argparse.Namespace, report: Report) -> None:
    candidates = clip_steps(args.preset, args.layers, args.batch_size)
    title = f"{args.preset}, {args.layers} blocks, batch {args.batch_size}"
    report.compare(title, candidates, "keras_moe", pairs=args.batch_size)


def measure_limoe(args: argparse.Namespace, report: Report) -> None:
    candidates = limoe_steps(
        args.layers, args.experts, args.batch_size, args.group_sizes
    )
    title = f"LIMoE-B/32, {args.layers} blocks, batch {args.batch_size}"
    report.compare(title, candidates, "two dense models", pairs=args.batch_size)


def measure_recipes(args: argparse.Namespace, report: Report) -> None:
    candidates = {}
    for name in args.recipes:
        recipe = load_recipe(name)
        model = recipe.new_model(None)
        recipe.compile(model, 1000)
        batch = pairs(model.backbone, recipe.data.batch_size)
        ids = np.arange(recipe.data.batch_size)

        def step(model=model, batch=batch, ids=ids):
            return model.train_on_batch(batch, {"image_ids": ids})

        candidates[name] = step
    report.compare("steps of recipes", candidates, args.recipes[0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clip", action="store_true", help="the two-tower model")
    parser.add_argument("--recipes", nargs="*", default=[], help="recipes of pairs")
    parser.add_argument("--preset", default="clip_b32", choices=sorted(TEXT_HEADS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--group-sizes", type=int, nargs="*", default=[1, 2, 4])


def measure(args: argparse.Namespace, report: Report) -> None:
    if args.recipes:
        measure_recipes(args, report)
    else:
        (measure_clip if args.clip else measure_limoe)(args, report)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=7)
