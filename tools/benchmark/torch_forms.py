"""A V-MoE without a capacity in plain PyTorch, by its grouped matmul.

What one writes without a library: tokens sorted by expert, two grouped matmuls, a sum.
Under `torch.autocast`, as timm's models beside it.

Axes: B batch, N tokens, R rows (a token and a choice), E experts, D hidden, H mlp.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class GroupedExperts(nn.Module):
    """Token choice of K experts with the two losses of V-MoE, and the experts."""

    def __init__(self, dim: int, mlp_dim: int, num_experts: int, num_selected: int):
        super().__init__()
        self.num_selected = num_selected
        self.router = nn.Linear(dim, num_experts, bias=False)
        shapes = (num_experts, dim, mlp_dim), (num_experts, mlp_dim, dim)
        self.kernels = nn.ParameterList(
            nn.Parameter(torch.randn(shape) * shape[1] ** -0.5) for shape in shapes
        )
        self.biases = nn.ParameterList(
            nn.Parameter(torch.zeros(num_experts, shape[2])) for shape in shapes
        )

    def forward(self, x: Any) -> Any:
        tokens = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            logits = self.router(tokens.float())
            std = 1 / logits.shape[1]
            noisy = logits + std * torch.randn_like(logits)
            gates, chosen = noisy.softmax(dim=-1).topk(self.num_selected)
            loss = self._loss(logits, noisy, std)
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.zeros_like(logits[0], dtype=torch.int32)
        counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
        ends = counts.cumsum(0).to(torch.int32)
        rows = tokens[order // self.num_selected].bfloat16()
        for number, (kernel, bias) in enumerate(zip(self.kernels, self.biases)):
            rows = functional.grouped_mm(rows, kernel.bfloat16(), offs=ends)
            rows = rows + functional.embedding(experts, bias.bfloat16())
            rows = rows if number else functional.gelu(rows, approximate="tanh")
        # Back in the order of the tokens: no scatter adds.
        outputs = torch.empty_like(rows).index_copy(0, order, rows)
        outputs = outputs.view(*gates.shape, -1) * gates[..., None]
        return outputs.sum(dim=1).view_as(x), loss

    def _loss(self, logits, noisy, std):
        threshold = noisy.topk(self.num_selected).values[:, -1:]
        load = torch.special.ndtr((logits - threshold) / std).mean(dim=0)
        importance = logits.softmax(dim=-1).sum(dim=0)
        losses = [(x.std(correction=0) / x.mean()) ** 2 for x in (importance, load)]
        return sum(losses)


class Block(nn.Module):
    """Pre-norm attention, and an MLP or experts."""

    def __init__(self, dim: int, num_heads: int, feed_forward: nn.Module):
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
        self.qkv, self.projection = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed_forward = feed_forward

    def forward(self, x: Any) -> Any:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        outputs = self.feed_forward(self.norms[1](x))
        y, loss = outputs if isinstance(outputs, tuple) else (outputs, 0.0)
        return x + y, loss


class GroupedVMoE(nn.Module):
    """A V-MoE that returns logits and the sum of its losses.

    Args:
        config: config of the same backbone of this library.
        num_classes: number of classes.
    """

    def __init__(self, config: dict[str, Any], num_classes: int = 1000):
        super().__init__()
        dim, size = config["hidden_dim"], config["patch_size"]
        height, width, channels = config["image_shape"]
        self.patches = nn.Conv2d(channels, dim, size, size)
        tokens = math.prod((height // size, width // size))
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens + 1, dim))
        self.blocks = nn.ModuleList(
            Block(dim, config["num_heads"], self._feed_forward(config, number))
            for number in range(config["num_layers"])
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)

    @staticmethod
    def _feed_forward(config, number):
        dim, mlp_dim, moe = config["hidden_dim"], config["mlp_dim"], config["moe"]
        if number % 2:
            selected = moe["router"]["num_selected_experts"]
            return GroupedExperts(dim, mlp_dim, moe["num_experts"], selected)
        layers = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)
        return nn.Sequential(layers[0], nn.GELU(approximate="tanh"), layers[1])

    def forward(self, images: Any) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        losses = 0.0
        for block in self.blocks:
            x, loss = block(x)
            losses = losses + loss
        return self.head(self.norm(x)[:, 0]), losses


def running(model: nn.Module, images: Any, labels: Any) -> Any:
    """A step of plain gradient descent in bfloat16, of a model of PyTorch.

    Args:
        model: its outputs are logits, or these and a loss.
        images: (B, height, width, channels), on the device.
        labels: (B,), likewise.
    """
    device = images.device
    model, images = model.to(device), images.permute(0, 3, 1, 2).contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            outputs = model(images)
        logits, losses = outputs if isinstance(outputs, tuple) else (outputs, 0.0)
        loss = functional.cross_entropy(logits.float(), labels) + 0.01 * losses
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
