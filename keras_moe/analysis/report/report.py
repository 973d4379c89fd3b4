"""The report on the routing of a model: a page, its pictures, and its figures."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_moe.analysis.plots.figure import write_figure
from keras_moe.analysis.report.collection import Collection
from keras_moe.analysis.report.examples import array_length
from keras_moe.analysis.report.page import Chapter, import_jinja2, page_html
from keras_moe.analysis.report.queues import ShuffledBatches, whole_groups
from keras_moe.analysis.report.reservoir import checked_numbers
from keras_moe.analysis.report.section import (
    LEVELS,
    Figure,
    Options,
    Section,
    Verdict,
)
from keras_moe.analysis.report.subject import make_subject
from keras_moe.checks import check_integer
from keras_moe.files import is_plain_file, staged_folder, write_json, write_text

PAGE, DATA = "report.html", "report.json"
# Dots per inch of pictures: 3.5 inches are wide enough for a model card.
_DPI = 160


class Report(NamedTuple):
    """The files of a report, and its findings.

    Attributes:
        page: path of `report.html`.
        data: path of `report.json`.
        pictures: paths of its figures as PNG files, in reading order.
        verdicts: findings in plain words, those of the page.
        num_examples: number of examples that it read.
    """

    page: Path
    data: Path
    pictures: list[Path]
    verdicts: list[Verdict]
    num_examples: int


def report(
    model: Any,
    data: Any,
    folder: str | os.PathLike = "report",
    *,
    name: str | None = None,
    class_names: Any = None,
    batch_size: int = 32,
    max_examples: int | None = None,
    sections: Sequence[type[Section]] | None = None,
    options: Options | None = None,
    verbose: Any = "auto",
) -> Report:
    """Writes a page on what the experts of a model do with data.

    The page is one file without links to others, which any browser shows without a
    network. The data is read once, batch by batch, and memory does not grow with it.

    Args:
        model: backbone or task with experts, with its weights.
        data: images as the model takes them, an array (B, height, width, channels), or
            the dict of a model of texts; a tuple `(images, labels)` of arrays, or
            `(images, captions)`, or a dict with `"images"` and `"captions"` for a
            model with a tokenizer; or batches of any of these, such as
            `keras_moe.data.load` and `keras_moe.data.load_pairs` give.
        folder: new folder for the report, or that of an older one, which it replaces.
        name: name of the model for the title; None is the model's own.
        class_names: names of all classes of labels; None takes the preprocessor's, and
            numbers for classes beyond them.
        batch_size: number of examples that are routed at once; a smaller one, or up to
            four times as many, where groups of training would be divided.
        max_examples: number of examples after which the report ends; None for all.
        sections: sections in reading order; None for
            `keras_moe.analysis.report.sections.SECTIONS`. Those that do not fit the
            model are left out.
        options: choices of its sections; None for `Options()`.
        verbose: whether to show a progress bar.

    Returns:
        `Report` with the paths of the files, and the findings in plain words.

    Raises:
        ValueError: if the model has no experts, the data does not fit it or has no
            example, a label has none of the `class_names`, the options ask for examples
            that it has not, or the folder holds something else than a report.
        OSError: if it cannot be written. An older report is whole then.
        ImportError: if Jinja2 or matplotlib is not installed.

    Example:

    >>> import numpy as np
    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", num_classes=10, load_weights=False)
    >>> images = np.zeros((3, 16, 16, 1), "float32")
    >>> written = analysis.report(model, images, "my_report", verbose=0)
    >>> written.page.name, written.num_examples
    ('report.html', 3)
    """
    import_jinja2()
    # Sections write markup with what Jinja2 brings: who makes no report needs it not.
    from keras_moe.analysis.report.sections import SECTIONS

    options = options or Options()
    checked_numbers(options.examples, _known_count(data, max_examples))
    subject = make_subject(model, name, class_names)
    chosen = [x for x in sections or SECTIONS if x.fits(subject)]
    if len({section.anchor for section in chosen}) < len(chosen):
        raise ValueError(
            "Expected sections of different anchors; received: "
            f"{[section.anchor for section in chosen]}"
        )
    sections = [section(subject, options) for section in chosen]
    bar = keras.utils.Progbar(max_examples, unit_name="example") if verbose else None
    # Tokens of a batch then compete as they do in training.
    at_once = whole_groups(subject, check_integer("batch_size", batch_size))
    collection = Collection(subject, at_once, max_examples, bar and bar.update)
    shuffled = ShuffledBatches(subject, at_once, options.seed)
    for batch in collection.batches(data):
        if class_names is not None and batch.labels is not None:
            _check_names(subject.class_names, batch.labels)
        for section in sections:
            section.update(batch)
        for drawn in shuffled.add(batch):
            for section in sections:
                section.update_queues(drawn)
    for drawn in shuffled.rest():
        for section in sections:
            section.update_queues(drawn)
    checked_numbers(options.examples, collection.num_examples)
    chapters = [Chapter(section, section.finish()) for section in sections]
    verdicts = [verdict for chapter in chapters for verdict in chapter.content.verdicts]
    # Problems first, and for the rest in reading order.
    verdicts.sort(key=lambda verdict: -LEVELS.index(verdict.level))
    experts = sorted({block.num_experts for block in subject.blocks.values()})
    facts = {
        "examples": f"{collection.num_examples:,}",
        "layers with experts": len(subject.by_layer()),
        "experts in a layer": " or ".join(map(str, experts)),
    }
    with staged_folder(folder, "report", _is_report, _is_own(folder)) as staging:
        pictures = _write_pictures(chapters, staging)
        write_text(staging / PAGE, page_html(subject, chapters, facts))
        values = {
            "name": subject.name,
            "examples": collection.num_examples,
            "pictures": pictures,
            "verdicts": [verdict._asdict() for verdict in verdicts],
            "sections": {c.section.anchor: c.content.data for c in chapters},
        }
        write_json(staging / DATA, values)
    folder = Path(folder).expanduser().resolve()
    return Report(
        folder / PAGE,
        folder / DATA,
        [folder / picture for picture in pictures],
        verdicts,
        collection.num_examples,
    )


def _check_names(names, labels):
    largest = labels.max(initial=-1)
    if largest >= len(names):
        raise ValueError(
            "Expected class_names of all classes of the labels; received: "
            f"{len(names)} class_names, and label {largest}"
        )


def _known_count(data, max_examples):
    """The number of examples as far as it is known before they are read."""
    counts = [x for x in (array_length(data), max_examples) if x is not None]
    return min(counts, default=None)


def _write_pictures(chapters, folder):
    """Writes the figures, and returns the names of their files."""
    names = []
    for chapter in chapters:
        for item in chapter.content.body:
            if isinstance(item, Figure):
                name = f"{item.name}.png"
                if name in names:
                    raise ValueError(
                        "Expected figures of different names; received: "
                        f"{item.name!r} twice"
                    )
                item.drawing.set_dpi(_DPI)
                write_figure(item.drawing, folder / name)
                names.append(name)
    return names


def _is_report(folder):
    return is_plain_file(folder, PAGE) and is_plain_file(folder, DATA)


def _is_picture(name):
    """Whether it is a name that pictures of reports have."""
    return isinstance(name, str) and name.endswith(".png") and name == Path(name).name


def _is_own(folder):
    """A function that tells whether a file belongs to the report in a folder."""
    names = {PAGE, DATA}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        text = (Path(folder).expanduser() / DATA).read_text(encoding="utf-8")
        # A name in a list that others wrote is no reason to delete a file of theirs.
        names.update(filter(_is_picture, json.loads(text)["pictures"]))
    return lambda path: path.name in names
