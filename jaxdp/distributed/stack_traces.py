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
# Threads that the run waits for; others belong to loggers and the like.
RUN_THREADS = (MAIN, NATIVE, "decode_", "prefetch_", "prepare_", "compile_", "checkpoint_")
# Threads of jaxdp that only watch.
WATCHING_THREADS = ("watchdog", "status-files", "print-stacks")
DEVICES, OTHER_RANKS, OTHER_THREAD, COMPILER = "devices", "other ranks", "another thread", "the compiler"
WORKING = ("", COMPILER)
DEVICE_WAITS = ("device_get", "_value", "block_until_ready", "__array__", "_item")  # JAX's functions that wait for a device
LIBRARY = re.compile(r"/(jax|orbax|concurrent|asyncio)/|/(threading|queue|selectors|pathlib|contextlib|nest_asyncio)\.py$")
CONTROL = tuple(f"jaxdp/distributed/{name}.py" for name in ("process_group", "watchdog", "follower", "status", "coordination"))
# The innermost frame is here during the call of a compiled program, which may wait for other devices.
STARTED_IN = f"{Path(__file__).parents[1] / 'training'}/"
COORDINATION = ("barrier", "sync_global", "key_value")  # parts of the names of functions that wait for JAX's service
SIGNAL_HANDLER = "jaxdp/distributed/signal_handler.py"
CALLERS = ("concurrent/futures/thread.py", SIGNAL_HANDLER)  # call the functions that the run's threads execute
SLEEPING = ("/threading.py", "/queue.py", "/selectors.py", "/socket.py", "/asyncio/base_events.py", "/socketserver.py")
PREFIX = re.compile(rf"^.*/(?:(?:site|dist)-packages|lib/python3\.\d+)/|^{re.escape(str(Path(__file__).parents[2]))}/")
# Files whose frames do not show what a thread does or waits for.
WAIT_PRIMITIVES = ("threading.py", "concurrent/", "selectors.py", "queue.py", "asyncio/", "jax/", "orbax/")
THREAD_BASE = ("_bootstrap", "_bootstrap_inner", "run", "_worker")  # the outermost functions of every thread


_walking = threading.Lock()


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PREFIX.sub('', self.file)}:{self.line} in {self.function}"


class Stack(NamedTuple):
    """The stack trace of a thread. frames: innermost first; waits_for: "" if it executes code."""

    name: str
    frames: tuple[Frame, ...]
    waits_for: str

    @property
    def is_working(self) -> bool:
        """Whether the run waits for this thread, and the thread executes code."""
        return self.waits_for in WORKING and self.name.startswith(RUN_THREADS)


