"""Muon for mixtures of experts: one orthogonal step per expert, all at once."""

import math
import re
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_dropout, check_one_of, check_positive

# Kernels of one matrix per expert, and of attention's heads.
_EXPERTS = re.compile(r"(.*/)?experts/[a-z]+_kernel")
_FROM_HEADS = re.compile(r"(.*/)?attention_output/kernel")
_TO_HEADS = re.compile(r"(.*/)?(query|key|value)/kernel")
# Kernels of routers, and of last layers: of classes, or of what pairs are compared in.
_KERNEL = re.compile(r"(.*/)?kernel")
_NOT_HIDDEN = re.compile(
    r"(.*/)?(router|predictions|head|zero_computation_experts"
    r"|[a-z_]*embedding[a-z_]*|([a-z]+_)?projection|teacher_[^/]+/output)/.*"
)


@keras.saving.register_keras_serializable("keras_moe")
class Muon(keras.optimizers.Muon):
    """Muon, which moves the matrices of hidden layers by orthogonal steps.

    With the gradient g of a matrix of R rows and C columns:

        m = momentum m + g
        u = g + momentum m, or m without Nesterov's form
        weight = weight - learning_rate rms_rate sqrt(max(R, C)) orthogonal(u)

    `orthogonal` sets the singular values of u to about 1 by five steps of Newton and
    Schulz: X = u / |u|, then X = a X + (b A + c A A) X with A = X X^T.

    Matrices are the kernels of each expert, in one batch that stays where a layout
    shards experts; queries, keys and values as (hidden_dim, heads * key_dim), and
    attention's output as (heads * key_dim, hidden_dim); and other kernels of rank 2,
    such as those of dense MLPs. (`keras.optimizers.Muon` has only the last.)

    Everything else is moved by Adam, with the same decoupled weight decay: routers and
    gates; embeddings; the last layer (`predictions`, a muMoE `head`, projections of
    image-text models); norms, biases, scales, muMoE's factors and LoRA's adapters.

    A step has the same size however small the gradient. An expert that no token has
    ever reached stays where it is.

    Args:
        learning_rate: a number or a schedule, for both kinds of weights. With
            `rms_rate=0.2` one that suits AdamW does.
        weight_decay: decoupled weight decay of both kinds of weights, or None.
        momentum: momentum of matrices, in [0, 1).
        rms_rate: root mean square of a matrix's step for a learning rate of 1; None
            for `learning_rate orthogonal(u)`.
        ns_dtype: dtype of these steps, `"float32"` or, as the release, `"bfloat16"`.
        exclude_layers: regular expressions; weights whose path contains one are moved
            by Adam, too. Name the last layer of your own model.
        **kwargs: further arguments of `keras.optimizers.Muon`, such as `nesterov` and
            `ns_steps`.

    References: *Muon: An optimizer for hidden layers in neural networks*,
        https://kellerjordan.github.io/posts/muon; *Muon is Scalable for LLM Training*,
        section 2.2, for `rms_rate`.

    Example:

    >>> from keras_moe import models
    >>> from keras_moe.training import Muon
    >>> model = models.from_preset("vmoe_digits")
    >>> by_path = {weight.path: weight for weight in model.weights}
    >>> optimizer = Muon(1e-3, weight_decay=0.1)
    >>> optimizer.matrix_shape(by_path["block_1/moe/experts/hidden_kernel"])
    (8, 64, 128)
    >>> optimizer.matrix_shape(by_path["block_1/attention/query/kernel"])
    (64, 64)
    >>> optimizer.matrix_shape(by_path["block_1/moe/router/kernel"]) is None
    True
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1e-3,
        weight_decay: float | None = 0.004,
        *,
        momentum: float = 0.95,
        rms_rate: float | None = 0.2,
        ns_dtype: str = "float32",
        exclude_layers: Sequence[str] = (),
        name: str = "muon",
        **kwargs: Any,
    ):
        for pattern in exclude_layers:
            try:
                re.compile(pattern)
            except (TypeError, re.error) as error:
                raise ValueError(
                    "Expected exclude_layers to be regular expressions; "
                    f"received: exclude_layers={exclude_layers!r} ({error})"
                ) from error
        # Keras's annotations are narrower than what it takes.
        rate: Any = learning_rate
        decay: Any = weight_decay
        super().__init__(
            rate,
            weight_decay=decay,
            momentum=check_dropout("momentum", momentum),
            rms_rate=check_positive("rms_rate", rms_rate, optional=True),
            exclude_layers=list(exclude_layers),
            # Refused if given: both kinds of weights decay alike, and embeddings are
            # never matrices.
            adam_weight_decay=decay,
            exclude_embeddings=True,
            name=name,
            **kwargs,
        )
        self.ns_dtype = check_one_of("ns_dtype", ns_dtype, ("float32", "bfloat16"))

    def matrix_shape(self, variable: keras.Variable) -> tuple[int, ...] | None:
        """Returns the shape of a weight as matrices, or None if Adam moves it."""
        path, shape = variable.path, tuple(variable.shape)
        if any(re.search(pattern, path) for pattern in self.exclude_layers):
            return None
        if len(shape) == 3:
            if _EXPERTS.fullmatch(path):
                return shape
            if _FROM_HEADS.fullmatch(path):
                return shape[0] * shape[1], shape[2]
            if _TO_HEADS.fullmatch(path):
                return shape[0], shape[1] * shape[2]
        is_hidden = _KERNEL.fullmatch(path) and not _NOT_HIDDEN.fullmatch(path)
        return shape if len(shape) == 2 and is_hidden else None

    def build(self, variables):
        if self.built:
            return
        self._matrix_shapes = [self.matrix_shape(variable) for variable in variables]
        super().build(variables)

    def _should_use_adamw(self, variable):
        return self.matrix_shape(variable) is None

    # Keras's Muon has another for each kind of weight.
    _apply_weight_decay = keras.optimizers.Optimizer._apply_weight_decay

    def _muon_update_step(self, gradient, variable, lr, m):
        momentum = self.momentum * m + gradient
        self.assign(m, momentum)
        update = gradient + self.momentum * momentum if self.nesterov else momentum
        # On TensorFlow, this variable has no path.
        shape: Any = self._matrix_shapes[self._get_variable_index(variable)]
        matrices = ops.cast(ops.reshape(update, shape), self.ns_dtype)
        update = self.zeropower_via_newtonschulz5(matrices, self.ns_steps)
        update = ops.cast(ops.reshape(update, variable.shape), variable.dtype)
        scale = 1.0
        if self.rms_rate is not None:
            # An orthogonal matrix has a root mean square of max(R, C)^-1/2.
            scale = self.rms_rate * math.sqrt(max(shape[-2:]))
        self.assign_sub(variable, ops.cast(lr * scale, variable.dtype) * update)

    def get_config(self):
        config = {**super().get_config(), "ns_dtype": self.ns_dtype}
        for name in ("adam_weight_decay", "exclude_embeddings"):
            del config[name]
        return config
