"""Routing during training: health of the routers and usage of the experts.

Axes: B batch, N tokens, E experts.
"""

import collections
import csv
import io
import os
import statistics
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe._batches import array_length
from keras_moe._checks import check_bool, check_integer, unfit
from keras_moe._files import write_text
from keras_moe._processes import batch_devices, predict_batch, process_index
from keras_moe._types import Structure
from keras_moe.analysis._hooks import Hooked
from keras_moe.analysis.interventions import coverage_curves
from keras_moe.analysis.routing import (
    DEAD,
    MAX_DEAD,
    MAX_SHARE,
    MIN_ENTROPY,
    routing_statistics,
)
from keras_moe.analysis.usage import (
    ExpertUsage,
    UsageProbe,
    merged_usage,
    routed_tokens,
)
from keras_moe.models import Description
from keras_moe.models.loading.blueprint import costs_of
from keras_moe.training import callbacks

# Coverage for the metric `usage/experts` of `UsageRecorder`.
_COVERED = 0.9
COLUMNS = (
    "epoch",
    "step",
    "layer",
    "load_entropy",
    "largest_share",
    "dead_experts",
    "dropped_tokens",
    "dropped_choices",
    "mean_max_gate",
    "selected_experts",
    "tokens_per_expert",
    "expert_shares",
    "selection_bias",
)
_PER_EXPERT = COLUMNS[-2:]


