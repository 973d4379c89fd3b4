"""The reported model and its routing records. Axes: E experts, K selected experts."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_moe._checks import unfit
from keras_moe.analysis.usage import masks_padding

IMAGE, TEXT = "image", "text"
# Type of experts that a pruned layer has lost.
PRUNED = "pruned"
# Unpaired surrogates cannot be encoded in files.
_SURROGATES = re.compile("[\ud800-\udfff]")


class Block(NamedTuple):
    """Description of a routing record.

    Attributes:
        key: key of `model.routing`, such as `"block_1"`, `"image/block_3"` or `"head"`.
        block: name of its layer, such as `"block_3"`, or `"image/block_3"` in a tower.
        modality: modality of its tokens, `"image"` or `"text"`.
        kind: `"token_choice"`, `"expert_choice"`, `"soft"` or `"mumoe"`.
        expert_types: type of each of the E experts: `"ffn"`, `"zero"`, `"copy"`,
            `"constant"`, or `"pruned"` for removed ones.
        num_selected_experts: K of token choice, or None; of an ensemble, the choices
            of all members together.
        capacity_factor: capacity factor at inference; None if nothing is dropped.
        group_size: tokens per group at inference; None if each example is a group.
        training_capacity_factor: capacity factor in training, or None.
        pruning: method of `keras_moe.analysis.prune_experts`, or None.
        routes_padding: whether padding is routed and uses capacity.
        members: members of an ensemble, each with its part of the experts.
    """

    key: str
    block: str
    modality: str
    kind: str
    expert_types: tuple[str, ...]
    num_selected_experts: int | None = None
    capacity_factor: float | None = None
    group_size: int | None = None
    training_capacity_factor: float | None = None
    pruning: str | None = None
    routes_padding: bool = False
    members: int = 1

    @property
    def is_sparse(self) -> bool:
        """Whether each expert serves only some tokens."""
        return self.kind in ("token_choice", "expert_choice")

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.expert_types)

    @property
    def is_present(self) -> np.ndarray:
        """Boolean (E,), False for pruned experts."""
        return np.array([name != PRUNED for name in self.expert_types])

    @property
    def is_of_tokens(self) -> bool:
        """Whether it routes tokens, and is neither a head nor a token mixer."""
        return self.key != "head" and not self.key.endswith("/token_mixer")

    @property
    def short_key(self) -> str:
        """The key without its modality."""
        return self.key.removeprefix(f"{self.modality}/")

    def expert_name(self, expert: int) -> str:
        """The number of an expert, and its type unless FFN."""
        name = self.expert_types[expert]
        return f"{expert}" if name == "ffn" else f"{expert} {name}"


class ReportedModel(NamedTuple):
    """The model of a report.

    Attributes:
        keras_model: model with `routing`.
        name: name for titles; untrusted, to be escaped.
        blocks: descriptions of its routing records by key, in order of depth.
        grid: patches down and across, or None without images.
        class_names: names of the labels' classes, or None; untrusted, to be escaped.
        modalities: modalities of its inputs: `"image"`, `"text"`, or both.
    """

    keras_model: Any
    name: str
    blocks: dict[str, Block]
    grid: tuple[int, int] | None
    class_names: tuple[str, ...] | None
    modalities: tuple[str, ...]

    @property
    def backbone(self) -> Any:
        """The backbone of the model, or the model itself."""
        return getattr(self.keras_model, "backbone", self.keras_model)

    def by_layer(self) -> dict[str, dict[str, Block]]:
        """Records by layer and modality (two if both share it), in order of depth."""
        layers = {}
        for block in self.blocks.values():
            layers.setdefault(block.block, {})[block.modality] = block
        return layers

    def of_tokens(self, modality: str) -> list[Block]:
        """Records whose tokens are patches or words."""
        if modality == IMAGE and self.grid is None:
            return []
        blocks = self.blocks.values()
        return [x for x in blocks if x.is_of_tokens and x.modality == modality]

    def class_name(self, label: int) -> str:
        """The name of a class, or its number."""
        names = self.class_names or ()
        return names[label] if label < len(names) else str(label)


def reported_model(
    model: Any,
    name: str | None = None,
    class_names: Sequence[str | bytes] | None = None,
) -> ReportedModel:
    """Describes a Keras model for a report."""
    if not getattr(model, "routing", None):
        expected = "a model with experts, whose `routing` has their records"
        raise unfit(expected, f"{type(model).__name__} without")
    backbone = getattr(model, "backbone", model)
    inputs = model.input if isinstance(model.input, dict) else {"images": model.input}
    if "grids" in inputs:
        expected = "images of one shape for a report: load the model with"
        raise unfit(f"{expected} max_patches=None", inputs=sorted(inputs))
    takes = {IMAGE: "images" in inputs, TEXT: "token_ids" in inputs}
    default = IMAGE if takes[IMAGE] else TEXT
    if class_names is None:
        preprocessor = getattr(model, "preprocessor", None)
        class_names = getattr(preprocessor, "class_names", None)
    return ReportedModel(
        model,
        _shown(model.name if name is None else name),
        {key: _block(model, backbone, key, default) for key in model.routing},
        _grid(backbone) if takes[IMAGE] else None,
        None if class_names is None else tuple(map(_shown, class_names)),
        tuple(modality for modality, is_taken in takes.items() if is_taken),
    )


def _shown(name):
    """A name in a form that pages, pictures and files can hold."""
    return shortened(plain_text(name if isinstance(name, bytes) else str(name)))


def plain_text(text: str | bytes) -> str:
    """Text in a form that files and pictures can hold."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    return _SURROGATES.sub("\ufffd", text)


