"""Looks at layers from outside: models that call other layers in places of their own.

The layers of a model are shared with whatever else runs it, maybe in another thread, so
none of them changes. A view has a layer's weights and another `call`, and a walk over
the model's graph calls the view.

Axes: B batch, N tokens, G groups, S group_size, R rows, E
experts, L levels of muMoE experts.
"""

from typing import Any

import keras
from keras import ops
from keras.layers import Layer

from keras_moe._checks import unfit
from keras_moe._compat import Functional, view
from keras_moe._types import Tensor
from keras_moe.ops.grouped import row_experts


class Hooked(keras.Model):
    """A model with some of its layers replaced: a dict from `id`, or one of inputs."""

    def __init__(self, model, layers=None, training=False):
        # The global dtype policy may differ from the model's.
        super().__init__(name="hooked", dtype="float32")
        self.model, self.in_training, self.built = model, training, True
        # In a function, since Keras would track the views.
        self._hooks_of: Any = lambda inputs: layers or {}
        if callable(layers):
            self._hooks_of = layers

    def call(self, inputs):
        hooks = self._hooks_of(inputs)
        if isinstance(self.model.input, dict):
            # Batches of language models have targets, too.
            inputs = {name: inputs[name] for name in self.model.input}
        elif isinstance(inputs, dict):
            inputs = inputs["images"]
        return with_layers(self.model, hooks)(inputs, training=self.in_training)


def with_layers(layer: Layer, layers: dict[int, Layer]) -> Layer:
    """A layer or functional model that calls `layers[id(x)]` for an inner layer `x`."""
    if id(layer) in layers:
        return layers[id(layer)]
    if isinstance(layer, Functional):

        def run(inputs, operation_fn=lambda operation: operation, **kwargs):
            def replaced(operation):
                return operation_fn(with_layers(operation, layers))

            return layer._run_through_graph(inputs, operation_fn=replaced, **kwargs)

        return view(layer, _run_through_graph=run)
    changed = {}
    # PyTorch's layers have theirs in `_modules`.
    for name, part in (vars(layer) | vars(layer).get("_modules", {})).items():
        if isinstance(part, Layer):
            new = with_layers(part, layers)
            if new is not part:
                changed[name] = new
    return view(layer, **changed) if changed else layer


def measuring(moe: Layer) -> Layer:
    """Returns the router of an MoE layer, with contributions in place of affinity."""
    router, experts = moe.router, moe.experts

    def call(tokens, **kwargs):
        # A contribution is an expert's combine weight times the norm of its output, the
        # pruning criterion of *REAP the Experts* (arXiv 2510.13999).
        plan, routing = router.call(tokens, **kwargs)
        slots = plan.dispatch(ops.cast(moe.input_scale * tokens, moe.compute_dtype))
        outputs = experts(slots, plan.group_sizes, training=False)
        norms = ops.norm(ops.cast(outputs, "float32"), axis=-1, keepdims=True)
        # One column per expert, so that combining does not mix their norms.
        columns = ops.one_hot(router.expert_columns, router.num_experts)
        norms = norms * _by_expert(columns, norms, plan.group_sizes)
        return plan, routing._replace(affinity=plan.combine(norms))

    return view(router, call=call)


def _by_expert(values, outputs, group_sizes):
    """Values (E, X) of the experts of slots (G, E, C, D) or rows (R, D)."""
    if group_sizes is None:
        return ops.expand_dims(values, (0, 2))
    owner = row_experts(group_sizes, ops.shape(outputs)[0])
    return ops.take(values, owner, axis=0)


def excluding(router: Layer, experts: tuple[int, ...]) -> Layer:
    """A token choice router that does not choose certain experts either."""
    if not hasattr(router, "excluded_experts"):
        raise unfit("token choice routers for removal='choice'", type(router).__name__)
    excluded = router.check_excluded((*router.excluded_experts, *experts))
    return view(router, excluded_experts=excluded)


def zeroed(experts: Layer, kept: Tensor) -> Layer:
    """Experts of which some output zeros, where `kept` (E,) is 0."""
    kept = ops.expand_dims(ops.cast(kept, "bool"), -1)

    def call(inputs, group_sizes=None, training=None):
        outputs = experts.call(inputs, group_sizes, training)
        return ops.where(_by_expert(kept, outputs, group_sizes), outputs, 0)

    return view(experts, call=call)


def without_one(experts: Layer, removed: Tensor) -> Layer:
    """A muMoE's experts without one (B, L) of each example (*muMoE*, 4.1.2)."""

    def call(inputs, coefficients, projected=None, sources=None):
        between = (1,) * (len(inputs.shape) - 2)
        index = ops.reshape(removed, (-1, *between, removed.shape[-1]))
        chosen = [
            a * ops.one_hot(index[..., level], count, dtype=a.dtype)
            for level, (a, count) in enumerate(zip(coefficients, experts.num_experts))
        ]
        # All experts but one, summed by the first level at which they differ from it.
        # Unlike a difference of outputs, this is exactly zero if no other expert takes
        # part.
        outputs = 0.0
        for level, (a, own) in enumerate(zip(coefficients, chosen)):
            others = [*chosen[:level], a - own, *coefficients[level + 1 :]]
            outputs = outputs + experts.call(inputs, others)
        return outputs

    return view(experts, call=call)
