"""Every error says what is wrong and what to do; the page of errors, made from the source, has all of them."""

import functools
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("messages", ROOT / "docs/messages.py")
page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(page)
page.messages = functools.cache(lambda folder, read=page.messages: [*read(folder)])

MAKE_CONFIG_ERRORS = {"ConfigError", "NotPreparedError", "error", "_error"}
# Reasons that say themselves what is required, or that the named thing is missing or unreadable.
SAYS_WHAT_TO_DO = r"must |needs |required?s?\b|expected |[Nn]o effect|not used|takes no|only |not found|no such|cannot|missing"
SAYS_WHAT_TO_DO += r"|invalid JSON|not UTF-8|not a |has no |have no |holds no |no \.\.\.|is empty"


def test_every_config_error_says_what_to_do():
    found = [message for folders in page.HEADINGS.values() for folder in folders for message in page.messages(folder)]
    of_users = [message for message in found if message.exception in MAKE_CONFIG_ERRORS]
    assert len(of_users) > 300
    unhelpful = [message for message in of_users if not message.fix and not re.search(SAYS_WHAT_TO_DO, message.reason)]
    assert not unhelpful, "give them a hint"


def test_every_folder_with_errors_has_a_heading():
    listed = {folder for folders in page.HEADINGS.values() for folder in folders}
    folders = {path.name for path in (ROOT / "jaxdp").iterdir() if (path / "__init__.py").exists()}
    assert not [folder for folder in folders - listed - {"doctor"} if any(page.messages(folder))]  # doctor prints fixes itself


def test_page_has_each_message_with_its_fix():
    rows = re.findall(r"^\| `.*", page.errors(), re.MULTILINE)
    assert len(rows) > 400
    assert "| `batch: needs at least one phase` |  |" in rows
    assert any("the warm-up would lower the rate" in row and row.endswith("| `use --schedule.start 0` |") for row in rows)
