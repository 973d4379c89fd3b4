"""Base class of image-text backbones. Axes: B batch, N tokens, P embedding."""

from typing import Any

import keras

from keras_moe._checks import check_concrete, check_one_of, unfit
from keras_moe._compat import ONE_AT_A_TIME
from keras_moe._types import Tensor
from keras_moe.layers import LogitScale
from keras_moe.losses.contrastive import TEMPERATURES, Temperature
from keras_moe.models.backbones.base import MoEBackbone, ReadsTexts
from keras_moe.models.base import _input_checks
from keras_moe.models.base._exporting import Exportable, Mixin

# A modality's id is its index here.
MODALITIES = ("image", "text")
_TEXTS = ("token_ids", "padding_mask")


class PairEncoder(Exportable, keras.Model):
    """The model of one modality, created by `PairBackbone.encoder`."""

    def __init__(
        self,
        inputs: object,
        outputs: Any,
        max_length: int,
        max_patches: int | None,
        **kwargs,
    ):
        super().__init__(inputs, outputs, **kwargs)
        self.max_length, self.max_patches = max_length, max_patches


class TakesPairs(Mixin):
    """Mixin of models of image-text pairs, which checks the names of their inputs."""

    def call(
        self, inputs: object, training: bool | None = None, mask: Tensor | None = None
    ) -> Any:
        # The first place that sees batches of datasets.
        if isinstance(inputs, dict):
            _input_checks.check_input_names(inputs, tuple(self.input))
        return super().call(inputs, training=training, mask=mask)


class PairBackbone(TakesPairs, ReadsTexts, MoEBackbone):
    """Base class of `CLIPBackbone` and `LIMoEBackbone`.

    Names in `routing`, `features` and `get_layer` have the modality as a prefix, such
    as `"image/block_1"`; a shared block has both names.
    """

    example = "pair"
    image_shape: Any
    _encoders: dict[str, tuple[Any, list[int]]]
    pipeline_tag = "zero-shot-image-classification"

    def __init__(self, **kwargs):
        check_concrete(type(self), PairBackbone, "CLIPBackbone")
        super().__init__(**kwargs)
        # Bypass attribute tracking: the models share this backbone's layers.
        object.__setattr__(self, "_encoders", {})

    def _encoder(self, modality: str) -> tuple[Any, Any]:
        """Returns the symbolic inputs and outputs of `encoder`."""
        raise NotImplementedError

    def encoder(self, modality: str) -> PairEncoder:
        """Returns the model of one modality, sharing this backbone's weights."""
        check_one_of("modality", modality, MODALITIES)
        with ONE_AT_A_TIME:
            encoder, weights = self._encoders.get(modality, (None, []))
            # Quantisation and LoRA replace weights, which a compiled function does not
            # notice.
            if encoder is None or weights != _identities(encoder):
                inputs, name = self._encoder(modality), f"{modality}_encoder"
                limits = self.max_length, self.max_patches
                encoder = PairEncoder(*inputs, *limits, name=name)
                self._encoders[modality] = encoder, _identities(encoder)
            return encoder

    @property
    def logit_scale(self) -> LogitScale:
        """The layer with the learned scale and bias of the similarities."""
        return self.get_layer("logit_scale")

    def get_layer(self, name: str | None = None, index: int | None = None) -> Any:
        """Returns a layer by name or index, as `keras.Model.get_layer`."""
        modality, slash, inner = str(name).partition("/")
        if slash and modality in MODALITIES:
            return self._layer_of(modality, inner)
        return super().get_layer(name, index)

    def _layer_of(self, modality, name):
        return super().get_layer(name)

    def _check_inputs(self, inputs, labels=None):
        of_images = [name for name in self.input if name not in _TEXTS]
        if _input_checks.is_array(inputs) or (
            isinstance(inputs, dict) and not {*of_images} <= {*inputs}
        ):
            given = sorted(inputs) if isinstance(inputs, dict) else "an array"
            raise ValueError(
                f"Expected a dict of {', '.join((*of_images, *_TEXTS))}, unless to "
                "encoder('image') or encoder('text'), which take one modality alone; "
                f"received: {given}"
            )
        if isinstance(inputs, dict):
            _input_checks.check_input_names(inputs, tuple(self.input))
            self.check_modality("text", {k: inputs[k] for k in _TEXTS})
            numbers = {
                k: len(x)
                for k, x in inputs.items()
                if _input_checks.is_array(x) and x.ndim
            }
            if len(set(numbers.values())) > 1:
                raise unfit("as many images as texts", numbers)
        _input_checks.check_inputs(self, inputs)

    def check_modality(self, modality: str, inputs: object) -> None:
        """Checks the inputs of one modality where their values are known."""
        check_one_of("modality", modality, MODALITIES)
        if modality == "image":
            encoder: Any = self.encoder("image")
            if isinstance(inputs, dict):
                names = encoder.input if isinstance(encoder.input, dict) else ()
                _input_checks.check_input_names(inputs, tuple(names))
            _input_checks.check_inputs(encoder, inputs, self)
            return
        config = self._text_config
        _input_checks.check_texts(
            inputs,
            config.vocabulary_size,
            config.max_length,
            _TEXTS,
            getattr(config, "end_of_text_id", None),
        )


def temperature_config(temperature: Any) -> dict[str, Any]:
    """Returns the fields of a `keras_moe.losses.Temperature`, checked."""
    if isinstance(temperature, str):
        check_one_of("temperature", temperature, tuple(TEMPERATURES))
        temperature = TEMPERATURES[temperature]
    if isinstance(temperature, Temperature):
        temperature = temperature._asdict()
    if not isinstance(temperature, dict):
        raise ValueError(
            "Expected temperature to be a Temperature, a dict of its fields or one of "
            f"{list(TEMPERATURES)}; received: temperature={temperature!r}"
        )
    fields = Temperature(**{"scale": 10.0, **temperature})._asdict()
    layer = LogitScale(**fields)
    return {name: layer.get_config()[name] for name in fields}


def _identities(model):
    """Returns the ids of a model's weights."""
    return [id(weight) for weight in model.weights]
