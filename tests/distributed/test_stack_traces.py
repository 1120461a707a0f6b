import gc
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxdp.distributed import stack_traces
from jaxdp.training import loop


def stack(file, function, waits_for="", name=stack_traces.MAIN):
    return stack_traces.Stack(name, (stack_traces.Frame(file, 9, function),), waits_for)


WAITS = stack("jaxdp/distributed/signal_handler.py", "wait_for", stack_traces.OTHER_THREAD)
COMPILES = stack("jax/compiler.py", "backend_compile", stack_traces.COMPILER, "compile_0")


@pytest.mark.parametrize(
    ("stacks", "expected"),
    [
        ([stack("train.py", "__getitem__")], "code"),
        ([WAITS, COMPILES], "compiler"),
        ([stack("train.py", "__getitem__"), COMPILES], "code"),
        ([stack("jax/array.py", "_value", stack_traces.DEVICES)], ""),
        ([WAITS, stack("train.py", "callback", name=stack_traces.NATIVE)], "code"),  # of the compiled program
        ([WAITS, stack("logger.py", "run", name="logger")], ""),
    ],
)
def test_work_is_what_the_threads_of_a_run_do(stacks, expected):
    assert stack_traces.work(stacks) == expected


def captured():
    """Stack traces taken by another thread, as the watchdog takes them."""
    stacks = []
    thread = threading.Thread(target=lambda: stacks.extend(stack_traces.capture(threading.main_thread().ident)))
    thread.start()
    thread.join()
    return stacks


def test_capture_shows_busy_pool_threads_and_omits_idle_ones():
    release, began = threading.Event(), threading.Event()

    def reads_an_image():
        began.set()
        release.wait()

    with ThreadPoolExecutor(1, "decode") as busy, ThreadPoolExecutor(1, "idle") as idle:
        busy.submit(reads_an_image)
        idle.submit(int).result()
        began.wait()
        stacks = captured()
        release.set()
    by_name = {stack.name: stack for stack in stacks}
    assert stacks[0].name == stack_traces.MAIN
    assert by_name["decode_0"].waits_for == ""
    assert "in reads_an_image" in stack_traces.place_of_work([by_name["decode_0"]])
    assert not any(name.startswith("idle") for name in by_name)


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


def test_capture_shows_user_threads_and_they_do_not_put_a_rank_at_fault():
    """A thread of a logger, beside a main thread that waits for its devices."""
    stop, began = threading.Event(), threading.Event()

    def sleeps():
        began.set()
        while not stop.is_set():
            time.sleep(0.05)

    thread = threading.Thread(target=sleeps, name="monitor")
    thread.start()
    began.wait()
    stacks = captured()
    stop.set()
    thread.join()
    assert any("in sleeps" in line for line in stack_traces.format_stacks(stacks))
    (monitor,) = [stack for stack in stacks if stack.name == "monitor"]
    of_rank_0 = [stack("jax/array.py", "_value", stack_traces.DEVICES), monitor]
    assert stack_traces.work(of_rank_0) == ""
    assert "in sleeps" not in stack_traces.place_of_work(of_rank_0)


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
BUSY = '  File "/x/train.py", line 5 in decodes\n  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run\n'


@pytest.mark.parametrize(
    ("threads", "place"),
    [
        ([IDLE, BUSY, WAITING], "a thread at /x/train.py:5 in decodes"),
        ([IDLE, BUSY], "main thread at /x/train.py:5 in decodes"),
        ([IDLE, WAITING], "main thread at /x/train.py:9 in <module>"),
        ([], ""),
    ],
)
def test_place_of_a_dump_is_that_of_the_thread_that_executes_code(threads, place):
    """As faulthandler writes it, while native code in a thread of the loader holds the GIL."""
    headers = [f"Thread 0x{number:x} (most recent call first):\n" for number in range(9)]
    dump = "\n".join(header + thread for header, thread in zip(headers, threads, strict=False))
    assert stack_traces.place_of_dump(dump).startswith(place)
    assert bool(place) == bool(stack_traces.place_of_dump(dump))


STARTED = f"{stack_traces.STARTED_IN}state.py create_state"


@pytest.mark.parametrize(
    ("innermost_first", "expected"),
    [
        ("/lib/jax/_src/array.py _value, /x/train.py step", stack_traces.DEVICES),
        ("/lib/jax/_src/compiler.py backend_compile_and_load, /x/p.py f", stack_traces.COMPILER),
        ("/lib/jax/_src/interpreters/pxla.py __call__, /x/p.py f", stack_traces.DEVICES),
        ("/lib/jax/_src/stages.py __call__, /x/p.py f", stack_traces.DEVICES),
        ("/x/mine.py callback, /lib/jax/_src/interpreters/pxla.py __call__", ""),
        ("/p/threading.py wait, /x/jaxdp/distributed/process_group.py _wait_for", stack_traces.OTHER_RANKS),
        ("/p/threading.py wait, /x/jaxdp/distributed/watchdog.py fail", stack_traces.OTHER_RANKS),
        ("/p/pathlib.py mkdir, /x/jaxdp/distributed/status.py write", stack_traces.OTHER_RANKS),
        (STARTED, stack_traces.DEVICES),  # in the call of a compiled program
        ("/x/jaxdp/training/my_data.py __getitem__", ""),
        ("/lib/orbax/checkpoint/multihost.py _barrier_fn, /x/p.py f", stack_traces.OTHER_RANKS),
        ("/lib/orbax/checkpoint/signaling_client.py key_value_try_get", stack_traces.OTHER_RANKS),
        ("/p/threading.py wait, /p/concurrent/futures/_base.py result, /x/p.py f", stack_traces.OTHER_THREAD),
        ("/x/mine.py __del__, /lib/jax/_src/array.py _value", ""),  # garbage collection during the wait
        ("/p/threading.py wait, /x/mine.py __getitem__", ""),
    ],
)
def test_waits_for_is_decided_by_the_innermost_library_frames(innermost_first, expected):
    pairs = [frame.split(" ") for frame in innermost_first.split(", ")]
    assert stack_traces.waits_for([stack_traces.Frame(file, 1, function) for file, function in pairs]) == expected


