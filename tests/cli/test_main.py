"""The command line as a person meets it: what is printed, where, and with which exit code."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxdp.cli import main
from jaxdp.session import train
from jaxdp.validation import from_json

ROOT = Path(__file__).parents[2]
SMALL = ["--model.depth", "18", "--model.width", "4", "--model.stem", "small", "--mesh.cpu-devices", "2"]
IMAGES = ["--data.source", "synthetic", "--data.image-size", "12", "--data.train-examples", "700"]
SMALL_PLAN = "plan --wire --devices 12 --mesh.vertical 3 --mesh.horizontal 4 --model.depth 18 --model.width 4"
SMALL_PLAN += " --batch.0.global-batch 96 --batch.1.global-batch 96"
QUICK = [*SMALL, *IMAGES, "--epochs", "1", "--batch.0.until-epoch", "0.5", "--schedule.warmup-epochs", "0.5"]


@pytest.fixture
def inside(tmp_path):
    """The directory that a test runs in."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch.1.global-batch 100 --mesh.vertical 2 --mesh.horizontal 4 --mesh.cpu-devices 8", "batch.1.global_batch=100: "),
        ("--mesh.vertical 4 --mesh.horizontal 4", "mesh='4x4': "),
        ("--config nothing.py", "--config='nothing.py': "),
        ("--config digts", "did you mean digits?"),
        ("--workdir /proc/nowhere", "--workdir='/proc/nowhere': "),
        ("--cluster slrum", "did you mean slurm?"),
        ("--epochs 1 --no-scale-schedule", "or omit --no-scale-schedule"),
        ("--data.source ./photos", "use --data.source folder --data.directory DIR, "),
        ("--finetune.weights resnet18", "file not found; jaxdp downloads no weights, see docs/weights.md"),
        ("--resume runs/none", "--resume='runs/none': "),
    ],
)
def test_train_with_an_invalid_config_exits_with_2_and_one_line(failing, inside, arguments, message):
    assert message in failing("train", *arguments.split())
    assert not list(inside.iterdir())


def test_main_outside_of_the_main_thread_needs_no_signal_handlers():
    with ThreadPoolExecutor(1) as thread, pytest.raises(SystemExit) as stopped:
        thread.submit(main.main, ["train", "--seed", "x"]).result()
    assert stopped.value.code == 2


def test_main_with_an_unknown_command_suggests_the_nearest(failing):
    assert "command='trian': invalid choice; did you mean train?" in failing("trian")
    assert "choose from train, plan, " in failing("qqq")


def test_plan_warns_of_batch_normalization_over_few_values(capsys, failing):
    flags = ["--devices", "1", "--model.depth", "18", "--model.width", "8", "--batch.0.global-batch", "2"]
    main.main(["plan", *flags])
    assert "batch.0: workers of 2 images each, few for batch" in capsys.readouterr().out
    assert "batch.0.per_worker_batch=1: the last map has one value" in failing("plan", *flags[:-1], "1")


def test_plan_of_resnet50_has_the_published_sizes(capsys):
    imagenet = ["--data.source", "synthetic", "--data.image-size", "224", "--model.classes", "1000"]
    main.main(["plan", "--json", "--hosts", "2", "--gpus-per-host", "8", *imagenet])
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert err == ""
    assert (printed["model"]["parameters"], printed["model"]["macs"]) == (25_557_032, 4_089_184_256)
    assert printed["gradient_bytes"] == 102_228_128
    assert (printed["phases"][0]["vertical"], printed["phases"][0]["horizontal"]) == (2, 8)


