"""Figures of a model of pairs: retrieval, and what its routers do by modality.

Axes: M pairs, N tokens, E experts, P embedding.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe import analysis, evaluation

KS = (1, 5)
# Pairs of a batch of the contrastive accuracy, where there are as many.
ACCURACY_BATCH = 1024
# The share of a modality's tokens whose experts are counted, as in LIMoE's Figure 10.
COVERED = 0.9


class Embedded(NamedTuple):
    """The embeddings of pairs.

    Attributes:
        images: (N, P), of different images; None without a model of them.
        texts: (M, P), or None.
        image_of_text: (M,) index of each text's image.
    """

    images: np.ndarray | None
    texts: np.ndarray | None
    image_of_text: np.ndarray


def embed(pairs: Iterable, image_model: Any, text_model: Any) -> Embedded:
    """Embeds pairs batch by batch, each image once.

    Args:
        pairs: batches of `keras_moe.data.load_pairs`.
        image_model: model that embeds the images; None for no embeddings of them.
        text_model: model that embeds the texts, or None.
    """
    images, texts, owners, places = [], [], [], {}
    size = 0
    for inputs, ids in pairs:
        inputs = {name: np.asarray(value) for name, value in inputs.items()}
        pixels = inputs.pop("images")
        size = max(size, len(pixels))
        numbers = np.asarray(ids["image_ids"]).tolist()
        new = [
            row
            for row, number in enumerate(numbers)
            if number not in places and number not in numbers[:row]
        ]
        places |= {numbers[row]: len(places) + k for k, row in enumerate(new)}
        owners += [places[number] for number in numbers]
        if new and image_model is not None:
            images.append(encoded(image_model.encode_images, pixels[new], size))
        if text_model is not None:
            texts.append(encoded(text_model.encode_text, inputs, size))
    both = (np.concatenate(x) if x else None for x in (images, texts))
    return Embedded(*both, np.array(owners))


def encoded(encode: Callable, inputs: Any, size: int) -> np.ndarray:
    """Embeddings of a batch that is filled up, so that one program serves all.

    Args:
        encode: method of a model of pairs that embeds one modality.
        inputs: array, or dict of arrays by name, of at most `size` examples.
        size: examples of a full batch.
    """
    count = len(next(iter(keras.tree.flatten(inputs))))
    rows = np.minimum(np.arange(size), count - 1)
    full = keras.tree.map_structure(lambda x: x[rows], inputs)
    return encode(full, batch_size=size)[:count]


def retrieval_figures(embedded: Embedded) -> dict[str, float]:
    """Recalls of both directions, and the contrastive accuracy.

    Args:
        embedded: the pairs.
    """
    images, texts, owner = embedded
    ks = [k for k in KS if k <= min(len(images), len(texts))]
    recalls = evaluation.retrieval(images, texts, owner, ks).figures()
    batch_size = min(ACCURACY_BATCH, len(texts))
    accuracy = evaluation.contrastive_accuracy(
        images[owner], texts, batch_size, image_ids=owner
    )
    mean = (recalls["image_to_text_r1"] + recalls["text_to_image_r1"]) / 2
    return {**recalls, "r1": mean, "contrastive_accuracy": accuracy.accuracy}


def routing_figures(model: Any, inputs: dict) -> dict[str, float]:
    """What the routers would do with tokens of each modality, if none was dropped.

    Args:
        model: a model of pairs with MoE blocks.
        inputs: one batch of its inputs.
    """
    records = keras.Model(model.input, model.routing).predict(
        inputs, batch_size=len(inputs["images"]), verbose=0
    )
    masks = {"text": np.asarray(inputs["padding_mask"], bool)}
    return modality_figures(records, masks)


def modality_figures(
    records: dict[str, Any], masks: dict[str, np.ndarray]
) -> dict[str, float]:
    """Entropies of routers and numbers of experts by modality, averaged over blocks.

    Args:
        records: `Routing` of arrays (B, N, E) by the name of a block, such as
            `"text/block_1"`.
        masks: boolean (B, N) by modality, False for tokens that do not count.

    Returns:
        For each modality `"text_routing_entropy"`, that of the mean gates, in nats
        (the global entropy); `"text_local_entropy"`, the mean of the tokens';
        `"text_experts"`, the number of experts that serve 90% of the tokens; and
        `"text_max_gate"`.
    """
    rows: dict[str, list[float]] = {}
    for name, record in records.items():
        modality = name.partition("/")[0]
        mask = masks.get(modality)
        gates = np.asarray(record.gates, "float64")
        gates = gates.reshape(-1, gates.shape[-1]) if mask is None else gates[mask]
        usage = analysis.ExpertUsage(
            [modality], {name: analysis.routing_usage(record, mask=mask)}
        )
        curve = analysis.coverage_curves(usage)[name]
        for figure, value in {
            "routing_entropy": entropy(gates.mean(axis=0)),
            "local_entropy": float(np.mean([entropy(row) for row in gates])),
            "experts": float(np.argmax(curve.covered >= COVERED) + 1),
            "max_gate": float(gates.max(axis=-1).mean()),
        }.items():
            rows.setdefault(f"{modality}_{figure}", []).append(value)
    return {name: statistics.fmean(values) for name, values in rows.items()}


def health_figures(layers: list[dict]) -> dict[str, float]:
    """What the routers did in training, by modality and averaged over blocks.

    Args:
        layers: rows of `keras_moe.training.RouterHealth` of one time.

    Returns:
        For each modality `"text_dropped"`, the share of tokens that no expert served,
        and `"text_dispatched_entropy"`, that of the served tokens' experts, in nats.
    """
    rows: dict[str, list[float]] = {}
    for layer in layers:
        modality = layer["layer"].partition("/")[0]
        for figure, value in {
            "dropped": layer["dropped_tokens"],
            "dispatched_entropy": entropy(np.array(layer["expert_shares"])),
        }.items():
            rows.setdefault(f"{modality}_{figure}", []).append(value)
    return {name: statistics.fmean(values) for name, values in rows.items()}


def entropy(shares: np.ndarray) -> float:
    """The entropy of shares that sum to one, in nats.

    Args:
        shares: (E,), at least 0.
    """
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum() + 0.0)
