"""Runs of several real processes on this machine."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import torch_layout
from safetensors.numpy import save_file

from jaxdp.training import seal
from jaxdp.training.metrics import TIMING, read_log
from jaxdp.training.restored import restored

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PATIENCE = 300  # seconds: a slow machine is no failure
TINY = [
    *("--data.source", "synthetic", "--data.image-size", "8", "--data.train-examples", "64", "--data.eval-examples", "37"),
    *(
        "--model.depth",
        "18",
        "--model.width",
        "2",
        "--model.stem",
        "small",
        "--epochs",
        "4",
        "--schedule.learning-rate",
        "0.002",
    ),
    *("--batch.0.global-batch", "8", "--batch.0.until-epoch", "2", "--batch.1.global-batch", "16", "--optimizer.name", "sgd"),
    *("--batch.0.per-worker-batch", "2", "--batch.1.per-worker-batch", "2", "--schedule.warmup-epochs", "1"),
    *("--logging.no-tensorboard", "--logging.every-steps", "1"),
]


def launched(processes, workdir, *more, devices=None, restarts=0, command=(), environment=None, **options):
    """`jaxdp launch` of the tiny run, eight devices being spread over its processes."""
    command = command or ["train.py", "--workdir", str(workdir), *TINY, "--mesh.cpu-devices", str(devices or 8 // processes)]
    line = [sys.executable, "-m", "jaxdp", "launch", "--processes", str(processes), "--restarts", str(restarts), "--"]
    pipe = subprocess.PIPE
    there = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | (environment or {})
    return subprocess.Popen([*line, *command, *more], cwd=ROOT, env=there, stdout=pipe, stderr=pipe, text=True, **options)


def done(process, code=0):
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, (process.returncode, out, err)
    return out, err


def left(workdir):
    """Everything that a run leaves and that does not tell time."""
    log = [{name: value for name, value in line.items() if name not in TIMING} for line in read_log(workdir / "metrics.jsonl")]
    result = json.loads((workdir / "result.json").read_text())
    return log, result["accuracy"], seal.newest_good(workdir / "checkpoints").arrays


def parameters(workdir):
    """Of the last checkpoint, in one vector."""
    state, _, _ = restored(workdir)
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(state.params)])


def ranks_of(process, number):
    """The process ids of the ranks that a launcher has started, by rank."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                places = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == str(process.pid):
                found |= {int(one[15:]): int(path.name) for one in places if one.startswith(b"JAX_PROCESS_ID=")}
        if len(found) == number:
            return [found[rank] for rank in range(number)]
        time.sleep(0.05)
    raise AssertionError("the processes did not start")


