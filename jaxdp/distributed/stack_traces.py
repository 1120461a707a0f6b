"""Stack traces of this process's threads, taken without reading a file, because the disk may be stuck."""

import contextlib
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypedDict

from jaxdp.errors import printable

MAX_FRAMES, MAX_THREADS = 12, 5  # innermost frames of a stack; threads of a process beside the main thread
MAIN, NATIVE = "main thread", "native thread"
DUMPED = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')  # a frame as faulthandler writes it
# Threads that the run waits for; others belong to loggers and the like.
RUN_THREADS = (MAIN, NATIVE, "decode_", "prefetch_", "prepare_", "compile_", "checkpoint_")
# Threads of jaxdp that only watch.
WATCHING_THREADS = ("watchdog", "status-files", "print-stacks")
DEVICES, OTHER_RANKS, OTHER_THREAD, COMPILER = "devices", "other ranks", "another thread", "the compiler"
WORKING = ("", COMPILER)
DEVICE_WAITS = ("device_get", "_value", "block_until_ready", "__array__", "_item")  # JAX's functions that wait for a device
LIBRARY = re.compile(r"/(jax|orbax|concurrent|asyncio)/|/(threading|queue|selectors|contextlib|nest_asyncio)\.py$")
CONTROL = ("jaxdp/distributed/process_group.py", "jaxdp/distributed/coordination.py")
PREEMPTION = "jaxdp/distributed/preemption.py"
SLEEPING = ("/threading.py", "/queue.py", "/selectors.py", "/socket.py", "/asyncio/base_events.py", "/socketserver.py")
PREFIX = re.compile(rf"^.*/(?:(?:site|dist)-packages|lib/python3\.\d+)/|^{re.escape(str(Path(__file__).parents[2]))}/")
WAIT_PRIMITIVES = (
    "threading.py",
    "concurrent/",
    "selectors.py",
    "queue.py",
    "asyncio/",
)  # do not show what the thread waits for
THREAD_BASE = ("_bootstrap", "_bootstrap_inner", "run", "_worker")  # the outermost functions of every thread


class Stack(TypedDict):
    """The stack trace of a thread. frames: "file:line in function", innermost first; waits_for: "" if it executes code."""

    name: str
    frames: list[str]
    waits_for: str


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def capture(training_thread: int | None) -> list[Stack]:
    """The stack trace of the thread that trains, given by its identity, then those of other threads that are not idle."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
    stacks: list[Stack] = []
    for identity, top in sys._current_frames().items():
        if identity == threading.get_ident() or names.get(identity, "") in WATCHING_THREADS:
            continue
        frames = list(_walk(top))
        if identity == training_thread:
            stacks.insert(0, _stack(MAIN, frames))
        elif identity not in names:  # such as one of XLA's in a callback of the compiled program
            stacks.append(_stack(NATIVE, frames))
        elif not _is_idle(frames):
            stacks.append(_stack(names[identity], frames))
    return _grouped(stacks)


def _walk(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _stack(name: str, frames: Sequence[Frame]) -> Stack:
    shown = frames
    while len(shown) > 1 and shown[-1].function in THREAD_BASE:
        shown = shown[:-1]
    texts = [str(frame._replace(file=PREFIX.sub("", frame.file))) for frame in shown[:MAX_FRAMES]]
    return {"name": name, "frames": texts, "waits_for": waits_for(frames)}


def _grouped(stacks: list[Stack]) -> list[Stack]:
    """Threads of a pool at the same line are merged; threads that execute code come first after the main thread."""
    groups: dict[tuple, list[Stack]] = {}
    for stack in stacks:
        groups.setdefault((stack["name"] == MAIN, tuple(stack["frames"])), []).append(stack)
    merged: list[Stack] = []
    for first, *others in groups.values():
        name = first["name"] + (f" and {len(others)} more" if others else "")
        merged.append({"name": name, "frames": first["frames"], "waits_for": first["waits_for"]})
    return sorted(merged, key=lambda stack: (stack["name"] != MAIN, stack["waits_for"]))[: 1 + MAX_THREADS]


def _is_idle(frames: Sequence[Frame]) -> bool:
    """Whether a thread waits for work: one of a pool, or a library's."""
    if frames[0].file.endswith("concurrent/futures/thread.py"):
        return True
    in_pool = any(frame.file.endswith("concurrent/futures/thread.py") and frame.function == "run" for frame in frames)
    return not in_pool and frames[0].file.endswith(SLEEPING)


