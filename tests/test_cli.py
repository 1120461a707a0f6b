"""The command line as a person meets it: what is printed, where, and with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdp import cli
from jaxdp.recipes import load_config
from jaxdp.training import console
from jaxdp.validation import from_json, to_json

ROOT = Path(__file__).parent.parent
SMALL = ["--model.depth", "18", "--model.width", "4", "--model.stem", "small", "--mesh.cpu-devices", "2"]
IMAGES = ["--data.source", "synthetic", "--data.image-size", "12", "--data.train-examples", "700"]
QUICK = [*SMALL, *IMAGES, "--epochs", "1", "--batch.0.until-epoch", "0.5", "--schedule.warmup-epochs", "0.5"]


def failing(capsys, *arguments, code=2) -> str:
    """The one line that a command which must fail prints on stderr; it prints nothing on stdout."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert stopped.value.code == code
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.classes", "0"], "model.classes: 0 is not allowed; input should be greater than or equal to 2"),
        (
            ["--batch.0.until-epoch", "99"],
            "epochs: 10 is not allowed; phases go forward, so it must be above batch.0.until_epoch (99)",
        ),
        (
            ["--batch.1.global-batch", "100", "--mesh.vertical", "2", "--mesh.horizontal", "4", "--mesh.cpu-devices", "8"],
            "batch.1.global_batch: 100 is not allowed; its global batch 100 cannot be shared evenly by the 2x4 mesh",
        ),
        (["--mesh.vertical", "4", "--mesh.horizontal", "4"], "mesh: 4x4 is not allowed; it takes 16 devices and there are"),
        (["--config", "nothing.py"], "--config: 'nothing.py' is not allowed; there is no such file"),
        (["--config", "digts"], "there is no such recipe; did you mean digits?"),
        (["--workdir", "/proc/nowhere"], "--workdir: '/proc/nowhere' is not allowed"),
        (["--schedule.warmup-epochs", "50"], "schedule.warmup_epochs: 50 is not allowed; it must be below epochs (10)"),
        (["--model.classes", "99999999999999"], "model.classes: 99999999999999 is not allowed; input should be less than"),
        (
            ["--mesh.cpu-devices", "100000"],
            "mesh.cpu_devices: 100000 is not allowed; input should be less than or equal to 1024",
        ),
        (["--cluster", "slrum"], "--cluster: 'slrum' is not allowed; did you mean slurm? give auto, none, jax"),
        (["--name", "a/b"], "name: 'a/b' is not allowed"),
        (["--epochs", "nan"], "epochs: nan is not allowed"),
    ],
)
def test_a_wrong_configuration_ends_with_one_line_and_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in failing(capsys, "train", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["--model.depht", "50"], ["--epochs", "many"], ["--model.depth", "20"], ["extra"], ["--config"], ["--seed", "1.5"]],
)
def test_an_unknown_field_or_wrong_type_ends_with_code_2_and_names_it(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *arguments])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert arguments[0] in out + err
    assert "Traceback" not in out + err


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert "unknown command 'trian'; did you mean train?" in failing(capsys, "trian")
    known = "known are train, plan, evaluate, predict, checkpoints, export, import, bench, data, launch, report, doctor"
    assert known in failing(capsys, "qqq")


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_shows_every_field_with_its_default(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    tree = json.loads(to_json(load_config("digits")))

    def flags(part, prefix="--"):
        if isinstance(part, dict):
            return [flag for name, inner in part.items() for flag in flags(inner, f"{prefix}{name}.")]
        if isinstance(part, list) and part and isinstance(part[0], dict):
            return [flag for index, inner in enumerate(part) for flag in flags(inner, f"{prefix}{index}.")]
        return [prefix[:-1].replace("_", "-")]

    for flag in flags(tree):
        assert flag in shown


def test_a_plan_for_no_device_is_refused(capsys):
    assert "devices: 0 is not allowed; give 1 or more" in failing(capsys, "plan", "--devices", "0")


def test_plan_prints_one_json_document(capsys):
    cli.main(["plan", "--json", "--devices", "6"])
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert err == ""
    assert (printed["model"]["parameters"], printed["model"]["macs"]) == (23_528_522, 83_431_424)
    assert [phase["idle_devices"] for phase in printed["phases"]] == [2, 2]


def test_plan_of_the_published_network_has_the_published_figures(capsys):
    imagenet = ["--data.source", "synthetic", "--data.image-size", "224", "--model.classes", "1000"]
    cli.main(["plan", "--json", "--devices", "4", *imagenet])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["model"]["parameters"], printed["model"]["macs"]) == (25_557_032, 4_089_184_256)
    assert printed["gradient_bytes"] == 102_228_128


