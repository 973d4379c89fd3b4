"""Optimizers by name with parameter groups, and the recipe's `optimizer` section."""

import collections
import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import keras
import numpy as np
from keras import ops

from keras_moe import _compat
from keras_moe._checks import (
    check_argument_names,
    check_dropout,
    check_integer,
    check_not_negative,
    check_one_of,
    check_positive,
    unfit,
)
from keras_moe.training.muon import Muon
from keras_moe.training.sections import Section

# Groups that can be matched by name. Weights of muMoE layers are factors; only their
# gates have kernels.
NAMED_GROUPS = {
    "experts": r"(.*/)?((zero_computation_)?experts|moe/(hidden|output))/.*",
    "router": r"(.*/)?(router|moe/gate)/.*",
    "head": r"(.*/)?(predictions|head)/.*",
    "kernels": r"(.*/)?([a-z]+_)?kernel(_\d+)?",
    "rest": r".*",
}
# A block, and what comes before the blocks.
_BLOCK = re.compile(r"((?:.*/)?)block_(\d+)/.*")
_EMBEDDING = re.compile(
    r"((?:.*/)?)(?:[a-z_]*embedding[a-z_]*|[a-z_]*positions|class_token)"
    # The output matrix of untied embeddings belongs to the head.
    r"/(?!reverse_)[^/]*"
)


# Weights whose second longest axis is shorter have a second moment per element.
_SHORTEST_FACTORED = 32


class Factors(NamedTuple):
    """Multipliers of a weight's learning rate and weight decay."""

    learning_rate: float = 1.0
    weight_decay: float = 1.0


def check_groups(groups: Sequence[dict]) -> list[dict]:
    """Validates parameter groups and returns them as a list of dicts."""
    for group in groups:
        try:
            re.compile(group["match"])
        except (KeyError, TypeError, re.error) as error:
            raise ValueError(
                "Expected groups to be dicts whose 'match' is a regular expression or "
                f"one of {', '.join(NAMED_GROUPS)}; received: groups={groups!r} "
                f"({error!r})"
            ) from error
        check_argument_names(group, ["match", *Factors._fields], "a group")
        for name in Factors._fields:
            check_not_negative(name, group.get(name, 1.0))
    return [dict(group) for group in groups]


def group_factors(groups: Sequence[dict], paths: Sequence[str]) -> list[Factors]:
    """Returns the factors of each weight."""
    factors: list[Factors | None] = [None] * len(paths)
    for group in groups:
        match: str = group["match"]
        pattern = re.compile(NAMED_GROUPS.get(match, match))
        matched = [i for i, path in enumerate(paths) if pattern.fullmatch(path)]
        new = [i for i in matched if factors[i] is None]
        if not new:
            names = [*NAMED_GROUPS, *paths]
            close = difflib.get_close_matches(match, names, n=3, cutoff=0.3)
            raise ValueError(
                "Expected every group to match the full path of a weight that is not "
                f"in a group before it; received: match={match!r} "
                f"(nearest: {', '.join(close or paths[:3])})"
            )
        for index in new:
            factors[index] = Factors(*(group.get(x, 1.0) for x in Factors._fields))
    return [x or Factors() for x in factors]


def layer_factors(decay: float, paths: Sequence[str]) -> list[float]:
    """Returns decay^n for each weight, n blocks from the end of its tower."""
    depths = collections.Counter()
    for block in filter(None, map(_BLOCK.fullmatch, paths)):
        depths[block[1]] = max(depths[block[1]], int(block[2]) + 1)

    def distance(path):
        if block := _BLOCK.fullmatch(path):
            return depths[block[1]] - int(block[2])
        embedding = _EMBEDDING.fullmatch(path)
        return depths[embedding[1]] + 1 if embedding else 0

    return [decay ** distance(path) for path in paths]


if TYPE_CHECKING:
    _Optimizer: TypeAlias = keras.optimizers.Optimizer
else:
    _Optimizer = object


