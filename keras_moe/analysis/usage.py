"""Usage of experts by group. Axes: B batch, N tokens, E experts, U groups of tokens."""

import json
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_moe._batches import progress_bar, read_batches
from keras_moe._checks import check_bool, check_integer, check_mask, unfit
from keras_moe._compat import serving
from keras_moe._files import read_text, write_json
from keras_moe._types import KerasModel
from keras_moe.analysis._hooks import Hooked, measuring

# The group of all tokens.
ALL = "all"
# As `groups`: the second part of each batch.
LABELS = "labels"


class BlockUsage(NamedTuple):
    """Usage of the experts of one MoE layer, summed over each group's tokens.

    Attributes:
        tokens: float64 (U, E), number of tokens that the expert served.
        mass: float64 (U, E), sum of its combine weights.
        contributions: (U, E), sum of combine weights times output norms, or None.
        first_choices: (U, E), tokens whose largest gate is the expert's, or None.
    """

    tokens: np.ndarray
    mass: np.ndarray
    contributions: np.ndarray | None = None
    first_choices: np.ndarray | None = None


def _mapped(function, *blocks):
    """The function of each field of some blocks, None for a field without values."""
    fields: list[Any] = [
        None if x[0] is None else function(*x) for x in zip(*blocks, strict=True)
    ]
    return BlockUsage(*fields)


class ExpertUsage(NamedTuple):
    """Usage of a model's experts.

    Attributes:
        groups: names of the U groups, such as classes; `["all"]` for a single group.
        blocks: dict from block name to `BlockUsage`.
    """

    groups: list[str]
    blocks: dict[str, BlockUsage]

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        blocks = {
            name: _mapped(np.ndarray.tolist, block)._asdict()
            for name, block in self.blocks.items()
        }
        return {"groups": list(self.groups), "blocks": blocks}

    @classmethod
    def from_dict(cls, content: dict) -> "ExpertUsage":
        """Restores the result of `to_dict`."""
        blocks = {
            name: _mapped(lambda x: np.array(x, "float64"), BlockUsage(**fields))
            for name, fields in content["blocks"].items()
        }
        return cls(list(content["groups"]), blocks)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ExpertUsage":
        """Reads a file written by `save`."""
        return cls.from_dict(json.loads(read_text(path)))


def routing_usage(
    routing: Any,
    groups: ArrayLike | None = None,
    num_groups: int | None = None,
    mask: ArrayLike | None = None,
    contributions: ArrayLike | None = None,
) -> BlockUsage:
    """Counts the usage of experts in a record; groups below 0 do not count."""
    tokens = np.asarray(routing.dispatched, "float64")
    first = np.argmax(routing.gates, axis=-1)
    figures = {
        "tokens": tokens,
        "mass": routing.combined,
        "first_choices": np.eye(tokens.shape[-1])[first],
    }
    if contributions is not None:
        figures["contributions"] = contributions
    owners = _owners(groups, mask, tokens.shape[:2])
    if num_groups is None:
        num_groups = int(owners.max(initial=0)) + 1
    counts = owners >= 0
    sums: dict[str, np.ndarray] = {}
    for name, figure in figures.items():
        figure = np.asarray(figure, "float64")
        if not np.isfinite(figure[counts]).all():
            raise ValueError(f"Expected finite {name}; received: NaN or inf")
        sums[name] = np.zeros((num_groups, tokens.shape[-1]))
        np.add.at(sums[name], owners[counts], figure[counts])
    return BlockUsage(**sums)


def _owners(groups, mask, shape):
    """The group of each token (B, N); -1 for tokens to ignore."""
    owners = np.zeros(shape, int) if groups is None else np.asarray(groups)
    if owners.ndim == 1:
        owners = owners[:, None]
    owners = np.broadcast_to(owners, shape)
    if mask is None:
        return owners
    mask = np.asarray(check_mask("mask", mask, shape))
    return np.where(mask.astype(bool), owners, -1)


def merged_usage(usages: Iterable[ExpertUsage]) -> ExpertUsage:
    """Sums usages, such as those of several batches.

    Args:
        usages: usages of one model with the same groups.

    Example:

    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, merged_usage
    >>> block = BlockUsage(np.array([[3.0, 1.0]]), np.array([[2.0, 0.5]]))
    >>> usage = ExpertUsage(["all"], {"block_1": block})
    >>> merged_usage([usage, usage]).blocks["block_1"].tokens.tolist()
    [[6.0, 2.0]]
    """
    usages = list(usages)
    layouts = [_layout(usage) for usage in usages]
    if not usages or any(layout != layouts[0] for layout in layouts):
        expected = "usages with the same groups, blocks and experts, at least one"
        raise unfit(expected, usages=layouts)
    first = usages[0]
    blocks = {
        name: _mapped(lambda *x: np.sum(x, axis=0), *(x.blocks[name] for x in usages))
        for name in first.blocks
    }
    return ExpertUsage(list(first.groups), blocks)


