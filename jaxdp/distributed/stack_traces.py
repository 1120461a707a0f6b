"""Stack traces of this process's threads, taken without reading a file, because the disk may be stuck."""

import contextlib
import gc
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from jaxdp.errors import print_safe, printable

MAX_FRAMES, MAX_THREADS = 12, 5  # innermost frames of a stack; threads of a process besides the main thread
MAIN, NATIVE = "main thread", "native thread"
DUMPED = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')  # a frame as faulthandler writes it
# Threads that the training thread waits for, in the order they are shown; others belong to loggers and the like.
AWAITED = (NATIVE, "decode_", "prefetch_", "prepare_", "compile_", "checkpoint_")
WATCHING_THREADS = ("watchdog", "status-files", "print-stacks")
STANDARD_LIBRARY = re.compile(r"/lib\d*/python3\.\d+/(?!(?:site|dist)-packages/)")
PREFIX = re.compile(rf"^.*/(?:(?:site|dist)-packages|lib\d*/python3\.\d+)/|^{re.escape(str(Path(__file__).parents[2]))}/")


_walking = threading.Lock()


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PREFIX.sub('', self.file)}:{self.line} in {self.function}"


class Stack(NamedTuple):
    """The stack trace of a thread. frames: innermost first."""

    name: str
    frames: tuple[Frame, ...]


def capture(training_thread: int | None) -> list[Stack]:
    """The stack trace of the training thread, given by its identity, then of the other threads that are not idle.

    Threads of a pool at the same line are merged; the threads that the run may wait for come first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
    groups: dict[tuple[bool, tuple[Frame, ...]], list[str]] = {}
    for identity, frames in _frames_by_thread().items():
        name = MAIN if identity == training_thread else names.get(identity, NATIVE)  # such as XLA's in a callback
        is_watching = identity == threading.get_ident() or name in WATCHING_THREADS
        # A thread of a pool waits for work in the standard library alone; other threads wait somewhere in it.
        is_idle = all(map(_is_standard, frames)) if name.startswith(AWAITED) else _is_standard(frames[0])
        if name == MAIN or not (is_watching or is_idle):
            groups.setdefault((name == MAIN, frames), []).append(name)
    stacks = []
    for (_, frames), (first, *others) in groups.items():
        stacks.append(Stack(first + (f" and {len(others)} more" if others else ""), frames))
    return sorted(stacks, key=lambda stack: [stack.name != MAIN, *(not stack.name.startswith(name) for name in AWAITED)])[
        : 1 + MAX_THREADS
    ]


def _frames_by_thread() -> dict[int, tuple[Frame, ...]]:
    """The frames of every thread, innermost first.

    Garbage collection is off meanwhile. Before Python 3.12, a collection may begin when a frame object is made. It runs
    finalizers, which may let the other thread leave this frame; reading the frame then ends the process by SIGSEGV.
    """
    with _walking:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return {identity: tuple(_walk(top)) for identity, top in sys._current_frames().items()}
        finally:
            if is_enabled:
                gc.enable()


def _walk(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _is_standard(frame: Frame) -> bool:
    return STANDARD_LIBRARY.search(frame.file) is not None


def format_stacks(stacks: Sequence[Stack]) -> list[str]:
    """Lines to print, most recent call first as in faulthandler."""
    lines = []
    for stack in stacks:
        lines += [f"  {stack.name}:", *(f"    {frame}" for frame in stack.frames[:MAX_FRAMES])]
    return lines


def place_in(stacks: Sequence[Stack], names: str | tuple[str, ...]) -> str:
    """On one line, the innermost frames of the first thread with one of these names, or else of the first; "" if none."""
    found = [*(stack for stack in stacks if stack.name.startswith(names)), *stacks]
    return f"{found[0].name} at {_shown(found[0].frames)}" if found else ""


def place_of(error: BaseException) -> str:
    """The innermost frames of the traceback of an error, or of the first one that led to it, on one line."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    frames = [Frame(*entry[:3]) for entry in traceback.extract_tb(error.__traceback__)][::-1]
    return f"raised at {_shown(frames)}" if frames else ""


def place_of_dump(text: str) -> str:
    """The innermost frames of up to three threads that execute code, or else of the main thread, as faulthandler writes them.

    The main thread, which is the oldest, comes last. Returns "" without threads.
    """
    threads = []
    for part in text.split("most recent call first")[1:]:
        matches = map(DUMPED.match, part.splitlines())
        threads.append([Frame(match[1], int(match[2]), match[3]) for match in matches if match])
    if not (threads := [frames for frames in threads if frames]):
        return ""
    named = [(MAIN, threads.pop()), *(("a thread", frames) for frames in threads)]
    busy = [one for one in named if not (_is_standard(one[1][0]) or str(Path(__file__).parent) in one[1][0].file)]
    return "; ".join(f"{name} at {_shown(frames)}" for name, frames in (busy or named[:1])[:3])


def _shown(frames: Sequence[Frame]) -> str:
    own = [frame for frame in frames if not _is_standard(frame)] or frames
    return printable(" < ".join(map(str, own[:3])), 400)


def print_lines(lines: Sequence[str]) -> None:
    """Print a report on stderr in another thread, because a full pipe blocks the writer.

    The report is lost if the system allows no further thread: the caller, which watches the run, must continue.
    """
    text = "jaxdp: " + "\n".join(lines)
    thread = threading.Thread(target=lambda: print_safe(text, sys.stderr), name="print-stacks", daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
