"""The batches that a recipe trains and evaluates on."""

from typing import Any, NamedTuple

from keras_moe import data
from keras_moe.processes import process_shard
from keras_moe.training.data_config import DataConfig


class Datasets(NamedTuple):
    """The batches of a run.

    Attributes:
        train: batches of inputs and targets, in any form that `fit` takes with
            `steps_per_epoch`: those of one epoch, or without end. Images are in
            [-1, 1], labels those that the objective's loss takes.
        test: the same for evaluation, with labels that are not mixed.
        num_classes: the number of classes, or None where the objective has none.
        steps_per_epoch: batches of `train` in an epoch.
    """

    train: Any
    test: Any
    num_classes: int | None
    steps_per_epoch: int


def image_datasets(
    config: DataConfig,
    image_shape: tuple[int, int, int],
    batch_size: int,
    seed: int,
    num_classes: int | None,
    data_dir: str | None = None,
    start_step: int = 0,
    **labels: Any,
) -> Datasets:
    """Images with their labels, for classifiers of any kind."""
    exclude, exclude_from_test = config.left_out(data_dir)
    count = data.num_examples(config.source, config.train_split, data_dir, exclude)
    steps = count // batch_size
    if steps < 1:
        raise ValueError(
            "Expected a batch no larger than the images to train on; "
            f"received: batch_size={config.batch_size}, source={config.source!r}, "
            f"train_split={config.train_split!r}"
        )
    common = {
        "image_shape": tuple(image_shape),
        "batch_size": batch_size,
        "seed": seed,
        "data_dir": data_dir,
        "shard": process_shard(),
        **labels,
    }
    train = data.load(
        config.source,
        config.train_split,
        augment=config.augment,
        shuffle=True,
        repeat=True,
        start_batch=start_step,
        exclude=exclude,
        **common,
    )
    test = data.load(
        config.source,
        config.test_split,
        shuffle=False,
        exclude=exclude_from_test,
        **common,
    )
    return Datasets(train, test, num_classes, steps)


def pair_datasets(
    config: DataConfig,
    image_shape: tuple[int, int, int],
    batch_size: int,
    test_batch_size: int,
    tokenizer: Any,
    seed: int,
    data_dir: str | None = None,
    start_step: int = 0,
) -> Datasets:
    """Images with their captions, for models of pairs.

    Batches are as those of `image_datasets`. The test pairs are the same in each
    evaluation: where an image has several captions and one is drawn for training, its
    first. They are those of `config.test_source`, or of a mixture's first source.
    """
    source, options = config.source, config.pair_options()
    count = config.epoch_size or data.num_pairs(
        source,
        config.train_split,
        data_dir,
        exclude=config.exclude or (),
        **options,
    )
    steps = count // batch_size
    if steps < 1:
        raise ValueError(
            "Expected a batch no larger than the pairs to train on; "
            f"received: batch_size={config.batch_size}, source={config.source!r}, "
            f"train_split={config.train_split!r}"
        )
    common = {
        "image_shape": tuple(image_shape),
        "tokenizer": tokenizer,
        "seed": seed,
        "data_dir": data_dir,
        "shard": process_shard(),
    }
    train = data.load_pairs(
        source,
        config.train_split,
        batch_size=batch_size,
        augment=config.augment,
        shuffle=True,
        repeat=True,
        start_batch=start_step,
        exclude=config.exclude or (),
        **common,
        **options,
    )
    test = data.load_pairs(
        config.evaluated_source,
        config.test_split,
        batch_size=test_batch_size,
        shuffle=False,
        **common,
        **config.test_pair_options(data_dir),
    )
    return Datasets(train, test, None, steps)