def _layout(usage):
    """The groups of a usage, and the shapes of its blocks' arrays."""
    shapes = {name: list(_mapped(np.shape, x)) for name, x in usage.blocks.items()}
    return list(usage.groups), shapes


def expert_usage(
    model: KerasModel,
    inputs: object,
    groups: ArrayLike | str | None = None,
    group_names: list[str] | None = None,
    *,
    mask: str | dict[str, str] | None = None,
    contributions: bool = False,
    batch_size: int = 32,
    verbose: str | int = "auto",
    modality: str | None = None,
) -> ExpertUsage:
    """Counts how much each expert is used, in one pass over data.

    Models with blocks shared by two modalities, such as LIMoE, are counted by modality.
    Otherwise there is one group, unless `groups` is given.

    Args:
        model: backbone or task with token or expert choice routers.
        inputs: array or dict of arrays, or an iterable of batches of these or of tuples
            `(inputs, labels)`.
        groups: integers (B,) or (B, N), the group of each example or token (negative to
            ignore); the name of such an input; or `"labels"`, those of each batch.
        group_names: names of the U groups; None numbers those of an array.
        mask: name of an input (B, N), such as `"padding_mask"`, False for tokens to
            ignore; for images and texts a dict of these, `{"text": "padding_mask"}`.
            None counts all routed tokens.
        contributions: whether to measure output norms for `"reap"`; runs experts twice.
        batch_size: examples per batch of arrays.
        verbose: see `keras_moe.evaluation.extract_features`.
        modality: `"text"` or `"image"` to count only that tower's tokens; `groups` and
            `mask` then refer to these.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

    Example:

    >>> from keras_moe import analysis, data, models
    >>> model = models.from_preset("vmoe_digits")
    >>> images, labels = data.load_digits("test", image_shape=(16, 16, 1))
    >>> usage = analysis.expert_usage(model, images, groups=labels, verbose=0)
    >>> tokens = usage.blocks["block_1"].tokens  # of each digit, by each expert
    >>> tokens.shape, int(tokens.sum()) == 450 * 17 * 2  # 17 tokens, K=2
    ((10, 8), True)
    """
    probe = UsageProbe(model, contributions, modality=modality)
    names = _group_names(groups, group_names)
    bar = progress_bar(None, verbose, "batch")
    total = None
    for number, (batch, owners) in enumerate(_batches(inputs, groups, batch_size)):
        usage = probe.count(batch, owners, names, mask)
        total = usage if total is None else merged_usage([total, usage])
        bar.update(number + 1)
    if total is None:
        raise ValueError("Expected at least one batch of inputs; received: none")
    bar.update(number + 1, finalize=True)
    return total


def _group_names(groups, group_names):
    """Names of the groups; None if they follow from the model."""
    needs_names = isinstance(groups, str)
    if (needs_names and group_names is None) or (groups is None and group_names):
        expected = "group_names if groups come with each batch, none without groups"
        raise unfit(expected, group_names=group_names, groups=groups)
    if groups is None or group_names is not None:
        return group_names
    return [str(number) for number in range(int(np.max(groups, initial=0)) + 1)]


def _batches(inputs, groups, batch_size):
    has_array = groups is not None and not isinstance(groups, str)
    data = (inputs, np.asarray(groups)) if has_array else inputs
    batch_size = check_integer("batch_size", batch_size)
    for batch in read_batches(data, batch_size, "inputs and groups")[0]:
        own, *labels = batch if isinstance(batch, (tuple, list)) else (batch,)
        if groups is None:
            yield own, None
        else:
            is_second = has_array or groups == LABELS
            yield own, np.asarray(labels[0] if is_second else own[groups])


def _modality(key):
    """The modality of a record, `"all"` if its name has none."""
    start = key.partition("/")[0]
    return start if start in ("image", "text") else ALL


def _masks(inputs, mask, keys):
    if mask is None:
        return {}
    modalities = list(dict.fromkeys(map(_modality, keys)))
    only = modalities[0] if len(modalities) == 1 else None
    names = mask if isinstance(mask, dict) else {only: mask}
    if not {*names} <= {*modalities}:
        expected = "a dict of names" if only is None else "the name of an input"
        raise unfit(f"mask to be {expected} for records of {modalities}", mask=mask)
    return {key: np.asarray(inputs[name]) for key, name in names.items()}


