"""The use of experts over the last steps of training.

Axes: B batch, N tokens, E experts.
"""

import collections
import os
import statistics
from typing import Any

import numpy as np

from keras_moe.analysis.pruning import coverage_curves
from keras_moe.analysis.usage import ExpertUsage, UsageProbe, merged_usage
from keras_moe.checks import check_bool, check_integer
from keras_moe.training.periodic import PeriodicCallback, written_if_possible

# The share of tokens whose experts the logs count.
_COVERED = 0.9


class UsageRecorder(PeriodicCallback):
    """Counts at regular intervals how much each expert is used, and sums the last ones.

    Each time the next batch of the examples is routed: telemetry is an output of the
    model, and training is the same with it and without. `usage` is the sum over the
    window, for `keras_moe.analysis.select_experts`. *LIMoE* ranks the experts to prune
    by the last 2,500 steps, counted every 50.

    The logs, and with them the history, get `usage/experts`: the number of experts that
    serve 90% of the tokens, averaged over blocks.

    Args:
        inputs: array or dict of arrays by name, examples to route: those of training
            count as the paper does, others count what the pruned model will see.
        groups: integers (B,) or (B, N), the group of each example or token, such as
            its class or modality; None is one group, or the modalities of a model
            whose records are by modality.
        group_names: names of the groups; None numbers them.
        mask: argument of `keras_moe.analysis.expert_usage`.
        every: number of steps or epochs between counts.
        unit: `"steps"` or `"epochs"`.
        last: length of the window in this unit.
        batch_size: number of examples that are routed each time. A batch of training's
            size meets the capacity of training.
        training: whether to route as in training, with its capacity, noise and dropout;
            or as at inference, where nothing is dropped by default.
        contributions: argument of `keras_moe.analysis.expert_usage`.
        path: JSON file that is written when training ends, for `ExpertUsage.load`; None
            for none.

    Raises:
        ValueError: if an argument is out of range, or the model has no router; in
            training, if the routing is not finite.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

    Example:

    >>> import numpy as np
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
        inputs: Any,
        groups: Any = None,
        group_names: list[str] | None = None,
        mask: Any = None,
        every: int = 50,
        unit: str = "steps",
        last: int = 2500,
        batch_size: int = 32,
        training: bool = True,
        contributions: bool = False,
        path: str | os.PathLike | None = None,
    ):
        super().__init__(every, unit)
        if check_integer("last", last) < self.every:
            raise ValueError(
                f"Expected last to be at least every={every}; received: last={last}"
            )
        arrays = inputs if isinstance(inputs, dict) else {"inputs": inputs}
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        groups = None if groups is None else np.asarray(groups)
        lengths = {len(x) if x.ndim else 0 for x in arrays.values()}
        if groups is not None:
            lengths.add(len(groups))
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                "Expected arrays of inputs and groups of one length, at least 1; "
                f"received: lengths {sorted(lengths)}"
            )
        if group_names is not None and groups is None:
            raise ValueError(
                "Expected group_names=None without groups; "
                f"received: group_names={group_names}"
            )
        if group_names is None and groups is not None:
            group_names = [str(number) for number in range(int(groups.max()) + 1)]
        (self.num_examples,) = lengths
        self.inputs = arrays if isinstance(inputs, dict) else arrays["inputs"]
        self.groups, self.group_names, self.mask = groups, group_names, mask
        self.batch_size = check_integer("batch_size", batch_size)
        self.training = check_bool("training", training)
        self.contributions = check_bool("contributions", contributions)
        self.path = path
        self._counts = collections.deque(maxlen=last // self.every)
        self._next = 0
        self._of, self._probe = None, None

    @property
    def usage(self) -> ExpertUsage:
        """The use of each expert, summed over the window.

        Raises:
            ValueError: if nothing was counted yet.
        """
        return merged_usage(self._counts)

    def measure(self):
        if self._of is not self.model:
            self._of = self.model
            self._probe = UsageProbe(self.model, self.contributions, self.training)
        # Every batch has the same size: the last examples are followed by the first.
        rows = (self._next + np.arange(self.batch_size)) % self.num_examples
        self._next = int(rows[-1] + 1) % self.num_examples
        if isinstance(self.inputs, dict):
            batch = {name: array[rows] for name, array in self.inputs.items()}
        else:
            batch = self.inputs[rows]
        groups = None if self.groups is None else self.groups[rows]
        names, mask = self.group_names, self.mask
        self._counts.append(self._probe.count(batch, groups, names, mask))
        curves = coverage_curves(self._counts[-1]).values()
        needed = [np.argmax(curve.covered >= _COVERED) + 1 for curve in curves]
        return {"usage/experts": float(statistics.fmean(needed))}

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        if self.path is not None and self._counts:
            with written_if_possible(self.path):
                self.usage.save(self.path)

    def get_state(self):
        counts = [usage.to_dict() for usage in self._counts]
        return {**super().get_state(), "counts": counts, "next": self._next}

    def set_state(self, state):
        super().set_state(state)
        self._counts.clear()
        self._counts.extend(map(ExpertUsage.from_dict, state["counts"]))
        self._next = state["next"]
