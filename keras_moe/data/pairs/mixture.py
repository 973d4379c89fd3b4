"""Several sources of pairs, mixed by ratio within each batch.

Reference: *Multimodal Contrastive Learning with LIMoE*, appendix A.1.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from keras_moe.checks import check_positive
from keras_moe.data.pairs.captions import equal_ids


def batch_sizes(
    sources: Mapping[str, float], batch_size: int, shards: int
) -> dict[str, int]:
    """The number of pairs that each source has in a batch.

    Args:
        sources: weight of each source.
        batch_size: size of the batches of all hosts together.
        shards: number of hosts.

    Raises:
        ValueError: if the weights do not divide each host's batch.
    """
    if not sources:
        raise ValueError("Expected sources with their weights; received: none")
    weights = {}
    for source, weight in sources.items():
        check_positive(f"source[{source!r}]", weight)
        weights[source] = Fraction(weight).limit_denominator(10_000)
    total = sum(weights.values())
    sizes = {name: batch_size * weight / total for name, weight in weights.items()}
    if any(size % shards for size in sizes.values()):
        # The smallest batch in which each share is a multiple of the hosts.
        multiple = shards * math.lcm(
            *((weight / total).denominator for weight in weights.values())
        )
        raise ValueError(
            f"Expected a batch that the weights divide, a multiple of {multiple}; "
            f"received: batch_size={batch_size}, source={dict(sources)}"
        )
    return {name: int(size) for name, size in sizes.items()}


def mixed(datasets: list) -> Any:
    """Batches of several sources, joined: those of the first source come first.

    Args:
        datasets: `tf.data.Dataset` of (images, texts) without end of each source.
    """
    import tensorflow as tf

    specs = [dataset.element_spec[1] for dataset in datasets]
    keys = [sorted(spec) for spec in specs]
    if any(other != keys[0] for other in keys):
        raise ValueError(
            "Expected captions in all sources of a mixture, or stored tokens in all; "
            f"received: {keys}"
        )

    def join(*batches):
        images = tf.concat([images for images, _ in batches], axis=0)
        texts = {
            key: tf.concat([texts[key] for _, texts in batches], axis=0)
            for key in keys[0]
        }
        # Ids of one source may be those of other images in another one.
        numbers = tf.concat(
            [
                tf.cast(texts["image_ids"], "int64") * len(batches) + number
                for number, (_, texts) in enumerate(batches)
            ],
            axis=0,
        )
        texts["image_ids"] = equal_ids(tf.strings.as_string(numbers))
        several = texts["captions" if "captions" in texts else "token_ids"]
        texts["text_ids"] = equal_ids(several)
        return images, texts

    return tf.data.Dataset.zip(tuple(datasets)).map(
        join, num_parallel_calls=tf.data.AUTOTUNE
    )
