"""The section `optimizer` of a recipe: how gradients change the weights."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from keras_moe.checks import (
    check_integer,
    check_not_negative,
    check_one_of,
    check_positive,
)
from keras_moe.training.optimizers import make_optimizer
from keras_moe.training.parameter_groups import check_groups, group_factors
from keras_moe.training.section import Section

DECAY_TIMES = ("learning_rate", "share_of_peak")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer of a recipe; its learning rates are the schedule's.

    Args:
        name: `"vitg_adafactor"`, or the name of a Keras optimizer; see
            `optimizer_class`.
        options: its further arguments, such as `{"beta_2": 0.95}`.
        weight_decay: weight decay of all weights alike, but for `groups`; 0 for none.
        weight_decay_times: `"learning_rate"`, that of the step, as `AdamW` of Keras and
            PyTorch and the V-MoE release have it; or `"share_of_peak"`, the same
            divided by the peak learning rate, as big_vision has it.
        groups: dicts that give weights learning rates and weight decay of their own,
            such as `{"match": "head", "weight_decay": 10.0}`, a factor; see
            `ParameterGroups`.
        gradient_clipping: largest norm of all gradients together, or None.
        gradient_accumulation_steps: the batches into which that of a step is divided,
            one after the other, where memory is short. Tokens compete for experts, and
            losses of routers are taken, within each of them.
        ema_momentum: share that an average of the weights keeps of itself in each step;
            the model is evaluated, and left, with the averages. None for no average.

    Raises:
        ValueError: if a setting is out of range, or is not JSON.

    Example:

    >>> from keras_moe.training import OptimizerConfig
    >>> OptimizerConfig(weight_decay=0.1, options={"epsilon": 1e-8}).name
    'adamw'
    """

    title = "optimizer"

    name: str = "adamw"
    options: dict = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.0
    weight_decay_times: str = "learning_rate"
    groups: Sequence = ()
    gradient_clipping: float | None = 1.0
    gradient_accumulation_steps: int = 1
    ema_momentum: float | None = None

    def __post_init__(self):
        check_integer("gradient_accumulation_steps", self.gradient_accumulation_steps)
        check_not_negative("weight_decay", self.weight_decay)
        if self.gradient_clipping is not None:
            check_positive("gradient_clipping", self.gradient_clipping)
        check_one_of("weight_decay_times", self.weight_decay_times, DECAY_TIMES)
        check_groups(self.groups)
        if check_not_negative("ema_momentum", self.ema_momentum or 0.0) >= 1:
            raise ValueError(
                "Expected ema_momentum to be below 1; "
                f"received: ema_momentum={self.ema_momentum!r}"
            )
        super().__post_init__()
        for name in ("use_ema", "ema_momentum", "ema_overwrite_frequency"):
            if name in self.options:
                raise ValueError(
                    f"Expected no {name} in options: the optimizer section's own "
                    "ema_momentum says it; received: "
                    f"{name}={self.options[name]!r}"
                )

    def new_optimizer(
        self,
        learning_rate: keras.optimizers.schedules.LearningRateSchedule,
        peak: float,
        paths: Sequence[str],
    ) -> Any:
        """The optimizer.

        Args:
            learning_rate: the learning rate by step.
            peak: the highest learning rate.
            paths: the paths of the weights that it is to train.

        Raises:
            ValueError: if the optimizer does not exist, or a group has no weights.
        """
        # An optimizer would say it after the first batch.
        group_factors(self.groups, paths)
        batches = self.gradient_accumulation_steps
        ema = {} if self.ema_momentum is None else {"ema_momentum": self.ema_momentum}
        return make_optimizer(
            self.name,
            self.options,
            learning_rate=learning_rate,
            weight_decay=float(self.weight_decay),
            peak_learning_rate=(
                peak if self.weight_decay_times == "share_of_peak" else None
            ),
            groups=self.groups,
            global_clipnorm=self.gradient_clipping,
            # With one batch, Keras knows no accumulation.
            gradient_accumulation_steps=batches if batches > 1 else None,
            use_ema=bool(ema),
            **ema,
        )
