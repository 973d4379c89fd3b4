"""Writes the routing report: one HTML file that loads nothing else."""

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe import _files
from keras_moe._batches import progress_bar
from keras_moe._checks import check_integer, import_extra, unfit
from keras_moe._types import KerasModel
from keras_moe._version import __version__
from keras_moe.analysis.plots._figure import figure_svg, save_figure
from keras_moe.evaluation.retrieval import retrieval
from keras_moe.report._data import draw_examples, routed_batches
from keras_moe.report._queues import ShuffledBatches, whole_groups
from keras_moe.report.model import reported_model
from keras_moe.report.section import (
    LEVELS,
    Batch,
    Figure,
    Finding,
    Html,
    Options,
    Section,
    SectionContent,
    Table,
)

PAGE, DATA = "report.html", "report.json"
# A picture for model cards.
FRONT = "experts.png"
# Page size that mail programs still send and phones show quickly.
MAX_BYTES = 2_000_000
_FOLDER = Path(__file__).parent
# Pairs whose embeddings are kept, so that memory does not grow with the data.
_MOST_PAIRS = 10_000
# Dots per inch of PNG files: 3.5 inches are wide enough for a model card.
_DPI = 160


class Report(NamedTuple):
    """The files of a report, and its findings.

    Attributes:
        page: path of `report.html`.
        data: path of `report.json`.
        pictures: paths of its figures as PNG files, in reading order; for images the
            first one, `experts.png`, is what each expert looks at.
        findings: findings in plain words, as on the page.
        num_examples: number of examples reported on.
    """

    page: Path
    data: Path
    pictures: list[Path]
    findings: list[Finding]
    num_examples: int


def write_report(
    model: KerasModel,
    data: object,
    folder: str | os.PathLike = "report",
    *,
    name: str | None = None,
    class_names: Sequence[str | bytes] | None = None,
    batch_size: int = 32,
    max_examples: int | None = None,
    sections: Sequence[type[Section]] | None = None,
    options: Options | None = None,
    command: str | None = None,
    credit: str | None = None,
    verbose: str | int = "auto",
) -> Report:
    """Writes a page on what the experts of a model do with data.

    The page is a single offline HTML file. Data is read batch by batch.

    Args:
        model: backbone or task with experts.
        data: images (B, height, width, channels) or the model's input dict; a tuple
            `(images, labels)` or `(images, captions)`, or a dict of `"images"` and
            `"captions"` for a model with a tokenizer; for a language model a list of
            texts or rows of token ids (B, N); or batches of these, such as
            `keras_moe.data.load` or `keras_moe.data.load_pairs`.
        folder: folder of the report; an older report there is replaced.
        name: model name for the title; None for the model's own.
        class_names: names of the labels' classes; None for the preprocessor's.
        batch_size: examples per batch; may change to keep training groups whole.
        max_examples: number of examples to report on; None for all. They are drawn by
            the options' seed, of all classes alike, which reads the data twice, in
            the same order. Of iterators and endless data, they are the first ones.
        sections: in reading order; None for `keras_moe.report.sections.SECTIONS`. Those
            that do not fit the model are left out.
        options: options of the sections; None for `Options()`.
        command: command that made the report, to show on the page.
        credit: owners and licence of the pictures, to show on the page; see
            `keras_moe.data.credit`.
        verbose: see `keras_moe.evaluation.extract_features`.

    Raises:
        OSError: if the report cannot be written; an older one stays untouched.

    Example:

    >>> from keras_moe import models
    >>> from keras_moe.report import write_report
    >>> model = models.from_preset("vmoe_digits", num_classes=10, load_weights=False)
    >>> images = np.zeros((3, 16, 16, 1), "float32")
    >>> written = write_report(model, images, "my_report", verbose=0)
    >>> written.page.name, written.num_examples
    ('report.html', 3)
    """
    import_jinja2()
    # Sections write markup with what Jinja2 brings, which only reports need.
    from keras_moe.report.sections import SECTIONS

    options = options or Options()
    check_integer("max_examples", max_examples, optional=True)
    check_examples(options.examples, max_examples)
    reported = reported_model(model, name, class_names)
    own = [x(reported, options) for x in sections or SECTIONS if x.fits(reported)]
    _check_distinct("anchors of sections", [section.anchor for section in own])
    drawn = draw_examples(reported, data, max_examples, options.seed)
    numbers = None if drawn is None else drawn.numbers
    seen = _read(reported, data, own, batch_size, max_examples, verbose, numbers)
    count, score, labels = seen
    check_examples(options.examples, count)
    contents = [(section, section.finish()) for section in own]
    findings = [finding for _, content in contents for finding in content.findings]
    # Problems first, otherwise in reading order.
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    figures = [item for _, x in contents for item in x.body if isinstance(item, Figure)]
    pictures = [f"{figure.name}.png" for figure in figures]
    fronts = [front for x in own if (front := x.front()) is not None]
    drawings = [*fronts[:1], *(figure.drawing for figure in figures)]
    pictures = [*[FRONT][: len(fronts)], *pictures]
    _check_distinct("names of figures", pictures)
    experts = sorted({block.num_experts for block in reported.blocks.values()})
    part, read = "", f"{count:,}"
    if drawn is not None and drawn.numbers is not None:
        part = f"{count:,} of {'the first ' * drawn.cut}{drawn.total:,}"
        read = f"{part}, drawn with seed {options.seed}"
    elif drawn is None and count == max_examples:
        part = read = f"the first {count:,}"
    known = len(reported.class_names or ())
    facts = {
        **{f"{x} on {part}" if part else x: y for x, y in score.items()},
        "examples": read,
        **({"classes": f"{labels} of {known}" if known else labels} if labels else {}),
        "layers with experts": len(reported.by_layer()),
        "experts in a layer": " or ".join(map(str, experts)),
        "backend": f"{keras.backend.backend()}, Keras {keras.__version__}",
        "date": datetime.date.today().isoformat(),
    }
    values = {
        "name": reported.name,
        "examples": count,
        "examples_in_data": drawn.total if drawn else count,
        "classes": labels,
        "score": score,
        "pictures": pictures,
        "findings": [finding._asdict() for finding in findings],
        "sections": {section.anchor: content.data for section, content in contents},
    }
    with _files.staged_folder(folder, "report", _is_report, _is_own(folder)) as staging:
        for drawing, picture in zip(drawings, pictures):
            drawing.set_dpi(_DPI)
            save_figure(drawing, staging / picture)
        page = page_html(reported.name, contents, facts, command, credit)
        _files.write_text(staging / PAGE, page)
        _files.write_json(staging / DATA, values)
    folder = Path(folder).expanduser().resolve()
    paths = [folder / picture for picture in pictures]
    return Report(folder / PAGE, folder / DATA, paths, findings, count)