class RouterHealth(callbacks.PeriodicCallback):
    """Routes a fixed batch every few epochs or steps and reports statistics per layer.

    The statistics are those of `keras_moe.analysis.routing_statistics`, and selection
    biases; for muMoE, non-zero coefficients count as assignments. Dead experts have a
    share below 0.01 / E. The logs and the history get the worst layer's
    `router/entropy`, `router/dead` and `router/dropped`, and `router/max_gate` averaged
    over layers. Rows also have K, and the tokens per expert of these images (not
    where modalities share a layer).

    `costs` is the model's `describe()`, or None if it has none: the routed share of the
    FLOPs, with `costs.findings()` on what would change it.

    The primary process writes the files. A failed write only warns and is repeated with
    the next one.

    Args:
        images: (B, height, width, channels) probe images, or a dict of inputs for text
            and image-text models; the same in all processes. Use the training batch
            size to measure at the training capacity.
        every: number of epochs or steps between probes.
        unit: `"epochs"` or `"steps"`.
        training: whether to route as in training, with its capacity, noise (the same
            each time) and dropout, instead of as at inference.
        csv_path: CSV file with a row per probe and layer, or None.
        tensorboard: folder for TensorBoard events (needs tensorboardX), or None.
        min_entropy: entropy below which to warn that a layer has collapsed.
        max_share: share of one expert above which to warn, with more than two experts.
        max_dead: fraction of dead experts above which to warn.

    Example:

    >>> from keras_moe import models
    >>> from keras_moe.training import RouterHealth
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=10, num_layers=2, load_weights=False
    ... )
    >>> health = RouterHealth(np.zeros((4, 16, 16, 1), "float32"), min_entropy=0.0)
    >>> health.set_model(model)
    >>> sorted(health.measure())
    ['router/dead', 'router/dropped', 'router/entropy', 'router/max_gate']
    """

    def __init__(
        self,
        images: Any,
        *,
        every: int = 1,
        unit: str = "epochs",
        training: bool = True,
        csv_path: str | os.PathLike | None = None,
        tensorboard: str | os.PathLike | None = None,
        min_entropy: float = MIN_ENTROPY,
        max_share: float = MAX_SHARE,
        max_dead: float = MAX_DEAD,
    ):
        super().__init__(every, unit)
        images = keras.tree.map_structure(np.asarray, images)
        number = array_length(images)
        # The same number on each device.
        number -= number % batch_devices()
        if not number:
            expected = f"an image for each of {batch_devices()} devices of a batch"
            raise unfit(expected, "fewer")
        self.images = keras.tree.map_structure(lambda x: x[:number], images)
        self.training = check_bool("training", training)
        self.csv_path, self.tensorboard = csv_path, tensorboard
        if tensorboard is not None:
            callbacks.import_tensorboardx()
        self.min_entropy, self.max_share = min_entropy, max_share
        self.max_dead = max_dead
        self.layers = []
        self.costs: Description | None = None
        self._events = None
        # Rows not yet written to TensorBoard.
        self._unwritten = []

    def set_model(self, model):
        super().set_model(model)
        self.costs = costs_of(model)

    def measure(self):
        probe = self.probe(lambda: _RoutingProbe(self.model, self.training))
        self._rows = rows = probe.rows(self.images)
        parts = {} if self.costs is None else {x.name: x for x in self.costs.parts}
        for row in rows:
            own = parts.get(row["layer"])
            # Modalities may share a layer, whose tokens are then those of both.
            part = own or parts.get(row["layer"].split("/")[-1])
            tokens = own and own.tokens_per_expert
            row["selected_experts"] = part and part.selected_experts
            row["tokens_per_expert"] = tokens and tokens * array_length(self.images)
        dropped = [(row["dropped_choices"], row["dropped_tokens"]) for row in rows]
        return {
            "router/entropy": min(row["load_entropy"] for row in rows),
            "router/dead": max(row["dead_experts"] for row in rows),
            "router/dropped": max(x if y is None else y for y, x in dropped),
            "router/max_gate": statistics.fmean(row["mean_max_gate"] for row in rows),
        }

    def measured(self, record):
        when = {name: record[name] for name in ("epoch", "step")}
        rows = [{**when, **row} for row in self._rows]
        self.layers += rows
        if process_index():
            return
        for row in rows:
            self._warn(row)
        self._write_csv()
        if self.tensorboard is not None:
            self._unwritten += rows
            self._write_events(self.tensorboard)

    def get_state(self):
        return {**super().get_state(), "layers": list(self.layers)}

    def set_state(self, state):
        super().set_state(state)
        self.layers = list(state["layers"])
        # Drops the rows of steps that will be repeated.
        if not process_index():
            self._write_csv()

    def _warn(self, row):
        reasons = []
        if row["load_entropy"] < self.min_entropy:
            reasons.append(f"load_entropy={row['load_entropy']:.3f}")
        if len(row["expert_shares"]) > 2 and row["largest_share"] > self.max_share:
            reasons.append(f"largest_share={row['largest_share']:.3f}")
        if row["dead_experts"] > self.max_dead:
            reasons.append(f"dead_experts={row['dead_experts']:.3f}")
        if reasons:
            warnings.warn(
                f"The router of {row['layer']} has collapsed in step {row['step']}: "
                f"{', '.join(reasons)}",
                stacklevel=2,
            )

    def _write_csv(self):
        if self.csv_path is None:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self.layers:
            joined: dict[Any, str] = {
                name: " ".join(f"{value:.6g}" for value in row[name] or ())
                for name in _PER_EXPERT
            }
            writer.writerow({**row, **joined})
        with callbacks.written_if_possible(self.csv_path):
            write_text(self.csv_path, text.getvalue())

    def _write_events(self, folder):
        events, self._events = self._events, None
        with callbacks.written_if_possible(folder):
            # After a failure, a new file hides what the last one has of these steps.
            events = events or callbacks.EventFile(folder, self._unwritten[0]["step"])
            for row in self._unwritten:
                scalars = {name: row[name] for name in COLUMNS[3:-2]}
                for tag, name in zip(("load", "bias"), _PER_EXPERT):
                    of_experts = enumerate(row[name] or ())
                    scalars |= {f"{tag}/{expert}": x for expert, x in of_experts}
                tag = f"router/{row['layer']}"
                given = {f"{tag}/{x}": y for x, y in scalars.items() if y is not None}
                events.write(row["step"], given)
            self._events, self._unwritten = events, []


class _RoutingProbe:
    """Reads a model's routing records, optionally in training mode."""

    def __init__(self, model, training):
        routing = getattr(model, "routing", None)
        if not routing:
            expected = "a model with MoE blocks, whose `routing` has their records"
            raise unfit(expected, type(model).__name__)
        self.model, self.routers = model, dict.fromkeys(routing)
        self.records = Hooked(keras.Model(model.input, routing), training=training)
        backbone: Any = getattr(model, "backbone", model)
        for name in routing:
            # Heads and token mixers of muMoE use all experts.
            if name != "head" and not name.endswith("/token_mixer"):
                layer = backbone.get_layer(name).feed_forward
                self.routers[name] = getattr(layer, "router", None)

    def rows(self, inputs):
        """Returns the figures of each layer."""
        for number, variable in enumerate(self.records.model.non_trainable_variables):
            if variable.path.endswith("seed_generator_state"):
                variable.assign(ops.cast([number, 0], variable.dtype))
        # Before the pass, which in training mode may move them.
        biases = dict.fromkeys(self.routers)
        for name, router in self.routers.items():
            bias: Any = getattr(router, "selection_bias", None)
            if bias is not None:
                biases[name] = ops.convert_to_numpy(bias).tolist()
        records, rows = predict_batch(self.records, inputs), []
        for name, router in self.routers.items():
            mask = routed_tokens(self.model, name, inputs)
            selected = getattr(router, "choices_per_token", None)
            figures = routing_statistics(records[name], selected, mask)
            shares = figures.expert_shares
            row = {"layer": name, **figures.to_dict()}
            del row["affinity_imbalance"]
            row["selection_bias"] = biases[name]
            row["largest_share"] = float(shares.max())
            row["dead_experts"] = float((shares < DEAD / len(shares)).mean())
            rows.append(row)
        return rows


