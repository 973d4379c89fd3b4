"""Weights and optimizer slots of an upcycled model, and how close its function is.

Axes: B batch, N tokens, E experts, K selected experts, D hidden, H mlp; for muMoE N_l
experts of level l, I inputs, O units, R ranks.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console

from keras_moe._compat import own_variables
from keras_moe._tables import numbers_table
from keras_moe._types import KerasModel
from keras_moe.layers import MuMoEBlock
from keras_moe.layers.activations import entmax15
from keras_moe.models import describe
from keras_moe.models.backbones._pairs import MODALITIES, PairBackbone
from keras_moe.routers import TokenChoiceRouter

# Suffix of an expert weight's path -> suffix of the dense weight that is tiled.
_TILED = {
    f"moe/experts/{layer}_{kind}": f"mlp/{layer}/{kind}"
    for layer in ("hidden", "output", "gate")
    for kind in ("kernel", "bias")
}
_SHARED = "moe/shared_experts/"
# Optimizer attributes that are lists but not slots.
_NOT_SLOTS = ("_variables", "_trainable_variables")


def _source_of(path: str, dense: dict) -> tuple[str | None, bool]:
    """Returns the dense weight that becomes a sparse one, and whether it is tiled."""
    if path in dense:
        return path, False
    for end, dense_end in _TILED.items():
        if path.endswith(end):
            return path.removesuffix(end) + dense_end, True
    if _SHARED in path:
        return path.replace(_SHARED, "mlp/"), False
    return None, False  # The routers' own.


def copy_weights(
    dense_model: KerasModel,
    sparse_model: KerasModel,
    noise: float,
    reinitialize: float,
    seed: int,
) -> dict[str, tuple[str, bool]]:
    """Copies weights; returns the dense path of each sparse one, and if it is tiled."""
    dense = {weight.path: weight for weight in dense_model.weights}
    generator, sources = np.random.default_rng(seed), {}
    _copy_to_mumoe(dense_model, sparse_model, noise, generator)
    shares = _shares(sparse_model)
    for weight in sparse_model.weights:
        source, is_tiled = _source_of(weight.path, dense)
        if source is None:
            continue
        # Copied: on JAX both models would otherwise share, and donate, one buffer.
        value = keras.ops.convert_to_numpy(dense[source])
        if "/output" in weight.path and (is_tiled or _SHARED in weight.path):
            value = value * shares.get(weight.path.partition("/moe/")[0], 1.0)
        if is_tiled:
            value = _tiled(weight, value.astype("float32"), noise, generator)
            weight.assign(_reinitialized(weight.path, value, reinitialize, seed))
        elif _SHARED in weight.path:
            _assign_shared(weight, value)
        else:
            weight.assign(value)
        if is_tiled or tuple(weight.shape) == value.shape:
            sources[weight.path] = source, is_tiled
    return sources


def _shares(model):
    """The share of each block's MLP that its experts, and its shared ones, compute."""
    backbone, shares = getattr(model, "backbone", model), {}
    for name in backbone.routing:
        moe: Any = getattr(backbone.get_layer(name), "feed_forward", None)
        if getattr(moe, "shared_experts", None) is not None:
            # s MLP(x) from each, where the routed ones have route_scale on top.
            scale = getattr(moe.router, "route_scale", 1.0)
            shares[moe.path.removesuffix("/moe")] = 1.0 / (1.0 + scale)
    return shares


def _assign_shared(weight, value):
    """Copies a dense weight to an MLP that is n of them, whose outputs add up."""
    if "/output/bias" in weight.path:
        weight.assign(value)
        return
    axis = 0 if "/output/" in weight.path else -1
    count = weight.shape[axis] // value.shape[axis]
    value = np.concatenate([value] * count, axis)
    weight.assign(value / count if axis == 0 else value)


def _tiled(weight, value, noise, generator):
    """A dense weight for every expert, with noise relative to its deviation."""
    scale = noise * value.std()
    value = np.repeat(value[None], weight.shape[0], axis=0)
    if scale:
        draw = generator.normal(scale=scale, size=value.shape)
        value += draw.astype("float32")
    return value