def _read(model, data, sections, batch_size, max_examples, verbose, numbers):
    """Reads data in order and in random groups; returns counts and the score."""
    # Keeps training groups whole, so that tokens compete as in training.
    at_once = whole_groups(model, check_integer("batch_size", batch_size))
    shuffled = ShuffledBatches(model, at_once, sections[0].options.seed)
    bar = progress_bar(max_examples, verbose, "example")
    count, score, labels = 0, _Score(), set()
    for batch in routed_batches(model, data, at_once, max_examples, numbers):
        for section in sections:
            section.update(batch)
        _update_queues(sections, shuffled.add(batch))
        score.update(batch)
        if batch.labels is not None:
            labels.update(batch.labels[batch.labels >= 0].tolist())
        count += batch.size
        bar.update(count)
    if max_examples is None or count < max_examples:
        bar.update(count, finalize=True)
    _update_queues(sections, shuffled.rest())
    return count, score.facts(), len(labels)


class _Score:
    """The score in the header: accuracy, or recall of pairs."""

    def __init__(self):
        self._hits = self._labelled = 0
        self._pairs, self._num_pairs = [], 0

    def update(self, batch: Batch) -> None:
        if batch.embeddings is not None:
            if self._num_pairs < _MOST_PAIRS:
                images, texts = batch.embeddings
                pixels = map(np.ndarray.tobytes, np.asarray(batch.images))
                keys = [hashlib.sha256(image).hexdigest() for image in pixels]
                self._pairs.append((images, texts, batch.captions, keys))
                self._num_pairs += batch.size
        elif batch.outputs is not None and batch.labels is not None:
            known = batch.labels >= 0
            self._labelled += int(known.sum())
            hits = batch.outputs[known].argmax(axis=-1) == batch.labels[known]
            self._hits += int(hits.sum())

    def facts(self) -> dict[str, str]:
        """The score by its name; empty without labels and pairs."""
        if self._labelled:
            return {"accuracy": f"{self._hits / self._labelled:.1%}"}
        if not self._pairs:
            return {}
        images, texts, captions, keys = map(np.concatenate, zip(*self._pairs))
        if not (np.isfinite(images).all() and np.isfinite(texts).all()):
            return {}
        # Equal captions belong to all their images.
        _, ids = np.unique(captions.astype(str), return_inverse=True)
        # An image with several captions is there several times.
        _, first, image_of_text = np.unique(
            keys, return_index=True, return_inverse=True
        )
        recalls = retrieval(images[first], texts, image_of_text, (1,), text_ids=ids)
        recalls = recalls.figures().values()
        name = "R@1 image to text, text to image"
        if self._num_pairs >= _MOST_PAIRS:
            name = f"{name}, first {self._num_pairs:,} pairs"
        return {name: ", ".join(f"{recall:.1%}" for recall in recalls)}


def _update_queues(sections, batches):
    for batch in batches:
        for section in sections:
            section.update_queues(batch)


