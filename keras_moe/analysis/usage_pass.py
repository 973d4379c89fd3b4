"""A pass over data that counts the use of each expert.

Axes: B batch, N tokens, E experts, U groups of tokens (modalities or classes).
"""

import contextlib
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.analysis.blocks import masks_padding
from keras_moe.analysis.expert_usage import (
    ALL,
    BlockUsage,
    ExpertUsage,
    checked_usage,
    merged_usage,
    routing_usage,
)
from keras_moe.checks import check_bool, check_integer

# In the place of groups: the second part of each batch.
LABELS = "labels"


def expert_usage(
    model: Any,
    inputs: Any,
    groups: Any = None,
    group_names: list[str] | None = None,
    mask: Any = None,
    contributions: bool = False,
    batch_size: int = 32,
    verbose: Any = "auto",
    modality: str | None = None,
) -> ExpertUsage:
    """Counts how much each expert is used, in a pass over data.

    Models of two modalities whose blocks are shared, such as LIMoE, are counted by
    modality. Others have one group, unless `groups` divides their tokens, and so have
    the tokens of one `modality`.

    Args:
        model: backbone or task with MoE blocks.
        inputs: the model's inputs, an array or a dict of arrays by name; or an iterable
            of batches of these, or of tuples `(inputs, labels)`.
        groups: integers (B,) or (B, N) beside arrays, the group of each example or
            token, such as its class; the name of an input that has them, such as
            `"modality_ids"`; or `"labels"`, the second part of each batch. Tokens of
            negative groups do not count.
        group_names: names of the U groups; None numbers those of an array.
        mask: name of an input (B, N), such as `"padding_mask"`, that is False for
            tokens that do not count, or a dict from modalities to such names, such as
            `{"text": "padding_mask"}`; None counts each token that is routed.
        contributions: whether to measure the norms of experts' outputs, too, which
            REAP's criterion needs; experts then run twice.
        batch_size: number of examples in a batch of arrays.
        verbose: whether to show a progress bar.
        modality: `"text"` or `"image"` of a model of pairs, whose tokens alone count;
            `groups` and `mask` are then those of its tokens. None counts all.

    Returns:
        `ExpertUsage`.

    Raises:
        ValueError: if the model has no MoE blocks (of the modality), or soft routing or
            muMoE, where all experts serve all tokens; there is no example; or arguments
            do not fit.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

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
    bar = keras.utils.Progbar(None, unit_name="batch") if verbose else None
    total = None
    for number, (batch, owners) in enumerate(_batches(inputs, groups, batch_size)):
        usage = probe.count(batch, owners, names, mask)
        total = usage if total is None else merged_usage([total, usage])
        if bar is not None:
            bar.update(number + 1)
    if total is None:
        raise ValueError("Expected at least one batch of inputs; received: none")
    return checked_usage(total)


def _group_names(groups, group_names):
    """The names of the groups, or None where they follow from the model."""
    if groups is None:
        if group_names is not None:
            raise ValueError(
                "Expected group_names=None without groups; "
                f"received: group_names={group_names}"
            )
        return None
    if group_names is not None:
        return [str(name) for name in group_names]
    if isinstance(groups, str):
        raise ValueError(
            "Expected group_names for groups that come with each batch; received: "
            f"group_names=None, groups={groups!r}"
        )
    return [str(number) for number in range(int(np.max(groups, initial=0)) + 1)]


def _batches(inputs, groups, batch_size):
    """Pairs of a batch of inputs and its groups."""
    batch_size = check_integer("batch_size", batch_size)
    arrays = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    if not all(hasattr(array, "shape") for array in arrays.values()):
        yield from (_batch(each, groups) for each in inputs)
        return
    sizes = {name: len(array) for name, array in arrays.items()}
    if groups is not None and not isinstance(groups, str):
        sizes["groups"] = len(groups)
    if len({*sizes.values()}) > 1:
        raise ValueError(
            f"Expected inputs and groups of one length; received: lengths {sizes}"
        )
    for start in range(0, min(sizes.values()), batch_size):
        place = slice(start, start + batch_size)
        batch = {name: array[place] for name, array in arrays.items()}
        batch = batch if isinstance(inputs, dict) else batch["inputs"]
        if groups is None or isinstance(groups, str):
            yield _batch(batch, groups)
        else:
            yield batch, np.asarray(groups)[place]


def _batch(each, groups):
    inputs, *labels = each if isinstance(each, (tuple, list)) else (each,)
    if groups is None:
        return inputs, None
    if groups != LABELS:
        return inputs, _input(inputs, "groups", groups)
    if not labels:
        raise ValueError(
            "Expected batches (inputs, labels) for groups='labels'; received: inputs "
            "alone"
        )
    return inputs, np.asarray(labels[0])


def _input(batch, argument, name):
    if not isinstance(batch, dict) or name not in batch:
        names = list(batch) if isinstance(batch, dict) else "one array"
        raise ValueError(
            f"Expected {argument} to be the name of an input, of {names}; "
            f"received: {argument}={name!r}"
        )
    return np.asarray(batch[name])


def _masks(inputs, mask, modalities):
    """The mask of each modality that has one."""
    if mask is None:
        return {}
    names = mask if isinstance(mask, dict) else {ALL: mask}
    if not {*names} <= {*modalities}:
        expected = "the name of an input" if modalities == [ALL] else "a dict of names"
        raise ValueError(
            f"Expected mask to be {expected} for records of {modalities}; "
            f"received: mask={mask!r}"
        )
    return {key: _input(inputs, "mask", name) for key, name in names.items()}


class UsageProbe:
    """Counts the use of experts in batches of a model's inputs."""

    def __init__(
        self,
        model: Any,
        contributions: bool = False,
        training: bool = False,
        modality: str | None = None,
    ):
        backbone = getattr(model, "backbone", model)
        routing = getattr(model, "routing", None)
        if not routing:
            raise ValueError(
                "Expected a model with MoE blocks, whose `routing` has their records; "
                f"received: {type(model).__name__} without"
            )
        if modality is not None:
            every, start = list(routing), f"{modality}/"
            routing = {key: x for key, x in routing.items() if key.startswith(start)}
            if not routing:
                raise ValueError(
                    f"Expected a modality of the records {every}; received: "
                    f"modality={modality!r}"
                )
        layers = {key: _moe_layer(backbone, key) for key in routing}
        self._layers = list({id(layer): layer for layer in layers.values()}.values())
        self._keys = _keys_by_block(layers)
        self._without_padding = {key for key in layers if masks_padding(model, key)}
        self._fields = list(_Counted._fields)
        if check_bool("contributions", contributions):
            # The context of `count` puts them there.
            self._fields.append("affinity")
        records = {
            key: {name: getattr(record, name) for name in self._fields}
            for key, record in routing.items()
        }
        self._records = _Records(keras.Model(model.input, records), training)

    def count(
        self,
        inputs: Any,
        groups: Any = None,
        group_names: list[str] | None = None,
        mask: Any = None,
    ) -> ExpertUsage:
        """The use of experts in one batch."""
        modalities = list(next(iter(self._keys.values())))
        if modalities != [ALL] and groups is not None:
            raise ValueError(
                "Expected groups=None for a model whose records are by modality; "
                f"received: groups, records of {modalities}"
            )
        masks = _masks(inputs, mask, modalities)
        count = 1 if group_names is None else len(group_names)
        with contextlib.ExitStack() as stack:
            if "affinity" in self._fields:
                for layer in self._layers:
                    stack.enter_context(layer.measuring_contributions())
            records = self._records.predict_on_batch(inputs)
        blocks = {}
        for name, keys in self._keys.items():
            usages = [
                routing_usage(
                    _Counted(*(records[key][x] for x in _Counted._fields)),
                    groups,
                    count,
                    self._mask(key, inputs, masks.get(modality)),
                    records[key].get("affinity"),
                )
                for modality, key in keys.items()
            ]
            # A row for each modality.
            rows = (None if x[0] is None else np.concatenate(x) for x in zip(*usages))
            blocks[name] = BlockUsage(*rows)
        return ExpertUsage(group_names or modalities, blocks)

    def _mask(self, key, inputs, mask):
        """The tokens of a record that count, without padding that is not routed."""
        if key not in self._without_padding:
            return mask
        padding = np.asarray(inputs["padding_mask"], bool)
        return padding if mask is None else padding & mask.astype(bool)