class ParameterGroups(_Optimizer):
    """Mixin that adds parameter groups to a Keras optimizer; must be the first base."""

    def __init__(
        self,
        *args: Any,
        groups: Sequence[dict] = (),
        peak_learning_rate: float | None = None,
        layer_decay: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.groups = check_groups(groups)
        self.layer_decay = check_positive("layer_decay", layer_decay, optional=True)
        check_positive("peak_learning_rate", peak_learning_rate, optional=True)
        self.peak_learning_rate = peak_learning_rate
        self._rate_scale = 1.0

    def build(self, variables):
        if self.built:
            return
        paths = [getattr(variable, "path", variable.name) for variable in variables]
        self._factors = group_factors(self.groups, paths)
        if self.layer_decay is not None:
            self._factors = [
                own._replace(learning_rate=own.learning_rate * factor)
                for own, factor in zip(
                    self._factors, layer_factors(self.layer_decay, paths)
                )
            ]
        super().build(variables)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        gradients = dict(zip(map(id, trainable_variables), grads, strict=True))
        for factor, members in self._by_factor(
            trainable_variables, lambda factors: factors.learning_rate
        ):
            super()._backend_update_step(
                [gradients[id(variable)] for variable in members],
                members,
                learning_rate if factor == 1.0 else learning_rate * factor,
            )

    def _apply_weight_decay(self, variables):
        if not self.weight_decay:
            return

        def factor_of(factors):
            if self.peak_learning_rate is None or factors.learning_rate == 0:
                return factors.weight_decay * factors.learning_rate
            return factors.weight_decay / self.peak_learning_rate

        for factor, members in self._by_factor(variables, factor_of):
            # Weight decay is the learning rate times this.
            self._rate_scale = factor
            try:
                super()._apply_weight_decay(members)
            finally:
                self._rate_scale = 1.0

    def _by_factor(self, variables: Sequence, factor_of: Callable) -> list[tuple]:
        members = {}
        for variable in variables:
            factor = factor_of(self._factors[self._get_variable_index(variable)])
            members.setdefault(factor, []).append(variable)
        return [(factor, chosen) for factor, chosen in members.items() if factor]

    def _get_current_learning_rate(self):
        rate = _compat.rate_or_schedule(self)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(self.iterations)
        else:
            rate = super()._get_current_learning_rate()
        return rate if self._rate_scale == 1.0 else rate * self._rate_scale

    def _update_model_variables_moving_average(self, trainable_variables):
        batches = self.gradient_accumulation_steps
        if not batches:
            super()._update_model_variables_moving_average(trainable_variables)
            return
        # Otherwise Keras would average again after batches that change no weight.
        done = ops.cast(_compat.count_batches(self), "int32") + 1
        kept = ops.where(done % batches == 0, self.ema_momentum, 1.0)
        kept = ops.where(done <= batches, 0.0, kept)
        for variable, average in zip(
            trainable_variables, _compat.moving_averages(self), strict=True
        ):
            share = ops.cast(kept, variable.dtype)
            average.assign(share * average + (1 - share) * variable)

    def get_config(self):
        groups = [dict(group) for group in self.groups]
        names = ("peak_learning_rate", "layer_decay")
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), "groups": groups, **own}


