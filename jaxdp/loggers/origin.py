"""Where a session runs, as trackers show it: host, command and commit."""

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdp.files import PASSWORD, SECRET

SECRET_VALUE = re.compile(rf"((?:{SECRET})[^\s:=]*[\s:=]).*", re.IGNORECASE | re.DOTALL)


def describe_origin() -> dict[str, str]:
    """The host, the command and the commit of this session, without what is unknown."""
    origin = {"host": socket.gethostname(), "command": command_line(sys.orig_argv), "commit": git_commit() or ""}
    return {name: encodable(text) for name, text in origin.items() if text}


def command_line(words: Sequence[str]) -> str:
    """A command as one line, without passwords in URLs and without the text after a secret's name."""
    shown: list[str] = []
    for word in words:
        after_flag = bool(shown) and shown[-1].startswith("-") and "=" not in shown[-1]
        after_secret = after_flag and re.search(SECRET, shown[-1], re.IGNORECASE)
        shown.append("..." if after_secret else PASSWORD.sub(r"\1...@", SECRET_VALUE.sub(r"\1...", word)))
    return shlex.join(shown)


def git_commit(folder: str | Path = ".") -> str | None:
    """The commit of a folder's checkout, with "+changes" for changed files; None outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]  # no lock that would stop a command of the user
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+changes" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def encodable(text: str) -> str:
    """Text with backslash escapes in place of bytes that are not UTF-8, which file names may contain."""
    return text.encode(errors="backslashreplace").decode()