def check_examples(examples: Sequence[int] | None, count: int | None) -> None:
    """Checks that example numbers are distinct and below `count`, if it is known."""
    if examples is None:
        return
    numbers = [check_integer("examples", number, 0) for number in examples]
    if not numbers or (count is not None and max(numbers) >= count):
        expected = f"numbers of examples below {count}, which the report reads"
        raise unfit(expected, examples=examples)
    _check_distinct("numbers of examples", numbers)


def _check_distinct(what, names):
    if len({*names}) < len(names):
        raise ValueError(f"Expected different {what}; received: {names}")


def _is_report(folder):
    return _files.is_plain_file(folder, PAGE) and _files.is_plain_file(folder, DATA)


def _is_own(folder):
    """A predicate for the files in a folder that belong to its report."""
    names = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        folder = Path(folder).expanduser()
        names = json.loads(_files.read_text(folder / DATA, folder))["pictures"]
    # A tampered list must not delete other files.
    return lambda path: (
        path.name in (PAGE, DATA) or (path.suffix == ".png" and path.name in names)
    )


def page_html(
    name: str,
    contents: list[tuple[Section, SectionContent]],
    facts: dict[str, object],
    command: str | None = None,
    credit: str | None = None,
) -> str:
    """The page: title, summary, and sections."""
    # With Jinja2, which only reports need.
    from keras_moe.report._markup import ENVIRONMENT

    template = ENVIRONMENT.get_template("page.html")
    sections = [
        {
            "title": section.title,
            "anchor": section.anchor,
            "intro": section.intro,
            "parts": _parts(content.body),
            "findings": content.findings,
        }
        for section, content in contents
    ]
    values = {
        "name": name,
        "sections": sections,
        "css": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": (_FOLDER / "page.js").read_text(encoding="utf-8"),
        # Problems first.
        "levels": LEVELS[::-1],
        "version": __version__,
        "command": command,
        "credit": credit,
        "cell_text": _cell_text,
    }
    page = template.render(facts=facts, **values)
    if (excess := len(page.encode("utf-8")) - MAX_BYTES) > 0:
        left_out = _leave_out(sections, excess)
        facts = {**facts, "pictures left out for the page's size": left_out}
        page = template.render(facts=facts, **values)
    return page


def _leave_out(sections, excess):
    """Replaces the largest pictures by a sentence, and returns their number."""
    parts = [part for section in sections for part in section["parts"]]
    pieces = [piece for part in parts for piece in part.get("figures", [part])]
    pieces = [piece for piece in pieces if "markup" in piece]
    pieces.sort(key=lambda piece: -len(piece["markup"]))
    for number, piece in enumerate(pieces):
        if excess <= 0:
            return number
        where = f"it is in {piece['file']}" if "file" in piece else "it is left out"
        text = f"The page has no room for this picture: {where}."
        excess += len(text) - len(piece["markup"])
        piece.update(kind="text", text=text, markup="")
    return len(pieces)


def import_jinja2() -> ModuleType:
    """Imports Jinja2, which the page needs."""
    return import_extra("jinja2", "Reports need Jinja2 and matplotlib", "report")


def _cell_text(cell):
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return f"{cell:,.4g}" if isinstance(cell, float) else cell


def _is_number(cell):
    """Whether a cell is a number, a percentage, or empty."""
    if isinstance(cell, str):
        return cell.removesuffix("%").replace(".", "", 1).replace(",", "").isdigit()
    return cell is None or type(cell) in (int, float)


def _parts(body):
    """The template's view of a section's parts, with figures in rows."""
    parts = []
    for item in body:
        if isinstance(item, Figure):
            if not parts or parts[-1]["kind"] != "figures":
                parts.append({"kind": "figures", "figures": []})
            parts[-1]["figures"].append(_drawn(item))
        elif isinstance(item, Table):
            parts.append({"kind": "table", **_table(item)})
        elif isinstance(item, Html):
            parts.append({"kind": "html", "markup": item.markup})
        else:
            parts.append({"kind": "text", "text": item})
    return parts


def _table(table):
    """The template's view of a table, without empty columns."""
    columns: Any = zip(*table.rows) if table.rows else [()] * len(table.head)
    columns = [
        (title, column)
        for title, column in zip(table.head, columns)
        if not column or any(cell is not None for cell in column)
    ]
    return {
        "head": [title for title, _ in columns],
        "rows": list(zip(*(column for _, column in columns))),
        "caption": table.caption,
        "numeric": [all(map(_is_number, column)) for _, column in columns],
    }


def _drawn(figure):
    import markupsafe

    return {
        "markup": markupsafe.Markup(figure_svg(figure.drawing)),
        "alt": figure.alt,
        "caption": figure.caption,
        "file": f"{figure.name}.png",
        "width": figure.drawing.get_size_inches()[0],
    }