def _reinitialized(path, experts, share, seed):
    """Draws a share of each expert's hidden units again, as Drop-Upcycling does."""
    if not share or path.endswith("output_bias"):
        return experts
    # Units (E, H, ...): the columns of hidden and gate kernels, the rows of the output.
    units = experts if "/output" in path else np.moveaxis(experts, -1, 1)
    count = round(share * units.shape[1])
    # One set S for all kernels of an expert.
    block = np.random.default_rng([seed, *path.partition("/moe/")[0].encode()])
    generator = np.random.default_rng([seed, *path.encode()])
    for own in units:
        chosen = block.permutation(len(own))[:count]
        # W = I_S * R + (1 - I_S) * W, with R from N(mean, deviation) of W's units in S.
        mean, deviation = own[chosen].mean(), own[chosen].std()
        own[chosen] = generator.normal(mean, deviation, own[chosen].shape)
    return experts


def _copy_to_mumoe(dense_model, sparse_model, noise, generator):
    dense, sparse = (getattr(x, "backbone", x) for x in (dense_model, sparse_model))
    # Shared blocks have one name per modality.
    blocks = {id(sparse.get_layer(name)): name for name in sparse.routing}
    for name in blocks.values():
        block = sparse.get_layer(name).feed_forward
        mlp = dense.get_layer(name).feed_forward
        if not isinstance(block, MuMoEBlock) or isinstance(mlp, MuMoEBlock):
            continue
        pairs = {mlp.hidden: block.hidden, mlp.output_dense: block.output_experts}
        for layer, experts in pairs.items():
            kernel, bias = (
                np.zeros(layer.units, "float32")
                if x is None
                else keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))
                for x in (layer.kernel, layer.bias)
            )
            values = _factors_of_dense(kernel, bias, experts, noise, generator)
            for factor, value in zip(experts.factors, values):
                factor.assign(value)


def carry_state(dense: Any, sparse: Any, sources: dict[str, tuple[str, bool]]) -> int:
    """Copies the optimizer state by `sources` of `copy_weights`."""
    carried = 0
    if hasattr(dense, "inner_optimizer"):
        carried += carry_state(dense.inner_optimizer, sparse.inner_optimizer, sources)
    dense_paths = [weight.path for weight in own_variables(dense, trainable=True)]
    sparse_paths = [weight.path for weight in own_variables(sparse, trainable=True)]
    indices = {path: index for index, path in enumerate(dense_paths)}
    for name, slots in vars(dense).items():
        if isinstance(slots, keras.Variable):
            # Scalars, such as the iterations and the loss scale.
            getattr(sparse, name).assign(keras.ops.convert_to_numpy(slots))
            carried += 1
            continue
        # Slots are a list with a variable for each weight that has one.
        is_list = isinstance(slots, (list, tuple)) and len(slots) == len(dense_paths)
        if name in _NOT_SLOTS or not is_list:
            continue
        if not all(isinstance(x, (keras.Variable, type(None))) for x in slots):
            continue
        for path, slot in zip(sparse_paths, getattr(sparse, name)):
            source, is_tiled = sources.get(path, (None, False))
            old = slots[indices[source]] if source in indices else None
            if slot is not None and old is not None:
                value = keras.ops.convert_to_numpy(old)
                slot.assign(np.broadcast_to(value, slot.shape) if is_tiled else value)
                carried += 1
    return carried


def _factors_of_dense(kernel, bias, experts, noise, generator):
    """Factors of the truncated SVD of the kernel with its bias as last row."""
    matrix = np.concatenate([kernel, bias[None]]).astype("float64")
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    root = np.sqrt(values)
    of_input, of_output = left * root, right.T * root

    def component(index):
        """Returns (I + 1,) and (O,). Surplus components add nothing, but can learn."""
        if index < len(values):
            return of_input[:, index], of_output[:, index]
        scale = root[0] / np.sqrt(len(left))
        return generator.normal(scale=scale, size=len(left)), 0.0

    factors = [np.zeros(tuple(factor.shape)) for factor in experts.factors]
    levels = len(experts.num_experts)
    if experts.factorization is None:
        factors[0][...] = matrix
    else:
        fill = {"cp": _fill_cp, "tr": _fill_tr}.get(experts.factorization, _fill_tucker)
        fill(factors[:levels], factors[levels:], component)
    if noise:
        # To non-zero expert factors (CP), or to each matrix of a tensor train.
        draw = generator.normal(scale=noise, size=factors[0].shape)
        factors[0] = factors[0] * (1.0 + draw)
    return [factor.astype("float32") for factor in factors]


def _fill_cp(of_experts, others, component):
    for factor in of_experts:
        factor[...] = 1.0
    inputs, outputs = others
    for rank in range(outputs.shape[1]):
        inputs[:, rank], outputs[:, rank] = component(rank)