def capture(training_thread: int | None) -> list[Stack]:
    """The stack trace of the training thread, given by its identity, then of the other threads that are not idle.

    Threads of a pool at the same line are merged; threads that execute code or compile come first after the main thread.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
    groups: dict[tuple[bool, tuple[Frame, ...]], list[str]] = {}
    for identity, frames in _frames_by_thread().items():
        name = MAIN if identity == training_thread else names.get(identity, NATIVE)  # such as XLA's in a callback
        is_watching = identity == threading.get_ident() or name in WATCHING_THREADS
        if not is_watching and (name in (MAIN, NATIVE) or not _is_idle(frames)):
            groups.setdefault((name == MAIN, _without_base(frames)), []).append(name)
    stacks = []
    for (_, frames), (first, *others) in groups.items():
        stacks.append(Stack(first + (f" and {len(others)} more" if others else ""), frames, waits_for(frames)))
    return sorted(stacks, key=lambda stack: (stack.name != MAIN, stack.waits_for not in WORKING, stack.waits_for))[
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


def _without_base(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    while len(frames) > 1 and frames[-1].function in THREAD_BASE:
        frames = frames[:-1]
    return frames


def _is_idle(frames: Sequence[Frame]) -> bool:
    """Whether a thread waits for work, as a thread of a pool or of a library."""
    if frames[0].file.endswith("concurrent/futures/thread.py"):
        return True
    in_pool = any(frame.file.endswith(CALLERS) and frame.function in ("run", "work") for frame in frames)
    return not in_pool and frames[0].file.endswith(SLEEPING)


def waits_for(frames: Sequence[Frame]) -> str:
    """What a thread waits for, judged by the library functions it is in; "" if it executes code. frames: innermost first."""
    if frames[0].file.startswith(STARTED_IN):
        return DEVICES
    waits = ""
    for frame in frames:
        if not (LIBRARY.search(frame.file) or frame.file.endswith((*CONTROL, SIGNAL_HANDLER))):
            break
        if frame.file.endswith(CONTROL) or any(part in frame.function for part in COORDINATION):
            return OTHER_RANKS
        if "/jax/" in frame.file and (
            frame.function in DEVICE_WAITS or (frame.file.endswith(("/pxla.py", "/stages.py")) and frame.function == "__call__")
        ):
            return DEVICES
        if "/jax/" in frame.file and frame.function.startswith("backend_compile"):
            return COMPILER
        if "/concurrent/futures/_base.py" in frame.file or frame.file.endswith(("/selectors.py", SIGNAL_HANDLER)):
            waits = OTHER_THREAD
    return waits


def work(stacks: Sequence[Stack]) -> str:
    """What the threads of a process do: "code", "compiler", or "" if all of them wait."""
    waits = {stack.waits_for for stack in stacks if stack.is_working}
    return "code" if "" in waits else "compiler" if waits else ""


def at_devices(stacks: Sequence[Stack]) -> bool:
    """Whether the thread that trains waits for its devices."""
    return any(stack.name == MAIN and stack.waits_for == DEVICES for stack in stacks)


def format_stacks(stacks: Sequence[Stack]) -> list[str]:
    """Lines to print, most recent call first as in faulthandler: the main thread, and the threads that execute code."""
    lines = []
    for stack in stacks:
        if stack.name == MAIN or stack.waits_for in WORKING:
            waits = f" (waits for {stack.waits_for})" if stack.waits_for else ""
            lines += [f"  {stack.name}{waits}:", *(f"    {frame}" for frame in stack.frames[:MAX_FRAMES])]
    return lines


def place_of_work(stacks: Sequence[Stack]) -> str:
    """On one line, the innermost frames of the thread that executes code, or else of the first thread; "" without threads."""
    order = sorted(stacks, key=lambda stack: (not stack.is_working, stack.is_working and stack.waits_for))
    return f"{order[0].name} at {_shown(order[0].frames)}" if order else ""


def place_of(error: BaseException) -> str:
    """The innermost frames of the traceback of an error, or of the first one that led to it, on one line."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    frames = [Frame(*entry[:3]) for entry in traceback.extract_tb(error.__traceback__)][::-1]
    return f"raised at {_shown(frames)}" if frames else ""


def place_of_dump(text: str) -> str:
    """The innermost frames of a thread that executes code, or else of the main thread, as faulthandler writes it; "" if none.

    The main thread, which is the oldest, comes last.
    """
    threads = []
    for part in text.split("most recent call first")[1:]:
        matches = map(DUMPED.match, part.splitlines())
        threads.append([Frame(match[1], int(match[2]), match[3]) for match in matches if match])
    if not (threads := [frames for frames in threads if frames]):
        return ""
    named = [(MAIN, threads.pop()), *(("a thread", frames) for frames in threads)]
    busy = [one for one in named if not waits_for(one[1]) and not _is_idle(one[1])]
    name, frames = (busy or named)[0]
    return f"{name} at {_shown(frames)}"


def _shown(frames: Sequence[Frame]) -> str:
    texts = [str(frame) for frame in frames]
    own = [text for text in texts if not text.startswith(WAIT_PRIMITIVES)] or texts
    return printable(" < ".join(own[:3]), 400)


def print_lines(lines: Sequence[str]) -> None:
    """Print a report on stderr in another thread, because a full pipe blocks the writer.

    The report is lost if the system allows no further thread: the caller, which watches the run, must continue.
    """
    text = "jaxdp: " + "\n".join(lines)
    thread = threading.Thread(target=lambda: print_safe(text, sys.stderr), name="print-stacks", daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