def wait_for_lines(workdir, number, process):
    end = time.monotonic() + PATIENCE
    log = workdir / "metrics.jsonl"
    while not (log.exists() and log.read_bytes().count(b"\n") >= number):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    done(launched(1, workdir))
    return workdir


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A run of two processes that nothing disturbs."""
    workdir = tmp_path_factory.mktemp("pair") / "run"
    done(launched(2, workdir))
    return workdir


@pytest.mark.parametrize("processes", [2, 4])
def test_training_and_evaluation_on_several_processes_are_those_of_one(alone, pair, tmp_path, processes):
    workdir = pair if processes == 2 else tmp_path / "run"
    if processes != 2:
        done(launched(processes, workdir))
    one, several = left(alone), left(workdir)
    assert len(one[0]) == len(several[0])
    for ours, theirs in zip(one[0], several[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"accuracy"}:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4), name
    assert several[1] == one[1]
    first, second = parameters(alone), parameters(workdir)
    assert np.linalg.norm(first - second) < 1e-4 * np.linalg.norm(first)
    result = json.loads((workdir / "result.json").read_text())
    assert (result["processes"], result["hosts"], result["devices"]) == (processes, 1, 8)
    assert 0 <= result["waiting_share"] <= 1


def test_sigterm_to_any_one_saves_all_at_the_same_step_and_the_same_command_goes_on_exactly(pair, tmp_path):
    process = launched(2, tmp_path / "cut")
    wait_for_lines(tmp_path / "cut", 9, process)
    os.kill(ranks_of(process, 2)[1], signal.SIGTERM)  # not the one that writes
    _, err = done(process, 75)
    assert re.search(
        r"stopped by SIGTERM to rank 1 on \S+ after step \d+ .* the last good checkpoint is .*/checkpoints/\d+", err
    )
    done(launched(2, tmp_path / "cut"))
    assert left(tmp_path / "cut") == left(pair)


def test_a_run_goes_on_with_more_and_with_fewer_processes(alone, tmp_path):
    process = launched(2, tmp_path / "run")
    wait_for_lines(tmp_path / "run", 6, process)
    process.send_signal(signal.SIGTERM)  # to all of them
    done(process, 75)
    process = launched(4, tmp_path / "run")
    wait_for_lines(tmp_path / "run", 14, process)
    process.send_signal(signal.SIGINT)
    done(process, 75)
    done(launched(1, tmp_path / "run"))
    ours, theirs = left(alone)[0], left(tmp_path / "run")[0]
    exact = ("step", "samples", "epoch", "phase", "global_batch", "learning_rate", "momentum")
    assert [[line.get(name) for name in exact] for line in ours] == [[line.get(name) for name in exact] for line in theirs]
    first, second = parameters(alone), parameters(tmp_path / "run")
    assert np.linalg.norm(first - second) < 1e-4 * np.linalg.norm(first)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_a_restart_goes_on_exactly(pair, tmp_path, victim):
    process = launched(2, tmp_path / "cut", restarts=1)
    wait_for_lines(tmp_path / "cut", 20, process)
    os.kill(ranks_of(process, 2)[victim], signal.SIGKILL)
    _, err = done(process)
    assert re.search(rf"\[{1 - victim}\] jaxdp: rank {victim} on \S+ failed.*killed.*goes on from \S+/checkpoints/\d+", err)
    assert f"rank {victim} failed first, by SIGKILL" in err
    assert "starting again; 0 more restarts after this one" in err
    assert left(tmp_path / "cut") == left(pair)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_by_the_others_and_killed_by_the_launcher(tmp_path, victim):
    process = launched(2, tmp_path / "run", "--guard.silence-seconds", "4")
    wait_for_lines(tmp_path / "run", 5, process)
    os.kill(ranks_of(process, 2)[victim], signal.SIGSTOP)
    began = time.monotonic()
    _, err = done(process, 1)
    assert time.monotonic() - began < 60  # 4 s of silence, 10 s of the launcher's grace
    assert re.search(rf"\[{1 - victim}\] jaxdp: rank {victim} on \S+ failed.*has not been heard of for 4 s", err)
    assert f"rank {victim} is stopped and is killed" in err


def test_another_configuration_on_one_process_stops_all_and_is_shown_field_by_field(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys
        sys.argv += ["--optimizer.momentum", "0.8"] if os.environ["JAX_PROCESS_ID"] == "2" else []
        sys.path.insert(0, {str(ROOT)!r})
        from jaxdp.cli import run
        run("train", sys.argv[1:], "train.py")
        """)
    )
    command = [str(script), "--workdir", str(tmp_path / "run"), *TINY, "--mesh.cpu-devices", "2"]
    _, err = done(launched(4, tmp_path / "run", command=command), 2)
    assert "rank 2 on " in err
    assert "is about to run something else than rank 0" in err
    assert re.search(r"\(batch.*|\(optimizer.momentum: 0.9 on rank 0, 0.8 on rank 2\)", err)
    assert not (tmp_path / "run").exists()