def shortened(text: str, most: int = 300) -> str:
    """Truncates text, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _grid(backbone):
    try:
        return tuple(backbone.grid)
    except (AttributeError, ValueError):
        return None


def _block(model, backbone, key, default):
    modality, slash, _ = key.partition("/")
    if not slash or modality not in (IMAGE, TEXT):
        modality = default
    num_experts = int(model.routing[key].dispatched.shape[-1])
    block = Block(key, key, modality, "mumoe", ("ffn",) * num_experts)
    if not block.is_of_tokens:
        return block
    layer: Any = getattr(backbone.get_layer(key), "feed_forward", None)
    router = getattr(layer, "router", None)
    # A muMoE has a gate of coefficients instead of a router.
    if router is None or hasattr(layer, "gate"):
        return block
    side: Any = getattr(router, "side", None)
    invariant = router.groups_per_example(False)
    training_capacity_factor = getattr(router, "capacity_factor", None)
    if getattr(router, "dropless", False):
        training_capacity_factor = None
    # Experts that a pruned layer keeps.
    kept = getattr(router, "kept_experts", None)
    counts = router.expert_types._asdict()
    types = tuple(name for name, count in counts.items() for _ in range(count))
    if kept is not None:
        types = tuple(x if e in kept else PRUNED for e, x in enumerate(types))
    return block._replace(
        block=_name_of(backbone, key, layer, model.routing),
        kind={"token": "token_choice", "expert": "expert_choice"}.get(side, "soft"),
        expert_types=types,
        num_selected_experts=getattr(router, "choices_per_token", None),
        capacity_factor=None if side is None else router.limits(False)[0],
        group_size=None if invariant else layer.group_size,
        training_capacity_factor=training_capacity_factor,
        pruning=None if kept is None else router.method,
        routes_padding=modality == TEXT and not masks_padding(model, key),
        members=getattr(router, "ensemble_size", 1),
    )


def _name_of(backbone, key, layer, keys):
    """A layer's name, without modality if both share it."""
    modality, slash, name = key.partition("/")
    other = f"{TEXT if modality == IMAGE else IMAGE}/{name}"
    if slash and other in keys and backbone.get_layer(other).feed_forward is layer:
        return name
    return key
