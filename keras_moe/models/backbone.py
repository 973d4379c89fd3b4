"""The base of all backbones: a config, its tower and a functional model.

Axes: B batch, N tokens, D hidden.
"""

import copy
import os
from typing import Any

import keras
import keras_hub

from keras_moe.checks import check_image_shape
from keras_moe.compat import TorchParameters
from keras_moe.layers import MoEConfig, MuMoEConfig, activations, moe_config
from keras_moe.models import block_kinds, input_checks, lora, overrides, registry
from keras_moe.models.blueprint import build
from keras_moe.models.class_property import ClassProperty
from keras_moe.models.copying import config_with_router_options, copied
from keras_moe.models.description import Part
from keras_moe.models.exporting import export_signature
from keras_moe.models.features import image_features
from keras_moe.models.preset_folder import staged
from keras_moe.models.quantization import saved_policy, settle_policies
from keras_moe.models.soft_slots import config_for_slots
from keras_moe.models.state_recovery import state_kept
from keras_moe.models.tower import Tower
from keras_moe.models.weights_file import checked_weights, save_weights
from keras_moe.ops.expert_kinds import ExpertKinds


class MoEBackbone(TorchParameters, keras_hub.models.Backbone):
    """A config, the tower that follows from it, and a functional model.

    This is the base of `ViTBackbone` and `MixerBackbone`, and of one's own backbones: a
    subclass has a constructor with its arguments by name, which hands them to this
    one, and `tower`, which makes the layers of such arguments.

    `backbone.routing` holds the symbolic routing record of each MoE block, and
    `backbone.features` the symbolic features at every depth.

    Args:
        config: the subclass's arguments by name, with `image_shape`, `hidden_dim`,
            `num_layers`, `activation` and `moe`.
        dtype: dtype policy.
        **kwargs: arguments of `keras_hub.models.Backbone`.

    Input shape:
        (B, height, width, channels).

    Output shape:
        (B, N, D).

    Raises:
        ValueError: if an argument is unknown or out of range.

    Example:

    >>> from keras_moe.models import MoEBackbone, ViTBackbone
    >>> issubclass(ViTBackbone, MoEBackbone)
    True
    """

    # The kind of input, for descriptions.
    example = "image"

    @classmethod
    def tower(cls, config: dict, dtype: Any = None) -> Tower:
        """The layers of a backbone, not built: nothing is allocated.

        Args:
            config: all arguments of the constructor, but `dtype`.
            dtype: dtype policy.
        """
        raise NotImplementedError

    def __init__(self, config: dict, dtype: Any = None, **kwargs):
        cls = type(self)
        overrides.check_constructor_arguments(cls, kwargs)
        # Plain values of the backbone's own: the caller's may change, or not be JSON.
        moe = moe_config(config["moe"])
        moe = moe and moe.for_layers(config["num_layers"])
        config = {
            **copy.deepcopy({k: v for k, v in config.items() if k != "moe"}),
            **cls._checked_sizes(config),
            "activation": activations.plain(config["activation"]),
            "moe": moe and moe.to_dict(),
        }

        # === Layers and functional model ===
        inputs, outputs, encoded = cls._functional(config, dtype)
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        settle_policies(self)
        # Plain attributes: Keras would wrap the dicts of symbolic records.
        object.__setattr__(self, "_routing", encoded.routing)
        object.__setattr__(self, "_block_tokens", encoded.block_tokens)

        # === Config ===
        object.__setattr__(self, "_config", config)

    @classmethod
    def _checked_sizes(cls, config):
        """The sizes of the inputs, checked and as plain values."""
        return {"image_shape": check_image_shape(config["image_shape"])}

    @classmethod
    def _functional(cls, config, dtype):
        """The symbolic inputs, outputs and `TowerOutputs` of a config."""
        images = keras.Input(shape=config["image_shape"], name="images")
        encoded = cls.tower(config, dtype)(images)
        return images, encoded.tokens, encoded

    @property
    def moe(self) -> MoEConfig | MuMoEConfig | None:
        """Which blocks are mixtures of experts, and of what; None for a dense model."""
        return moe_config(self._config["moe"])

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by the block's name.

        A token mixer with experts has a record of its own, with channels (B, D, E),
        such as "block_0/token_mixer".
        """
        return dict(self._routing)

    @property
    def features(self) -> dict:
        """Symbolic features by name, for `keras.Model(backbone.input, ...)`.

        `"tokens"` (B, N, D) is the output, `"pooled"` (B, D) its class token or the
        average, `"grid"` (B, rows, columns, D) its patches where they lie in the image,
        and `"block_0"`, ... (B, N, D) the tokens behind each block.
        """
        features = image_features(self.output, self.grid, self.class_token)
        return {**features, **self._block_tokens}

    @property
    def expert_kinds(self) -> ExpertKinds | None:
        """How many experts of each kind an MoE block has; None for a dense model."""
        for name in self._routing:
            return self.get_layer(name).feed_forward.router.kinds
        return None

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels), for backbones of images."""
        if "image_shape" not in self._config:
            raise AttributeError(f"{type(self).__name__} has no image_shape")
        return self._config["image_shape"]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across."""
        return self.get_layer("patch_embedding").grid(self.image_shape)

    @property
    def hidden_dim(self) -> int:
        """D."""
        return self._config["hidden_dim"]

    @property
    def class_token(self) -> bool:
        """Whether the first token is a class token."""
        return self._config.get("class_token", False)

    @classmethod
    def from_config(cls, config: dict) -> "MoEBackbone":
        """A backbone of `get_config`'s arguments, also of an earlier version's.

        Args:
            config: arguments of the constructor; the fields of `moe` may stand beside
                the others, where earlier versions had them.
        """
        return super().from_config(overrides.nested_config(cls, config))

    def get_config(self):
        return {
            "name": self.name,
            "trainable": self.trainable,
            "dtype": saved_policy(self),
            **copy.deepcopy(self._config),
        }

    def save_own_variables(self, store):
        block_kinds.store_block_kinds(self, store)

    def load_own_variables(self, store):
        block_kinds.check_block_kinds(self, store)

    @classmethod
    def config_for_weights(cls, saved: dict, config: dict) -> dict:
        """A config that another config's weights still fit, as far as they can.

        Args:
            saved: config that the weights were saved with.
            config: config of the new model.

        Returns:
            The new config. A soft router keeps its number of slots at another image or
            patch size.

        Raises:
            ValueError: if no weights of `saved` could fit, where Keras's message would
                not say why.
        """
        return config_for_slots(cls, saved, config)

    @classmethod
    def unbuilt_blocks(cls, **config) -> list:
        """The blocks of a backbone, not built.

        Args:
            **config: arguments of the constructor. No weight is allocated.
        """
        config = overrides.complete_config(cls, config)
        return list(cls.tower(config, "float32").blocks)

    @classmethod
    def describe_parts(cls, **config) -> tuple[list[Part], int, int]:
        """The parts with their costs, the number of tokens N, and D.

        Args:
            **config: arguments of the constructor. No weight is allocated.
        """
        config = overrides.complete_config(cls, config)
        image_shape = check_image_shape(config["image_shape"])
        return cls.tower(config, "float32").parts(image_shape)

    def _check_inputs(self, inputs, labels=None):
        input_checks.check_inputs(self, inputs)

    def fit(
        self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any
    ) -> keras.callbacks.History:
        """Trains the model; see `keras.Model.fit`, and `MoETask.fit` for checks."""
        input_checks.check_training(self, x, y, kwargs.get("validation_data"))
        with state_kept(self, training=True):
            return super().fit(x, y, *args, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The loss and metrics; see `keras.Model.evaluate`, and `fit` for checks."""
        input_checks.check_training(self, x, y)
        with state_kept(self):
            return super().evaluate(x, y, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs; see `keras.Model.predict`. No images have empty outputs."""
        input_checks.check_prediction(self, x)
        if input_checks.has_no_examples(x):
            return input_checks.outputs_of_none(self)
        with state_kept(self):
            return super().predict(x, *args, **kwargs)

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One step of training; see `keras.Model.train_on_batch`, and `fit`."""
        input_checks.check_training(self, x, y)
        with state_kept(self, training=True):
            return super().train_on_batch(x, y, *args, **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loss and metrics of a batch; see `keras.Model.test_on_batch`, and `fit`."""
        input_checks.check_training(self, x, y)
        with state_kept(self):
            return super().test_on_batch(x, y, *args, **kwargs)

    def predict_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch; see `keras.Model.predict_on_batch`."""
        input_checks.check_prediction(self, x)
        if input_checks.has_no_examples(x):
            return input_checks.outputs_of_none(self)
        with state_kept(self):
            return super().predict_on_batch(x, *args, **kwargs)

    @ClassProperty
    def presets(cls):
        """The presets of this class that are known by name."""
        return registry.presets_of(cls)

    @classmethod
    def from_preset(cls, preset: Any, load_weights: bool = True, **kwargs) -> Any:
        """Makes a model from a preset.

        Args:
            preset: name of a preset (an architecture without weights), local folder,
                or `hf://`, `kaggle://` or `gs://` handle; or weights that others have
                published, see `keras_moe.models.convert`.
            load_weights: whether to load the preset's weights, if it has any.
            **kwargs: any argument of the backbone. Weights must fit,
                except that position embeddings and the patch kernel are resized to
                another `image_shape` or `patch_size`. The dtype policy is the saved
                one.

        Raises:
            ValueError: if the preset is unknown (the nearest names are listed), is
                of another class, is not whole, or an argument is unknown.
        """
        return build(preset, kwargs, cls=cls, load_weights=load_weights)

    def save_to_preset(
        self, preset_dir: str | os.PathLike, max_shard_size: float | None = 10
    ) -> None:
        """Saves config and weights to a preset folder, whole or not at all.

        The SHA-256 of the weights is in `metadata.json`, and loading compares it.

        Args:
            preset_dir: a new folder, or one with an older preset, which is replaced
                only when all files of the new one are written.
            max_shard_size: largest size of one weights file in GB.

        Raises:
            ValueError: if `preset_dir` holds something else than a preset.
            FolderInUse: an OSError that names the process that has been saving to
                `preset_dir` for ten minutes.
            OSError: with the path and the bytes, if a file cannot be written, as on a
                full disk. The older preset stays as it was.
        """
        with staged(preset_dir) as folder:
            super().save_to_preset(folder, max_shard_size=max_shard_size)

    def save_weights(
        self,
        filepath: str | os.PathLike,
        overwrite: bool = True,
        max_shard_size: float | None = None,
    ) -> None:
        """Saves all weights, see `keras.Model.save_weights`, whole or not at all.

        Raises:
            OSError: with the path and the bytes, if a file cannot be written, as on a
                full disk. Those that were there stay as they were.
        """
        save_weights(self, filepath, overwrite, max_shard_size)

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs
    ) -> None:
        """Loads weights, see `keras.Model.load_weights`.

        Args:
            filepath: path of a file that `save_weights` has written, or of a preset's,
                which is compared with the checksum in its `metadata.json`.
            skip_mismatch: whether to leave out weights that do not fit.
            **kwargs: arguments of `keras.Model.load_weights`.

        Raises:
            ValueError: naming the file, if it is damaged, or does not fit.
        """
        with checked_weights(filepath):
            super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def copy(self) -> Any:
        """A new model with the same config, weights and settings of training.

        Its optimizer starts afresh.

        Raises:
            ValueError: if the model has weights that its config does not imply, such as
                low-rank pairs.
        """
        return copied(self, self.get_config())

    def with_router_options(self, **options: Any) -> Any:
        """A new model whose routers have other options, and the same weights.

        Its optimizer starts afresh.

        Args:
            **options: arguments of the router's class, beside or instead of those in
                `router_options`.

        Raises:
            ValueError: as `copy`, or if the routers do not take an option, or have
                other weights with it.
        """
        return copied(self, config_with_router_options(self, options))

    def default_lora_layer_names(self) -> list[str]:
        """The names of the layers that `enable_lora` changes by default."""
        return ["query", "value"]

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone, and adds trainable low-rank pairs to some layers.

        Call it before `compile`. `save_to_preset` and `save` merge the pairs into the
        weights that they save; `save_lora_weights` saves the pairs alone.

        Args:
            rank: rank of the pairs.
            target_layer_names: the last parts of the layers' paths, such as `"query"`
                and `"value"` (None takes these two), `"key"`, `"attention_output"`,
                `"hidden"` and `"output"` (of dense MLPs), or `"experts"`, where each
                expert has pairs of its own.

        Raises:
            ValueError: if no layer of a name can have such pairs.
        """
        names = target_layer_names or self.default_lora_layer_names()
        lora.add_pairs(self, rank, names)

    def save_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Saves the low-rank pairs alone.

        Args:
            filepath: path of the file, which ends with `.lora.h5`.

        Raises:
            ValueError: if there are no pairs, or the name ends otherwise.
            OSError: with the path and the bytes, if the file cannot be written. An
                older one stays as it was.
        """
        lora.save_pairs(self, filepath)

    def load_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Loads low-rank pairs, after adding them where that was not done.

        Args:
            filepath: path of a file that `save_lora_weights` has written.

        Raises:
            ValueError: if the file is damaged, or its pairs do not fit the backbone's.
        """
        lora.load_pairs(self, filepath)

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        **kwargs,
    ) -> None:
        """Exports the backbone in its inference form, as `MoETask.export` a task.

        Raises:
            ValueError: if the format cannot hold the model.
        """
        shapes = kwargs.get("dynamic_shapes")
        signature = export_signature(self, format, input_signature, shapes)
        super().export(
            filepath,
            format=format,
            verbose=verbose,
            input_signature=signature,
            **kwargs,
        )
