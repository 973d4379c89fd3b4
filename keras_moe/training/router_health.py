"""Health of the routers: a probe at regular intervals, a warning on collapse.

Axes: B batch, N tokens, E experts.
"""

import csv
import io
import os
import statistics
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe.analysis.routing import (
    DEAD,
    MAX_DEAD,
    MAX_SHARE,
    MIN_ENTROPY,
    routing_statistics,
)
from keras_moe.analysis.usage import masks_padding
from keras_moe.checks import check_bool
from keras_moe.files import write_text
from keras_moe.processes import batch_devices, predict_batch, process_index
from keras_moe.training.event_file import EventFile, import_tensorboardx
from keras_moe.training.periodic import PeriodicCallback, written_if_possible

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
    "expert_shares",
)


class RouterHealth(PeriodicCallback):
    """Routes a fixed batch of images every so many epochs or steps, and reports.

    For each layer: the share of all assignments that each expert served, the entropy
    of these shares over log E, the share of dead experts (with less than a hundredth of
    1/E), the share of tokens that no expert served and of choices that were dropped,
    and the mean over tokens of the largest gate; see
    `keras_moe.analysis.routing_statistics`. Any router, and muMoE, whose coefficients
    other than zero count as served.

    The logs, and with them the progress line and the history, get the worst layer's:
    `router/entropy`, `router/dead`, `router/dropped` (of the choices; of the tokens
    where these do not choose), and the mean over layers `router/max_gate`.

    A file that cannot be written is a warning, and the run continues; its figures are
    written with the next ones. The first of several processes writes and warns.

    Args:
        images: (B, height, width, channels), the probe; for models of texts and pairs
            the dict that they take; the same in all processes. A batch of training's
            size meets the capacity of training. Padding that is not routed does not
            count.
        every: number of epochs or steps between probes.
        unit: `"epochs"` or `"steps"`.
        training: whether to route as in training, with its capacity, noise and dropout,
            the noise being the same each time; or as at inference, where nothing is
            dropped by default.
        csv_path: a CSV file with a row for each time and layer; None for none.
        tensorboard: a folder for TensorBoard's events; None for none. A run that goes
            on hides the events of the steps that it makes again.
        min_entropy: a layer whose entropy is below has collapsed: there is a warning.
        max_share: the same for an expert's share above it, if there are more than two.
        max_dead: the same for a share of dead experts above it.

    Raises:
        ValueError: if an argument is out of range, or the model has no router.
        ImportError: if `tensorboard` is given and tensorboardX is not installed.

    Example:

    >>> import numpy as np
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
        number = _number_of_examples(images)
        devices = batch_devices()
        if number < devices:
            raise ValueError(
                f"Expected at least as many images as the {devices} devices that share "
                f"a batch; received: {number}"
            )
        # Each device has the same number.
        number -= number % devices
        self.images = keras.tree.map_structure(lambda x: np.asarray(x)[:number], images)
        self.training = check_bool("training", training)
        self.csv_path, self.tensorboard = csv_path, tensorboard
        if tensorboard is not None:
            import_tensorboardx()
        self.limits = {
            "min_entropy": min_entropy,
            "max_share": max_share,
            "max_dead": max_dead,
        }
        for name, limit in self.limits.items():
            is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if not is_number or not 0 <= limit <= 1:
                raise ValueError(
                    f"Expected {name} between 0 and 1; received: {name}={limit!r}"
                )
        self.layers = []
        self._events = None
        # Rows that TensorBoard has not got yet.
        self._unwritten = []
        self._of, self._probe = None, None

    def measure(self):
        if self._of is not self.model:
            self._of, self._probe = self.model, _RoutingProbe(self.model, self.training)
        self._rows = [
            _row(name, routing_statistics(record, selected, mask))
            for name, (record, selected, mask) in self._probe.route(self.images).items()
        ]
        dropped = [
            row["dropped_tokens"]
            if row["dropped_choices"] is None
            else row["dropped_choices"]
            for row in self._rows
        ]
        return {
            "router/entropy": min(row["load_entropy"] for row in self._rows),
            "router/dead": max(row["dead_experts"] for row in self._rows),
            "router/dropped": max(dropped),
            "router/max_gate": statistics.fmean(
                row["mean_max_gate"] for row in self._rows
            ),
        }

    def measured(self, record):
        place = {name: record[name] for name in ("epoch", "step")}
        rows = [{**place, **row} for row in self._rows]
        self.layers += rows
        if process_index():
            return
        for row in rows:
            self._warn(row)
        self._write_csv()
        self._unwritten += rows
        self._write_events()

    def get_state(self):
        return {**super().get_state(), "layers": list(self.layers)}

    def set_state(self, state):
        super().set_state(state)
        self.layers = list(state["layers"])
        # Rows of steps that will be made again go.
        if not process_index():
            self._write_csv()

    def _warn(self, row):
        reasons, limits = [], self.limits
        if row["load_entropy"] < limits["min_entropy"]:
            reasons.append(
                f"load_entropy={row['load_entropy']:.3f} < {limits['min_entropy']}"
            )
        many = len(row["expert_shares"]) > 2
        if many and row["largest_share"] > limits["max_share"]:
            reasons.append(
                f"largest_share={row['largest_share']:.3f} > {limits['max_share']}"
            )
        if row["dead_experts"] > limits["max_dead"]:
            reasons.append(
                f"dead_experts={row['dead_experts']:.3f} > {limits['max_dead']}"
            )
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
            shares = " ".join(f"{share:.6g}" for share in row["expert_shares"])
            writer.writerow({**row, "expert_shares": shares})
        with written_if_possible(self.csv_path):
            write_text(self.csv_path, text.getvalue())

    def _write_events(self):
        if self.tensorboard is None or not self._unwritten:
            return
        events, self._events = self._events, None
        with written_if_possible(self.tensorboard):
            # After a failure in a new file, which hides what the last one has of them.
            events = events or EventFile(self.tensorboard, self._unwritten[0]["step"])
            for row in self._unwritten:
                events.write(row["step"], _scalars(row))
            self._events, self._unwritten = events, []


class _RoutingProbe(keras.Model):
    """The routing records of a model, as they are in training if need be."""

    def __init__(self, model, training):
        # The global policy is not the model's.
        super().__init__(name="routing_probe", dtype="float32")
        routing = getattr(model, "routing", None)
        if not routing:
            raise ValueError(
                "Expected a model with MoE blocks, whose `routing` has their records; "
                f"received: {type(model).__name__}"
            )
        self.records = keras.Model(model.input, routing)
        self.in_training = training
        # Plain numbers, which Keras need not track.
        self.selected = {name: _num_selected_experts(model, name) for name in routing}
        self.without_padding = [name for name in routing if masks_padding(model, name)]

    def call(self, inputs):
        return self.records(inputs, training=self.in_training)

    def route(self, inputs):
        for number, variable in enumerate(self.records.non_trainable_variables):
            if variable.path.endswith("seed_generator_state"):
                variable.assign(ops.cast([number, 0], variable.dtype))
        records = predict_batch(self, inputs)
        masks = dict.fromkeys(self.selected)
        for name in self.without_padding:
            masks[name] = np.asarray(inputs["padding_mask"], bool)
        return {
            name: (records[name], selected, masks[name])
            for name, selected in self.selected.items()
        }


def _number_of_examples(inputs):
    """B of images, or of a dict of arrays."""
    if isinstance(inputs, dict):
        numbers = {len(x) if np.ndim(x) else 0 for x in inputs.values()}
        if len(numbers) == 1 and 0 not in numbers:
            return numbers.pop()
        raise ValueError(
            "Expected arrays of one number of examples, at least one; received: "
            f"{ ({name: np.shape(x) for name, x in inputs.items()}) }"
        )
    shape = tuple(getattr(inputs, "shape", ()))
    if len(shape) != 4 or not shape[0]:
        raise ValueError(
            "Expected an array of at least one image (batch, height, width, "
            f"channels); received: shape={shape}"
        )
    return shape[0]


def _num_selected_experts(model, name):
    backbone = getattr(model, "backbone", model)
    # In a head or a token mixer of muMoE all experts take part.
    if name == "head" or name.endswith("/token_mixer"):
        return None
    block = backbone.get_layer(name)
    router = getattr(block.feed_forward, "router", None)
    return getattr(router, "num_selected_experts", None)


def _row(name, figures):
    shares = figures.expert_shares
    return {
        "layer": name,
        "load_entropy": figures.load_entropy,
        "largest_share": float(shares.max()),
        "dead_experts": float((shares < DEAD / len(shares)).mean()),
        "dropped_tokens": figures.dropped_tokens,
        "dropped_choices": figures.dropped_choices,
        "mean_max_gate": figures.mean_max_gate,
        "expert_shares": [float(share) for share in shares],
    }


def _scalars(row):
    """Returns the figures of a row that TensorBoard shows, by tag."""
    name = f"router/{row['layer']}"
    figures = {f"{name}/{x}": row[x] for x in COLUMNS[3:-1]}
    for expert, share in enumerate(row["expert_shares"]):
        figures[f"{name}/load/{expert}"] = share
    return {tag: x for tag, x in figures.items() if x is not None}
