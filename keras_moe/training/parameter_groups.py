"""Learning rates and weight decay by groups of weights, for any optimizer of Keras."""

import difflib
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moe.checks import (
    check_argument_names,
    check_not_negative,
    check_positive,
)
from keras_moe.compat import count_batches, moving_averages, rate_or_schedule

# Kinds of weights that a group may match by name. The weights of muMoE layers are
# factors: the gate alone has a kernel.
NAMED_GROUPS = {
    "experts": r"(.*/)?((zero_computation_)?experts|moe/(hidden|output))/.*",
    "router": r"(.*/)?(router|moe/gate)/.*",
    "head": r"(.*/)?(predictions|head)/.*",
    "kernels": r"(.*/)?([a-z]+_)?kernel(_\d+)?",
    "rest": r".*",
}


class Factors(NamedTuple):
    """Factors of a weight's learning rate and weight decay."""

    learning_rate: float = 1.0
    weight_decay: float = 1.0


def check_groups(groups: Any) -> list[dict]:
    """Groups as a list of dicts, if they are well formed."""
    if isinstance(groups, (str, dict)) or not isinstance(groups, Iterable):
        raise ValueError(f"Expected a list of groups; received: groups={groups!r}")
    checked = []
    for group in groups:
        if not hasattr(group, "items") or not isinstance(group.get("match"), str):
            raise ValueError(
                "Expected groups to be dicts with a string 'match'; "
                f"received: {group!r}"
            )
        check_argument_names(group, ["match", *Factors._fields], "a group")
        for name in Factors._fields:
            check_not_negative(name, group.get(name, 1.0))
        try:
            re.compile(group["match"])
        except re.error as error:
            raise ValueError(
                "Expected a regular expression or one of "
                f"{', '.join(NAMED_GROUPS)}; received: match={group['match']!r} "
                f"({error})"
            ) from error
        checked.append(dict(group))
    return checked


def group_factors(groups: Sequence[dict], paths: Sequence[str]) -> list[Factors]:
    """The factors of each weight."""
    factors: list[Factors | None] = [None] * len(paths)
    for group in groups:
        match = group["match"]
        pattern = re.compile(NAMED_GROUPS.get(match, match))
        matched = [i for i, path in enumerate(paths) if pattern.fullmatch(path)]
        new = [i for i in matched if factors[i] is None]
        if not new:
            if matched:
                reason = f"its {len(matched)} weights are in groups before it"
            else:
                names = [*NAMED_GROUPS, *paths]
                close = difflib.get_close_matches(match, names, n=3, cutoff=0.3)
                reason = f"nearest: {', '.join(close or paths[:3])}"
            raise ValueError(
                "Expected every group to have a weight, whose whole path it matches; "
                f"received: match={match!r} ({reason})"
            )
        for index in new:
            factors[index] = Factors(*(group.get(x, 1.0) for x in Factors._fields))
    return [x or Factors() for x in factors]


class ParameterGroups:
    """Comes before an optimizer of Keras among the bases of a class."""

    def __init__(
        self,
        *args: Any,
        groups: Sequence[dict] = (),
        peak_learning_rate: float | None = None,
        **kwargs: Any,
    ):
        rate = args[0] if args else kwargs.get("learning_rate")
        if isinstance(rate, numbers.Real):
            check_not_negative("learning_rate", rate)
        super().__init__(*args, **kwargs)
        self.groups = check_groups(groups)
        if peak_learning_rate is not None:
            check_positive("peak_learning_rate", peak_learning_rate)
        self.peak_learning_rate = peak_learning_rate
        self._rate_scale = 1.0

    def build(self, variables):
        if self.built:
            return
        paths = [getattr(variable, "path", variable.name) for variable in variables]
        self._factors = group_factors(self.groups, paths)
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
        for factor, members in self._by_factor(variables, self._decay_factor):
            # The optimizer decays by the learning rate, times this.
            self._rate_scale = factor
            try:
                super()._apply_weight_decay(members)
            finally:
                self._rate_scale = 1.0

    def _decay_factor(self, factors: Factors) -> float:
        if self.peak_learning_rate is None or factors.learning_rate == 0:
            return factors.weight_decay * factors.learning_rate
        return factors.weight_decay / self.peak_learning_rate

    def _by_factor(self, variables: Sequence, factor_of: Callable) -> list[tuple]:
        """The factors but 0 that variables have, each with these variables."""
        members = {}
        for variable in variables:
            factor = factor_of(self._factors[self._get_variable_index(variable)])
            members.setdefault(factor, []).append(variable)
        return [(factor, chosen) for factor, chosen in members.items() if factor]

    def _get_current_learning_rate(self):
        rate = rate_or_schedule(self)
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
        # Keras would average anew after batches that change no weight.
        done = ops.cast(count_batches(self), "int32") + 1
        kept = ops.where(done % batches == 0, self.ema_momentum, 1.0)
        kept = ops.where(done <= batches, 0.0, kept)
        for variable, average in zip(
            trainable_variables, moving_averages(self), strict=True
        ):
            share = ops.cast(kept, variable.dtype)
            average.assign(share * average + (1 - share) * variable)

    def get_config(self):
        config = super().get_config()
        config.update(
            groups=[dict(group) for group in self.groups],
            peak_learning_rate=self.peak_learning_rate,
        )
        return config
