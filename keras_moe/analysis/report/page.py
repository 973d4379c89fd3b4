"""The page of the report: one file of HTML, which loads nothing else."""

from pathlib import Path
from typing import Any, NamedTuple

from keras_moe._version import __version__
from keras_moe.analysis.plots.figure import figure_svg
from keras_moe.analysis.report.section import (
    LEVELS,
    Content,
    Figure,
    Section,
    Subject,
    Table,
)

_FOLDER = Path(__file__).parent
# The largest page: what many mail programs send, and phones show at once.
MAX_BYTES = 2_000_000


class Chapter(NamedTuple):
    """A section of the page.

    Attributes:
        section: its section.
        content: the section's content.
    """

    section: Section
    content: Content


def page_html(subject: Subject, chapters: list[Chapter], facts: dict[str, Any]) -> str:
    """The page."""
    jinja2 = import_jinja2()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["figure"] = _figure
    template = environment.get_template("page.html")
    css, script = (
        (_FOLDER / name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    parts = [
        {
            "title": section.title,
            "anchor": section.anchor,
            "intro": section.intro,
            "parts": _parts(content.body),
            "verdicts": content.verdicts,
        }
        for section, content in chapters
    ]

    def render():
        return template.render(
            subject=subject,
            # Problems are read first.
            levels=LEVELS[::-1],
            facts=facts,
            chapters=parts,
            css=css,
            script=script,
            version=__version__,
        )

    page, left_out = render(), 0
    while (excess := len(page.encode("utf-8")) - MAX_BYTES) > 0:
        if not (number := _leave_out(parts, excess)):
            break
        left_out += number
        facts = {**facts, "pictures left out for the page's size": left_out}
        page = render()
    return page


def _leave_out(chapters, excess):
    """Leaves pictures out of the longest chapters, and returns their number."""
    pieces = [
        [
            piece
            for part in chapter["parts"]
            for piece in part.get("figures", [part])
            if _markup(piece)
        ]
        for chapter in chapters
    ]
    number = 0
    while excess > 0 and any(pieces):
        longest = max(pieces, key=lambda own: sum(len(_markup(x)) for x in own))
        piece = max(longest, key=lambda x: len(_markup(x)))
        longest.remove(piece)
        excess -= len(_markup(piece))
        number += 1
        place = f"it is in {piece['file']}" if "file" in piece else "it is left out"
        text = f"The page has no room for this picture: {place}."
        piece.update(kind="text", text=text, svg="", markup="")
    return number


def _markup(piece):
    return piece.get("svg") or piece.get("markup") or ""


def import_jinja2() -> Any:
    """Jinja2, which the page needs."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            "Reports need Jinja2 and matplotlib: pip install 'keras-moe[report]'"
        ) from error
    return jinja2


def _figure(cell):
    """A cell of a table as text."""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"


def _is_number(cell):
    """Whether a cell is a number, a percentage, or empty."""
    if isinstance(cell, str):
        return cell.removesuffix("%").replace(".", "", 1).replace(",", "").isdigit()
    return cell is None or (isinstance(cell, (int, float)) and cell is not True)


def _parts(body):
    """The parts of a section as the template takes them; figures in rows."""
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
    """A table as the template takes it, without columns that are empty."""
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
