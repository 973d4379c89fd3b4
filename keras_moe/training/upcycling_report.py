"""The result of sparse upcycling: which blocks, how many parameters, how near.

Axes: B batch, N tokens, E experts, K selected experts.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.layers import MuMoEBlock
from keras_moe.layers.activations import entmax15
from keras_moe.models.pair_backbone import MODALITIES, PairBackbone
from keras_moe.routers import TokenChoiceRouter


class ModalityReport(NamedTuple):
    """The result of upcycling for one modality of a model of pairs.

    Attributes:
        blocks: the names of the modality's blocks that became mixtures of experts.
        largest_difference: between the embeddings before and after, at inference.
        largest_token_difference: the same between the tokens behind the last block,
            padding aside.
        preserved: whether the theory says that the modality's function is the same.
    """

    blocks: tuple[str, ...]
    largest_difference: float
    largest_token_difference: float
    preserved: bool

    def to_dict(self) -> dict:
        """The report as plain data, for JSON."""
        return {**self._asdict(), "blocks": list(self.blocks)}


class UpcyclingReport(NamedTuple):
    """The result of upcycling.

    Attributes:
        blocks: the names of the blocks that became mixtures of experts; in models of
            pairs by modality, such as `"image/block_1"`.
        dense_parameters: parameters before.
        parameters: parameters after.
        active_parameters: parameters after that one token meets.
        largest_difference: between the outputs before and after, at inference.
        largest_token_difference: the same between the backbone's tokens, which a
            head that is still zero would hide.
        preserved: whether the theory says that the function is the same.
        slots: variables of the optimizer that were carried over.
        modalities: a `ModalityReport` for each modality of a model of pairs; empty
            otherwise.
    """

    blocks: tuple[str, ...]
    dense_parameters: int
    parameters: int
    active_parameters: int
    largest_difference: float
    largest_token_difference: float
    preserved: bool
    slots: int
    modalities: dict[str, ModalityReport] = {}

    def to_dict(self) -> dict:
        """The report as plain data, for JSON."""
        modalities = {name: each.to_dict() for name, each in self.modalities.items()}
        return {
            **self._asdict(),
            "blocks": list(self.blocks),
            "modalities": modalities,
        }

    def print(self, console: Console | None = None) -> None:
        """Prints the report as a table."""
        table = Table("sparse upcycling", "")
        table.add_row("blocks with experts", ", ".join(self.blocks))
        table.add_row("parameters before", f"{self.dense_parameters:,}")
        table.add_row("parameters after", f"{self.parameters:,}")
        table.add_row("active per token", f"{self.active_parameters:,}")
        table.add_row("largest difference of outputs", f"{self.largest_difference:.2e}")
        tokens = f"{self.largest_token_difference:.2e}"
        table.add_row("largest difference of tokens", tokens)
        for name, each in self.modalities.items():
            table.add_row(
                f"largest difference, {name}",
                f"{each.largest_difference:.2e} "
                f"(tokens {each.largest_token_difference:.2e})",
            )
        table.add_row("the function, in theory", _theory(self.preserved))
        for name, each in self.modalities.items():
            table.add_row(f"the function, {name}", _theory(each.preserved))
        table.add_row("optimizer variables carried over", str(self.slots))
        (console or Console()).print(table)


def _theory(preserved):
    return "the same" if preserved else "not the same"


def example_inputs(backbone: keras.Model, examples: int = 4) -> Any:
    """Noise that a backbone of images, of texts or of pairs takes."""
    generator = np.random.default_rng(0)

    def images():
        shape = (examples, *backbone.image_shape)
        return generator.normal(size=shape).astype("float32")

    if not isinstance(backbone.input, dict):
        return images()
    config = backbone.get_config()
    config = config.get("text", config)
    shape = (examples, config["max_length"])
    token_ids = generator.integers(config["vocabulary_size"], size=shape, dtype="int32")
    if config.get("end_of_text_id") is not None:
        token_ids[:, -1] = config["end_of_text_id"]
    inputs = {"token_ids": token_ids, "padding_mask": np.ones(shape, bool)}
    if "images" in backbone.input:
        inputs["images"] = images()
    return inputs


def largest_differences(
    dense_model: keras.Model, sparse_model: keras.Model, inputs: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest differences between two models' outputs, and their tokens."""
    before, after = (_results(model, inputs) for model in (dense_model, sparse_model))
    return tuple(
        {
            name: float(np.abs(value - after[part][name]).max())
            for name, value in before[part].items()
        }
        for part in ("outputs", "tokens")
    )


def _results(model, inputs):
    """Float arrays of outputs and tokens by modality."""
    backbone = getattr(model, "backbone", model)
    if not isinstance(backbone, PairBackbone):
        results = {
            "outputs": {"": model.predict(inputs, verbose=0)},
            "tokens": {"": backbone.predict(inputs, verbose=0)},
        }
        if isinstance(backbone.input, dict):
            # A padding token's vector has no meaning.
            tokens = results["tokens"][""]["tokens"]
            results["tokens"][""] = tokens[np.asarray(inputs["padding_mask"], bool)]
            results["outputs"][""] = results["outputs"][""]["pooled"]
    else:
        names = {name: _last_block(backbone, name) for name in MODALITIES}
        features = backbone.features
        results = keras.Model(
            backbone.input,
            {
                "outputs": {
                    name: features[f"{name}_embeddings"] for name in MODALITIES
                },
                "tokens": {name: features[names[name]] for name in MODALITIES},
            },
        ).predict(inputs, verbose=0)
        mask = np.asarray(inputs["padding_mask"], bool)
        results["tokens"]["text"] = results["tokens"]["text"][mask]
    return {
        part: {name: value.astype("float32") for name, value in values.items()}
        for part, values in results.items()
    }


def _last_block(backbone, modality):
    """The name of a modality's last block."""
    names = [name for name in backbone.features if name.startswith(f"{modality}/")]
    return names[-1]


def modality_reports(
    backbone: keras.Model,
    blocks: list[str],
    differences: tuple[dict[str, float], dict[str, float]],
    noise: float,
) -> dict[str, ModalityReport]:
    """The results by modality, for a backbone of pairs; none for others."""
    if not isinstance(backbone, PairBackbone):
        return {}
    reports = {}
    for modality in MODALITIES:
        own = tuple(name for name in blocks if name.startswith(f"{modality}/"))
        reports[modality] = ModalityReport(
            own,
            *(each[modality] for each in differences),
            preserves(backbone, own, noise),
        )
    return reports


def preserves(backbone: keras.Model, blocks: Any, noise: float) -> bool:
    """Whether the theory says that a sparse backbone does what the dense one did."""
    layers = [backbone.get_layer(name).feed_forward for name in blocks]
    return not layers or (noise == 0 and all(map(_preserves, layers)))


def _preserves(layer):
    """Whether equal experts in this layer do what the MLP did."""
    router = layer.router
    if isinstance(layer, MuMoEBlock):
        # Coefficients that sum to one, and room for all of the matrices.
        sums_to_one = router.activation in (entmax15, keras.activations.softmax)
        return sums_to_one and all(
            experts.holds_any_matrix for experts in (layer.hidden, layer.output_experts)
        )
    if not isinstance(router, TokenChoiceRouter) or router.normalize_gates is None:
        return False
    if router.expert_types.zero_computation:
        return False
    factor = router.eval_capacity_factor
    if factor is None:
        return router.serves_every_token(False)
    # So large a capacity drops nobody.
    return factor * router.num_selected_experts >= router.num_experts