class UsageProbe:
    """Counts the usage of experts in batches of a model's inputs."""

    def __init__(
        self,
        model: KerasModel,
        contributions: bool = False,
        training: bool = False,
        modality: str | None = None,
    ):
        backbone = getattr(model, "backbone", model)
        routing = getattr(model, "routing", None) or {}
        if modality is not None:
            start = f"{modality}/"
            routing = {key: x for key, x in routing.items() if key.startswith(start)}
        if not routing:
            expected = f"a model with MoE blocks of modality={modality!r}"
            raise unfit(expected, type(model).__name__)
        layers = {key: _moe_layer(backbone, key) for key in routing}
        self._names = list(routing)
        self._keys = _keys_by_block(layers)
        self._model = model
        fields = ["gates", "dispatched", "combined"]
        hooks = {}
        if check_bool("contributions", contributions):
            # `measuring` puts them there.
            fields.append("affinity")
            hooks = {id(layer.router): measuring(layer) for layer in layers.values()}
        records = {
            key: {name: getattr(record, name) for name in fields}
            for key, record in routing.items()
        }
        self._records = Hooked(keras.Model(model.input, records), hooks, training)

    def count(
        self,
        inputs: object,
        groups: ArrayLike | None = None,
        group_names: list[str] | None = None,
        mask: str | dict[str, str] | None = None,
    ) -> ExpertUsage:
        """The usage of experts in one batch."""
        modalities = list(next(iter(self._keys.values())))
        if modalities != [ALL] and groups is not None:
            expected = "groups=None for a model whose records are by modality"
            raise unfit(expected, f"groups, records of {modalities}")
        masks = _masks(inputs, mask, self._names)
        count = 1 if group_names is None else len(group_names)
        records = serving(self._records).predict_on_batch(inputs)
        blocks = {}
        for name, keys in self._keys.items():
            usages = [
                routing_usage(
                    SimpleNamespace(**records[key]),
                    groups,
                    count,
                    _both(
                        routed_tokens(self._model, key, inputs),
                        masks.get(_modality(key)),
                    ),
                    records[key].get("affinity"),
                )
                for key in keys.values()
            ]
            # One row per modality.
            blocks[name] = _mapped(lambda *x: np.concatenate(x), *usages)
        return ExpertUsage(group_names or modalities, blocks)


def _both(mask, other):
    """The tokens that both masks (B, N) have, each of which may be None for all."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other.astype(bool)


def routed_tokens(model: KerasModel, name: str, inputs: Any) -> np.ndarray | None:
    """Which tokens (B, N) of a routing record are no unrouted padding; None for all."""
    if masks_padding(model, name):
        return np.asarray(inputs["padding_mask"], bool)
    if not isinstance(inputs, dict) or "grids" not in inputs or "text/" in name:
        return None
    backbone: Any = getattr(model, "backbone", model)
    if name.startswith("image/"):
        backbone = backbone.tower_backbone("image")
    return keras.ops.convert_to_numpy(backbone.token_mask(inputs))


def masks_padding(model: KerasModel, name: str) -> bool:
    """Whether the block of a routing record leaves padding of texts unrouted."""
    backbone = getattr(model, "backbone", model)
    takes_texts = isinstance(model.input, dict) and "padding_mask" in model.input
    if not takes_texts or name.startswith("image/"):
        return False
    config = backbone.get_config()
    never_routed = not getattr(backbone, "routes_padding", True)
    return config.get("text", config).get("mask_padding", never_routed)


def _moe_layer(backbone, key) -> Any:
    """The MoE layer of a routing record, if its experts can be counted."""
    is_block = key != "head" and not key.endswith("/token_mixer")
    layer = backbone.get_layer(key).feed_forward if is_block else None
    router = getattr(layer, "router", None)
    if getattr(router, "side", None) is None:
        mixture = key if router is None else type(router).__name__
        expected = "token or expert choice routers, by which an expert serves a part"
        raise unfit(expected, f"{mixture} in {type(backbone).__name__}")
    return layer


def _keys_by_block(layers):
    """Keys of the records by block and modality, `"all"` if not shared by several."""
    keys = {}
    for key, layer in layers.items():
        modality, _, block = key.rpartition("/")
        if sum(other is layer for other in layers.values()) > 1:
            keys.setdefault(block, {})[modality] = key
        else:
            keys[key] = {ALL: key}
    return keys
