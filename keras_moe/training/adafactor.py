"""Adafactor as it trained ViT-G, LIMoE and the largest V-MoE."""

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe.checks import check_integer, check_not_negative, check_positive
from keras_moe.compat import variable_layout
from keras_moe.training.parameter_groups import ParameterGroups


@keras.saving.register_keras_serializable("keras_moe")
class ViTGAdafactor(ParameterGroups, keras.optimizers.Optimizer):
    """Adafactor with the modifications of ViT-G.

    With g the gradient of a matrix at update t = 1, 2, ... and b = min(1 - t^-0.8,
    0.999):

        r = b r + (1 - b) mean over columns of (g^2 + epsilon)
        c = b c + (1 - b) mean over rows of (g^2 + epsilon)
        u = g / sqrt(r c / mean(r))
        m = 0.9 m + 0.1 u, kept in bfloat16
        weight = weight - learning_rate m

    Unlike Adafactor as it was published (and `keras.optimizers.Adafactor`), updates are
    neither clipped by their root mean square nor multiplied by that of the weight, and
    there is a first moment, which is not debiased. Beside the weights there are 2 bytes
    for each of these, where Adam has 8.

    Rows and columns are the two longest axes of a weight, the last of those equally
    long; along its other axes, such as the heads of attention, each matrix is by
    itself. So is each expert of weights (E, I, O) whose path matches `per_expert`,
    however many experts there are: their biases (E, O) are not factored. A weight whose
    second longest axis is shorter than `min_dim_size_to_factor` has second moments for
    each element.

    Args:
        learning_rate: a number or a schedule.
        min_dim_size_to_factor: the shortest axis that is factored.
        beta_2_exponent: 0.8 of the formula.
        beta_2_cap: 0.999 of the formula.
        epsilon: added to the squares.
        momentum: 0.9 of the formula; 0 for no first moment.
        momentum_dtype: dtype of the first moment between updates.
        per_expert: regular expression for the whole paths of weights whose first axis
            is never factored.
        weight_decay: share of a weight that an update takes off, decoupled from the
            gradient; see `ParameterGroups` for its factor.
        **kwargs: `groups` and `peak_learning_rate` of `ParameterGroups`, and what all
            optimizers of Keras take.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Scaling Vision Transformers*, section 3.4, and its released code, big_vision's
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
        learning_rate: Any = 1e-3,
        min_dim_size_to_factor: int = 32,
        beta_2_exponent: float = 0.8,
        beta_2_cap: float = 0.999,
        epsilon: float = 1e-30,
        momentum: float = 0.9,
        momentum_dtype: str = "bfloat16",
        per_expert: str = "(.*/)?experts/.*",
        weight_decay: float | None = None,
        name: str = "vitg_adafactor",
        **kwargs: Any,
    ):
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **kwargs)
        self.min_dim_size_to_factor = check_integer(
            "min_dim_size_to_factor", min_dim_size_to_factor
        )
        self.beta_2_exponent = check_positive("beta_2_exponent", beta_2_exponent)
        self.epsilon = check_positive("epsilon", epsilon)
        for argument, value in (("beta_2_cap", beta_2_cap), ("momentum", momentum)):
            if check_not_negative(argument, value) >= 1:
                raise ValueError(
                    f"Expected {argument} to be below 1; received: {argument}={value!r}"
                )
        self.beta_2_cap, self.momentum = beta_2_cap, momentum
        self.momentum_dtype = keras.backend.standardize_dtype(momentum_dtype)
        self.per_expert = per_expert

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
                        # On devices as the weight is.
                        layout=variable_layout(variable),
                        name=f"{name}_first_moment",
                    )
                )

    def second_moments(self, variable: keras.Variable) -> list[keras.Variable]:
        """The second moments of a weight: those of rows and of columns, or all.

        Args:
            variable: one that the optimizer was built with.
        """
        return list(self._second_moments[self._get_variable_index(variable)])

    def _axes_of(self, variable) -> tuple[int, int] | None:
        """The second longest and the longest axis, if they are factored."""
        first = 1 if re.fullmatch(self.per_expert, variable.path) else 0
        sizes = tuple(variable.shape)[first:]
        if len(sizes) < 2:
            return None
        # The last of equal axes, as in optax.
        rows, columns = np.argsort(sizes, kind="stable")[-2:]
        if sizes[rows] < self.min_dim_size_to_factor:
            return None
        return first + int(rows), first + int(columns)

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        gradient = ops.cast(gradient, "float32")
        step = ops.cast(self.iterations + 1, "float32")
        beta = ops.minimum(1 - step**-self.beta_2_exponent, self.beta_2_cap)
        squares = ops.square(gradient) + self.epsilon

        def moved(state, new):
            value = beta * state + (1 - beta) * new
            self.assign(state, value)
            return value

        states, axes = self._second_moments[index], self._factored_axes[index]
        if axes is None:
            update = gradient * ops.rsqrt(moved(states[0], squares))
        else:
            rows, columns = axes
            by_row = moved(states[0], ops.mean(squares, columns, keepdims=True))
            by_column = moved(states[1], ops.mean(squares, rows, keepdims=True))
            by_row = by_row / ops.mean(by_row, rows, keepdims=True)
            update = gradient * ops.rsqrt(by_row) * ops.rsqrt(by_column)
        if self.momentum:
            state = self._first_moments[index]
            kept = self.momentum * ops.cast(state, "float32")
            # The update itself is not rounded. (optax rounds 0.9 m, too.)
            update = kept + (1 - self.momentum) * update
            self.assign(state, ops.cast(update, state.dtype))
        change = ops.cast(learning_rate, "float32") * update
        self.assign_sub(variable, ops.cast(change, variable.dtype))

    def get_config(self):
        config = super().get_config()
        config.update(
            min_dim_size_to_factor=self.min_dim_size_to_factor,
            beta_2_exponent=self.beta_2_exponent,
            beta_2_cap=self.beta_2_cap,
            epsilon=self.epsilon,
            momentum=self.momentum,
            momentum_dtype=self.momentum_dtype,
            per_expert=self.per_expert,
        )
        return config


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return tuple(1 if i == axis else size for i, size in enumerate(shape))
