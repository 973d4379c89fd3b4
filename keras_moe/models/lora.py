"""Low-rank adaptation of backbones: attention by default, experts by name."""

import os

import h5py
import keras

from keras_moe.checks import check_integer
from keras_moe.models.weights_file import checked_weights, new_hdf5, plain_values

DEFAULT = ("query", "value")


class LoraMixin:
    """Freezes all of a backbone but low-rank pairs, and saves these alone."""

    def default_lora_layer_names(self) -> list[str]:
        """The names of the layers that `enable_lora` changes by default."""
        return list(DEFAULT)

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone, and adds trainable low-rank pairs to some layers.

        Call it before `compile`. What is saved with `save_to_preset` or `save` has the
        pairs in its weights; `save_lora_weights` saves the pairs alone. KerasHub's own
        method leaves the biases of the layers trainable, which the latter would lose:
        here they are frozen.

        Args:
            rank: of the pairs.
            target_layer_names: the last parts of the layers' paths, such as `"query"`
                and `"value"` (None takes these two), `"key"`, `"attention_output"`,
                `"hidden"` and `"output"` (of dense MLPs), or `"experts"`, where each
                expert has pairs of its own.

        Raises:
            ValueError: if no layer of a name can have such pairs.
        """
        names = target_layer_names or self.default_lora_layer_names()
        able = {
            layer.name
            for layer in self._flatten_layers(include_self=False)
            if hasattr(layer, "enable_lora") and layer.weights
        }
        if unknown := sorted(set(names) - able):
            raise ValueError(
                f"Expected target_layer_names among {sorted(able)}; "
                f"received: target_layer_names={names}, without {unknown}"
            )
        super().enable_lora(rank, target_layer_names=list(names))
        self._lora_names = list(names)
        for layer in self._flatten_layers(include_self=False):
            if not list(layer._flatten_layers(include_self=False)):
                for weight in layer.weights:
                    weight.trainable = "lora" in weight.name

    def save_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Saves the low-rank pairs alone.

        Args:
            filepath: ends with `.lora.h5`.

        Raises:
            ValueError: if there are no pairs, or the name ends otherwise.
            OSError: with the path and the bytes, if the file cannot be written. An
                older one stays as it was.
        """
        pairs = self._lora_pairs()
        if not pairs:
            raise ValueError(
                "Expected a backbone on which enable_lora was called; received: "
                "no low-rank pairs"
            )
        _check_name(filepath)
        with new_hdf5(filepath) as file:
            file.attrs["rank"] = self._lora_rank
            file.attrs["target_layer_names"] = self._lora_names
            for path, weight in pairs.items():
                file[path] = keras.ops.convert_to_numpy(weight)

    def load_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Loads low-rank pairs, after adding them where that was not done.

        Args:
            filepath: what `save_lora_weights` has written.

        Raises:
            ValueError: if the file is damaged, or its pairs do not fit the backbone's.
        """
        _check_name(filepath)
        with checked_weights(filepath), h5py.File(filepath, "r") as file:
            names, rank = _attributes(file, filepath)
            stored = plain_values(file)
        if not self._lora_pairs():
            self.enable_lora(rank, names)
        pairs = self._lora_pairs()
        expected = {path: tuple(weight.shape) for path, weight in pairs.items()}
        received = {path: value.shape for path, value in stored.items()}
        if expected != received:
            different = sorted(set(expected.items()) ^ set(received.items()))
            path = different[0][0]
            raise ValueError(
                f"Expected low-rank pairs that fit the backbone, {path} of shape "
                f"{expected.get(path)}; received: shape={received.get(path)}"
            )
        for path, weight in pairs.items():
            weight.assign(stored[path])

    def _lora_pairs(self):
        """The pairs' weights by their paths, without the backbone's own name."""
        return {
            weight.path.removeprefix(f"{self.name}/"): weight
            for weight in self.weights
            if "lora" in weight.name
        }


class TaskLoraMixin:
    """`enable_lora` for tasks: the head stays trainable as a whole."""

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone but for low-rank pairs; the head stays trainable.

        Call it before the first `fit`, or compile again.

        Args:
            rank: of the pairs.
            target_layer_names: see the backbone's `enable_lora`.
        """
        self.backbone.enable_lora(rank, target_layer_names)


def _attributes(file, filepath):
    """The names of the layers and the rank, with which the pairs were saved."""
    try:
        names = [str(name) for name in file.attrs["target_layer_names"]]
        return names, check_integer("rank", file.attrs["rank"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected low-rank pairs with target_layer_names and rank in {filepath}; "
            f"received: {str(dict(file.attrs))[:200]}"
        ) from error


def _check_name(filepath):
    if not str(filepath).endswith(".lora.h5"):
        raise ValueError(
            f"Expected a file name that ends with .lora.h5; "
            f"received: filepath={str(filepath)!r}"
        )
