"""Reading that names the file of an example that cannot be read.

TensorFlow's graphs have no exceptions, and its errors seldom name the file. A data set
can ignore an error: an example is therefore read in a data set of its own, which then
goes on with an element that raises an error with the file's name. Such a data set takes
as long as decoding several images: `map_or_name` ignores the errors of all examples in
one, and reads the one that is missing again.
"""

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator
from typing import Any

# The number of examples after which a beat shows that one is missing.
_AT_ONCE = 256
_FAILED = re.compile(r"assertion failed: \[(Expected [^\n]*)\]")


def decode_image(encoded: Any) -> Any:
    """Pixels (height, width, 3), uint8, of an image file; the first of a GIF.

    TensorFlow 2.21 decodes neither animated nor transparent WebP to three channels, and
    ends the process where four are asked for and an image has three.
    """
    import tensorflow as tf

    image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
    return tf.ensure_shape(image, (None, None, 3))


def attempt(function: Callable, item: Any, otherwise: Callable) -> Any:
    """`function(item)`, or `otherwise(item, specs)` if TensorFlow fails at the
    first.
    """
    import tensorflow as tf

    one = tf.data.Dataset.from_tensors({"item": item})
    done = one.map(lambda x: function(x["item"]))
    other = one.map(lambda x: otherwise(x["item"], done.element_spec))
    return done.ignore_errors().concatenate(other).take(1).get_single_element()


# Whether functions that are traced have errors that name a place.
_with_names = contextvars.ContextVar("with_names", default=True)


def map_or_name(dataset: Any, read: Callable, then: Callable, again: Callable) -> Any:
    """`dataset.map(read).map(then)`, in parallel and in order, with errors
    that name.
    """
    import tensorflow as tf

    def without_names(*element):
        token = _with_names.set(False)
        try:
            return then(*read(*element))
        finally:
            _with_names.reset(token)

    (fields, origin), count = dataset.element_spec, dataset.cardinality()
    # Errors of all examples that are left end a data set that ends, and leave one
    # without an end silent. Beats cost 0.04 ms an image, and are for the latter.
    has_beats = int(count) == tf.data.INFINITE_CARDINALITY
    if has_beats:
        # One program, which is called in one of two branches.
        values = tf.function(without_names, autograph=False)
        values = values.get_concrete_function(*fields)

    def value_or_beat(number, element):
        fields, origin = element
        if not has_beats:
            return number, origin, without_names(*fields)
        flat = tf.nest.flatten(fields)
        beat = _zeros(values.structured_outputs)
        made = tf.cond(number < 0, lambda: beat, lambda: values(*flat))
        return number, origin, made

    def check(state, element):
        expected, before = state
        number, origin, made = element
        is_beat = number <= -_AT_ONCE
        origin = tf.where(number < 0, before, origin)
        named = tf.cond(
            tf.where(is_beat, -number, number) == expected,
            lambda: True,
            lambda: fail(expected, origin),
        )
        with tf.control_dependencies([named]):
            made = tf.nest.map_structure(tf.identity, made)
        following = expected + tf.cast(~is_beat, "int64")
        return (following, origin), ((~is_beat, made) if has_beats else made)

    def fail(number, origin):
        # Reading again with names fails where reading failed.
        failing = again(number, origin).map(lambda *fields: then(*read(*fields)))
        expected = "an image that can be read twice"
        failing = failing.map(
            lambda *_: _fail(tf.TensorSpec([], "bool"), expected, "another one")
        )
        return failing.get_single_element()

    # An error leaves a gap between the numbers. Beats, which cannot fail, show it
    # where no example is read any more: they have the number of those before them.
    numbered = dataset.enumerate()
    if has_beats:
        beats = tf.data.Dataset.range(1, tf.int64.max).map(
            lambda n: (-n * _AT_ONCE, (_zeros(fields), _zeros(origin)))
        )
        turns = tf.data.Dataset.range(_AT_ONCE + 1).map(lambda n: n // _AT_ONCE)
        numbered = tf.data.Dataset.choose_from_datasets(
            [numbered, beats], turns.repeat()
        )
    # The order is kept whatever the options of the data set that is made of this one.
    done = numbered.map(
        value_or_beat, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    missing = tf.data.Dataset.from_tensors(0).map(
        lambda _: (*2 * [tf.constant(-1, "int64")], _zeros(done.element_spec[2]))
    )
    done = done.ignore_errors().concatenate(missing.repeat()).take(count)
    checked = done.scan(2 * (tf.constant(0, "int64"),), check)
    if has_beats:
        checked = checked.filter(lambda is_example, _: is_example)
        checked = checked.map(lambda _, made: made)
    return checked.apply(tf.data.experimental.assert_cardinality(count))


def read_or_name(function: Callable, item: Any, expected: str, place: Any) -> Any:
    """`function(item)`, or an error that names a place."""
    if not _with_names.get():
        return function(item)
    return attempt(function, item, lambda _, specs: _fail(specs, expected, place))


def records_or_name(records: Any, path: Any, count: Any) -> Any:
    """The first records of a data set, with an error that names a file with fewer."""
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

    Without it the message is the same, and the error's class one of TensorFlow's own.

    Raises:
        ValueError: if an example cannot be read; with the name of its file.

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
    """An error, with the structure of the element whose place it takes."""
    import tensorflow as tf

    about = [f"Expected {expected}; received:", place]
    with tf.control_dependencies([tf.debugging.Assert(False, about)]):
        return _zeros(specs)


def _zeros(specs):
    """A structure of tensors; sizes that are not known are 0."""
    import tensorflow as tf

    return tf.nest.map_structure(
        lambda spec: tf.zeros([size or 0 for size in spec.shape], spec.dtype), specs
    )
