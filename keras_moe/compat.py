"""Everything private of Keras that this library needs."""

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
    "ask_to_proceed_with_overwrite",
    "save_state",
]
