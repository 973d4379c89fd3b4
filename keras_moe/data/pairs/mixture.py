"""Several sources of pairs, mixed by ratio within each batch.

Reference: *Multimodal Contrastive Learning with LIMoE*, appendix A.1.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from keras_moe.checks import check_positive
from keras_moe.data.pairs.captions import equal_ids


def batch_sizes(
    sources: Mapping[str, float], batch_size: int, shards: int
) -> dict[str, int]:
    """The number of pairs that each source has in a batch.

    Where the weights do not divide a host's batch, the pairs that are left over go to
    the sources with the largest remainders, the first of equal ones: shares are less
    than one pair of each host from those of the weights.
    """
    if not sources:
        raise ValueError("Expected sources with their weights; received: none")
    weights = {}
    for source, weight in sources.items():
        check_positive(f"source[{source!r}]", weight)
        weights[source] = Fraction(float(weight))
    total, own = sum(weights.values()), batch_size // shards
    shares = {name: own * weight / total for name, weight in weights.items()}
    sizes = {name: int(share) for name, share in shares.items()}
    left = own - sum(sizes.values())
    # Sorting keeps the order of equal remainders.
    for name in sorted(shares, key=lambda name: sizes[name] - shares[name])[:left]:
        sizes[name] += 1
    if not all(sizes.values()):
        raise ValueError(
            "Expected a batch in which each host has pairs of each source; received: "
            f"batch_size={batch_size} for {shards} hosts, source={dict(sources)}"
        )
    return {name: size * shards for name, size in sizes.items()}


def mixed(datasets: list) -> Any:
    """Batches of several sources, joined: those of the first source come first."""
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