class _Counted(NamedTuple):
    """The part of a `Routing` that counts."""

    gates: Any
    dispatched: Any
    combined: Any


class _Records(keras.Model):
    """The records of a model, as they are in training if need be."""

    def __init__(self, records, in_training):
        # The global policy is not the model's.
        super().__init__(name="usage_probe", dtype="float32")
        self.records, self.in_training = records, in_training

    def call(self, inputs):
        return self.records(inputs, training=self.in_training)


def _moe_layer(backbone, key):
    """The MoE layer of a routing record, if its experts can be counted."""
    place = None if key == "head" or key.endswith("/token_mixer") else key
    layer = None if place is None else backbone.get_layer(place).feed_forward
    if getattr(getattr(layer, "router", None), "side", None) is None:
        mixture = key if layer is None else type(layer.router).__name__
        raise ValueError(
            "Expected token or expert choice routers, since all experts serve all "
            f"tokens otherwise; received: {mixture} in {type(backbone).__name__}"
        )
    return layer


def _keys_by_block(layers):
    """The keys of the records by block and modality.

    A block that several records share has one for each modality, such as "text" of
    "text/block_1"; others have the modality "all".
    """
    keys = {}
    for key, layer in layers.items():
        modality, _, block = key.rpartition("/")
        if sum(other is layer for other in layers.values()) > 1:
            keys.setdefault(block, {})[modality] = key
        else:
            keys[key] = {ALL: key}
    return keys
