"""Forward passes of released encoders: here, and in the code that they come from.

    KERAS_BACKEND=torch python tools/benchmark/encoder_forward.py

SigLino's is the form of its release: experts one after another in a loop, on tokens
sorted by expert. DINOv3-S/16's are those of transformers and timm. All have the same
weights and images, and run eagerly on PyTorch; here on JAX compiled.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from row import peer
from runner import Report, run
from safetensors.numpy import save_file
from torch.nn import functional
from zoo_step import import_timm

from keras_moe import models

# Of SigLino's mixtures; the release has 18 blocks.
SIGLINO = {
    "dim": 768, "n_heads": 8, "head_dim": 128, "patch_size": 16, "n_storage_tokens": 4,
    "norm_eps": 1e-5, "moe": {"top_k": 6, "route_norm": True, "route_scale": 1.0},
}  # fmt: skip


def siglino_tensors(num_layers: int, experts: int = 28, width: int = 384) -> dict:
    """Random weights under the release's names, without the teachers' heads."""
    draw, dim = np.random.default_rng(0), SIGLINO["dim"]
    heads, head_dim = SIGLINO["n_heads"], SIGLINO["head_dim"]
    shapes = {
        "img_projector.weight": (dim, 3 * SIGLINO["patch_size"] ** 2),
        "cls_token": (1, 1, dim),
        "storage_tokens": (1, SIGLINO["n_storage_tokens"], dim),
        "freqs_cis_golden": (heads, head_dim // 4, 2),
        "norm.weight": (dim,),
    }
    for i in range(num_layers):
        block = f"layers.{i}."
        for name in ("wq", "wk", "wv"):
            shapes[f"{block}attention.{name}.weight"] = (heads * head_dim, dim)
        shapes[f"{block}attention.wo.weight"] = (dim, heads * head_dim)
        shapes[f"{block}attention.sinks"] = (heads,)
        for name in ("attention_norm", "ffn_norm"):
            shapes[f"{block}{name}.weight"] = (dim,)
        for name in ("w1", "w3"):
            shapes[f"{block}moe.experts.{name}"] = (experts, width, dim)
        shapes[f"{block}moe.experts.w2"] = (experts, dim, width)
        shapes[f"{block}moe.router.gate.weight"] = (experts, dim)
        shapes[f"{block}moe.expert_bias"] = (experts,)
    return {
        name: draw.normal(0, shape[-1] ** -0.5, shape).astype("float32")
        for name, shape in shapes.items()
    }


class OfficialSigLino:
    """The encoder of the release in PyTorch, up to its last norm.

    Args:
        tensors: the release's tensors by name.
        config: its config.
    """

    def __init__(self, tensors: dict[str, np.ndarray], config: dict):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.state = {
            name: torch.tensor(x, device=self.device) for name, x in tensors.items()
        }
        self.config = config
        blocks = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        self.num_layers = len(blocks)

    @torch.no_grad()
    def __call__(self, patches: Any, rows: int, columns: int) -> Any:
        """Tokens (N, 1 + registers + L, D) of patches (N, L, pixels)."""
        x = patches @ self.state["img_projector.weight"].T
        first = [self.state[name] for name in ("cls_token", "storage_tokens")]
        x = torch.cat([*(t.expand(len(x), -1, -1) for t in first), x], dim=1)
        rotation = self._rotation(rows, columns)
        for i in range(self.num_layers):
            part = self._part(f"layers.{i}.")
            x = x + self._attention(self._norm(x, part("attention_norm")), part,
                                    rotation)  # fmt: skip
            x = x + self._experts(self._norm(x, part("ffn_norm")), part)
        return self._norm(x, self.state["norm.weight"])

    def _part(self, block):
        def part(name):
            full = f"{block}{name}"
            return self.state.get(full, self.state.get(f"{full}.weight"))

        return part

    def _norm(self, x, weight):
        eps = self.config["norm_eps"] if weight is not None else None
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    def _rotation(self, rows, columns):
        """Complex numbers (L, heads, pairs), once for all blocks."""
        y, x = (
            limit * (2 * torch.arange(n) / max(n - 1, 1) - 1)
            for n, limit in (
                (rows, (rows / columns) ** 0.5), (columns, (columns / rows) ** 0.5)
            )
        )  # fmt: skip
        places = torch.cartesian_prod(y, x).to(self.device)
        table = self.state["freqs_cis_golden"]
        angles = torch.einsum("np,hfp->nhf", places, table)
        return torch.polar(torch.ones_like(angles), angles)

    def _rotated(self, x, rotation):
        """The second half of each head, of the patches."""
        first, half = x.shape[1] - len(rotation), x.shape[-1] // 2
        turned = torch.view_as_complex(
            x[:, first:, :, half:].unflatten(-1, (-1, 2)).contiguous()
        )
        turned = torch.view_as_real(turned * rotation).flatten(-2)
        patches = torch.cat([x[:, first:, :, :half], turned], dim=-1)
        return torch.cat([x[:, :first], patches], dim=1)

    def _attention(self, x, part, rotation):
        heads = self.config["n_heads"]
        q, k, v = (
            (x @ part(f"attention.w{name}").T).unflatten(-1, (heads, -1))
            for name in "qkv"
        )
        q, k = (self._rotated(self._norm(t, None), rotation) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        sinks = part("attention.sinks")[:, None]
        gates = torch.sigmoid(torch.logsumexp(scores, dim=-1) - sinks)
        y = scores.softmax(dim=-1) @ v * gates[..., None]
        return y.transpose(1, 2).flatten(2) @ part("attention.wo").T

    def _experts(self, x, part):
        moe, tokens = self.config["moe"], x.flatten(0, 1)
        scores = torch.sigmoid(tokens @ part("moe.router.gate").T)
        chosen = (scores + part("moe.expert_bias")).topk(moe["top_k"]).indices
        gates = scores.gather(1, chosen)
        if moe["route_norm"]:
            gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        order = chosen.flatten().argsort(stable=True)
        gates = gates.flatten()[order] * moe["route_scale"]
        source, w1 = order // moe["top_k"], part("moe.experts.w1")
        counts = chosen.flatten().bincount(minlength=len(w1)).tolist()
        outputs = []
        for number, own in enumerate(tokens[source].split(counts)):
            hidden = functional.silu(own @ w1[number].T)
            hidden = hidden * (own @ part("moe.experts.w3")[number].T)
            outputs.append(hidden @ part("moe.experts.w2")[number].T)
        y = torch.cat(outputs) * gates[:, None]
        index = source[:, None].expand(-1, y.shape[1])
        return torch.zeros_like(tokens).scatter_add(0, index, y).view_as(x)


def patches_of(images: np.ndarray, size: int) -> Any:
    """Patches (N, L, pixels) of images (N, height, width, channels)."""
    count, height, width, channels = images.shape
    x = images.reshape(count, height // size, size, width // size, size, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return torch.tensor(np.ascontiguousarray(x).reshape(count, -1, size**2 * channels))


def ours(model: keras.Model, images: np.ndarray) -> Callable[[], Any]:
    """The forward pass as it is used: eager on PyTorch, else compiled."""
    if keras.backend.backend() != "torch":
        import jax

        weights = [x.value for x in model.trainable_variables]
        others = [x.value for x in model.non_trainable_variables]
        images = jax.numpy.asarray(images)
        call = jax.jit(lambda *inputs: model.stateless_call(*inputs)[0])
        return lambda: call(weights, others, images)
    batch = keras.ops.convert_to_tensor(images)

    def forward():
        with torch.no_grad():
            return model(batch)

    return forward


def siglino(
    num_layers: int = 4, batch_size: int = 1, image_size: int = 256
) -> dict[str, Callable]:
    """SigLino's mixture, at 256 patches, here and in the form of its release."""
    tensors = siglino_tensors(num_layers)
    draw = np.random.default_rng(0)
    shape = (batch_size, image_size, image_size, 3)
    images = draw.uniform(-1, 1, shape).astype("float32")
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(SIGLINO))
        size = {} if image_size == 256 else {"image_shape": shape[1:]}
        model = models.from_preset(folder, task="backbone", **size)
    official = OfficialSigLino(tensors, SIGLINO)
    patches = patches_of(images, SIGLINO["patch_size"]).to(official.device)
    side = image_size // SIGLINO["patch_size"]
    return {
        "keras_moe": ours(model, images),
        "official form": lambda: official(patches, side, side),
    }


