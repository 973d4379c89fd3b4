"""Writes the routing report: one HTML file that loads nothing else."""

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_moe._version import __version__
from keras_moe.analysis.plots.figure import figure_svg, write_figure
from keras_moe.checks import check_integer
from keras_moe.files import is_plain_file, staged_folder, write_json, write_text
from keras_moe.report._data import RoutedData, array_length
from keras_moe.report._queues import ShuffledBatches, whole_groups
from keras_moe.report.model import reported_model
from keras_moe.report.section import (
    LEVELS,
    Figure,
    Finding,
    Options,
    Section,
    SectionContent,
    Table,
)

PAGE, DATA = "report.html", "report.json"
# Page size that mail programs still send and phones show quickly.
MAX_BYTES = 2_000_000
_FOLDER = Path(__file__).parent
# Dots per inch of PNG files: 3.5 inches are wide enough for a model card.
_DPI = 160


class Report(NamedTuple):
    """The files of a report, and its findings.

    Attributes:
        page: path of `report.html`.
        data: path of `report.json`.
        pictures: paths of its figures as PNG files, in reading order.
        findings: findings in plain words, as on the page.
        num_examples: number of examples read.
    """

    page: Path
    data: Path
    pictures: list[Path]
    findings: list[Finding]
    num_examples: int


