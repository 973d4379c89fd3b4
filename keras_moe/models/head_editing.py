"""Edits of a classifier's final muMoE head.

Axes: E experts.
"""

from typing import Any

import keras
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.models.copying import copied


def with_logit_offsets(classifier: keras.Model, output: int, offsets: Any) -> Any:
    """A copy of a classifier whose final muMoE head adds to one output's logits."""
    head = classifier.head
    if head is None or classifier.head_position != "final":
        raise ValueError(
            "Expected a classifier with head=MuMoE(...) as its final layer; "
            f"received: head={head}, head_position={classifier.head_position!r}"
        )
    output = check_integer("output", output, 0)
    experts = head.gate.expert_types.total
    offsets = np.asarray(offsets, "float32")
    if output >= classifier.num_classes or offsets.shape != (experts,):
        raise ValueError(
            f"Expected an output below {classifier.num_classes} and offsets of shape "
            f"({experts},); received: output={output}, shape={offsets.shape}"
        )
    if not np.isfinite(offsets).all():
        raise ValueError(f"Expected finite offsets; received: {offsets}")
    before = head.edited_outputs
    outputs = before if output in before else (*before, output)
    config = classifier.get_config()
    config["head"]["config"]["edited_outputs"] = outputs
    edited = copied(classifier, config, without="logit_offsets")
    table = np.zeros((experts, len(outputs)), "float32")
    if before:
        table[:, : len(before)] = keras.ops.convert_to_numpy(head.logit_offsets)
    table[:, outputs.index(output)] += offsets
    edited.head.logit_offsets.assign(table)
    return edited