@keras.saving.register_keras_serializable("keras_moe")
class ViTGAdafactor(ParameterGroups, keras.optimizers.Optimizer):
    """Adafactor with the modifications of ViT-G.

    For the gradient g of a matrix at update t = 1, 2, ..., with
    b = min(1 - t^-0.8, 0.999):

        r = b r + (1 - b) mean over columns of (g^2 + epsilon)
        c = b c + (1 - b) mean over rows of (g^2 + epsilon)
        u = g / sqrt(r c / mean(r))
        m = 0.9 m + 0.1 u, kept in bfloat16
        weight = weight - learning_rate m

    Unlike in `keras.optimizers.Adafactor`, updates are neither clipped nor scaled by
    the weight's root mean square, and there is a first moment, without bias correction.
    The state takes 2 bytes per weight instead of Adam's 8.

    Rows and columns are the two longest axes of a weight, the last ones if lengths are
    equal; matrices along the other axes, such as attention heads, are factored
    separately, and the axis of experts never is. Weights whose second longest axis is
    shorter than 32 have a second moment per element.

    Args:
        learning_rate: a number or a schedule.
        epsilon: added to the squared gradients.
        momentum: 0.9 in the formula; 0 disables the first moment.
        momentum_dtype: dtype in which the first moment is stored.
        **kwargs: `groups`, `layer_decay` and `peak_learning_rate`, see
            `optimizer_class`, and the arguments of all Keras optimizers.

    Reference: *Scaling Vision Transformers*, section 3.4, and big_vision's
        `scale_by_adafactor`; *Adafactor*, algorithms 4 and 5; *LIMoE*, appendix A.

    Example:

    >>> from keras_moe.training import ViTGAdafactor
    >>> optimizer = ViTGAdafactor(1e-3, weight_decay=1e-5, peak_learning_rate=1e-3)
    >>> kernel = keras.Variable(keras.ops.ones((64, 128)), name="kernel")
    >>> optimizer.build([kernel])
    >>> [tuple(state.shape) for state in optimizer.second_moments(kernel)]
    [(64, 1), (1, 128)]
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1e-3,
        epsilon: float = 1e-30,
        momentum: float = 0.9,
        momentum_dtype: str = "bfloat16",
        name: str = "vitg_adafactor",
        **kwargs: Any,
    ):
        super().__init__(learning_rate, name=name, **kwargs)
        self.epsilon = check_positive("epsilon", epsilon)
        self.momentum = check_dropout("momentum", momentum)
        self.momentum_dtype = keras.backend.standardize_dtype(momentum_dtype)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._factored_axes = [self._axes_of(variable) for variable in variables]
        self._second_moments, self._first_moments = [], []
        for variable, axes in zip(variables, self._factored_axes, strict=True):
            shapes = {"second_moment": tuple(variable.shape)}
            if axes is not None:
                rows, columns = axes
                shapes = {
                    "second_moment_rows": _without(variable.shape, columns),
                    "second_moment_columns": _without(variable.shape, rows),
                }
            name = variable.path.replace("/", "_")
            self._second_moments.append(
                [
                    self.add_variable(shape, dtype="float32", name=f"{name}_{what}")
                    for what, shape in shapes.items()
                ]
            )
            if self.momentum:
                self._first_moments.append(
                    self.add_variable(
                        variable.shape,
                        dtype=self.momentum_dtype,
                        # Sharded like the weight.
                        layout=_compat.variable_layout(variable),
                        name=f"{name}_first_moment",
                    )
                )

    def second_moments(self, variable: keras.Variable) -> list[keras.Variable]:
        """Returns a weight's second moments: of rows and columns, or per element."""
        return list(self._second_moments[self._get_variable_index(variable)])

    def _axes_of(self, variable) -> tuple[int, int] | None:
        """Returns the second longest and the longest axis, or None if not factored."""
        first = 1 if re.fullmatch("(.*/)?experts/.*", variable.path) else 0
        sizes = tuple(variable.shape)[first:]
        if len(sizes) < 2:
            return None
        # The last of several equal axes, as in optax.
        rows, columns = np.argsort(sizes, kind="stable")[-2:]
        if sizes[rows] < _SHORTEST_FACTORED:
            return None
        return first + int(rows), first + int(columns)

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        gradient = ops.cast(gradient, "float32")
        iterations: Any = self.iterations
        step = ops.cast(iterations + 1, "float32")
        # b = min(1 - t^-0.8, 0.999)
        beta = ops.minimum(1 - step**-0.8, 0.999)
        squares = ops.square(gradient) + self.epsilon

        def moved(state, new):
            value = beta * state + (1 - beta) * new
            self.assign(state, value)
            return value

        states, axes = self._second_moments[index], self._factored_axes[index]
        if axes is None:
            update = gradient * ops.rsqrt(moved(states[0], squares))
        else:
            # u = g / sqrt(r c / mean(r))
            rows, columns = axes
            by_row = moved(states[0], ops.mean(squares, columns, keepdims=True))
            by_column = moved(states[1], ops.mean(squares, rows, keepdims=True))
            by_row = by_row / ops.mean(by_row, rows, keepdims=True)
            update = gradient * ops.rsqrt(by_row) * ops.rsqrt(by_column)
        if self.momentum:
            # m = 0.9 m + 0.1 u
            state = self._first_moments[index]
            kept = self.momentum * ops.cast(state, "float32")
            # The update itself is not rounded (optax also rounds 0.9 m).
            update = kept + (1 - self.momentum) * update
            self.assign(state, ops.cast(update, state.dtype))
        change = ops.cast(learning_rate, "float32") * update
        self.assign_sub(variable, ops.cast(change, variable.dtype))

    def get_config(self):
        names = ("epsilon", "momentum", "momentum_dtype")
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own}


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return tuple(1 if i == axis else size for i, size in enumerate(shape))


def _grouped(base: Any) -> type:
    # On PyTorch, Keras replaces classes of `keras.optimizers` by other ones, which
    # update all weights together.
    implementation = type(base.__new__(base))
    name = f"Grouped{base.__name__}"
    doc = f"`{base.__name__}` with `ParameterGroups`."
    body = {"__doc__": doc, "__module__": __name__}
    grouped = type(name, (ParameterGroups, implementation), body)
    return keras.saving.register_keras_serializable("keras_moe")(grouped)


