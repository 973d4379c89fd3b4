"""Routing records made by hand, and what a report reads of them."""

from typing import Any

import numpy as np

from keras_moe.ops import Routing
from keras_moe.report import Batch, Block, ReportedModel


def record(gates: Any, served: Any = None, num_selected_experts: int = 1) -> Routing:
    """A record of gates (B, N, E); each token is served by its K largest gates."""
    gates = np.asarray(gates, "float32")
    if served is None:
        order = np.argsort(-gates, axis=-1, kind="stable")[..., :num_selected_experts]
        served = np.zeros_like(gates)
        np.put_along_axis(served, order, 1, axis=-1)
    return Routing(gates, gates, gates, gates, served, gates * served)


def block(key: str, expert_types: Any = 3, **changes: Any) -> Block:
    """A token choice layer of some FFN experts, or of experts of given types."""
    modality = key.partition("/")[0] if "/" in key else "image"
    if isinstance(expert_types, int):
        expert_types = ("ffn",) * expert_types
    whole = Block(key, key, modality, "token_choice", tuple(expert_types), 1, 1.0)
    return whole._replace(**changes)


def reported(
    *blocks: Block, grid: Any = (1, 2), keras_model: Any = None, name: str = "small"
) -> ReportedModel:
    """A model with these records."""
    modalities = tuple(dict.fromkeys(each.modality for each in blocks))
    by_key = {each.key: each for each in blocks}
    names = ("zero", "<b>one</b>")
    return ReportedModel(keras_model, name, by_key, grid, names, modalities)


def batch(routing: dict[str, Routing], **changes: Any) -> Batch:
    """A batch of these records, in which all tokens of images count."""
    count, tokens = next(iter(routing.values())).gates.shape[:2]
    masks = {"image": np.ones((count, tokens), bool)}
    whole = Batch(0, None, None, None, masks, None, routing, None, {})
    return whole._replace(**changes)
