"""Tables for a terminal."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text


def numbers_table(
    title: str | None,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    last: Iterable[Sequence[object]] = (),
    texts: Sequence[int] = (0,),
    caption: str | None = None,
) -> Table:
    """Rows, and the `last` ones apart, of numbers but for the columns of `texts`."""
    # Names of sources and files may have brackets, which are no markup.
    heading = title if title is None else Text(title, "table.title")
    table = Table(title=heading, caption=caption)
    for column, name in enumerate(head):
        table.add_column(name, justify="left" if column in texts else "right")
    for part in (rows, last):
        for row in part:
            table.add_row(*(Text(str(value)) for value in row))
        table.add_section()
    return table