# Without Nadam, which keeps a product of momenta that every group would update. Keras's
# own Muon is replaced by one that knows experts.
_OF_KERAS = "Adadelta Adafactor Adagrad Adam Adamax AdamW Ftrl Lamb Lion RMSprop SGD"
OPTIMIZERS = {
    name.lower(): _grouped(getattr(keras.optimizers, name))
    for name in _OF_KERAS.split()
} | {"muon": _grouped(Muon), "vitg_adafactor": ViTGAdafactor}


def optimizer_class(name: str) -> type:
    """Returns an optimizer class with decoupled weight decay and parameter groups.

    It has three additional arguments: `groups` and `layer_decay`, see
    `OptimizerConfig`, and `peak_learning_rate`, which divides the weight decay.

    Args:
        name: `"vitg_adafactor"`, `"muon"` (see `Muon`), or the name of a Keras
            optimizer, such as `"adamw"`.

    Example:

    >>> from keras_moe.training import optimizer_class
    >>> optimizer = optimizer_class("adamw")(
    ...     1e-3, weight_decay=0.1, groups=[{"match": "rest", "weight_decay": 0.0}]
    ... )
    >>> isinstance(optimizer, keras.optimizers.AdamW)
    True
    """
    return OPTIMIZERS[check_one_of("optimizer", str(name).lower(), OPTIMIZERS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer of a recipe; learning rates are in `ScheduleConfig`.

    Args:
        name: name of the optimizer, see `optimizer_class`.
        options: further arguments of the optimizer, such as `{"beta_2": 0.95}`.
        weight_decay: weight decay, multiplied by the factors of `groups`.
        weight_decay_times: what multiplies the decay: `"learning_rate"`, as in `AdamW`
            and the V-MoE release, or `"share_of_peak"`, the learning rate divided by
            its peak, as in big_vision.
        groups: dicts with factors for the learning rate and weight decay of some
            weights, such as `{"match": "head", "weight_decay": 10.0}`. `match` is a
            regular expression for full paths, or `"experts"`, `"router"`, `"head"`,
            `"kernels"` or `"rest"`. The first matching group applies.
        layer_decay: factor between the learning rates of a block and of the next, such
            as 0.75: the last block has it once, embeddings have it once more than the
            first. None for one rate.
        gradient_clipping: maximum global norm of the gradients, or None.
        gradient_accumulation_steps: number of parts of a batch, to save memory. Tokens
            compete for experts, and router losses are computed, within each part.
        ema_momentum: decay of a moving average of the weights, which is evaluated and
            kept at the end; None for no average.

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
    layer_decay: float | None = None
    gradient_clipping: float | None = 1.0
    gradient_accumulation_steps: int = 1
    ema_momentum: float | None = None

    def __post_init__(self):
        check_integer("gradient_accumulation_steps", self.gradient_accumulation_steps)
        check_not_negative("weight_decay", self.weight_decay)
        check_positive("gradient_clipping", self.gradient_clipping, optional=True)
        times = ("learning_rate", "share_of_peak")
        check_one_of("weight_decay_times", self.weight_decay_times, times)
        check_groups(self.groups)
        check_positive("layer_decay", self.layer_decay, optional=True)
        check_dropout("ema_momentum", self.ema_momentum or 0.0)
        super().__post_init__()

    def new_optimizer(
        self,
        learning_rate: keras.optimizers.schedules.LearningRateSchedule,
        peak: float,
        paths: Sequence[str],
    ) -> keras.optimizers.Optimizer:
        """Builds the optimizer of weights with these paths; `peak` is the peak rate."""
        # Fails here rather than after the first batch.
        group_factors(self.groups, paths)
        batches, ema_momentum = self.gradient_accumulation_steps, self.ema_momentum
        by_share = self.weight_decay_times == "share_of_peak"
        cls = optimizer_class(self.name)
        try:
            return cls(
                learning_rate=learning_rate,
                weight_decay=float(self.weight_decay),
                peak_learning_rate=peak if by_share else None,
                groups=self.groups,
                layer_decay=self.layer_decay,
                global_clipnorm=self.gradient_clipping,
                # Keras rejects 1.
                gradient_accumulation_steps=batches if batches > 1 else None,
                use_ema=ema_momentum is not None,
                # Keras's default, unused without averages.
                ema_momentum=0.99 if ema_momentum is None else ema_momentum,
                # Given twice, and so refused, if it is in the options.
                ema_overwrite_frequency=None,
                **self.options,
            )
        except (TypeError, ValueError) as error:
            expected = f"further arguments of {self.name}"
            raise unfit(expected, f"options={self.options!r} ({error})") from error
