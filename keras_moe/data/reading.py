"""Reading examples with errors that name the file.

TensorFlow's errors seldom name the file. `attempt` reads one example in a separate
dataset, followed by an element that raises an error with the name. That takes as long
as decoding several images, so `map_or_name` ignores the errors of all examples in one
dataset, and reads only the missing example again.
"""

import contextlib
import contextvars
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_moe._files import IMAGE_FORMATS
from keras_moe._types import Structure, Tensor
from keras_moe.data._packages import extra, tf

# What TensorFlow reads otherwise than Pillow: BMP, GIF and WebP; photos not upright, by
# Exif of either byte order or XMP, which come first; and JPEGs of four colours. A false
# alarm costs time alone, as Pillow looks closer. A look costs a pipeline 1 to 2%.
_HEAD = 4096
_ODD = (
    r"(?:BM|GIF8|RIFF)\C*|\C*(?:\x12\x01\x03\x00\x01\x00\x00\x00[\x02-\x08]"
    r"|\x01\x12\x00\x03\x00\x00\x00\x01\x00[\x02-\x08]"
    r"|tiff:Orientation(?:=\"|>)[2-8]|\x00\x14\x08\C{4}\x04)\C*"
)
_FAILED = re.compile(r"assertion failed: \[(Expected [^\n]*)\]")

# Whether traced functions produce errors that name the file.
_with_names = contextvars.ContextVar("with_names", default=True)


def decode_image(encoded: Tensor) -> Tensor:
    """Decodes an image file as Pillow does, upright: uint8 (height, width, 3)."""
    with extra("data"):
        import PIL.Image  # noqa: F401
    image = tf.cond(
        needs_pillow(encoded),
        lambda: tf.numpy_function(_decode_with_pillow, [encoded], tf.uint8, False),
        lambda: tf.io.decode_image(encoded, channels=3, expand_animations=False),
    )
    return tf.ensure_shape(image, (None, None, 3))


def needs_pillow(encoded: Tensor) -> Tensor:
    """Whether TensorFlow would read another image than Pillow, or may not read it."""
    return tf.strings.regex_full_match(tf.strings.substr(encoded, 0, _HEAD), _ODD)


def _decode_with_pillow(encoded: bytes) -> np.ndarray:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def attempt(function: Callable, item: Structure, otherwise: Callable) -> Any:
    """Returns `function(item)`, or `otherwise(item, specs)` if TensorFlow fails."""
    one = tf.data.Dataset.from_tensors({"item": item})
    done = one.map(lambda x: function(x["item"]))
    other = one.map(lambda x: otherwise(x["item"], done.element_spec))
    return done.ignore_errors().concatenate(other).take(1).get_single_element()


def map_or_name(
    dataset: Any, count: Tensor | int, function: Callable, again: Callable
) -> Any:
    """`dataset.map(function)`, parallel and in order, with errors that name files."""

    def numbered(number, element):
        token = _with_names.set(False)
        try:
            return number, function(*element)
        finally:
            _with_names.reset(token)

    def fail(number):
        # Reads again, now with names, and fails where reading failed.
        failing = again(number).take(1).map(lambda *element: function(*element))
        expected = "an image that can be read twice"
        failing = failing.map(
            lambda *_: _fail(tf.TensorSpec([], "bool"), expected, "another one")
        )
        return failing.get_single_element()

    def check(expected, found):
        number, made = found
        named = tf.cond(number == expected, lambda: True, lambda: fail(expected))
        with tf.control_dependencies([named]):
            return tf.nest.map_structure(tf.identity, made)

    done = dataset.enumerate().map(
        numbered, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    made = done.element_spec[1]
    missing = tf.data.Dataset.from_tensors(tf.constant(-1, "int64"))
    missing = missing.map(lambda number: (number, _zeros(made))).repeat()
    # Ignored errors leave gaps in the numbers, or missing elements at the end.
    done = done.ignore_errors().concatenate(missing)
    return tf.data.Dataset.zip((tf.data.Dataset.range(count), done)).map(check)


def read_or_name(
    function: Callable, item: Structure, expected: str, location: Tensor
) -> Any:
    """Returns `function(item)`, or raises an error that names the location."""
    if not _with_names.get():
        return function(item)
    return attempt(function, item, lambda _, specs: _fail(specs, expected, location))


def records_or_name(records: Any, path: Tensor, count: Tensor) -> Any:
    """Returns the first `count` records; names a file that has fewer."""
    expected = "a TFRecord file with all its records, none of them corrupt"
    failure = tf.data.Dataset.from_tensors(path).map(
        lambda path: _fail(records.element_spec, expected, path)
    )
    return records.ignore_errors().concatenate(failure).take(count)


@contextlib.contextmanager
def reading_errors() -> Iterator[None]:
    """Turns TensorFlow's errors about unreadable examples into ValueErrors.

    Example:

    >>> from keras_moe import data
    >>> with data.reading_errors():
    ...     for images, labels in data.load("digits", "test"):
    ...         pass
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("tensorflow."):
            raise
        failed = _FAILED.search(str(error))
        if failed is None:
            raise
        raise ValueError(failed[1].replace("] [", " ").replace(" ;", ";")) from error


def _fail(specs, expected, location):
    """Raises an error in an element of the given structure."""
    about = [f"Expected {expected}; received:", location]
    with tf.control_dependencies([tf.debugging.Assert(False, about)]):
        return _zeros(specs)


def _zeros(specs):
    """Returns a structure of zeros; unknown sizes are 0."""
    return tf.nest.map_structure(
        lambda spec: tf.zeros([size or 0 for size in spec.shape], spec.dtype), specs
    )
