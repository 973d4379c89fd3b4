"""Work of the input pipeline for an image, over `tf.data` by itself and other loaders.

    python tools/benchmark/input_pipeline.py
    python tools/benchmark/input_pipeline.py --preset vmoe_s32_last2_e8 --rounds 15

Writes JPEG files of photographs' size with the noise of a camera, and reads them as for
training: a random crop, resized, and a flip of every second image. The plain map
decodes each image as a whole; the fused one decodes the crop. torchvision and Grain
take part where they are installed.

A turn is one whole pass of a loader, from its first read to its last batch: a loader
that read ahead would work while another one is timed, and be paid for it later.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from neighbours import cpu_seconds
from passes import BATCH, one_pass
from row import peer
from runner import Report, run
from training_step import jitted_step

from keras_moe import data, models

# Photographs; further files are copies of them.
DIFFERENT = 64
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, default=1024, help=f"in {BATCH}s")
    parser.add_argument("--size", type=int, nargs=2, default=(375, 500))
    parser.add_argument("--preset", default="vit_s32")


def measure(args: argparse.Namespace, report: Report) -> None:
    model = models.from_preset(args.preset, num_classes=1000, multi_label=False)
    image_shape = model.backbone.image_shape
    title = f"{args.images} images of {args.size[1]}x{args.size[0]}"
    clocks = {f"{os.cpu_count()} cores": time.perf_counter, "CPU time": cpu_seconds}
    with candidates(args.images, args.size, image_shape[:2]) as loaders:
        for name, clock in clocks.items():
            amounts = {"images": args.images}
            report.compare(
                f"{title}, {name}", loaders, "plain map", clock=clock, **amounts
            )

    generator = np.random.default_rng(0)
    shape = (BATCH, *image_shape)
    step = jitted_step(
        model,
        generator.normal(size=shape).astype("float32"),
        generator.integers(10, size=BATCH),
    )
    # A step takes longer than a batch: a third of the rounds.
    seconds = report.seconds({"step": step}, max(args.rounds // 3, 1))["step"]
    row = {"model": args.preset, "step ms": 1e3 * seconds, "images/s": BATCH / seconds}
    formats = {"step ms": ".1f", "images/s": ".4g"}
    report.table(f"a training step, batch {BATCH}", [row], formats)


def photograph(seed: int, height: int, width: int) -> bytes:
    """A JPEG file of smooth colours with grain, about as large as a photograph's."""
    rng = np.random.default_rng(seed)
    colours = rng.uniform(0, 255, (height // 30, width // 30, 3)).astype("float32")
    grain = rng.normal(0, 14, (height // 2, width // 2, 3)).astype("float32")
    image = tf.image.resize(colours, (height, width), "bicubic")
    image += tf.image.resize(grain, (height, width))
    image = tf.cast(tf.clip_by_value(image, 0, 255), "uint8")
    return tf.io.encode_jpeg(image, quality=90).numpy()


@contextlib.contextmanager
def candidates(
    images: int, size: tuple[int, int], shape: tuple[int, int]
) -> Iterator[dict[str, Callable[[], None]]]:
    """Functions by name, each of which is a pass over files of photographs.

    Args:
        images: number of files, full batches.
        size: (height, width) of the photographs.
        shape: (height, width) of the images that are made of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        photographs = [photograph(seed, *size) for seed in range(DIFFERENT)]
        for number in range(images):
            path = Path(folder, "train", str(number % 10), f"{number}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photographs[number % DIFFERENT])
        files = sorted(str(path) for path in Path(folder).rglob("*.jpg"))
        loaders = pipelines(folder, files, (*shape, 3))
        yield {
            name: lambda loader=loader: one_pass(loader)
            for name, loader in loaders.items()
        }
        # Workers end with their loaders, and read the files until then.
        loaders.clear()


def pipelines(folder: str, files: list[str], image_shape: tuple[int, int, int]) -> dict:
    """Loaders by name; to iterate over one is a pass."""
    height, width, _ = image_shape
    crop = data.RandomResizedCrop(height, width, SCALE, RATIO)

    class Whole(data.RandomResizedCrop):
        """Calls its own method, so that images are decoded as a whole for it."""

        def __call__(self, images, seed):
            return super().__call__(images, seed)

    def loaded(crop):
        return data.load(
            f"folder:{folder}",
            "train",
            image_shape,
            batch_size=BATCH,
            augment=[crop, "flip"],
        )

    loaders = {
        "plain map": plain(files, (height, width), fused=False),
        "fused map": plain(files, (height, width), fused=True),
        "load": loaded(crop),
        "load, images as a whole": loaded(Whole(height, width, SCALE, RATIO)),
    }
    if transforms := peer("torchvision.transforms"):
        loaders["torchvision"] = of_torchvision(
            transforms, f"{folder}/train", (height, width)
        )
    if grain := peer("grain"):
        loaders["Grain"] = of_grain(grain, files, (height, width))
    return loaders


def plain(files: list[str], shape: tuple[int, int], fused: bool) -> tf.data.Dataset:
    """The same work in one function of `tf.image`."""

    def box(size, seed):
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            size,
            tf.zeros((1, 0, 4)),
            seed=tf.stack([seed, 0]),
            area_range=SCALE,
            aspect_ratio_range=RATIO,
            use_image_if_no_bounding_boxes=True,
        )
        return begin, extent

    def prepare(path, seed):
        encoded = tf.io.read_file(path)
        if fused:
            begin, extent = box(tf.image.extract_jpeg_shape(encoded), seed)
            window = tf.concat([begin[:2], extent[:2]], 0)
            image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
        else:
            image = tf.io.decode_jpeg(encoded, channels=3)
            image = tf.slice(image, *box(tf.shape(image), seed))
        image = tf.image.resize(image, shape)
        seed = tf.stack([seed, 1])
        image = tf.image.stateless_random_flip_left_right(image, seed)
        return image / 127.5 - 1.0, 0

    paths = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files), seed=0)
    pairs = tf.data.Dataset.zip((paths, tf.data.Dataset.counter()))
    pairs = pairs.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return pairs.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def of_torchvision(transforms, folder: str, shape: tuple[int, int]):
    """torchvision's transforms in PyTorch's loader, a worker for each core."""
    import torch
    from torchvision.datasets import ImageFolder

    images = ImageFolder(
        folder,
        transforms.Compose(
            [
                transforms.RandomResizedCrop(shape, SCALE, RATIO, antialias=False),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.5] * 3),
            ]
        ),
    )
    return torch.utils.data.DataLoader(
        images,
        batch_size=BATCH,
        shuffle=True,
        num_workers=os.cpu_count(),
        # A copy of this process would have its threads' locks and not its threads.
        multiprocessing_context="spawn",
        # Workers start once, before the clock, and wait between passes.
        persistent_workers=True,
        drop_last=True,
    )


def of_grain(grain, files: list[str], shape: tuple[int, int]):
    """Grain's threads, with Pillow's decoding, cropping and resizing."""
    height, width = shape

    def prepare(path, generator):
        from PIL import Image

        with Image.open(io.BytesIO(Path(path).read_bytes())) as image:
            image = image.convert("RGB")
        area = image.width * image.height * generator.uniform(*SCALE)
        ratio = np.exp(generator.uniform(*np.log(RATIO)))
        wide = min(int((area * ratio) ** 0.5), image.width)
        high = min(int((area / ratio) ** 0.5), image.height)
        left = generator.integers(image.width - wide + 1)
        top = generator.integers(image.height - high + 1)
        box = (left, top, left + wide, top + high)
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image, "float32")
        pixels = pixels[:, ::-1] if generator.random() < 0.5 else pixels
        return pixels / 127.5 - 1.0, 0

    images = grain.MapDataset.source(files).shuffle(seed=0).seed(0).random_map(prepare)
    options = grain.ReadOptions(num_threads=os.cpu_count(), prefetch_buffer_size=2)
    return images.batch(BATCH).to_iter_dataset(options)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