def test_train_prints_nothing_about_a_scaled_schedule_before_the_run_starts(capsys, monkeypatch):
    given = []
    monkeypatch.setattr(train, "train_job", lambda job: given.extend(job.notes))
    main.main(["train", *SMALL, "--epochs", "1"])
    assert given == ["the recipe's schedule is scaled from 7 epochs to 1: phases, warm-up (--no-scale-schedule keeps it)"]
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_train_with_json_prints_the_result_as_one_document(capsys, failing, tmp_path):
    main.main(["train", *QUICK, "--json", "--workdir", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "run/result.json").read_text())
    assert "held-out" in err
    assert "\x1b" not in out + err
    saved = tmp_path / "run/config.json"
    assert from_json(saved.read_text()).epochs == 1.0
    main.main(["train", "--config", str(saved), "--workdir", str(tmp_path / "run")])
    assert "holds this run, finished; to start a new one, use --resume never" in capsys.readouterr().out
    message = failing("train", "--config", str(saved), "--workdir", str(tmp_path / "run"), "--seed", "4")
    assert "it holds a different run (seed: 0 -> 4)" in message


@pytest.mark.slow
def test_plan_on_a_platform_that_does_not_start_exits_with_2_unless_devices_are_given():
    script = f"""
from jaxdp.cli import main
from jaxdp.session import train
main.main([*{SMALL_PLAN!r}.split(), "--json"])
main.main(["plan"])
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert json.loads(done.stdout)["wire"]  # for given devices a plan starts none, even to count its messages
    assert done.returncode == 2
    assert "JAX_PLATFORMS='cuda': this JAX platform does not start" in done.stderr.splitlines()[-1]
    assert "jaxdp/cli/" not in done.stderr  # no traceback of ours; a GPU plugin of JAX prints one of its own


def test_output_to_a_full_device_exits_with_1_and_one_line():
    full = f"{sys.executable} -m jaxdp --version >/dev/full"
    done = subprocess.run(full, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "jaxdp: stdout: No space left on device\n")


@pytest.mark.parametrize("unbuffered", [True, False])
def test_output_without_a_reader_ends_a_command_quietly_by_sigpipe(unbuffered):
    """As git does: 141 in a shell."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *["-u"] * unbuffered, "-m", "jaxdp", "--version"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_error_that_nobody_can_read_keeps_its_exit_code():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jaxdp", "plan", "--epochs", "-1"]
    assert subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer, check=False).returncode == 2
    os.close(writer)


