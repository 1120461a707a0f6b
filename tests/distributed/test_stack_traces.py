import gc
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdp.distributed import stack_traces


def stack(file, function="f", name=stack_traces.MAIN):
    return stack_traces.Stack(name, (stack_traces.Frame(file, 9, function),))


def captured():
    """Stack traces taken by another thread, as the watchdog takes them."""
    stacks = []
    thread = threading.Thread(target=lambda: stacks.extend(stack_traces.capture(threading.main_thread().ident)))
    thread.start()
    thread.join()
    return stacks


def test_capture_shows_busy_threads_of_pools_and_users_and_omits_idle_ones():
    release, began = threading.Event(), threading.Barrier(3)

    def reads_an_image():
        began.wait()
        release.wait()

    def sleeps():
        began.wait()
        while not release.is_set():
            time.sleep(0.05)

    with ThreadPoolExecutor(1, "decode") as busy, ThreadPoolExecutor(1, "idle") as idle, ThreadPoolExecutor(1, "user") as user:
        busy.submit(reads_an_image)
        user.submit(sleeps)
        idle.submit(int).result()
        began.wait()
        while "in sleeps" not in str(stack_traces.format_stacks(stacks := captured())):
            pass
        release.set()
    names = [stack.name for stack in stacks if not stack.name.startswith(stack_traces.NATIVE)]  # some are of earlier tests
    assert names == [stack_traces.MAIN, "decode_0", "user_0"]
    assert re.search("at tests/.*in reads_an_image$", stack_traces.place_in(stacks, "decode_"))


@pytest.mark.slow
def test_no_garbage_collection_begins_while_the_frames_of_threads_are_read():
    """Python 3.11 would corrupt memory if a finalizer let another thread leave the frame that is being read."""
    began_in, before = [], gc.get_threshold()

    def note(phase, info):
        began_in.append(sys._getframe(1).f_code.co_name)

    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        stacks = captured()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert stacks
    assert gc.isenabled()
    assert began_in
    assert not {"_walk", "<dictcomp>"} & set(began_in)


def test_place_of_an_error_is_where_the_first_one_was_raised():
    """In the user's code, though others have explained it since."""

    def reads():
        raise KeyError("row 7")

    try:
        try:
            reads()
        except KeyError as error:
            raise RuntimeError("the source raised KeyError") from error
    except RuntimeError as error:
        explained = error
    assert re.match(r"raised at .*test_stack_traces.py:\d+ in reads < ", stack_traces.place_of(explained))


WAITING = """  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 451 in result
  File "/x/train.py", line 9 in <module>
"""
IDLE = """  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/x/jaxdp/distributed/watchdog.py", line 130 in _sleep
"""
WRITING = f'  File "{Path(stack_traces.__file__).parent}/status.py", line 9 in write\n'
BUSY = '  File "/x/train.py", line 5 in decodes\n  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run\n'


@pytest.mark.parametrize(
    ("threads", "place"),
    [
        ([IDLE, BUSY, WAITING], "a thread at /x/train.py:5 in decodes"),
        ([BUSY, BUSY, BUSY, BUSY], "; ".join(["main thread at {0}", "a thread at {0}", "a thread at {0}"])),
        ([IDLE, BUSY], "main thread at /x/train.py:5 in decodes"),
        ([WRITING, WAITING], "main thread at /x/train.py:9 in <module>"),
        ([], ""),
    ],
)
def test_place_of_a_dump_is_where_up_to_three_threads_execute_code(threads, place):
    """As faulthandler writes it, while native code in a thread of the loader holds the GIL."""
    headers = [f"Thread 0x{number:x} (most recent call first):\n" for number in range(9)]
    dump = "\n".join(header + thread for header, thread in zip(headers, threads, strict=False))
    assert stack_traces.place_of_dump(dump) == place.format("/x/train.py:5 in decodes")


def test_a_report_without_a_thread_to_print_it_is_lost_without_an_error(monkeypatch, capfd):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        stack_traces.print_lines(["no progress"])
    assert capfd.readouterr() == ("", "")