def waits_for(frames: Sequence[Frame]) -> str:
    """What a thread waits for, judged by the library functions it is in; "" if it executes code. frames: innermost first."""
    waits = ""
    for frame in frames:
        if not (LIBRARY.search(frame.file) or frame.file.endswith((*CONTROL, PREEMPTION))):
            break
        if "barrier" in frame.function or "sync_global" in frame.function or frame.file.endswith(CONTROL):
            return OTHER_RANKS
        if "/jax/" in frame.file and (
            frame.function in DEVICE_WAITS or (frame.file.endswith("/pxla.py") and frame.function == "__call__")
        ):
            return DEVICES
        if "/jax/" in frame.file and frame.function.startswith("backend_compile"):
            return COMPILER
        if "/concurrent/futures/_base.py" in frame.file or frame.file.endswith(("/selectors.py", PREEMPTION)):
            waits = OTHER_THREAD
    return waits


def is_working(stack: Stack) -> bool:
    """Whether a thread that the run waits for executes code."""
    return stack["waits_for"] in WORKING and stack["name"].startswith(RUN_THREADS)


def work(stacks: Sequence[Stack]) -> str:
    """What the threads of a process do: "code", "compiler", or "" if all of them wait."""
    waits = {stack["waits_for"] for stack in stacks if is_working(stack)}
    return "code" if "" in waits else "compiler" if waits else ""


def format_stacks(stacks: Sequence[Stack]) -> list[str]:
    """Lines to print, most recent call first as in faulthandler: the main thread, and the threads that execute code."""
    lines = []
    for stack in stacks:
        if stack["name"] == MAIN or stack["waits_for"] in WORKING:
            waits = f" (waits for {stack['waits_for']})" if stack["waits_for"] else ""
            lines += [f"  {stack['name']}{waits}:", *(f"    {frame}" for frame in stack["frames"])]
    return lines


def innermost_frames(stacks: Sequence[Stack]) -> str:
    """One line with the innermost frames of the thread that executes code, or of the main thread if none does."""
    order = sorted(stacks, key=lambda stack: (not is_working(stack), is_working(stack) and stack["waits_for"]))
    if not (order and order[0]["frames"]):
        return ""
    frames = order[0]["frames"]
    shown = [frame for frame in frames if not frame.startswith((*WAIT_PRIMITIVES, "jax/"))] or frames
    return f"{order[0]['name']} at {' < '.join(shown[:3])}"


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
    *others, main = threads
    busy = [frames for frames in (main, *others) if not waits_for(frames) and not _is_idle(frames)]
    shown = busy[0] if busy else main
    return f"{MAIN if shown is main else 'a thread'} at {_shown(shown)}"


def _shown(frames: Sequence[Frame]) -> str:
    texts = [str(frame._replace(file=PREFIX.sub("", frame.file))) for frame in frames]
    own = [text for text in texts if not text.startswith((*WAIT_PRIMITIVES, "jax/", "orbax/"))] or texts
    return printable(" < ".join(own[:3]), 400)


def print_lines(lines: Sequence[str]) -> None:
    """Print a report on stderr in another thread, because a full pipe blocks the writer.

    The report is lost if the system allows no further thread: the caller, which watches the run, must go on.
    """
    text = "jaxdp: " + "\n".join(lines) + "\n"
    thread = threading.Thread(target=lambda: print(text, end="", file=sys.stderr, flush=True), name="print-stacks", daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