def test_a_narrow_terminal_folds_numbers(capsys, monkeypatch):
    monkeypatch.setattr(console, "PLAIN_WIDTH", 20)
    cli.main(["plan", "--devices", "4"])
    out = capsys.readouterr().out
    assert "…" not in out
    assert "23,528,522" in "".join(line[10:].strip() for line in out.splitlines())


def test_plan_prints_a_table(capsys):
    cli.main(["plan", "--devices", "4"])
    out = " ".join(capsys.readouterr().out.split())
    for part in (
        "23,528,522 parameters",
        "83,431,424 multiply-adds",
        "94,114,088 bytes",
        "on 54 tensors",
        "phase 1",
        "4 devices (2x2) x 64",
    ):
        assert part in out


@pytest.mark.slow
def test_train_prints_its_result_as_one_json_document(capsys, tmp_path):
    cli.main(["train", *QUICK, "--json", "--workdir", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "run/result.json").read_text())
    assert "held-out" in err
    assert "\x1b" not in out + err
    saved = tmp_path / "run/config.json"
    assert from_json(saved.read_text()).epochs == 1.0
    cli.main(["train", "--config", str(saved), "--workdir", str(tmp_path / "run")])
    assert "holds this run, finished; for a new one: --resume never" in capsys.readouterr().out
    message = failing(capsys, "train", "--config", str(saved), "--workdir", str(tmp_path / "run"), "--seed", "4")
    assert "it holds a different run (seed: 0 -> 4)" in message


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_with_code_1_and_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *QUICK, "--workdir", str(tmp_path), "--optimizer.name", "sgd", "--schedule.learning-rate", "1e30"])
    err = capsys.readouterr().err
    assert stopped.value.code == 1
    assert "at step" in err
    assert "learning rate" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("program", [["train.py", "--help"], ["-m", "jaxdp", "train", "--help"]])
def test_train_py_and_the_module_are_jaxdp_train(program):
    done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--batch.0.global-batch" in done.stdout


def test_a_platform_that_does_not_start_ends_with_code_2_and_one_line():
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    # for given devices a plan needs no platform at all
    given = [sys.executable, "-m", "jaxdp", "plan", "--devices", "4", "--json"]
    done = subprocess.run(given, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["total_steps"] > 0
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", "plan"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "JAX_PLATFORMS: 'cuda' is not allowed; that platform does not start here" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_output_cut_short_by_its_reader_is_no_error():
    pipe = f"{sys.executable} -m jaxdp plan --help | head -1"
    done = subprocess.run(pipe, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "train --version", "plan --help", "data --help", "plan --devices 4"]
)
def test_output_that_cannot_be_written_is_one_line(arguments):
    full = f"{sys.executable} -m jaxdp {arguments} >/dev/full"
    done = subprocess.run(full, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "jaxdp: No space left on device\n")


@pytest.mark.parametrize("arguments", ["--help", "plan --devices 4", "plan --devices 4 --json"])
def test_a_reader_that_has_gone_and_a_stdout_that_is_closed_are_no_traceback(arguments):
    for shell in (f"{sys.executable} -m jaxdp {arguments} | true", f"{sys.executable} -m jaxdp {arguments} >&-"):
        done = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr == ""