def test_a_report_shows_threads_with_their_twelve_innermost_frames():
    long = stack_traces.Stack("decode_0", tuple(stack_traces.Frame("user.py", line, "f") for line in range(20)))
    waits = stack("jaxdp/distributed/signal_handler.py", "wait_for")
    shown = stack_traces.format_stacks([waits, long])
    assert shown[:3] == ["  main thread:", "    jaxdp/distributed/signal_handler.py:9 in wait_for", "  decode_0:"]
    assert shown[3:] == [f"    user.py:{line} in f" for line in range(12)]


def test_the_place_is_in_the_first_thread_of_a_name_or_else_in_the_first_of_all():
    frames = [stack_traces.Frame(f"/x/lib/python3.{version}/queue.py", 1, "get") for version in (11, 14)]
    in_queue = stack_traces.Stack("decode_0", (*frames, *(stack_traces.Frame("user.py", line, "f") for line in range(9))))
    stacks = [stack("/x/lib/python3.11/site-packages/orbax/a.py"), in_queue, stack("b.py", name="decode_1")]
    assert stack_traces.place_in(stacks, ("a", "decode_")) == "decode_0 at user.py:0 in f < user.py:1 in f < user.py:2 in f"
    assert stack_traces.place_in(stacks, ("prefetch_",)) == "main thread at orbax/a.py:9 in f"
    assert stack_traces.place_in([stack_traces.Stack("a", (*frames,))], ("a",)).startswith("a at queue.py:1 in get < queue")
    assert stack_traces.place_in([], ("a",)) == ""


def test_threads_at_the_same_line_are_merged_and_at_most_five_are_shown_beside_the_main_thread(monkeypatch):
    """The threads of the run come first, in the order of their names. Threads that Python has not started have no name."""

    def frames(file, *outer):
        return tuple(stack_traces.Frame(each, 1, "f") for each in (file, *outer))

    base, idle = ("/lib64/python3.11/threading.py", "/lib64/python3.11/threading.py"), "/lib/python3.13/queue.py"
    names = ["user", "checkpoint_0", "compile_0", "prepare_0", "prefetch_0", "decode_0", "decode_1"]
    threads = [SimpleNamespace(ident=number, name=name) for number, name in enumerate(names)]
    monkeypatch.setattr(stack_traces.threading, "enumerate", lambda: [*threads, SimpleNamespace(ident=-9, name="Dummy-1")])
    found = {number: frames(f"{name}.py", *base) for number, name in enumerate(names)}
    found |= {-9: frames("same.py"), -8: frames("same.py"), -20: frames(idle, *base)}
    monkeypatch.setattr(stack_traces, "_frames_by_thread", lambda: found)

    def shown():
        return [(one.name, one.frames[0].file) for one in stack_traces.capture(-20)]

    loads = [(f"{name}_0", f"{name}_0.py") for name in ("decode", "prefetch", "prepare")]
    first = [(stack_traces.MAIN, idle), (f"{stack_traces.NATIVE} and 1 more", "same.py"), loads[0], ("decode_1", "decode_1.py")]
    assert shown() == [*first, *loads[1:]]
    found |= {5: frames(idle, "user.py"), 0: frames("user.py"), 6: frames(idle, *base), 4: frames(*base)}  # two are idle
    saves = [(f"{name}_0", f"{name}_0.py") for name in ("compile", "checkpoint")]
    assert shown() == [*first[:2], ("decode_0", idle), loads[2], *saves]
    del found[-9], found[-8]
    assert shown()[-1] == ("user", "user.py")
    found[0] = frames(idle, "user.py")  # a thread of a library waits for work
    assert shown()[-1] == saves[-1]


@pytest.mark.parametrize("hides", [False, True])
def test_place_of_an_error_that_hides_its_context_is_its_own(hides):
    def fails():
        raise KeyError("a")

    def explains():
        try:
            fails()
        except KeyError:
            error = ValueError("b")
            error.__suppress_context__ = hides
            raise error  # noqa: B904

    with pytest.raises(ValueError, match="b") as error:
        explains()
    innermost = stack_traces.place_of(error.value).split(" < ")[0]
    assert innermost.endswith("in explains" if hides else "in fails")
    assert stack_traces.place_of(ValueError("never raised")) == ""
