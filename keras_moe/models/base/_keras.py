"""Keras's and KerasHub's classes that ours extend, as far as a checker knows them."""

from typing import TYPE_CHECKING, Any

import keras_hub

from keras_moe import _compat
from keras_moe._types import KerasModel

if TYPE_CHECKING:

    class Mixin(KerasModel):
        """A class that stands before a model of KerasHub among the bases."""

        def save_to_preset(self, preset_dir: str, **kwargs: Any) -> None: ...

    class TorchParameters(KerasModel):
        pass

    class Backbone(KerasModel):
        pass

    class Task(KerasModel):
        backbone: Any
        preprocessor: Any

    class HubClassifier(Task):
        pass

    class HubCausalLM(Task):
        sampler: Any
        generate_function: Any

        def make_generate_function(self) -> Any: ...
        def generate(self, inputs: Any, *args: Any, **kwargs: Any) -> Any: ...

else:
    Backbone = keras_hub.models.Backbone
    Task = keras_hub.models.Task
    HubCausalLM = keras_hub.models.CausalLM
    HubClassifier = keras_hub.models.ImageClassifier
    Mixin, TorchParameters = object, _compat.TorchParameters