def _fill_tr(of_experts, others, component):
    # The experts' chain is an identity of the narrowest rank.
    width = min(min(factor.shape[0], factor.shape[2]) for factor in of_experts)
    for factor in of_experts:
        for index in range(min(factor.shape[0], factor.shape[2])):
            factor[index, :, index] = 1.0
    inputs, outputs = others
    for index in range(width * outputs.shape[0]):
        column, row = divmod(index, width)
        inputs[row, :, column], outputs[column, :, row] = component(index)


def _fill_tucker(of_experts, others, component):
    for factor in of_experts:
        factor[:, 0] = 1.0
    inputs, outputs, core = others
    first = (0,) * len(of_experts)
    for rank in range(min(inputs.shape[1], outputs.shape[1])):
        inputs[:, rank], outputs[:, rank] = component(rank)
        core[(*first, rank, rank)] = 1.0


# Report


class ModalityReport(NamedTuple):
    """The same as in `UpcyclingReport`, for the embeddings of one modality."""

    blocks: tuple[str, ...]
    largest_difference: float
    largest_token_difference: float
    preserved: bool


class UpcyclingReport(NamedTuple):
    """The result of upcycling.

    Attributes:
        blocks: names of the blocks that became mixtures of experts.
        dense_parameters: number of parameters before.
        parameters: number of parameters after.
        active_parameters: number of parameters after that each token uses.
        largest_difference: largest change of the outputs, at inference.
        largest_token_difference: the same for the backbone's tokens: a zero-initialised
            head would hide it.
        preserved: whether the function is the same in theory.
        slots: number of optimizer variables carried over.
        modalities: a `ModalityReport` per modality of an image-text model.
    """

    blocks: tuple[str, ...]
    dense_parameters: int
    parameters: int
    active_parameters: int
    largest_difference: float
    largest_token_difference: float
    preserved: bool
    slots: int = 0
    modalities: dict[str, ModalityReport] = {}

    def to_dict(self) -> dict:
        """Returns the report as JSON data."""
        modalities = {name: each._asdict() for name, each in self.modalities.items()}
        return {**self._asdict(), "modalities": modalities}

    def print(self, console: Console | None = None) -> None:
        """Prints the report as a table."""
        theory = {True: "the same", False: "not the same"}
        rows = {
            "blocks with experts": ", ".join(self.blocks),
            "parameters before": f"{self.dense_parameters:,}",
            "parameters after": f"{self.parameters:,}",
            "active per token": f"{self.active_parameters:,}",
            "largest difference of outputs": f"{self.largest_difference:.2e}",
            "largest difference of tokens": f"{self.largest_token_difference:.2e}",
            "the function, in theory": theory[self.preserved],
        }
        for name, each in self.modalities.items():
            rows[f"largest difference, {name}"] = (
                f"{each.largest_difference:.2e} "
                f"(tokens {each.largest_token_difference:.2e})"
            )
            rows[f"the function, {name}"] = theory[each.preserved]
        rows["optimizer variables carried over"] = str(self.slots)
        head = ("sparse upcycling", "")
        table = numbers_table(None, head, rows.items(), texts=(0, 1))
        (console or Console()).print(table)


def report_of(dense_model, sparse_model, blocks, inputs, is_changed):
    """Compares a sparse model with its dense original on the same inputs."""
    description = describe(sparse_model)
    backbone = getattr(sparse_model, "backbone", sparse_model)
    before, after = (_results(model, inputs) for model in (dense_model, sparse_model))
    if backbone.ensemble_size > 1:
        before = _of_equal_members(before, sparse_model, backbone.ensemble_size)
    outputs, tokens = (
        {
            name: float(np.abs(value - after[part][name]).max())
            for name, value in before[part].items()
        }
        for part in ("outputs", "tokens")
    )
    layers = {name: backbone.get_layer(name).feed_forward for name in blocks}
    modalities = {}
    for modality in MODALITIES if isinstance(backbone, PairBackbone) else ():
        own = tuple(name for name in blocks if name.startswith(f"{modality}/"))
        preserved = _preserves([layers[name] for name in own], is_changed)
        modalities[modality] = ModalityReport(
            own, outputs[modality], tokens[modality], preserved
        )
    return UpcyclingReport(
        blocks=tuple(blocks),
        dense_parameters=describe(dense_model).parameters,
        parameters=description.parameters,
        active_parameters=description.active_parameters,
        largest_difference=max(outputs.values()),
        largest_token_difference=max(tokens.values()),
        preserved=_preserves(layers.values(), is_changed),
        modalities=modalities,
    )