class UsageRecorder(callbacks.PeriodicCallback):
    """Counts the usage of each expert over a window of training.

    At each interval, the next batch of the given examples is routed, which does not
    affect training. `usage` is the sum over the window, for
    `keras_moe.analysis.select_experts`. The defaults are those of *LIMoE* for pruning.
    The logs and the history get `usage/experts`: the number of experts that serve 90%
    of the tokens, averaged over blocks.

    Args:
        inputs: array or dict of arrays, the examples to route: training data as in the
            paper, or what the pruned model will see.
        groups: int (B,) or (B, N), group of each example or token, such as its class;
            None is one group, or the modalities of models with records per modality.
        group_names: names of the groups; None numbers them.
        mask: see `keras_moe.analysis.expert_usage`.
        every: number of steps or epochs between counts.
        unit: `"steps"` or `"epochs"`.
        last: length of the window in this unit.
        batch_size: number of examples to route each time. Use the training batch size
            to measure at the training capacity.
        training: see `RouterHealth`.
        contributions: see `keras_moe.analysis.expert_usage`.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

    Example:

    >>> from keras_moe import models
    >>> from keras_moe.training import UsageRecorder
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=10, num_layers=2, load_weights=False
    ... )
    >>> recorder = UsageRecorder(np.zeros((4, 16, 16, 1), "float32"), batch_size=2)
    >>> recorder.set_model(model)
    >>> list(recorder.measure())
    ['usage/experts']
    >>> list(recorder.usage.blocks)
    ['block_1']
    """

    def __init__(
        self,
        inputs: Structure,
        groups: Any = None,
        group_names: list[str] | None = None,
        *,
        mask: Any = None,
        every: int = 50,
        unit: str = "steps",
        last: int = 2500,
        batch_size: int = 32,
        training: bool = True,
        contributions: bool = False,
    ):
        super().__init__(every, unit)
        if check_integer("last", last) < self.every:
            raise unfit(f"last to be at least every={every}", last=last)
        self.inputs = keras.tree.map_structure(np.asarray, inputs)
        groups = None if groups is None else np.asarray(groups)
        number = array_length((self.inputs, groups), "inputs and groups")
        self.num_examples = check_integer("the number of inputs", number)
        if groups is not None:
            group_names = group_names or [*map(str, range(int(groups.max()) + 1))]
        self.groups, self.group_names, self.mask = groups, group_names, mask
        self.batch_size = check_integer("batch_size", batch_size)
        self.training = check_bool("training", training)
        self.contributions = check_bool("contributions", contributions)
        self._counts = collections.deque(maxlen=last // self.every)
        self._next = 0

    @property
    def usage(self) -> ExpertUsage:
        """The usage of each expert, summed over the window."""
        return merged_usage(self._counts)

    def measure(self):
        probe = self.probe(
            lambda: UsageProbe(self.model, self.contributions, self.training)
        )
        # Wraps around, so that all batches have one size.
        rows = (self._next + np.arange(self.batch_size)) % self.num_examples
        self._next = int(rows[-1] + 1) % self.num_examples
        batch = keras.tree.map_structure(lambda array: array[rows], self.inputs)
        groups = None if self.groups is None else self.groups[rows]
        self._counts.append(probe.count(batch, groups, self.group_names, self.mask))
        curves = coverage_curves(self._counts[-1]).values()
        needed = [curve.needed(_COVERED) for curve in curves]
        return {"usage/experts": float(statistics.fmean(needed))}

    def get_state(self):
        counts = [usage.to_dict() for usage in self._counts]
        return {**super().get_state(), "counts": counts, "next": self._next}

    def set_state(self, state):
        super().set_state(state)
        self._counts.clear()
        self._counts.extend(map(ExpertUsage.from_dict, state["counts"]))
        self._next = state["next"]