def test_a_process_that_does_not_come_is_listed(tmp_path):
    command = [
        sys.executable,
        "-m",
        "jaxdp",
        "train",
        "--workdir",
        str(tmp_path / "run"),
        *TINY,
        "--guard.start-minutes",
        "0.1",
    ]
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:28765", "JAX_NUM_PROCESSES": "4"}
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, cwd=ROOT, env=os.environ | address | {"JAX_PROCESS_ID": rank}, stderr=pipe, text=True)
        for rank in ("0", "2")
    ]
    for one in running:
        _, err = one.communicate(timeout=PATIENCE)
        assert one.returncode == 1
        assert re.search(r"jaxdp: of 4 processes these did not come within 6 s: 1, 3 \(there are 0 on \S+, 2 on \S+\)", err)


SLOW = """
import dataclasses, os, sys, time
import numpy as np
sys.path.insert(0, {root!r})
import jaxdp
from jaxdp.config import Config, Data, Logging, Mesh, Model, Optimizer, Phase, Schedule

class Images:
    def __init__(self, seconds=0):
        self.seconds = seconds
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if {fails} and os.environ["JAX_PROCESS_ID"] == "1" and index == 17:
            raise RuntimeError("no such row")
        time.sleep(self.seconds if os.environ["JAX_PROCESS_ID"] == "1" else 0)
        return np.full((80, 80, 3), index, np.uint8), index % 10

config = Config(
    name="slow", epochs=3.0, data=Data(source="given", image_size=80, threads=1, resident="off", augmentation="none"),
    model=Model(depth=18, width=2, stem="small"), batch=(Phase(8),), optimizer=Optimizer(name="sgd"),
    schedule=Schedule(learning_rate=0.1, warmup_epochs=1.0), mesh=Mesh(cpu_devices=2),
    logging=Logging(every_steps=4, tensorboard=False),
)
jaxdp.train(config, {workdir!r}, datasets=(Images({seconds}), Images(0)))
"""


def test_a_process_that_makes_the_others_wait_is_named(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(root=str(ROOT), workdir=str(tmp_path / "run"), seconds=0.3, fails=False))
    done(launched(2, None, command=[str(script)]))
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["slowest"][0]["rank"] == 1
    assert result["slowest"][0]["last_share"] > 0.5
    assert result["waiting_share"] > 0.1  # of steps of 1.2 s; so much even where 0.96 s of it is computation
    lines = [line for line in read_log(tmp_path / "run/metrics.jsonl") if "slowest_rank" in line]
    assert [line["slowest_rank"] for line in lines].count(1) > len(lines) / 2


def test_a_process_that_is_slow_is_not_taken_for_dead(tmp_path):
    script = tmp_path / "slow.py"
    slow = SLOW.format(root=str(ROOT), workdir=str(tmp_path / "run"), seconds=0, fails=False)
    slow = slow.replace("time.sleep(self.seconds ", "time.sleep(12 * (index == 17) ").replace("epochs=3.0", "epochs=2.0")
    slow = slow.replace("import Config, Data,", "import Config, Data, Guard,").replace(
        "    logging=", "    guard=Guard(silence_seconds=4.0), logging="
    )
    script.write_text(slow)
    done(launched(2, None, command=[str(script)]))
    assert json.loads((tmp_path / "run/result.json").read_text())["slowest"][0]["rank"] == 1


def test_a_process_that_raises_is_named_with_its_reason(tmp_path):
    script = tmp_path / "raises.py"
    script.write_text(SLOW.format(root=str(ROOT), workdir=str(tmp_path / "run"), seconds=0, fails=True))
    _, err = done(launched(2, None, command=[str(script)]), 1)
    assert re.search(r"\[0\] jaxdp: rank 1 on \S+ failed in phase \w+.*no such row", err)
    assert "rank 1 failed first, with exit code 1" in err