@pytest.mark.slow
@pytest.mark.parametrize("launched", [True, False])
def test_training_outlasts_its_output(tmp_path, launched):
    """A pipe without a reader, of processes that are launched; a full device, with stderr closed."""
    if launched:
        reader, out = os.pipe()
        os.close(reader)
    else:
        out = os.open("/dev/full", os.O_WRONLY)
    before = ["launch", "--processes", "2", "--", "jaxdp"] * launched
    command = [sys.executable, "-m", "jaxdp", *before, "train", "--workdir", str(tmp_path), *QUICK]
    redirected = command if launched else ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    done = subprocess.run(redirected, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    os.close(out)
    assert done.returncode == 0
    assert json.loads((tmp_path / "result.json").read_text())["steps"] > 0
    line = "jaxdp launch: stdout cannot be written (Broken pipe); the run continues without it\n"
    own = [each for each in done.stderr.splitlines(keepends=True) if "compiling for" not in each and "resumed" not in each]
    assert own == [line] * launched  # a slow compilation is reported


def test_closed_stdout_gives_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m jaxdp --help >&-", shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.slow
def test_interrupt_during_an_import_is_one_line():
    script = """
import signal, sys
from jaxdp.cli import main
from jaxdp.session import train
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "jaxdp.doctor.checks":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
main.main(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, "jaxdp: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --devices 0", "--devices=0: "),
        ("plan --images-per-second 0", "--images-per-second=0.0: "),
        ("plan --hosts 2", "--hosts=2: "),
        ("plan --hosts 3 --devices 8", "--hosts=3: "),
        ("plan --hosts 2 --gpus-per-host 4 --devices 4", "--devices=4: "),
        ("plan --compile-for h200", "--compile-for='h200': "),
        ("plan --phase 1", "--phase=1: requires --compile-for"),
        ("plan --step evaluation", "--step='evaluation': requires --compile-for"),
        ("plan --compile-for h20 --gpus-per-host 8", "did you mean h200?"),
        ("plan --devices 128 --reduce.strategy parameter_server", "reduce.strategy='parameter_server': "),
        ("data", "data: "),
        ("data prepare imagnet", "did you mean imagenette?"),
        ("bench", "bench: "),
        ("bench speed", "bench='speed': "),
        ("bench allreduce --sizes 1", "--sizes=(1,): "),
        ("bench allreduce --mesh.cpu-devices 1", "mesh: "),
        ("bench scaling --repeats 0", "--repeats=0: "),
        ("doctor --verify --workdir a", "--workdir='a': has no effect with --verify in a single process"),
        ("doctor --verify --check-images", "--check-images: has no effect with --verify"),
        ("doctor --thorough", "--thorough: requires --verify"),
        ("doctor --processes 2", "--coordinator: flags of several processes require --verify"),
    ],
)
def test_command_with_invalid_options_exits_with_one_line(failing, inside, arguments, message):
    assert message in failing(*arguments.split())


def test_plan_with_the_network_of_a_tpu_shares_no_links_between_the_chips_of_a_host(capsys):
    flags = ["--model.depth", "18", "--devices", "8", "--hosts", "2", "--mesh.cpu-devices", "8"]
    main.main(["plan", *flags, "--network", "v5e", "--json"])
    network = json.loads(capsys.readouterr().out)["network"]
    assert (network["devices_per_host"], network["gloo"], network["hops"]) == (1, False, 1)


def test_plan_with_network_puts_all_devices_of_this_machine_on_one_host(capsys):
    flags = ["--model.depth", "18", "--model.width", "4", "--mesh.cpu-devices", "8", "--network", "5e-6,10e9,300e9", "--json"]
    predicted = []
    for devices in ([], ["--devices", "8"]):
        main.main(["plan", *devices, *flags])
        predicted.append(json.loads(capsys.readouterr().out)["network"])
    assert predicted[0]["devices_per_host"] == 8
    assert predicted[0] == predicted[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluate --workdir nowhere", "--workdir='nowhere': "),
        ("evaluate --workdir broken", "--workdir='broken': "),
        ("checkpoints --workdir binary", "--workdir='binary': "),
        ("export --workdir binary --output a.safetensors", "its config.json cannot be read"),
        ("launch --processes 2", "command: "),
        ("launch --processes 0 -- true", "--processes=0: "),
        ("launch --processes 1025 -- true", "--processes=1025: "),
        ("launch --processes 1 -- no-such-program", "command='no-such-program': "),
        ("train --cluster slurm", "--cluster='slurm': "),
        ("train --processes 2", "use jaxdp launch --processes 2 -- "),
        ("train --rank 1", "--coordinator: "),
    ],
)
def test_command_with_a_missing_run_or_program_exits_with_one_line(failing, inside, arguments, message):
    for name, content in (("broken", b"{"), ("binary", b"\xff\xfe\x00")):
        (inside / name).mkdir()
        (inside / name / "config.json").write_bytes(content)
    assert message in failing(*arguments.split())


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("std::bad_alloc"), RuntimeError("can't start new thread")])
def test_out_of_memory_or_threads_exits_with_1_and_one_line_with_the_limits(capsys, monkeypatch, error):
    limits = {resource.RLIMIT_AS: 2**31, resource.RLIMIT_NPROC: 7}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))

    def fails(arguments):
        raise error

    monkeypatch.setattr(main, "_with_help_last", fails)
    with pytest.raises(SystemExit) as exit_:
        main.main([])
    assert exit_.value.code == 1
    reason = str(error) or "out of memory"
    expected = f"jaxdp: {reason}; limits: address space 2,147,483,648 bytes (ulimit -v), 7 threads (ulimit -u)\n"
    assert capsys.readouterr().err == expected
