"""Figures of a model of pairs: retrieval, and what its routers do by modality.

Axes: B pairs, N tokens, E experts.
"""

import statistics
from typing import Any

import keras
import numpy as np

from keras_moe import analysis, evaluation

KS = (1, 5)
# Pairs of a batch of the contrastive accuracy, where there are as many.
ACCURACY_BATCH = 1024
# The share of a modality's tokens whose experts are counted, as in LIMoE's Figure 10.
COVERED = 0.9


def retrieval_figures(pairs: evaluation.PairEmbeddings) -> dict[str, float]:
    """Recalls of both directions, and the contrastive accuracy."""
    ks = [k for k in KS if k <= min(len(pairs.images), len(pairs.texts))]
    recalls = pairs.retrieval(ks).figures()
    accuracy = pairs.contrastive_accuracy(min(ACCURACY_BATCH, len(pairs.texts)))
    mean = (recalls["image_to_text_r1"] + recalls["text_to_image_r1"]) / 2
    return {**recalls, "r1": mean, "contrastive_accuracy": accuracy.accuracy}


def routing_figures(model: Any, inputs: dict) -> dict[str, float]:
    """Figures of routers by modality, routed as at inference."""
    records = keras.Model(model.input, model.routing).predict(
        inputs, batch_size=len(inputs["images"]), verbose=0
    )
    masks = {"text": np.asarray(inputs["padding_mask"], bool)}
    return modality_figures(records, masks)


def modality_figures(
    records: dict[str, Any], masks: dict[str, np.ndarray]
) -> dict[str, float]:
    """Entropies of routers and numbers of experts by modality, averaged over blocks."""
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
    """Figures of routers in training, by modality and averaged over blocks."""
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
    """The entropy of shares that sum to one, in nats."""
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum() + 0.0)
