"""Published weights fill a model of this library, one tensor at a time."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np

from keras_moe.checks import check_pair
from keras_moe.layers import fold_channels, resize_positions
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.published_tensors import FLOATS, PublishedTensors
from keras_moe.models.conversion.report import (
    ConversionReport,
    ConvertedWeight,
    licence,
)
from keras_moe.models.conversion.weight_rules import Filled, PatchKernel

_KERNEL, _POSITIONS = "patch_embedding/kernel", "position_embedding/embedding"


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """Published weights, and the rules by which they fill a model.

    Args:
        source: name of the source, for the report.
        file: tensors of the source.
        plan: rules that make the model's weights of them.
        new_weights: prefixes of the paths of weights that keep their initial values.
        is_wanted: whether values are read; False compares names and shapes alone.
    """

    source: str
    file: PublishedTensors
    plan: ConversionPlan
    new_weights: tuple[str, ...] = ()
    is_wanted: bool = True

    def load(
        self,
        model: keras.Model,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> ConversionReport:
        """Fills a model's weights.

        Args:
            model: backbone, or task around one.
            progress: function of (done, all, name), called before each weight.

        Raises:
            ValueError: naming file and tensor, if a tensor is missing, left over, of
                another shape or not finite.
        """
        file, plan = self.file, self.plan
        weights = [w for w in model.weights if keras.backend.is_float_dtype(w.dtype)]
        steps, new, ignored = _match(file, plan, weights, self.new_weights)
        done, nbytes = [], 0
        for number, (weight, rule, shape) in enumerate(steps if self.is_wanted else ()):
            if progress is not None:
                progress(number, len(steps), weight.path)
            rule = _resized(rule, plan, model)
            value = rule.make(functools.partial(_read, file), shape)
            value, how = _fit(value, weight, plan, model)
            value = np.asarray(value, "float32", order="C")
            if not _is_finite(value):
                raise ValueError(
                    f"Expected finite values for {weight.path!r}; received others, "
                    f"made of {list(rule.names)} in {file.path}"
                )
            weight.assign(value)
            del value
            sources = {name: file[name].shape for name in rule.names}
            nbytes += sum(file[name].nbytes for name in rule.names)
            how = how or _how(rule)
            done.append(ConvertedWeight(weight.path, tuple(weight.shape), sources, how))
        return ConversionReport(
            self.source,
            plan.scheme,
            licence(plan.scheme),
            plan.backbone,
            plan.arguments,
            done,
            new,
            ignored,
            [*plan.notes, *_notes(plan)],
            nbytes,
        )

    def check(self) -> None:
        """Does nothing: `load` compares names and shapes."""

    def explained(self) -> contextlib.AbstractContextManager:
        """Errors within are raised as they are: they name the file."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Closes the source."""
        self.file.close()


def _notes(plan):
    normalization = getattr(plan.rules.get(_KERNEL), "normalization", None)
    if normalization is not None:
        yield (
            "images are in [-1, 1]: the source's normalisation, "
            f"mean={normalization.mean} and std={normalization.std} of [0, 1], has "
            "become part of the patch embedding"
        )


def _is_finite(array):
    """Whether all values are numbers that float32 holds."""
    if not array.size:
        return True
    largest = float(np.finfo("float32").max)
    # A NaN is neither; extremes need no memory.
    return -largest <= float(array.min()) and float(array.max()) <= largest


def _read(file, name, rows=None):
    """The values of a tensor; refuses what is no number."""
    array = file.read(name, rows)
    if not _is_finite(array):
        raise ValueError(
            f"Expected finite values of float32's range as {name!r} in "
            f"{file[name].file}; received NaN, infinity or a larger value"
        )
    return array


