"""Tensors of other libraries, made of a model's weights by the rules of conversions."""

import numpy as np

from keras_moe.models.conversion.weight_rules import (
    Filled,
    Matrix,
    PatchBias,
    PatchKernel,
    Positions,
    Scalar,
    Squeezed,
    Vector,
)


def tensors_of(rules: dict, values: dict[str, np.ndarray], library: str) -> dict:
    """The tensors from which the rules would make the weights."""
    parts = {}
    if missing := sorted(set(rules) - set(values)):
        raise ValueError(
            f"Expected a model with all weights that {library} has; received: none at "
            f"{missing[0]!r}"
        )
    for path, value in values.items():
        if path not in rules:
            raise ValueError(
                f"Expected a model of the weights that {library} has; received: "
                f"{path!r} beside them"
            )
        rule = rules[path]
        if isinstance(rule, Filled):
            if not np.array_equal(value, rule.make(None, value.shape)):
                raise ValueError(
                    f"Expected {path!r} to be {rule.value}, since {library} has no "
                    "tensor for it; received other values"
                )
            continue
        name = rule.bias if isinstance(rule, PatchBias) else rule.name
        part = getattr(rule, "part", 0)
        parts.setdefault(name, {})[part] = _tensor(rule, value)
    return {
        name: np.ascontiguousarray(
            np.concatenate([pieces[i] for i in sorted(pieces)])
            if len(pieces) > 1
            else pieces[0]
        )
        for name, pieces in parts.items()
    }


def _tensor(rule, value):
    """The tensor, or its part, that a rule makes a weight of."""
    if isinstance(rule, Matrix):
        inputs = int(np.prod(value.shape[: rule.inputs], dtype="int64"))
        return value.reshape(inputs, -1).T
    if isinstance(rule, Vector):
        return value.reshape(-1)
    if isinstance(rule, PatchBias):
        return value
    if isinstance(rule, PatchKernel):
        return value.transpose(3, 2, 0, 1) if rule.torch else value
    if isinstance(rule, (Positions, Squeezed)):
        return value.reshape(value.shape[rule.axes :])
    if isinstance(rule, Scalar):
        return value.reshape(rule.shape)
    return value
