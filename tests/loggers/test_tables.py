"""Tables, on terminals of several widths and elsewhere."""

import io
import re

import pytest
from rich.table import Table

from jaxdp.doctor import checks
from jaxdp.doctor.checks import CheckResult
from jaxdp.loggers import console, notebook

UNTRUSTED = "\x1b[31mred\x1b[0m [bold]a[/nope] :smile:"
SHOWN = r"\x1b[31mred\x1b[0m [bold]a[/nope] :smile:"
STYLE = re.compile(r"\x1b\[[\d;]*m")
CHECKS = [
    CheckResult("control network", "ok", ["Python 3.12.1, jaxdp 0.1.0, jax 0.10.2"]),
    CheckResult("disk", "error", [UNTRUSTED], ["mount it"]),
]


def with_header():
    table = Table("state")
    table.add_column("accuracy", justify="right")
    table.add_row("valid", "97.00 %")
    table.add_row(f"corrupt: default/ocdbt is missing {UNTRUSTED}", "")
    return table


TABLES = {"with a header": with_header(), "without": checks.make_table(CHECKS)}
WORDS = {  # that a terminal of 80 columns does not break
    "with a header": ["state", "accuracy", "97.00 %", "valid", "corrupt:", *SHOWN.split()],
    "without": ["ok", "error", "control", "network", "3.12.1,", "fix:", *SHOWN.split()],
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """shown(table, stream, columns): what a `Screen` writes to the stream."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)

    def shown(table, stream, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        console.Screen(stream).table(table)
        return stream.getvalue()

    return shown


@pytest.mark.parametrize("columns", [30, 80])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_terminal_and_lose_nothing(shown, name, columns):
    text = STYLE.sub("", shown(TABLES[name], Terminal(), columns))
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text
    whole = shown(TABLES[name], io.StringIO())
    assert sorted("".join(text.split())) == sorted("".join(whole.split()))
    assert columns < 80 or [word for word in WORDS[name] if word not in text] == []


def test_rows_are_lines_where_there_is_no_terminal(shown):
    path = "/long" * 40
    table = checks.make_table([CheckResult("disk", "error", [f"no space in {path}"], ["delete it"])])
    assert shown(table, io.StringIO()).splitlines() == [f"error  disk  no space in {path}", 13 * " " + "fix: delete it"]


def test_tables_of_notebooks_have_no_escape_codes(capsys):
    notebook.Notebook().table(TABLES["without"])
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert output.splitlines()[1].split() == ["error", "disk", *SHOWN.split()]