def dinov3(batch_size: int = 8) -> dict[str, Callable]:
    """DINOv3-S/16 at 224 pixels, here, in transformers and in timm."""
    images = np.random.default_rng(0).uniform(-1, 1, (batch_size, 224, 224, 3))
    images, candidates = images.astype("float32"), {}
    pixels = torch.tensor(images.transpose(0, 3, 1, 2)).contiguous()
    model = models.ViTBackbone(
        image_shape=(224, 224, 3), patch_size=16, hidden_dim=384, num_layers=12,
        num_heads=6, mlp_dim=1536, register_tokens=4, key_bias=False,
        position_embedding="rotary_2d", layer_scale_initial_value=1.0,
        activation="gelu", layer_norm_epsilon=1e-5,
    )  # fmt: skip
    candidates["keras_moe"] = ours(model, images)
    others = {}
    if library := peer("transformers"):
        config = library.DINOv3ViTConfig(num_register_tokens=4)
        others["transformers"] = library.DINOv3ViTModel(config).eval()
    if library := import_timm():
        others["timm"] = library.create_model("vit_small_patch16_dinov3_qkvb").eval()

    def forward(other):
        with torch.no_grad():
            return other(pixels)

    for name, other in others.items():
        candidates[name] = lambda other=other: forward(other)
    return candidates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-layers", type=int, default=4)


def measure(args: argparse.Namespace, report: Report) -> None:
    title = f"SigLino, {args.num_layers} blocks, 256 patches"
    report.compare(title, siglino(args.num_layers), "keras_moe")
    report.compare("DINOv3-S/16, 8 images", dinov3(), "keras_moe")


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
