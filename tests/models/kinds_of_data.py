"""Labelled images in batches of two, as each kind of data that models take."""

import grain
import keras
import pytest


class Batches(keras.utils.PyDataset):
    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays[0]) // 2

    def __getitem__(self, index):
        return tuple(x[2 * index : 2 * index + 2] for x in self.arrays)


class Examples:
    def __init__(self, *arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays[0])

    def __getitem__(self, index):
        return tuple(x[index] for x in self.arrays)


def data_loader(*arrays):
    data = pytest.importorskip("torch.utils.data")
    dataset = data.TensorDataset(*map(data.default_convert, arrays))
    return data.DataLoader(dataset, batch_size=2)


def tf_dataset(*arrays):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays).batch(2)


def grain_loader(*arrays):
    sampler = grain.samplers.SequentialSampler(
        len(arrays[0]), grain.sharding.NoSharding()
    )
    batch = [grain.transforms.Batch(2)]
    return grain.DataLoader(
        data_source=Examples(*arrays), sampler=sampler, operations=batch
    )


SOURCES = {
    "PyDataset": Batches,
    "DataLoader": data_loader,
    "generator": lambda *arrays: (batch for batch in Batches(*arrays)),
    "tf.data": tf_dataset,
    "grain.MapDataset": lambda *x: grain.MapDataset.source(Examples(*x)).batch(2),
    "grain.DataLoader": grain_loader,
}
