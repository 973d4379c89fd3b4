"""Tables for a terminal."""

from collections.abc import Iterable, Sequence

from rich.table import Table


def numbers_table(
    title: str | None,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    last: Iterable[Sequence[object]] = (),
    texts: Sequence[int] = (0,),
    caption: str | None = None,
) -> Table:
    """Rows, and the `last` ones apart, of numbers but for the columns of `texts`."""
    table = Table(title=title, caption=caption)
    for column, name in enumerate(head):
        table.add_column(name, justify="left" if column in texts else "right")
    for part in (rows, last):
        for row in part:
            table.add_row(*map(str, row))
        table.add_section()
    return table
