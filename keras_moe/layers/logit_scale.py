"""Learned scale and bias of similarities. Axes: B batch, D embedding."""

from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_number, check_positive, unfit
from keras_moe._types import Structure, Tensor
from keras_moe.layers._layer import Layer
from keras_moe.losses._pairs import unit_vectors
from keras_moe.losses.contrastive import LogScaleBound, Temperature


@keras.saving.register_keras_serializable("keras_moe")
class LogitScale(Layer):
    """Normalises embeddings and owns the learned scale and bias of their logits.

    Logits are `scale * images @ texts.T + bias` (see `logits`). The scale is learned as
    its logarithm; everything is float32 under every dtype policy.

    Args:
        scale: initial scale, the inverse temperature.
        largest_scale: upper bound of the scale; None for none.
        bias: initial bias; None for no bias.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        embeddings: float (B, D), or a list or dict of such tensors.

    Output shape: Same as the input, float32.

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*,
    section 2.5; *Sigmoid Loss for Language Image Pre-Training*, section 3.2.

    Example:

    >>> import keras
    >>> from keras_moe.layers import LogitScale
    >>> layer = LogitScale(scale=5.0, bias=-1.0)
    >>> units = layer(np.array([[3.0, 4.0], [0.0, 2.0]], "float32"))
    >>> keras.ops.convert_to_numpy(layer.logits(units, units)).round(2).tolist()
    [[4.0, 3.0], [3.0, 4.0]]
    """

    def __init__(
        self,
        scale: float = 10.0,
        largest_scale: float | None = None,
        bias: float | None = None,
        **kwargs,
    ):
        # Float32 under every policy.
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.scale = check_positive("scale", scale)
        if largest_scale is not None:
            check_positive("largest_scale", largest_scale)
            if scale > largest_scale:
                expected = f"a scale of at most largest_scale={largest_scale}"
                raise unfit(expected, scale=scale)
        self.largest_scale = largest_scale
        self.bias_value = None if bias is None else check_number("bias", bias)
        self.bias = None

    def build(self, input_shape=None):
        temperature = Temperature(self.scale, self.largest_scale, self.bias_value)
        bound = self.largest_scale and LogScaleBound(self.largest_scale)
        self.log_scale = self._scalar("log_scale", temperature.log_scale, bound)
        if self.bias_value is not None:
            self.bias = self._scalar("bias", self.bias_value)

    def _scalar(self, name, value, constraint=None):
        return self.add_weight(
            name=name,
            shape=(),
            initializer=keras.initializers.Constant(value),
            constraint=constraint,
        )

    def call(self, embeddings: Structure) -> Any:
        return keras.tree.map_structure(unit_vectors, embeddings)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of `parameters`."""
        return ("logit_scale", "logit_bias")[: 1 + (self.bias_value is not None)]

    def parameters(self) -> dict[str, Any]:
        """Scalars of a contrastive loss: `logit_scale` and maybe `logit_bias`."""
        if not self.built:
            self.build()
            self.built = True
        scalars = {"logit_scale": ops.exp(ops.convert_to_tensor(self.log_scale))}
        if self.bias is not None:
            scalars["logit_bias"] = ops.convert_to_tensor(self.bias)
        return scalars

    def logits(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """Scaled similarities of images and texts."""
        images, texts = (
            ops.cast(ops.convert_to_tensor(x), "float32")
            for x in (image_embeddings, text_embeddings)
        )
        scalars = self.parameters()
        logits = scalars["logit_scale"] * ops.matmul(images, ops.transpose(texts))
        return logits + scalars.get("logit_bias", 0.0)

    def compute_output_spec(self, embeddings):
        return keras.tree.map_structure(
            lambda x: keras.KerasTensor(x.shape, "float32"), embeddings
        )

    def weight_shapes(self, shape: tuple | None = None) -> dict[str, tuple]:
        names = ("log_scale",) if self.bias_value is None else ("log_scale", "bias")
        return dict.fromkeys(names, ())

    def get_config(self):
        return {**super().get_config(), "bias": self.bias_value}
