"""Parts of Keras that are not public: those that saving and PyTorch's modules need.

Checked with Keras 3.15.1 and KerasHub 0.32.
"""

import collections
import re
from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask
from keras.src.saving.saving_lib import (
    H5IOStore,
    ShardedH5IOStore,
)
from keras.src.saving.saving_lib import (
    _save_state as save_state,
)
from keras.src.utils.io_utils import ask_to_proceed_with_overwrite

__all__ = [
    "H5IOStore",
    "ShardedH5IOStore",
    "TorchParameters",
    "ask_to_proceed_with_overwrite",
    "get_keras_mask",
    "save_state",
]

_GENERATOR = re.compile(r"(.*/)?seed_generator(?:_\d+)?/(\w+)")


class _NoParameters:
    """Backends whose models are no modules need nothing."""


class _TorchParameters:
    """Makes `parameters()` and `state_dict()` of a KerasHub model complete.

    On PyTorch a Keras model is a module whose parameters are in the dictionary
    `_torch_params`. KerasHub sets attributes past `torch.nn.Module.__setattr__` until
    its constructors have ended, so that the module does not know the dictionary
    before the first `fit`. Keras, in turn, does not renew a model's dictionary
    where its layers get weights afterwards, as low-rank pairs.

    The dictionary is made when somebody asks for it, and made anew where the model's
    variables are others than those in it. Names are the variables' paths. Keras
    numbers the states of random generators over the whole process: here they are
    numbered within the model, so that models with one config have the same names.
    """

    def _track_variables(self):
        super()._track_variables()
        variables, numbers = list(self.variables), collections.Counter()
        parameters = {}
        for variable in variables:
            name = variable.path
            if found := _GENERATOR.fullmatch(name):
                layer, state = found.groups("")
                name = f"{layer}seed_generator_{numbers[layer]}/{state}"
                numbers[layer] += 1
            parameters[name] = variable.value
        self._torch_params = type(self._torch_params)(parameters)
        object.__setattr__(self, "_tracked_variables", variables)

    def _track_all(self):
        tracked = self.__dict__.get("_tracked_variables", ())
        variables = self.variables
        is_complete = "_torch_params" in self._modules and len(tracked) == len(
            variables
        )
        if not is_complete or any(a is not b for a, b in zip(tracked, variables)):
            self._track_variables()

    def named_parameters(self, *args: Any, **kwargs: Any):
        """See `torch.nn.Module.named_parameters`."""
        self._track_all()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:
        """See `torch.nn.Module.state_dict`."""
        self._track_all()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any):
        """See `torch.nn.Module.load_state_dict`."""
        self._track_all()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any):
        # All of `to`, `cuda`, `double` and the like.
        self._track_all()
        return super()._apply(*args, **kwargs)


TorchParameters = (
    _TorchParameters if keras.backend.backend() == "torch" else _NoParameters
)