@pytest.mark.parametrize("module", ["tyro", "numpy", "jaxdp.doctor.probe"])
def test_an_interruption_of_an_import_is_one_line(module):
    script = f"""
import signal, sys
from jaxdp import cli
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
cli.main(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "jaxdp: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--network", "fast"], "--network: 'fast' is not allowed; give latency,bandwidth"),
        (["plan", "--picture", "x.png"], "--picture: 'x.png' is not allowed without --network"),
        (
            ["plan", "--network", "1e-6,1e9", "--picture", "x.gif"],
            "--picture: 'x.gif' is not allowed; give a file that ends in",
        ),
        (["plan", "--network", "1e-6,1e9", "--images-per-second", "0"], "--images-per-second: 0.0 is not allowed"),
        (["plan", "--wire", "--reduce.strategy", "auto"], "reduce.strategy: 'auto' is not allowed with --wire"),
        (["plan", "--hosts", "2"], "--hosts: 2 is not allowed alone; give --gpus-per-host or --devices"),
        (["plan", "--hosts", "3", "--devices", "8"], "--hosts: 3 is not allowed; it must divide the 8 devices"),
        (["plan", "--hosts", "0", "--devices", "8"], "--hosts: 0 is not allowed; give 1 or more"),
        (["plan", "--hosts", "2", "--gpus-per-host", "4", "--devices", "4"], "--devices: 4 is not allowed with --hosts 2"),
        (["plan", "--compile-for", "h200"], "--compile-for: give --hosts and --gpus-per-host with it"),
        (
            ["plan", "--compile-for", "tpu", "--gpus-per-host", "8"],
            "--compile-for: 'tpu' is not allowed; give a100, h100, h200",
        ),
        (["plan", "--reduce.bucket-bytes", "0"], "reduce.bucket_bytes: 0 is not allowed; input should be greater"),
        (
            ["plan", "--devices", "128", "--reduce.strategy", "parameter_server"],
            "reduce.strategy: 'parameter_server' is not allowed with batch.0 on 128 devices; one server takes at most 64",
        ),
        (["data"], "data: '' is not allowed; give prepare"),
        (
            ["data", "prepare", "imagnet"],
            "data prepare: 'imagnet' is not allowed; did you mean imagenette? give a data set of tensorflow-datasets",
        ),
        (["plan", "--compile-for", "h20", "--gpus-per-host", "8"], "did you mean h200? give a100, h100, h200"),
        (
            ["bench", "allreduce", "--sizes", "99999999999999999"],
            "is not allowed; give at most 17179869184, the bytes of 16 GiB",
        ),
        (["bench"], "bench: '' is not allowed; give allreduce, input, scaling"),
        (["bench", "speed"], "bench: 'speed' is not allowed; give allreduce, input, scaling"),
        (["bench", "allreduce", "--sizes", "1"], "--sizes: (1,) is not allowed; give numbers of bytes, 4 or more"),
        (["bench", "allreduce", "--mesh.cpu-devices", "1"], "mesh: one device has nobody to exchange with"),
        (["bench", "scaling", "--repeats", "0"], "--repeats: 0 is not allowed; give 1 or more"),
    ],
)
def test_what_plan_and_bench_cannot_do_is_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    told = failing(capsys, *arguments)
    assert message in told
    assert len(told.splitlines()) == 1


def test_plan_tells_what_a_step_sends_and_what_a_network_makes_of_it(capsys, tmp_path):
    flags = ["--devices", "8", "--model.depth", "18", "--model.width", "8", "--wire", "--network", "5e-6,10e9"]
    cli.main(["plan", *flags, "--json", "--picture", str(tmp_path / "efficiency.png")])
    told = json.loads(capsys.readouterr().out)
    assert {one["axes"][0] for one in told["wire"][0]["collectives"]} == {"horizontal", "vertical"}
    total = told["gradient_bytes"] + told["statistics_bytes"]
    assert told["wire"][0]["sent_bytes_busiest_device"] == pytest.approx(2 * 7 / 8 * total, rel=1e-3)  # padding apart
    assert told["network"]["message_bytes"] == total
    for phase in told["network"]["phases"]:
        for one in phase["strategies"].values():
            assert one["step_seconds"] == pytest.approx(phase["computation_seconds"] + one["communication_seconds"])
            assert one["efficiency"] == pytest.approx(phase["computation_seconds"] / one["step_seconds"])
    picture = tmp_path / "efficiency.png"
    assert picture.stat().st_size > 10_000
    picture.write_text("kept")
    refused = failing(capsys, "plan", *flags, "--json", "--picture", str(picture))
    assert "is not allowed; it is there already; give another file, or --overwrite" in refused
    assert picture.read_text() == "kept"
    cli.main(["plan", *flags, "--json", "--picture", str(picture), "--overwrite"])
    assert picture.stat().st_size > 10_000
    capsys.readouterr()
    cli.main(["plan", *flags])
    shown = capsys.readouterr().out
    assert "what a step of phases 0, 1 sends: torus on 2x4 devices" in shown
    assert "no proof that the torus is faster" in shown


def test_plan_for_hosts_has_them_as_rows(capsys):
    cli.main(["plan", "--json", "--hosts", "2", "--gpus-per-host", "8"])
    (first, _) = json.loads(capsys.readouterr().out)["phases"]
    assert (first["vertical"], first["horizontal"]) == (2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--workdir", "nowhere"], "--workdir: 'nowhere' is not allowed; it holds no run"),
        (["evaluate", "--workdir", "broken"], "--workdir: 'broken' is not allowed; its config.json cannot be read"),
        (["checkpoints", "--workdir", "binary"], "--workdir: 'binary' is not allowed; its config.json cannot be read"),
        (["export", "--workdir", "binary", "--output", "a.safetensors"], "its config.json cannot be read"),
        (["launch", "--processes", "2"], "no command is given; put it behind --, as in jaxdp launch --processes 2 -- train.py"),
        (["launch", "--processes", "0", "--", "true"], "--processes: 0 is not allowed; give 1 or more"),
        (["launch", "--processes", "1", "--", "no-such-program"], "'no-such-program' cannot be started"),
        (["train", "--cluster", "slurm"], "--cluster: 'slurm' is not allowed; its variables are not set"),
        (["train", "--rank", "1"], "--coordinator: is missing; give --coordinator, --processes and --rank together"),
    ],
)
def test_a_place_or_a_command_that_is_not_there_is_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, content in (("broken", b"{"), ("binary", b"\xff\xfe\x00")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    assert message in failing(capsys, *arguments)