@pytest.mark.parametrize("wait", [loop.to_host_scalars, jax.device_get, jax.block_until_ready])
def test_a_thread_that_waits_for_its_devices_is_recognized(wait):
    """As the loop, an evaluation and an audit wait: a rank that is stuck in its data is named only if the others wait."""
    release, mesh = threading.Event(), jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    whole = jax.sharding.PartitionSpec()

    def waits(value):
        release.wait(60)
        return value

    def on_device(value):
        return jax.lax.pmean(jax.pure_callback(waits, jax.ShapeDtypeStruct((), jnp.float32), value), "x")

    value = jax.device_put(jnp.float32(1), jax.NamedSharding(mesh, whole))
    result = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=whole, out_specs=whole))(value)
    of_one_device = result.addressable_shards[0].data  # whose buffer NumPy takes without a call of Python
    thread = threading.Thread(target=lambda: wait({"loss": of_one_device}))
    thread.start()
    deadline, waiting = time.monotonic() + 300, ""
    while waiting != stack_traces.DEVICES and time.monotonic() < deadline:
        waiting = next(iter(stack_traces.capture(thread.ident)), stack("", "")).waits_for
        time.sleep(0.01)
    release.set()
    thread.join()
    assert waiting == stack_traces.DEVICES


@pytest.mark.parametrize("file", [*stack_traces.CONTROL, stack_traces.SIGNAL_HANDLER, stack_traces.STARTED_IN])
def test_the_files_that_wait_for_other_ranks_exist(file):
    assert (Path(__file__).parents[2] / file).exists()


def test_a_report_without_a_thread_to_print_it_is_lost_without_an_error(monkeypatch, capfd):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        stack_traces.print_lines(["no progress"])
    assert capfd.readouterr() == ("", "")


def test_a_report_shows_the_main_thread_and_those_that_work_with_their_twelve_innermost_frames():
    long = stack_traces.Stack("decode_0", tuple(stack_traces.Frame("user.py", line, "f") for line in range(20)), "")
    waits = stack("/p/queue.py", "get", stack_traces.OTHER_THREAD, "prefetch_0")
    shown = stack_traces.format_stacks([WAITS, long, COMPILES, waits])
    first, second, third = (index for index, line in enumerate(shown) if line.endswith(":"))
    assert shown[first : second + 1] == [
        "  main thread (waits for another thread):",
        "    jaxdp/distributed/signal_handler.py:9 in wait_for",
        "  decode_0:",
    ]
    assert shown[second + 1 : third] == [f"    user.py:{line} in f" for line in range(12)]
    assert shown[third:] == ["  compile_0 (waits for the compiler):", "    jax/compiler.py:9 in backend_compile"]
    assert stack_traces.place_of_work([WAITS, COMPILES, long]) == "decode_0 at user.py:0 in f < user.py:1 in f < user.py:2 in f"
    assert stack_traces.place_of_work([WAITS, COMPILES, waits]).startswith("compile_0 at ")
    assert stack_traces.place_of_work([WAITS, waits]).startswith("main thread at jaxdp/distributed/signal_handler.py:9")
    assert stack_traces.place_of_work([]) == ""
    devices = [stack("jax/array.py", "_value", stack_traces.DEVICES, name) for name in (stack_traces.MAIN, "decode_0")]
    assert [stack_traces.at_devices(each) for each in (devices, devices[1:], [WAITS])] == [True, False, False]


def test_threads_at_the_same_line_are_merged_and_at_most_five_are_shown_beside_the_main_thread(monkeypatch):
    """Those that execute code come first. Threads that Python has not started have no name."""

    def frames(file, function="f"):
        return (stack_traces.Frame(file, 1, function),)

    main, waits = frames("/lib/jax/_src/array.py", "_value"), frames("/lib/jax/_src/array.py", "__array__")
    others = dict.fromkeys(range(-9, -6), frames("same.py")) | {-number: frames(f"{number}.py") for number in range(1, 4)}
    monkeypatch.setattr(stack_traces, "_frames_by_thread", lambda: {-10: waits, -20: main} | others)
    stacks = stack_traces.capture(-20)
    shown = [(one.name, one.frames[0].file, one.waits_for) for one in stacks]
    assert shown[0] == (stack_traces.MAIN, main[0].file, stack_traces.DEVICES)
    assert shown[1] == (f"{stack_traces.NATIVE} and 2 more", "same.py", "")
    assert shown[2:5] == [(stack_traces.NATIVE, f"{number}.py", "") for number in range(1, 4)]
    assert shown[5:] == [(stack_traces.NATIVE, waits[0].file, stack_traces.DEVICES)]
    others |= {-number: frames(f"{number}.py") for number in range(4, 6)}
    assert [one.waits_for for one in stack_traces.capture(-20)] == [stack_traces.DEVICES, *[""] * 5]


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
