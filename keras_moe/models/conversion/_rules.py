"""Rules between checkpoint tensors and weights. Axes: D hidden, N tokens.

A rule names its tensors and the shapes that a weight needs. `make` creates the
weight, and `tensor` inverts it.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from keras_moe.layers import resize_patch_kernel


class Normalization(NamedTuple):
    """Image normalisation: (pixels in [0, 1] - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def is_default(self) -> bool:
        """Whether it gives [-1, 1], the range of this library's models."""
        return all(abs(x - 0.5) < 1e-6 for x in (*self.mean, *self.std))


@dataclass(frozen=True)
class Direct:
    """Copies a tensor, adding `axes` leading axes of size 1."""

    name: str
    axes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def shapes(self, target: tuple) -> dict[str, tuple]:
        """Returns the tensors' shapes for a weight of shape `target`."""
        return {self.name: target[self.axes :]}

    def make(self, read: Callable, target: tuple) -> np.ndarray:
        """Creates the weight; `read(name)` returns a tensor."""
        return read(self.name).reshape(target)

    def tensor(self, value: np.ndarray) -> np.ndarray:
        """Inverts `make`: returns the tensor, or the part of it."""
        return value.reshape(value.shape[self.axes :])


@dataclass(frozen=True)
class Reshaped(Direct):
    """A tensor with other axes, such as a number with some of size 1."""

    shape: tuple[int, ...] = ()

    def shapes(self, target):
        return {self.name: self.shape}

    def tensor(self, value):
        return value.reshape(self.shape)


@dataclass(frozen=True)
class Vector(Direct):
    """A PyTorch bias, or `part` of several `parts` stacked in one tensor."""

    part: int = 0
    parts: int = 1

    def shapes(self, target):
        return {self.name: (self.parts * math.prod(target),)}

    def make(self, read, target):
        return self._part(read).reshape(target)

    def tensor(self, value):
        return value.reshape(-1)

    def _part(self, read):
        return np.split(read(self.name), self.parts)[self.part]


@dataclass(frozen=True)
class Matrix(Vector):
    """A PyTorch kernel (outputs, inputs), or one of several in one tensor."""

    inputs: int = 1

    def shapes(self, target):
        inputs, outputs = target[: self.inputs], target[self.inputs :]
        return {self.name: (self.parts * math.prod(outputs), math.prod(inputs))}

    def make(self, read, target):
        return self._part(read).T.reshape(target)

    def tensor(self, value):
        inputs = math.prod(value.shape[: self.inputs])
        return value.reshape(inputs, -1).T


@dataclass(frozen=True)
class TransposedMatrix(Matrix):
    """A kernel (inputs, outputs), as of GPT-2's `Conv1D`, or one of several."""

    axis = 1

    def shapes(self, target):
        (outputs, inputs), *_ = super().shapes(target).values()
        return {self.name: (inputs, outputs)}

    def make(self, read, target):
        kernels = np.split(read(self.name), self.parts, axis=self.axis)
        return kernels[self.part].reshape(target)

    def tensor(self, value):
        return super().tensor(value).T


@dataclass(frozen=True)
class ExpertMatrix(Matrix):
    """A PyTorch kernel to experts in another order; `square` also from experts."""

    # The tensor's index of each of this library's experts.
    order: tuple[int, ...] = ()
    square: bool = False

    def make(self, read, target):
        return self._ordered(super().make(read, target), np.array(self.order))

    def tensor(self, value):
        return super().tensor(self._ordered(value, np.argsort(self.order)))

    def _ordered(self, value, order):
        return value[order][:, order] if self.square else value[:, order]


@dataclass(frozen=True)
class Stacked:
    """A weight of all experts, from a PyTorch kernel or vector of each."""

    names: tuple[str, ...]
    # Kernels may hold several layers' outputs, of which this is one.
    part: int = 0
    parts: int = 1

    def shapes(self, target: tuple) -> dict[str, tuple]:
        *inputs, outputs = target[1:]
        return dict.fromkeys(self.names, (self.parts * outputs, *inputs))

    def make(self, read: Callable, target: tuple) -> np.ndarray:
        return np.stack(
            [np.split(read(name), self.parts)[self.part].T for name in self.names]
        )

    def tensors(self, value: np.ndarray) -> dict[str, np.ndarray]:
        """Inverts `make`: returns the tensors, or the parts of them."""
        return {name: own.T for name, own in zip(self.names, value, strict=True)}


@dataclass(frozen=True)
class PatchKernel(Direct):
    """The patch convolution, with the image normalisation folded in."""

    # Stored as (D, channels, height, width).
    torch: bool = False
    normalization: Normalization | None = None
    # To which the kernel is resized.
    patch_size: tuple[int, int] | None = None
    interpolation: str = "bilinear"

    def shapes(self, target):
        height, width, channels, dim = target
        if self.torch:
            return {self.name: (dim, channels, height, width)}
        return {self.name: target}

    def make(self, read, target):
        kernel = self._kernel(read)
        if self.normalization is None:
            return kernel
        # Pixels x in [-1, 1] are (x + 1) / 2 in [0, 1], so ((x + 1) / 2 - mean) / std =
        # x / (2 std) + (0.5 - mean) / std.
        std = np.array(self.normalization.std, "float32")
        return kernel.astype("float32") / (2.0 * std[:, None])

    def tensor(self, value):
        return value.transpose(3, 2, 0, 1) if self.torch else value

    def _kernel(self, read):
        kernel = read(self.name)
        if self.torch:
            kernel = kernel.transpose(2, 3, 1, 0)
        if self.patch_size is None:
            return kernel
        kernel = kernel.astype("float32")
        return resize_patch_kernel(kernel, self.patch_size, self.interpolation)


@dataclass(frozen=True)
class PatchBias(PatchKernel):
    """Bias of the patch convolution: stored bias plus that of normalisation."""

    bias: str | None = None

    @property
    def names(self):
        # The kernel belongs to another weight.
        return (self.bias,) if self.bias else ()

    def shapes(self, target):
        return {self.bias: target} if self.bias else {}

    def make(self, read, target):
        bias = read(self.bias) if self.bias else np.zeros(target, "float32")
        if self.normalization is None:
            return bias
        mean, std = (np.array(x, "float64") for x in self.normalization)
        # Resizing changes the kernel's sums.
        sums = self._kernel(read).sum(axis=(0, 1), dtype="float64")
        return (bias + ((0.5 - mean) / std) @ sums).astype("float32")

    def tensor(self, value):
        return value


@dataclass(frozen=True)
class Positions(Direct):
    """A table of position embeddings; `ids` names KerasHub's stored position ids."""

    # Without a row for the class token, which gets zeros.
    without_class_token: bool = False
    ids: str | None = None

    @property
    def names(self):
        return (self.name, self.ids) if self.ids else (self.name,)

    def shapes(self, target):
        one, rows, dim = target
        rows -= self.without_class_token
        shapes = {self.name: (one, rows, dim)[self.axes :]}
        return {**shapes, self.ids: (1, rows)} if self.ids else shapes

    def make(self, read, target):
        table = read(self.name)
        if self.ids:
            table = table[read(self.ids)[0]]
        table = table.reshape(1, *table.shape[-2:])
        if self.without_class_token:
            table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
        return table


@dataclass(frozen=True)
class Filled:
    """A constant: `"zeros"`, or `"identity"` for a matrix."""

    value: str = "zeros"
    names = ()

    def shapes(self, target: tuple) -> dict[str, tuple]:
        return {}

    def make(self, read: Callable | None, target: tuple) -> np.ndarray:
        if self.value == "identity":
            return np.eye(*target, dtype="float32")
        return np.zeros(target, "float32")


def renamed(rules: dict, rename: Callable[[str], str]) -> dict:
    result = {}
    for path, rule in rules.items():
        names = {
            field: rename(getattr(rule, field))
            for field in ("name", "ids", "bias")
            if getattr(rule, field, None) is not None
        }
        result[path] = dataclasses.replace(rule, **names)
    return result


def tensors_of(rules: dict, values: dict[str, np.ndarray], library: str) -> dict:
    """Inverts rules: returns the tensors that would give these weights."""
    if different := sorted(set(rules) ^ set(values)):
        raise ValueError(
            f"Expected a model with the weights of {library}; received: a model with "
            f"more or fewer of them, such as {different[0]!r}"
        )
    parts, axes = {}, {}
    for path, value in values.items():
        rule = rules[path]
        if isinstance(rule, Filled):
            if not np.array_equal(value, rule.make(None, value.shape)):
                raise ValueError(
                    f"Expected {path!r} to be {rule.value}, since {library} has no "
                    "tensor for it; received other values"
                )
            continue
        if isinstance(rule, Stacked):
            tensors = rule.tensors(value)
        else:
            (name,) = rule.names
            tensors = {name: rule.tensor(value)}
        for name, tensor in tensors.items():
            parts.setdefault(name, {})[getattr(rule, "part", 0)] = tensor
            axes[name] = getattr(rule, "axis", 0)
    return {
        name: np.ascontiguousarray(
            np.concatenate([pieces[i] for i in sorted(pieces)], axis=axes[name])
        )
        for name, pieces in parts.items()
    }


# Rules of layers


def norm(path: str, name: str, scale: str = "weight", offset: str = "bias") -> dict:
    return {
        f"{path}/gamma": Direct(f"{name}{scale}"),
        f"{path}/beta": Direct(f"{name}{offset}"),
    }


def direct(path: str, name: str) -> dict:
    """Rules of a kernel and a bias stored as in the model."""
    return {
        f"{path}/kernel": Direct(f"{name}kernel"),
        f"{path}/bias": Direct(f"{name}bias"),
    }


def linear(
    path: str, name: str, has_bias: bool = True, inputs: int = 1, **part: Any
) -> dict:
    """Rules of a PyTorch linear layer; `part` has arguments of `Vector`."""
    return {
        f"{path}/kernel": Matrix(f"{name}weight", inputs=inputs, **part),
        f"{path}/bias": Vector(f"{name}bias", **part) if has_bias else Filled(),
    }


def patches(
    kernel: str, bias: str | None, torch: bool, images: Normalization | None = None
) -> dict:
    return {
        "patch_embedding/kernel": PatchKernel(
            kernel, torch=torch, normalization=images
        ),
        "patch_embedding/bias": PatchBias(
            kernel, torch=torch, normalization=images, bias=bias
        ),
    }


def without_projection() -> dict:
    """Rules of a classifier that outputs the pooled vector itself."""
    return {"predictions/kernel": Filled("identity"), "predictions/bias": Filled()}


# Blocks of PyTorch ViTs: one structure with different names


class BlockNames(NamedTuple):
    """Names of a block's parts, without the block's prefix."""

    norms: tuple[str, str]
    mlp: tuple[str, str]
    queries: tuple[str, ...]  # three, or one for a joint matrix
    output: str
    scales: tuple[str, str] = ("", "")
    query_key_norms: tuple[str, str] = ("", "")
    gate: str = ""  # the hidden layer's if one matrix has both


def block_rules(path: str, block: str, names: BlockNames, arguments: dict) -> dict:
    hidden, output = (f"{block}{name}" for name in names.mlp)
    rules = {
        **norm(f"{path}/mixer_norm", f"{block}{names.norms[0]}"),
        **norm(f"{path}/feed_forward_norm", f"{block}{names.norms[1]}"),
        **linear(f"{path}/mlp/output", output),
        **attention_rules(
            f"{path}/attention",
            [f"{block}{name}" for name in names.queries],
            f"{block}{names.output}",
        ),
    }
    if not arguments.get("key_bias", True):
        del rules[f"{path}/attention/key/bias"]
    is_gated = arguments.get("gated_mlp", False)
    is_fused = is_gated and names.gate == names.mlp[0]
    # The gate comes first in a matrix of both.
    of_hidden: dict = {"part": 1, "parts": 2} if is_fused else {}
    rules.update(linear(f"{path}/mlp/hidden", hidden, **of_hidden))
    if is_gated:
        of_gate: dict = {**of_hidden, "part": 0} if is_fused else {}
        rules.update(linear(f"{path}/mlp/gate", f"{block}{names.gate}", **of_gate))
    if arguments.get("query_key_norm"):
        for projection, name in zip(("query", "key"), names.query_key_norms):
            rules.update(norm(f"{path}/attention/{projection}_norm", f"{block}{name}"))
    if arguments.get("layer_scale_initial_value") is not None:
        for branch, name in zip(("mixer", "feed_forward"), names.scales):
            rules[f"{path}/{branch}_scale/scale"] = Direct(f"{block}{name}")
    return rules


class TowerNames(NamedTuple):
    """Names of a tower's parts; `blocks` is the prefix before a block's number."""

    blocks: str
    block: BlockNames
    positions: str
    final_norm: str
    patches: str = ""
    class_token: str = ""
    embedding_norm: str = ""
    tokens: str = ""
    registers: str = ""

    def under(self, root: str) -> "TowerNames":
        """Returns the names prefixed by `root`."""
        full = {k: root + x for k, x in self._asdict().items() if k != "block"}
        return self._replace(**full)


def tower_rules(names: TowerNames, arguments: dict) -> dict:
    rules = norm("final_norm", names.final_norm)
    for i in range(arguments["num_layers"]):
        block = f"{names.blocks}{i}."
        rules.update(block_rules(f"block_{i}", block, names.block, arguments))
    return rules


def image_tower_rules(
    names: TowerNames,
    arguments: dict,
    images: Normalization | None = None,
    file: Collection[str] | None = None,
    axes: int = 1,
) -> dict:
    """Rules without the head; stored positions lack `axes` leading axes of size 1."""
    bias = f"{names.patches}bias"
    # A file may lack it.
    bias = bias if file is None or bias in file else None
    rules = {
        **patches(f"{names.patches}weight", bias, True, images),
        **tower_rules(names, arguments),
    }
    if arguments.get("position_embedding", "learned") == "learned":
        rules["position_embedding/embedding"] = Positions(names.positions, axes=axes)
    if arguments.get("register_tokens"):
        rules["register_tokens/tokens"] = Direct(names.registers)
    if arguments["class_token"]:
        # (D,) if positions are (N, D), and (1, 1, D) if they are (1, N, D).
        rules["class_token/token"] = Direct(names.class_token, axes=2 * axes)
    if arguments["embedding_norm"]:
        rules.update(norm("embedding_norm", names.embedding_norm))
    return rules


def text_tower_rules(names: TowerNames, arguments: dict) -> dict:
    return {
        "token_embedding/embeddings": Direct(names.tokens),
        "text_positions/embedding": Direct(names.positions, axes=1),
        **tower_rules(names, arguments),
    }


def attention_rules(path: str, queries: list[str], output: str) -> dict:
    """Rules of attention, with queries, keys and values in one matrix or three."""
    rules = linear(f"{path}/attention_output", output, inputs=2)
    for part, projection in enumerate(("query", "key", "value")):
        fused: dict = {}
        if len(queries) == 1:
            fused = {"part": part, "parts": 3}
        name = queries[0] if fused else queries[part]
        rules.update(linear(f"{path}/{projection}", name, **fused))
    return rules


def pooler_rules(head: str, path: str = "pooler") -> dict:
    """Rules of attention pooling, by the prefix of transformers' names."""
    return {
        f"{path}/probe": Direct(f"{head}probe"),
        **norm(f"{path}/norm", f"{head}layernorm."),
        **linear(f"{path}/mlp/hidden", f"{head}mlp.fc1."),
        **linear(f"{path}/mlp/output", f"{head}mlp.fc2."),
        **attention_rules(
            f"{path}/attention",
            [f"{head}attention.in_proj_"],
            f"{head}attention.out_proj.",
        ),
    }
