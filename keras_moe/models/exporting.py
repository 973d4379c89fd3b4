"""`export`, with errors that say what a format and a backend cannot do."""

import importlib.util
import os
from typing import Any

import keras

from keras_moe.layers import ExpertCoefficients, MoEEncoderBlock
from keras_moe.routers import SoftRouter, SparseRouter, TokenChoiceRouter


class ExportMixin:
    """Checks what is asked of `export` before Keras tries it."""

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        **kwargs,
    ) -> None:
        """Exports the model in its inference form.

        Args:
            filepath: where to.
            format: `"tf_saved_model"` (JAX and TensorFlow), which serves any batch (on
                JAX of one size where groups are larger than an image);
                `"torch"` (PyTorch), for one image, or with `dynamic_shapes={0:
                torch.export.Dim("batch", max=256)}` for any number where each image
                is routed by itself: dense models, soft routing and token choice; or
                `"onnx"`, on PyTorch for dense models and soft routing.
            verbose: whether to print a message.
            input_signature: `[keras.InputSpec((batch, height, width, channels))]`, for
                another number of images than one.
            **kwargs: see `keras.Model.export`.

        Raises:
            ValueError: if the format cannot hold the model.
        """
        if keras.backend.backend() == "torch":
            _check_saved_model(format)
            routers = _routers(self)
            if format == "onnx":
                input_signature = _one_image(self, input_signature)
                _check_onnx(self, routers)
            if format == "torch" and kwargs.get("dynamic_shapes") is not None:
                _check_any_batch(routers)
        if keras.backend.backend() == "jax" and format == "tf_saved_model":
            _check_groups(_routers(self), input_signature)
        super().export(
            filepath,
            format=format,
            verbose=verbose,
            input_signature=input_signature,
            **kwargs,
        )


def _check_groups(routers, input_signature):
    """Refuses groups of images in a program for any number of them, on JAX."""
    if input_signature is not None:
        specs = keras.tree.flatten(input_signature)
        if all(None not in spec.shape for spec in specs):
            return
    for router in routers:
        if isinstance(router, SparseRouter) and not router.groups_by_image(False):
            raise ValueError(
                "Expected an input_signature of one size of batch, such as "
                "[keras.InputSpec((8, height, width, channels))], where groups are "
                "larger than an image, since JAX wants to know how many there are; "
                f"received: router={router.summary!r}, "
                f"input_signature={input_signature}. "
                "Load the model with evaluation='batch_invariant' to serve any batch."
            )


def _check_saved_model(format):
    # With this package Keras tries it.
    if format == "tf_saved_model" and importlib.util.find_spec("torch_xla") is None:
        raise ValueError(
            "Expected format='torch' or 'onnx' on PyTorch, which writes no SavedModel "
            "without torch_xla; received: format='tf_saved_model'. Save the model with "
            "save_to_preset, and export it with KERAS_BACKEND=jax or tensorflow."
        )


def _routers(model):
    return [
        layer.feed_forward.router
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, MoEEncoderBlock)
    ]


def _one_image(model, input_signature):
    """The signature, of one image by default."""
    if input_signature is None:
        shape = (1, *model.input.shape[1:])
        return [keras.InputSpec(shape=shape, dtype="float32", name="images")]
    shapes = [tuple(spec.shape) for spec in keras.tree.flatten(input_signature)]
    if any(None in shape for shape in shapes):
        raise ValueError(
            "Expected an input_signature of a fixed size for format='onnx' on PyTorch "
            f"(Keras has no other there); received: shapes={shapes}"
        )
    return input_signature


def _check_onnx(model, routers):
    for router in routers:
        if not isinstance(router, SoftRouter):
            raise ValueError(
                "Expected a dense model or soft routing for format='onnx' on PyTorch, "
                "whose exporter cannot translate a stable sort or searchsorted; "
                f"received: router={router.summary!r}. Use format='torch', or "
                "format='tf_saved_model' on JAX or TensorFlow."
            )
    policy = model.dtype_policy
    if policy.compute_dtype != "float32":
        raise ValueError(
            "Expected dtype='float32' for format='onnx'; "
            f"received: dtype={policy.name!r}. Load the weights with dtype='float32'."
        )


def _check_any_batch(routers):
    for router in routers:
        each_by_itself = isinstance(router, (SoftRouter, ExpertCoefficients)) or (
            isinstance(router, TokenChoiceRouter) and router.groups_by_image(False)
        )
        if not each_by_itself:
            raise ValueError(
                "Expected a dense model, soft routing, or token choice without "
                "eval_capacity_factor and evaluation='official' for dynamic_shapes: "
                "PyTorch's exporter wants one capacity; received: "
                f"router={router.summary!r}. Export it for one size of batch, by "
                "input_signature."
            )
