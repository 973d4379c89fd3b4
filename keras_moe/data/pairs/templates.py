"""Sources of classes, whose names become captions by templates.

Reference: *Multimodal Contrastive Learning with LIMoE*, appendix A.3.
"""

import copy
from typing import Any

import numpy as np

from keras_moe.data.examples import IndexedExamples
from keras_moe.data.pairs.captions import CaptionTable, checked_captions, equal_ids
from keras_moe.data.pairs.source import PairSource
from keras_moe.data.sources import open_source
from keras_moe.templates import PLACE, fill, read_templates


def read_pairs(
    source: str, split: str, templates: Any, every_caption: bool, data_dir: str | None
) -> PairSource:
    """The pairs of a source of `keras_moe.data.load`."""
    templates = read_templates(PLACE if templates is None else templates)
    examples = open_source(source, split, data_dir)
    names = _names(source, examples.classes)
    captions = [tuple(fill(template, name) for template in templates) for name in names]
    indexed = isinstance(examples, IndexedExamples)
    if every_caption and not indexed:
        raise ValueError(
            'Expected captions="random" or "first" with classes in record files; '
            f'received: source={source!r}, captions="all"'
        )
    table = CaptionTable(captions)
    images = copy.copy(examples)

    def read(item):
        stored, label = examples.read(item)
        return stored, table.texts(label, item if indexed else equal_ids(stored))

    images.read = read
    counts = np.full(examples.count, len(templates))
    return PairSource(source, images, captions, counts, has_classes=True)


def _names(source: str, classes: Any) -> tuple[str, ...]:
    """The names of classes, each once."""
    if classes.max_labels is not None:
        raise ValueError(
            "Expected one label for each image, whose class's name is the caption; "
            f"received: source={source!r} with several"
        )
    if classes.names is None:
        raise ValueError(
            "Expected classes with names, which become captions; received: "
            f"source={source!r} with {classes.count} classes without"
        )
    places: dict[str, int] = {}
    for number, name in enumerate(classes.names):
        _, fault = checked_captions(name)
        if fault is not None:
            raise ValueError(
                f"Expected a name of each class of {source!r}; received: {fault} for "
                f"class {number}"
            )
        if places.setdefault(name, number) != number:
            raise ValueError(
                f"Expected each class's name once in {source!r}; received: {name!r} "
                f"for classes {places[name]} and {number}"
            )
    return classes.names