def _of_equal_members(results, model, members):
    """A dense model's results as an ensemble has them whose members are equal."""
    tokens = {x: np.tile(y, (1, members, 1)) for x, y in results["tokens"].items()}
    if not hasattr(model, "members_mean"):
        return {"outputs": tokens, "tokens": tokens}
    mean, outputs = model.members_mean.mean, results["outputs"]
    outputs = {
        name: keras.ops.convert_to_numpy(mean(value[:, None]))
        for name, value in outputs.items()
    }
    return {"outputs": outputs, "tokens": tokens}


def example_inputs(backbone: Any, examples: int = 4) -> Any:
    """Returns noise in the form of a backbone's inputs."""
    generator = np.random.default_rng(0)

    def images():
        shape = (examples, *backbone.image_shape)
        return generator.normal(size=shape).astype("float32")

    if not isinstance(backbone.input, dict):
        return images()
    of_patches = {}
    if (most := getattr(backbone, "max_patches", None)) is not None:
        # No padding, whose vectors are meaningless.
        shape = (examples, most, backbone.input["patches"].shape[2])
        patches = generator.normal(size=shape).astype("float32")
        grids = np.full((examples, 2), [1, most], "int32")
        of_patches = {"patches": patches, "grids": grids}
    if "token_ids" not in backbone.input:
        return of_patches
    config = backbone.get_config()
    config = config.get("text", config)
    # A language model takes any length, and has a number for each token id.
    is_causal = backbone.input["token_ids"].shape[1] is None
    length = min(config["max_length"], 32 if is_causal else config["max_length"])
    shape = (examples, length)
    token_ids = generator.integers(config["vocabulary_size"], size=shape, dtype="int32")
    if config.get("end_of_text_id") is not None:
        token_ids[:, -1] = config["end_of_text_id"]
    texts = {"token_ids": token_ids, "padding_mask": np.ones(shape, bool)}
    inputs = {**texts, **of_patches}
    if "images" in backbone.input:
        inputs["images"] = images()
    return inputs


def _results(model, inputs):
    """Returns float arrays of outputs and of tokens, by modality."""
    backbone = getattr(model, "backbone", model)
    # Vectors of padding tokens are meaningless.
    real = None
    if isinstance(inputs, dict) and "padding_mask" in inputs:
        real = np.asarray(inputs["padding_mask"], bool)
    if isinstance(backbone, PairBackbone):
        features = backbone.features
        last = {name.partition("/")[0]: name for name in features if "/" in name}
        embeddings = {name: features[f"{name}_embeddings"] for name in MODALITIES}
        tokens = {name: features[last[name]] for name in MODALITIES}
        both: Any = KerasModel(
            backbone.input, {"outputs": embeddings, "tokens": tokens}
        )
        results = both.predict(inputs, verbose=0)
        results["tokens"]["text"] = results["tokens"]["text"][real]
    else:
        outputs, tokens = (x.predict(inputs, verbose=0) for x in (model, backbone))
        if isinstance(tokens, dict):
            outputs, tokens = outputs["pooled"], tokens["tokens"][real]
        elif real is not None:
            outputs, tokens = outputs[real], tokens[real]
        results = {"outputs": {"": outputs}, "tokens": {"": tokens}}
    return {
        part: {name: value.astype("float32") for name, value in values.items()}
        for part, values in results.items()
    }


def _preserves(layers, is_changed):
    """Whether layers of experts compute the dense ones' function, in theory."""
    return not layers or (not is_changed and all(map(_averages_experts, layers)))


def _averages_experts(layer):
    """Whether identical experts in this layer compute what the MLP did."""
    router = layer.router
    if isinstance(layer, MuMoEBlock):
        # Coefficients sum to one, and the ranks hold the whole matrix.
        sums_to_one = router.activation in (entmax15, keras.activations.softmax)
        return sums_to_one and all(
            experts.holds_any_matrix for experts in (layer.hidden, layer.output_experts)
        )
    if not isinstance(router, TokenChoiceRouter) or router.normalize_gates is None:
        return False
    if router.expert_types.zero_computation or layer.input_scale != 1:
        return False
    if router.route_scale != 1 and layer.shared_experts is None:
        return False
    factor = router.limits(False)[0]
    if factor is None:
        return router.serves_every_token(False)
    # The capacity is large enough that no token is dropped.
    return factor * router.choices_per_token >= router.num_experts