def _match(file, plan, weights, replaced):
    """The assignment of tensors to weights: all are compared, and none is read."""
    steps, new, used = [], [], set()
    for weight in weights:
        if weight.path.startswith(replaced):
            new.append(weight.path)
            continue
        rule = plan.rules.get(weight.path)
        if rule is None:
            raise ValueError(
                f"Expected a tensor of {file.path} for each weight; received: none for "
                f"{weight.path!r} with shape {tuple(weight.shape)}"
            )
        shape = _source_shape(weight, plan)
        for name, expected in rule.shapes(shape).items():
            _check_tensor(file, name, expected, weight)
        used.update(rule.names)
        steps.append((weight, rule, shape))
    ignored = dict(plan.ignored or {})
    for path, rule in plan.rules.items():
        if path.startswith(replaced):
            for name in rule.names:
                if name not in used:
                    ignored.setdefault(name, "of a head that is not wanted")
    left = sorted(set(file) - used - set(ignored))
    if left:
        raise ValueError(
            "Expected a weight of ours for each tensor; received: "
            f"{len(left)} left over in {file[left[0]].file}: {left[:5]}"
        )
    return steps, new, {name: ignored[name] for name in sorted(ignored) if name in file}


def _check_tensor(file, name, expected, weight):
    if name not in file:
        raise ValueError(
            f"Expected the tensor {name!r} for {weight.path!r} in {file.path}; "
            "received: none"
        )
    info = file[name]
    if info.shape != tuple(expected):
        raise ValueError(
            f"Expected shape {tuple(expected)} of {name!r} for {weight.path!r} in "
            f"{info.file}; received: shape={info.shape}"
        )
    if info.dtype not in FLOATS and not name.endswith("position_ids"):
        raise ValueError(
            f"Expected floats as {name!r} for {weight.path!r} in {info.file}; "
            f"received: dtype={info.dtype}"
        )


def _source_shape(weight, plan):
    """The shape of a weight in a model of the source's image size."""
    shape = tuple(weight.shape)
    channels = plan.arguments["image_shape"][2]
    if weight.path == _KERNEL:
        return (*_patch_size(plan), channels, shape[3])
    if weight.path == _POSITIONS:
        rows, columns = _grid(plan)
        class_token = plan.arguments.get("class_token", False)
        return (1, rows * columns + class_token, shape[2])
    return shape


def _patch_size(plan):
    return check_pair("patch_size", plan.arguments["patch_size"])


def _grid(plan):
    height, width = _patch_size(plan)
    image = plan.arguments["image_shape"]
    return image[0] // height, image[1] // width


def _resized(rule, plan, model):
    """The rule of the patch embedding for patches of the model's size."""
    backbone = getattr(model, "backbone", model)
    embedding = backbone.get_layer("patch_embedding")
    if not isinstance(rule, PatchKernel) or embedding.patch_size == _patch_size(plan):
        return rule
    return dataclasses.replace(
        rule,
        patch_size=embedding.patch_size,
        interpolation=embedding.interpolation,
    )


def _fit(value, weight, plan, model):
    """`value` for the model's image size, and the steps that it took."""
    if weight.path == _KERNEL:
        how, channels, size = [], weight.shape[2], tuple(weight.shape[:2])
        if size != _patch_size(plan):
            how.append(f"resized from {_patch_size(plan)} to {size}")
        if value.shape[2] != channels:
            value = fold_channels(value, channels)
            how.append(f"folded to {channels} channels")
        return value, ", ".join(how)
    if weight.path == _POSITIONS:
        backbone = getattr(model, "backbone", model)
        if backbone.grid != _grid(plan):
            kind = backbone.get_config()["position_interpolation"]
            table = resize_positions(value, _grid(plan), backbone.grid, kind)
            return table, f"resized from {_grid(plan)} to {backbone.grid}, {kind}"
    return value, None


def _how(rule):
    if isinstance(rule, Filled):
        return rule.value
    if getattr(rule, "normalization", None) is not None:
        return "with the images' normalisation"
    if getattr(rule, "scale", None):
        return "with LayerScale"
    if getattr(rule, "parts", 1) > 1:
        return f"part {rule.part + 1} of {rule.parts}"
    return type(rule).__name__.lower()