def write_report(
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

    The page is a single offline HTML file. Data is read once, batch by batch, and
    memory does not grow with it.

    Args:
        model: backbone or task with experts.
        data: images (B, height, width, channels) as the model expects them, or the
            input dict of a model with texts; a tuple `(images, labels)` or `(images,
            captions)`, or a dict of `"images"` and `"captions"` for a model with a
            tokenizer; or batches of these, such as `keras_moe.data.load` or
            `keras_moe.data.load_pairs`.
        folder: folder of the report; an older report there is replaced.
        name: model name for the title; None for the model's own.
        class_names: names of the labels' classes; None for the preprocessor's.
        batch_size: examples per batch; may shrink, or grow up to four times, to keep
            training groups whole.
        max_examples: number of examples to read; None for all.
        sections: sections in reading order; None for
            `keras_moe.report.sections.SECTIONS`. Those that do not fit the model are
            left out.
        options: options of the sections; None for `Options()`.
        verbose: whether to show a progress bar.

    Raises:
        OSError: if the report cannot be written; an older one stays untouched.

    Example:

    >>> import numpy as np
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
    known = [x for x in (array_length(data), max_examples) if x is not None]
    checked_numbers(options.examples, min(known, default=None))
    reported = reported_model(model, name, class_names)
    chosen = [x for x in sections or SECTIONS if x.fits(reported)]
    if len({section.anchor for section in chosen}) < len(chosen):
        raise ValueError(
            "Expected sections of different anchors; received: "
            f"{[section.anchor for section in chosen]}"
        )
    sections = [section(reported, options) for section in chosen]
    bar = keras.utils.Progbar(max_examples, unit_name="example") if verbose else None
    # Keeps training groups whole, so that tokens compete as in training.
    at_once = whole_groups(reported, check_integer("batch_size", batch_size))
    routed = RoutedData(reported, at_once, max_examples, bar and bar.update)
    _read(routed, data, sections, class_names is not None)
    checked_numbers(options.examples, routed.num_examples)
    contents = [(section, section.finish()) for section in sections]
    findings = [finding for _, content in contents for finding in content.findings]
    # Problems first, otherwise in reading order.
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    experts = sorted({block.num_experts for block in reported.blocks.values()})
    facts = {
        "examples": f"{routed.num_examples:,}",
        "layers with experts": len(reported.by_layer()),
        "experts in a layer": " or ".join(map(str, experts)),
    }
    with staged_folder(folder, "report", _is_report, _is_own(folder)) as staging:
        pictures = _write_pictures(contents, staging)
        write_text(staging / PAGE, page_html(reported.name, contents, facts))
        values = {
            "name": reported.name,
            "examples": routed.num_examples,
            "pictures": pictures,
            "findings": [finding._asdict() for finding in findings],
            "sections": {section.anchor: content.data for section, content in contents},
        }
        write_json(staging / DATA, values)
    folder = Path(folder).expanduser().resolve()
    paths = [folder / picture for picture in pictures]
    count = routed.num_examples
    return Report(folder / PAGE, folder / DATA, paths, findings, count)


def _read(routed, data, sections, has_names):
    """Reads the data once, both in order and in random groups."""
    model = routed.model
    shuffled = ShuffledBatches(model, routed.batch_size, sections[0].options.seed)
    for batch in routed.batches(data):
        if has_names and batch.labels is not None:
            largest = batch.labels.max(initial=-1)
            if largest >= len(model.class_names):
                raise ValueError(
                    "Expected class_names of all classes of the labels; received: "
                    f"{len(model.class_names)} class_names, and label {largest}"
                )
        for section in sections:
            section.update(batch)
        for drawn in shuffled.add(batch):
            for section in sections:
                section.update_queues(drawn)
    for drawn in shuffled.rest():
        for section in sections:
            section.update_queues(drawn)


def checked_numbers(examples: Any, count: int | None) -> None:
    """Checks that example numbers are distinct and below `count`."""
    if examples is None:
        return
    if isinstance(examples, (str, bytes)) or not isinstance(examples, Iterable):
        raise ValueError(
            "Expected examples to be a sequence of numbers of examples; received: "
            f"examples={examples!r}"
        )
    numbers = tuple(check_integer("examples", number, 0) for number in examples)
    if not numbers or len({*numbers}) < len(numbers):
        raise ValueError(
            "Expected different numbers of examples, at least one; received: "
            f"examples={numbers}"
        )
    if count is not None and max(numbers) >= count:
        raise ValueError(
            f"Expected numbers of examples from 0 to {count - 1}, since the report "
            f"reads {count}; received: examples={numbers}"
        )


def _write_pictures(contents, folder):
    """Writes the figures as PNG, and returns their file names."""
    names = []
    for _, content in contents:
        for item in content.body:
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


def _is_own(folder):
    """A predicate for the files in a folder that belong to its report."""
    names = {PAGE, DATA}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        text = (Path(folder).expanduser() / DATA).read_text(encoding="utf-8")
        # A tampered list must not delete other files.
        names.update(filter(_is_picture, json.loads(text)["pictures"]))
    return lambda path: path.name in names


def _is_picture(name):
    """Whether a name has the form of a report's picture."""
    return isinstance(name, str) and name.endswith(".png") and name == Path(name).name


def page_html(
    name: str, contents: list[tuple[Section, SectionContent]], facts: dict[str, Any]
) -> str:
    """The page: title, summary, and sections."""
    jinja2 = import_jinja2()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["figure"] = _cell_text
    template = environment.get_template("page.html")
    css, script = (
        (_FOLDER / file).read_text(encoding="utf-8")
        for file in ("report.css", "report.js")
    )
    parts = [
        {
            "title": section.title,
            "anchor": section.anchor,
            "intro": section.intro,
            "parts": _parts(content.body),
            "findings": content.findings,
        }
        for section, content in contents
    ]
    values = {"name": name, "sections": parts, "css": css, "script": script}
    # Problems first.
    values |= {"levels": LEVELS[::-1], "version": __version__}
    page, left_out = template.render(facts=facts, **values), 0
    while (excess := len(page.encode("utf-8")) - MAX_BYTES) > 0:
        if not (number := _leave_out(parts, excess)):
            break
        left_out += number
        facts = {**facts, "pictures left out for the page's size": left_out}
        page = template.render(facts=facts, **values)
    return page


def _leave_out(sections, excess):
    """Replaces the largest figures by a sentence, and returns their number."""
    parts = [part for section in sections for part in section["parts"]]
    pieces = [piece for part in parts for piece in part.get("figures", [part])]
    number = 0
    for piece in sorted(pieces, key=lambda piece: -len(_markup(piece))):
        if excess <= 0 or not _markup(piece):
            break
        excess -= len(_markup(piece))
        number += 1
        where = f"it is in {piece['file']}" if "file" in piece else "it is left out"
        text = f"The page has no room for this picture: {where}."
        piece.update(kind="text", text=text, svg="", markup="")
    return number


def _markup(piece):
    return piece.get("svg") or piece.get("markup") or ""


def import_jinja2() -> Any:
    """Imports Jinja2, which the page needs."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            "Reports need Jinja2 and matplotlib: pip install 'keras-moe[report]'"
        ) from error
    return jinja2


def _cell_text(cell):
    """A table cell as text."""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"


def _is_number(cell):
    """Whether a cell is a number, a percentage, or empty."""
    if isinstance(cell, str):
        return cell.removesuffix("%").replace(".", "", 1).replace(",", "").isdigit()
    return cell is None or (isinstance(cell, (int, float)) and cell is not True)


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
        elif isinstance(item, str) and not hasattr(item, "__html__"):
            parts.append({"kind": "text", "text": item})
        else:
            parts.append({"kind": "html", "markup": item.markup})
    return parts


def _table(table):
    """The template's view of a table, without empty columns."""
    columns = zip(*table.rows) if table.rows else [()] * len(table.head)
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

    if not hasattr(figure.drawing, "savefig"):
        raise TypeError(
            f"Expected a matplotlib figure for {figure.name!r}; received: "
            f"{type(figure.drawing).__name__}"
        )
    return {
        "svg": markupsafe.Markup(figure_svg(figure.drawing)),
        "alt": figure.alt,
        "caption": figure.caption,
        "file": f"{figure.name}.png",
        "width": figure.drawing.get_size_inches()[0],
    }