@pytest.mark.parametrize("gone", [(1,), (0, 1)])
def test_processes_go_on_together_where_the_file_that_they_began_from_is_gone(tmp_path, gone):
    recipe, run, files = tmp_path / "own_paths.py", tmp_path / "run", [tmp_path / f"{rank}.safetensors" for rank in (0, 1)]
    recipe.write_text(
        "import os, jaxdp\n"
        f"path = {str(tmp_path)!r} + '/' + os.environ['JAX_PROCESS_ID'] + '.safetensors'\n"
        "def config():\n    return jaxdp.load_config('digits', ['--finetune.weights', path])\n"
    )
    for file in files:
        save_file(torch_layout.random_tensors(0, (2, 2, 2, 2), False, width=2, classes=3, stem=3), file)
    done(launched(2, run, "--config", str(recipe)))
    whole = left(run)
    (run / "result.json").unlink()
    shutil.rmtree(seal.newest_good(run / "checkpoints").path)
    for rank in gone:
        files[rank].unlink()
    out, _ = done(launched(2, run, "--config", str(recipe)))
    assert left(run) == whole
    assert ("is gone; the run, begun from it, does without" in re.sub(r"\s+(\[0\] )?", " ", out)) == (0 in gone)


def test_a_checkpoint_is_written_by_all_processes_and_runs_no_program_of_its_own_beside_the_step(tmp_path):
    there = {"JAX_LOG_COMPILES": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    _, err = done(launched(2, tmp_path / "run", environment=there))
    assert "Finished XLA compilation of jit(step)" in err
    assert "Finished XLA compilation of jit(slice)" not in err
    (state,) = {seal.newest_good(tmp_path / "run/checkpoints").path / "state"}
    parts = [state / f"ocdbt.process_{rank}" for rank in range(2)]
    assert all(any((part / "d").iterdir()) for part in parts)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed (Debian: openmpi-bin)")
def test_mpirun_starts_a_run(alone, tmp_path):
    allowed = ["--allow-run-as-root", "--oversubscribe"]
    command = [sys.executable, "train.py", "--workdir", str(tmp_path / "run"), *TINY, "--mesh.cpu-devices", "4"]
    there = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ran = subprocess.run(
        ["mpirun", *allowed, "-np", "2", *command], cwd=ROOT, env=there, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["processes"] == 2
    first, second = parameters(alone), parameters(tmp_path / "run")
    assert np.linalg.norm(first - second) < 1e-4 * np.linalg.norm(first)


def script_of(tmp_path, body):
    """A script of two processes: `config` is the tiny run of `SLOW`, `rank` this process's."""
    text = SLOW.format(root=str(ROOT), workdir=str(tmp_path / "run"), seconds=0, fails=False).rpartition("jaxdp.train")[0]
    script = tmp_path / "script.py"
    script.write_text(f"{text}\nrank = int(os.environ['JAX_PROCESS_ID'])\n{textwrap.dedent(body)}")
    return [str(script)]


def test_a_save_that_fails_in_one_process_ends_all_and_says_how_to_go_on(tmp_path):
    """Orbax's own barriers, in which the others are by then, would hold them for minutes."""
    body = f"""
        import errno
        import orbax.checkpoint as ocp
        save, saves = ocp.StandardCheckpointer.save, []
        def failing(*arguments, **more):
            saves.append(None)
            if rank == 1 and len(saves) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return save(*arguments, **more)
        ocp.StandardCheckpointer.save = failing
        jaxdp.train(config, {str(tmp_path / "run")!r}, datasets=(Images(), Images()))
    """
    began = time.monotonic()
    _, err = done(launched(2, None, command=script_of(tmp_path, body)), 1)
    assert time.monotonic() - began < 120
    assert re.search(
        r"\[0\] jaxdp: rank 1 on \S+ failed in phase \w+, step \d+, saving the checkpoint of 128 samples: the ", err
    )
    assert re.search(r"could not be saved \(.*No space left on device\); the same command goes on from \S+/checkpoints/64", err)


def test_sigterm_while_one_process_still_opens_its_data_stops_all(tmp_path):
    body = f"""
        from jaxdp.training import prepared
        opened = prepared.open_datasets
        def slow(*arguments):
            print("opening", flush=True)
            time.sleep(20 * rank)
            return opened(*arguments)
        prepared.open_datasets = slow
        from jaxdp.cli import main
        main(["train", "--workdir", {str(tmp_path / "run")!r}, *{TINY!r}, "--mesh.cpu-devices", "2"])
    """
    process = launched(2, None, command=script_of(tmp_path, body))
    seen = ""
    while seen.count("opening") < 2:
        seen += process.stdout.readline()
    time.sleep(2)  # rank 0 has opened its own, and waits
    began = time.monotonic()
    os.kill(ranks_of(process, 2)[1], signal.SIGTERM)
    done(process, 75)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("flags", [["--resume", "never"], ["--accept-changes"]])
def test_processes_with_different_commands_end_and_say_in_what_they_differ(tmp_path, flags):
    body = f"""
        from jaxdp.cli import main
        more = {flags!r} if rank else []
        main(["train", "--workdir", {str(tmp_path / "run")!r}, *{TINY!r}, "--mesh.cpu-devices", "2", *more])
    """
    _, err = done(launched(2, None, command=script_of(tmp_path, body)), 2)
    assert re.search(rf"about to run something else than rank 0 .*{flags[0]}: \w+ on rank 0, \w+ on rank 1", err)


def test_an_error_between_two_runs_of_a_program_ends_all_its_processes(tmp_path):
    body = f"""
        for name in ("one", "two"):
            jaxdp.train(config, {str(tmp_path)!r} + "/" + name, datasets=(Images(), Images()))
            if rank == 1:
                raise ValueError("of the program itself")
    """
    _, err = done(launched(2, None, command=script_of(tmp_path, body)), 1)
    assert re.search(r"\[0\] jaxdp: rank 1 on \S+ failed .*: ValueError: of the program itself", err)


def test_a_process_that_is_stopped_while_it_waits_for_rank_0_says_so(tmp_path, free_port):
    there = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    command = [sys.executable, "train.py", "--workdir", str(tmp_path / "run"), *TINY]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | there, stderr=subprocess.PIPE, text=True)
    with socket.create_server(("127.0.0.1", free_port)) as silent, silent.accept()[0]:  # it has come so far
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert err.strip() == "jaxdp: stopped by SIGTERM before the first step; the same command begins again"


def test_processes_that_have_failed_train_no_more(tmp_path):
    body = f"""
        import dataclasses
        other = dataclasses.replace(config, seed=rank)
        try:
            jaxdp.train(other, {str(tmp_path / "run")!r}, datasets=(Images(), Images()))
        except jaxdp.ConfigError as error:
            print("first:", error, flush=True)
        jaxdp.train(config, {str(tmp_path / "run")!r}, datasets=(Images(), Images()))
    """
    out, err = done(launched(2, None, command=script_of(tmp_path, body)), 1)
    assert "seed: 0 on rank 0, 1 on rank 1" in out
    assert "have failed before, and cannot train together any more" in err


def test_a_process_whose_output_nobody_reads_ends_all_the_same(tmp_path):
    """Its pipe is full: what it has to say cannot be said."""
    script = script_of(tmp_path, f"jaxdp.train(config, {str(tmp_path / 'run')!r}, datasets=(Images(), Images()))")
    (script,) = script
    Path(script).write_text(Path(script).read_text().replace("epochs=3.0", "epochs=400.0"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    read, write = os.pipe()
    os.set_blocking(write, False)
    there = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [
        subprocess.Popen(
            [sys.executable, script],
            env=os.environ | there | {"JAX_PROCESS_ID": str(rank)},
            cwd=ROOT,
            **({"stdout": write, "stderr": write} if rank == 0 else quiet),
        )
        for rank in range(2)
    ]
    wait_for_lines(tmp_path / "run", 3, running[0])
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    running[1].kill()
    assert running[0].wait(30) != 0
    running[1].wait()
    os.close(read), os.close(write)


def test_with_json_stdout_is_one_document_though_gloo_writes_there(tmp_path):
    out, err = done(launched(2, tmp_path / "run", "--json"))
    lines = [line.partition("] ")[2] for line in out.splitlines() if line.startswith("[0] ")]
    assert json.loads("\n".join(lines))["processes"] == 2
    assert "[Gloo]" in err
