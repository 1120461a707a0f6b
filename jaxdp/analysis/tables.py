"""Rich tables of text and numbers."""

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str], caption: str | None = None
) -> Table:
    """A table whose columns are aligned to the right, except those that `left` names."""
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, caption=caption)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    return table
