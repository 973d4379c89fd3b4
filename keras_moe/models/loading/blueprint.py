"""Blueprints: what a source and overrides give, before any weight is allocated."""

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
from rich.console import Console

from keras_moe._checks import check_bool, check_one_of, unfit
from keras_moe._compat import kept_random_states, variables_without_values
from keras_moe._tables import numbers_table
from keras_moe._types import KerasModel, OnProgress
from keras_moe.models import registry
from keras_moe.models.conversion import HEAD, POOLING, is_convertible
from keras_moe.models.loading import _overrides, _sources
from keras_moe.models.saving._lora import FROZEN, TRAINABLE, TRAINING
from keras_moe.models.saving._preset_folder import HUB_MODELS
from keras_moe.ops._initializers import skip_init

# Of the FLOPs. The literature says large; the threshold is ours.
LARGE_SHARE = 1 / 3
# As many experts did well in the last two layers that have any.
ROBUST_EXPERTS = 16

_has_warned_of_random_weights = False


class Part(NamedTuple):
    """One part of a model.

    Attributes:
        name: name of the part.
        kind: such as "dense".
        parameters: number of parameters.
        active_parameters: those used by one token.
        flops: forward FLOPs of matmuls per image, 2 per multiply-add.
        routed_flops: those of experts, for the tokens routed to them.
        num_experts: experts to which tokens are routed; None without any.
        selected_experts: K, an integer, if tokens choose their experts; the slots per
            token, a float, with other routers; None without experts.
        tokens_per_expert: tokens or slots of an image per expert; None without experts.
        members: members of an ensemble that run it.
    """

    name: str
    kind: str
    parameters: int
    active_parameters: int
    flops: int
    routed_flops: int = 0
    num_experts: int | None = None
    selected_experts: float | None = None
    tokens_per_expert: float | None = None
    members: int = 1

    def of_members(self, members: int) -> "Part":
        """The part, run by several members of an ensemble."""
        tokens = self.tokens_per_expert
        return self._replace(
            flops=members * self.flops,
            routed_flops=members * self.routed_flops,
            tokens_per_expert=tokens and members * tokens,
            members=members,
        )


