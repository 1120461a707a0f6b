"""Markdown and YAML of text that is not trusted, such as names of classes."""

import json
import re
from collections.abc import Iterable, Sequence

from jaxdp.errors import printable

# What has a meaning within a line of CommonMark or GitHub's Markdown; a backslash takes it away.
SPECIAL = re.compile(r"([\\`*_{\[\]<>&|~$#]|:(?=/)|(?<=www)\.)")
LONGEST = 1000  # characters of a text


def escape(text: object) -> str:
    """Text that a Markdown document shows verbatim, in one line, also in a table."""
    return SPECIAL.sub(r"\\\1", printable(text, LONGEST))


def yaml_string(text: object) -> str:
    """Text as a double-quoted scalar of YAML, in one line: a JSON string of printable characters is one."""
    return json.dumps(printable(text, LONGEST), ensure_ascii=False)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of text, which is escaped."""
    lines = [header, ["---"] * len(header), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
