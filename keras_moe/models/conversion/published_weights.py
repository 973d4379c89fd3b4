"""Published weights fill a model of this library, one tensor at a time."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np

from keras_moe.models.conversion.image_sizes import KERNEL, ImageSizes
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.published_tensors import FLOATS, PublishedTensors
from keras_moe.models.conversion.report import (
    ConversionReport,
    ConvertedWeight,
    licence,
)
from keras_moe.models.conversion.weight_rules import Filled


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

    def fills_backbone(self) -> bool:
        """Whether no initial value is kept: `load` refuses a weight without a rule."""
        return self.is_wanted

    def fills_head(self) -> bool:
        """Whether no initial value of the task around the backbone is kept."""
        return self.is_wanted and not self.new_weights

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
        sizes = ImageSizes.of(plan.arguments)
        steps, new, ignored = self._match(weights, sizes, hasattr(model, "backbone"))
        target = ImageSizes.of(getattr(model, "backbone", model).get_config())
        done, nbytes = [], 0
        for number, (weight, rule, shape) in enumerate(steps if self.is_wanted else ()):
            if progress is not None:
                progress(number, len(steps), weight.path)
            how = ""
            if sizes is not None:
                rule = sizes.rule_for(rule, target)
            value = rule.make(functools.partial(_read, file), shape)
            if sizes is not None:
                value, how = sizes.fit(value, weight.path, target)
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

    def _match(self, weights, sizes, is_task):
        """The assignment of tensors to weights: all are compared, and none is read."""
        file, plan, replaced = self.file, self.plan, self.new_weights
        steps, new, used = [], [], set()
        for weight in weights:
            # A backbone's own pooling is none of a head.
            if is_task and weight.path.startswith(replaced):
                new.append(weight.path)
                continue
            rule = plan.rules.get(weight.path)
            if rule is None:
                raise ValueError(
                    f"Expected a tensor of {file.path} for each weight; received: none "
                    f"for {weight.path!r} with shape {tuple(weight.shape)}"
                )
            shape = tuple(weight.shape)
            if sizes is not None:
                shape = sizes.shape_of(weight.path, shape)
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
        kept = {name: ignored[name] for name in sorted(ignored) if name in file}
        return steps, new, kept

    def check(self) -> None:
        """Does nothing: `load` compares names and shapes."""

    def explained(self) -> contextlib.AbstractContextManager:
        """Errors within are raised as they are: they name the file."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Closes the source."""
        self.file.close()


def _notes(plan):
    sizes = ImageSizes.of(plan.arguments)
    rule = None if sizes is None else plan.rules.get(sizes.place + KERNEL)
    normalization = getattr(rule, "normalization", None)
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