class Description(NamedTuple):
    """The costs of a model.

    Attributes:
        name: name of the preset.
        num_tokens: tokens per image, including the class token.
        parts: parts in order.
        hidden_dim: D, the size of a token.
        example: kind of input, for tables.
    """

    name: str
    num_tokens: int
    parts: list[Part]
    hidden_dim: int
    example: str = "image"

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        return sum(part.parameters for part in self.parts)

    @property
    def active_parameters(self) -> int:
        """Number of parameters used by one token."""
        return sum(part.active_parameters for part in self.parts)

    @property
    def gflops(self) -> float:
        """Forward GFLOPs per image, 2 FLOPs per multiply-add."""
        return sum(part.flops for part in self.parts) / 1e9

    @property
    def routed_share(self) -> float:
        """rho, the routed experts' share of the FLOPs; 0 if nothing is routed."""
        routed = sum(part.routed_flops for part in self.parts)
        return routed / max(sum(part.flops for part in self.parts), 1)

    @property
    def parameter_ratio(self) -> float:
        """Parameters over active parameters."""
        return self.parameters / max(self.active_parameters, 1)

    @property
    def selected_experts(self) -> list[float]:
        """The different K of the layers with experts; see `Part`."""
        return sorted({x.selected_experts for x in self.parts if x.selected_experts})

    @property
    def tokens_per_expert(self) -> list[float]:
        """The different numbers of an image's tokens per expert; see `Part`."""
        return sorted({x.tokens_per_expert for x in self.parts if x.tokens_per_expert})

    @property
    def ensemble_size(self) -> int:
        """Number of members of an ensemble; 1 for any other model."""
        return max(part.members for part in self.parts)

    @property
    def separate_gflops(self) -> float:
        """Forward GFLOPs of as many separate models, which share nothing."""
        own = (part.flops / part.members for part in self.parts)
        return self.ensemble_size * sum(own) / 1e9

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        names = (
            "name", "num_tokens", "hidden_dim", "parameters", "active_parameters",
            "gflops", "routed_share", "selected_experts", "tokens_per_expert",
            "parameter_ratio",
        )  # fmt: skip
        findings = [text for _, text in self.findings()]
        parts = [part._asdict() for part in self.parts]
        values = {name: getattr(self, name) for name in names}
        return {**values, "findings": findings, "parts": parts}

    def routing_text(self, batch_size: int | None = None) -> str:
        """What experts do in a sentence or two; empty if nothing is routed.

        Args:
            batch_size: examples per training step, to count tokens of a step.
        """
        if not self.routed_share:
            return ""
        tokens = [(batch_size or 1) * number for number in self.tokens_per_expert]
        per = self.example
        if batch_size is not None:
            per = f"step of {batch_size:,} {per}s"
        selected, what = _listed(self.selected_experts), "tokens"
        if not all(isinstance(number, int) for number in self.selected_experts):
            selected, what = f"{selected} slots per token", "slots"
        return (
            f"Routed experts do {self.routed_share:.1%} of the FLOPs (rho). K is "
            f"{selected}, with {_listed(tokens)} {what} per expert and {per}. "
            f"Parameters are {self.parameter_ratio:.2f} times the active ones."
        )

    def findings(self) -> list[tuple[str, str]]:
        """What the literature says of the routed share and of K: levels and sentences.

        Only for images, since it is on these. Shares that another setting would make
        count its blocks like the ones here.

        Reference: *When Does Sparse MoE Help in Vision?* (arXiv 2605.15484); *Mixture
        of Experts in Image Classification: What's the Sweet Spot?* (arXiv 2411.18322).
        """
        blocks = [part for part in self.parts if part.name.startswith("block_")]
        experts = [part for part in blocks if part.routed_flops]
        if self.example != "image" or self.ensemble_size > 1 or not experts:
            return []
        level, text = "good", f"Routed experts do {self.routed_share:.0%} of the FLOPs"
        text += ", and gains were seen with large shares (arXiv 2605.15484)"
        if self.routed_share < LARGE_SHARE:
            level = "notice"
            counts = {"every_2": len(blocks) // 2, "every_1": len(blocks)}
            larger = [name for name, count in counts.items() if count > len(experts)]
            if larger:
                share = _share_of_more(self.parts, blocks, experts, counts[larger[0]])
                text += f": moe_layers='{larger[0]}' would make it {share:.0%}"
            else:
                text += ": a larger expert_mlp_dim would raise the share"
        most = max(part.num_experts or 0 for part in experts)
        is_last_2 = len(experts) == 2 and experts == blocks[1::2][-2:]
        if is_last_2 and most <= ROBUST_EXPERTS:
            level = "good"
            text += (
                ". Experts in the last two of every second block, and no more than "
                f"{ROBUST_EXPERTS}, are a robust choice (arXiv 2411.18322)"
            )
        findings = [(level, f"{text}.")]
        selected = self.selected_experts
        # An integer: tokens choose.
        if selected == [1] and isinstance(selected[0], int) and most > 1:
            routed = sum(part.routed_flops for part in experts)
            share = 2 * routed / (sum(part.flops for part in self.parts) + routed)
            text = (
                "K = 1, and at ImageNet's scale gains needed two experts per token "
                "(arXiv 2605.15484): num_selected_experts=2 would route "
                f"{share:.0%} of the FLOPs."
            )
            findings.append(("notice", text))
        return findings

    def print(self, console: Console | None = None) -> None:
        """Prints the parts and totals as a table."""
        title = f"{self.name}: {self.num_tokens} tokens per {self.example}"
        flops = sum(part.flops for part in self.parts)
        total = Part("total", "", self.parameters, self.active_parameters, flops)
        *rows, last_row = (
            (
                part.name,
                part.kind,
                f"{part.parameters:,}",
                f"{part.active_parameters:,}",
                f"{part.flops / 1e9:.3f}",
            )
            for part in (*self.parts, total)
        )
        last = [last_row]
        if self.ensemble_size > 1:
            separate = self.separate_gflops
            saved = f"{1 - self.gflops / separate:.0%} less here"
            name = f"{self.ensemble_size} separate models"
            last.append((name, saved, "", "", f"{separate:.3f}"))
        head = ("part", "kind", "parameters", "active per token")
        head += (f"GFLOPs per {self.example}",)
        console = console or Console()
        console.print(numbers_table(title, head, rows, last, texts=(0, 1)))
        self.print_routing(console)

    def print_routing(self, console: Console, batch_size: int | None = None) -> None:
        """Prints what experts do, and the findings on it."""
        texts = (self.routing_text(batch_size), *(text for _, text in self.findings()))
        for text in filter(None, texts):
            console.print(text, markup=False, highlight=False)


def _listed(numbers):
    return " or ".join(f"{x:,.0f}" if x >= 100 else f"{x:.4g}" for x in numbers)


def _share_of_more(parts, blocks, experts, count):
    """The routed share with experts in `count` blocks."""
    dense = [part.flops for part in blocks if not part.routed_flops]
    routed = sum(part.routed_flops for part in experts) / len(experts)
    flops = sum(part.flops for part in experts) / len(experts)
    more = (count - len(experts)) * (flops - sum(dense) / len(dense))
    return count * routed / (sum(part.flops for part in parts) + more)


class UnbuiltTower(NamedTuple):
    """One tower of an unbuilt backbone."""

    # `prefix` starts the paths of its weights, such as "text/"; "" for a single tower.
    # Tokens attend within their sequence; `sequences` has the lengths.
    prefix: str
    blocks: list
    # `members` has how many members of an ensemble run each block.
    sequences: tuple[int, ...]
    hidden_dim: int
    members: list[int]


def costs_of(model: KerasModel) -> Description | None:
    """The model's `describe()`; custom families may have no costs."""
    with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
        return Blueprint.of_model(model).describe()
    return None


@dataclass(frozen=True)
class Blueprint:
    """Everything that determines a model, before any weight is allocated.

    Use it in a `with` statement to close its source.

    Args:
        backbone: class of the backbone.
        config: arguments of the backbone.
        task: class of the task, or None for a backbone.
        task_config: arguments of the task without its backbone.
        weights: source of the weights; None for random initialisation.
        name: name of the source.

    Example:

    >>> from keras_moe import models
    >>> blueprint = models.resolve("vmoe_b32", {"num_experts": 8})
    >>> blueprint.backbone.__name__, blueprint.task
    ('ViTBackbone', None)
    >>> blueprint.unbuilt_blocks()[1].feed_forward.experts.num_experts
    8
    >>> blueprint.describe().parameters < models.describe("vmoe_b32").parameters
    True
    """

    backbone: type
    config: dict[str, Any]
    task: Any = None
    task_config: dict[str, Any] = field(default_factory=dict)
    weights: _sources.Weights | None = None
    name: str = ""

    @classmethod
    def of_model(cls, model: Any) -> "Blueprint":
        """Creates the blueprint of a backbone or task, without its weights."""
        backbone = getattr(model, "backbone", model)
        if not registry.is_registered(type(backbone)):
            expected = f"a model with one of {registry.backbone_names()}"
            raise unfit(expected, type(model).__name__)
        config = backbone.get_config()
        if model is backbone:
            return cls(type(backbone), config, name=model.name)
        task_config = {**model.get_config(), "preprocessor": model.preprocessor}
        del task_config["backbone"]
        return cls(type(backbone), config, type(model), task_config, None, model.name)

    def describe(self) -> Description:
        # Routers without a seed draw one.
        with kept_random_states(), _explained(self.weights):
            config = self.backbone.make_config(self.config)
            parts, num_tokens, dim = self.backbone.describe_parts(config)
            if self.task is not None:
                parts = parts + self.task.describe_parts(
                    config.to_dict(), num_tokens, dim, **self.task_config
                )
            if self.weights is not None:
                self.weights.check()
        return Description(self.name, num_tokens, parts, dim, self.backbone.example)

    def unbuilt_blocks(self) -> list[keras.layers.Layer]:
        """Creates the blocks of the backbone, unbuilt."""
        return [block for tower in self.unbuilt_towers() for block in tower.blocks]

    def unbuilt_towers(self) -> list[UnbuiltTower]:
        """Creates the towers of the backbone, unbuilt."""
        families = _overrides.tower_families(self.backbone)
        with _explained(self.weights):
            config = self.backbone.make_config(self.config)
            towers = {"": (self.backbone, config)}
            if families:
                towers = {f"{k}/": (x, getattr(config, k)) for k, x in families.items()}
            unbuilt = []
            for prefix, (cls, config) in towers.items():
                tower = cls.tower(config, "float32")
                lengths = cls.sequence_lengths(config)
                sizes = lengths, config.hidden_dim, tower.members
                unbuilt.append(UnbuiltTower(prefix, list(tower.blocks), *sizes))
            return unbuilt

    def build(self) -> KerasModel:
        """Creates the model and loads the source's weights, if requested."""
        return self.build_with_report()[0]

    def build_with_report(
        self, progress: OnProgress | None = None
    ) -> tuple[keras.Model, Any]:
        """Creates the model; also returns a `ConversionReport` or None."""
        weights = self.weights
        with _explained(self.weights):
            with skip_init(weights is not None and weights.fills_backbone()):
                model = self.backbone.from_config(self.config)
            if self.task is not None:
                with skip_init(weights is not None and weights.fills_head()):
                    model = self._task_of(model)
            report = None if weights is None else weights.load(model, progress)
        return model, report

    def build_abstract(self, compiled_like: Any = None) -> Any:
        """Creates the model with weights that have shapes, and no values."""
        with _explained(self.weights), variables_without_values(), skip_init():
            model = self.backbone.from_config(self.config)
            if self.task is not None:
                model = self._task_of(model, compile=False)
        if self.task is not None:
            # Its optimizer has numbers, which have values.
            settings = {}
            if compiled_like is not None and compiled_like.compiled:
                config = keras.optimizers.serialize(compiled_like.optimizer)
                optimizer = keras.optimizers.deserialize(config)
                settings = {"optimizer": optimizer, "loss": compiled_like.loss}
            model.compile(**settings)
        return model

    def _task_of(self, backbone, **changes):
        config = {**self.task_config, **changes, "backbone": backbone}
        return self.task.from_config(config)

    def close(self) -> None:
        """Closes the source; the blueprint cannot be built afterwards."""
        if self.weights is not None:
            self.weights.close()

    def __enter__(self) -> "Blueprint":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _explained(weights):
    return contextlib.nullcontext() if weights is None else weights.explained()


def resolve(
    source: object,
    overrides: dict[str, Any] | None = None,
    *,
    task: str | None = None,
    cls: type | None = None,
    load_weights: bool = True,
    counts_only: bool = False,
    tower: str | None = None,
) -> Blueprint:
    """Returns the blueprint of a model from any source, with overrides.

    `from_preset`, `describe`, `convert`, `upcycle` and `keras_moe.distribution` are
    built on it.

    Args:
        source: preset name, folder, handle, published weights or a model.
        overrides: arguments of the backbone or the task, by name; `num_classes=None`
            means no new head.
        task: task name or `"backbone"`; None decides as in `from_preset`.
        cls: required class of the model, or None for any.
        load_weights: whether the model gets the source's weights.
        counts_only: whether the blueprint is only for descriptions: no weights are
            read, and task arguments are allowed without the task.
        tower: `"image"` or `"text"` for one tower of published image-text weights. None
            means what `cls` or `task` implies, or all.

    Example:

    >>> from keras_moe import models
    >>> overrides = {"num_classes": 10, "activation": "gelu"}
    >>> blueprint = models.resolve("vmoe_digits", overrides)
    >>> blueprint.config["activation"], blueprint.task.__name__
    ('gelu', 'ViTImageClassifier')
    """
    overrides = dict(overrides or {})
    if overrides.get("num_classes") is None:
        overrides.pop("num_classes", None)
    check_bool("load_weights", load_weights)
    if task is not None:
        check_one_of("task", task, (None, _sources.BACKBONE, *registry.task_names()))
    if task == _sources.BACKBONE and "num_classes" in overrides:
        expected = "no num_classes for task='backbone'"
        raise unfit(expected, num_classes=overrides["num_classes"])
    if isinstance(source, keras.Model) and not is_convertible(source):
        if overrides:
            raise unfit("no further arguments with a model", overrides)
        return Blueprint.of_model(source)
    check_one_of("tower", tower, (None, *_sources.TOWERS))
    has_classes = "num_classes" in overrides
    tower = tower or _sources.tower_of(task, cls, has_classes)
    opened = _sources.open_model_source(
        source, overrides, load_weights, counts_only, tower
    )
    weights, new_weights = opened.weights(), (*HEAD, *POOLING)
    try:
        backbone, task_cls = opened.classes(task, cls, has_classes)
        if task_cls is not None:
            opened = opened.for_task(task_cls)
        # Descriptions may have a task's arguments without the task.
        owner = task_cls or (opened.task if counts_only else None)
        of_backbone, of_task = _overrides.split_overrides(backbone, owner, overrides)
        # What is frozen is given, or the source's.
        replaced = {*TRAINING} if {TRAINABLE, FROZEN} & {*overrides} else set()
        with _explained(weights):
            _overrides.check_config(backbone, opened.config)
            config = {k: v for k, v in opened.config.items() if k not in replaced}
            config = _overrides.apply_overrides(backbone, config, of_backbone)
            if opened.must_fit:
                config = _overrides.config_for_weights(backbone, opened.config, config)
            task_config = {}
            if task_cls is not None:
                task_config, new_weights = task_cls.config_from(opened, of_task, config)
                replaced -= {*of_task}
        task_config = {k: v for k, v in task_config.items() if k not in replaced}
        weights = opened.weights(new_weights)
    except BaseException:
        if weights is not None:
            weights.close()
        raise
    return Blueprint(backbone, config, task_cls, task_config, weights, opened.name)


def build(
    source: object,
    overrides: dict[str, Any] | None = None,
    load_weights: bool = True,
    **options,
) -> Any:
    """Builds a model from a source that is not itself a model of this library."""
    if isinstance(source, keras.Model) and not is_convertible(source):
        raise unfit("the name of a preset", f"{source!r}. {HUB_MODELS}")
    with resolve(source, overrides, load_weights=load_weights, **options) as blueprint:
        model = blueprint.build()
    if load_weights and blueprint.weights is None:
        _warn_of_random_weights(blueprint.name)
    return model


def _warn_of_random_weights(name):
    """Says once that a preset is an architecture only."""
    global _has_warned_of_random_weights
    if not _has_warned_of_random_weights:
        _has_warned_of_random_weights = True
        warnings.warn(
            f"{name!r} is an architecture, so the model's weights are random. Trained "
            "ones: keras_moe.models.list_presets(trained=True), and handles such as "
            "hf://timm/... and hf://openai/... (docs/weights.md). load_weights=False "
            "asks for random weights and silences this.",
            # Point to the caller of `from_preset`.
            stacklevel=4,
        )
