"""Reading examples so that an error names the file.

TensorFlow's graphs have no exceptions, and its errors seldom name the file. A data set
can ignore an error, so `attempt` reads one example in its own data set, which then
continues with an element that raises an error with the file's name. That takes as long
as decoding several images: `map_or_name` therefore ignores the errors of all examples
in one data set, and reads only the missing example again.
"""

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator
from typing import Any

_FAILED = re.compile(r"assertion failed: \[(Expected [^\n]*)\]")

# Whether functions that are traced have errors that name a file.
_with_names = contextvars.ContextVar("with_names", default=True)


def decode_image(encoded: Any) -> Any:
    """Pixels (height, width, 3), uint8, of an image file; the first frame of a GIF.

    TensorFlow 2.21 decodes neither animated nor transparent WebP to three channels, and
    kills the process when asked for four channels of an image with three.
    """
    import tensorflow as tf

    image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
    return tf.ensure_shape(image, (None, None, 3))


def attempt(function: Callable, item: Any, otherwise: Callable) -> Any:
    """`function(item)`, or `otherwise(item, specs)` if TensorFlow fails at it."""
    import tensorflow as tf

    one = tf.data.Dataset.from_tensors({"item": item})
    done = one.map(lambda x: function(x["item"]))
    other = one.map(lambda x: otherwise(x["item"], done.element_spec))
    return done.ignore_errors().concatenate(other).take(1).get_single_element()


def map_or_name(dataset: Any, count: Any, function: Callable, again: Callable) -> Any:
    """`dataset.map(function)`, in parallel and in order, with errors that name files.

    Args:
        dataset: data set of `count` elements.
        count: number of elements, which must be finite: if nothing can be read any
            more, all remaining elements are tried before the error.
        function: function that calls `read_or_name`.
        again: function from the number of an element to a data set that begins with it.
    """
    import tensorflow as tf

    def numbered(number, element):
        token = _with_names.set(False)
        try:
            return number, function(*element)
        finally:
            _with_names.reset(token)

    def fail(number):
        # Reading again, now with names, fails where reading failed.
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
    # An ignored error leaves a gap in the numbers, or elements missing at the end.
    done = done.ignore_errors().concatenate(missing)
    return tf.data.Dataset.zip((tf.data.Dataset.range(count), done)).map(check)


def read_or_name(function: Callable, item: Any, expected: str, place: Any) -> Any:
    """`function(item)`, or an error that names a place."""
    if not _with_names.get():
        return function(item)
    return attempt(function, item, lambda _, specs: _fail(specs, expected, place))


def records_or_name(records: Any, path: Any, count: Any) -> Any:
    """The first `count` records, with an error that names a file with fewer."""
    import tensorflow as tf

    expected = "a TFRecord file with all its records, none of them corrupt"
    failure = tf.data.Dataset.from_tensors(path).map(
        lambda path: _fail(records.element_spec, expected, path)
    )
    return records.ignore_errors().concatenate(failure).take(count)


def check_or_name(condition: Any, expected: str, place: Any, received: Any) -> Any:
    """An assertion whose error names a place."""
    import tensorflow as tf

    about = [f"Expected {expected} in", place, "; received:", received]
    return tf.debugging.Assert(condition, about)


@contextlib.contextmanager
def reading_errors() -> Iterator[None]:
    """Turns TensorFlow's errors about examples that cannot be read into ValueErrors.

    Without it the message is the same, but the error is one of TensorFlow's classes.

    Raises:
        ValueError: with the name of the file, if an example cannot be read.

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


def _fail(specs, expected, place):
    """An error in place of an element of the given structure."""
    import tensorflow as tf

    about = [f"Expected {expected}; received:", place]
    with tf.control_dependencies([tf.debugging.Assert(False, about)]):
        return _zeros(specs)


def _zeros(specs):
    """A structure of zeros; unknown sizes are 0."""
    import tensorflow as tf

    return tf.nest.map_structure(
        lambda spec: tf.zeros([size or 0 for size in spec.shape], spec.dtype), specs
    )
