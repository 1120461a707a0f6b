"""A command line that cannot be parsed: one line that names the flag and the nearest that there is."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdp import ConfigError, cli, load_config
from jaxdp.commands.bench import BENCHES

ROOT = Path(__file__).parent.parent
COMMANDS = [[name] for name in cli.COMMANDS] + [["bench", name] for name in BENCHES] + [["data", "prepare"]]

QUICK = (["bench"], ["data", "prepare"], ["evaluate"], ["launch"])


def failing(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("jaxdp: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --model.dept 18", "--model.dept: unknown flag; did you mean --model.depth?"),
        ("train --sede 1", "--sede: unknown flag; did you mean --seed?"),
        ("train --lr 0.1", "--lr: unknown flag; did you mean --schedule.learning-rate?"),
        ("train --batch-size 8", "--batch-size: unknown flag; did you mean --batch.0.global-batch?"),
        ("plan --wd 0", "--wd: unknown flag; did you mean --optimizer.weight-decay?"),
        ("export --lr 0.1", "--lr: unknown flag; did you mean --help?"),
        ("train --tyro-foo", "--tyro-foo: unknown flag; `jaxdp train --help` lists all"),
        ("plan --depth 18", "--depth: unknown flag; did you mean --model.depth?"),
        ("plan --logging.no-tensorboar", "--logging.no-tensorboar: unknown flag; did you mean --logging.no-tensorboard?"),
        ("train --batch.2.global-batch 3", "--batch.2.global-batch: unknown flag; did you mean --batch.1.global-batch?"),
        ("checkpoints --workdr a", "--workdr: unknown flag; did you mean --workdir?"),
        ("bench step --kernel", "--kernel: unknown flag; did you mean --kernels?"),
        ("doctor --verfy", "--verfy: unknown flag; did you mean --verify?"),
        ("report --qqqq", "--qqqq: unknown flag; `jaxdp report --help` lists all"),
        (
            "train --reduce.strategy tours",
            "reduce.strategy: 'tours' is not allowed; did you mean torus? give psum, ring, hierarchical, torus, "
            "parameter_server, auto, "
            "or make one of your own known in this process first: jaxdp.register_strategy('tours', ...), in Python or in the "
            "recipe's file, which --config names",
        ),
        ("train --model.depth 20", "--model.depth: '20' is not allowed; give 18, 34, 50, 101, 152"),
        ("train --model.depth=20", "--model.depth: '20' is not allowed; give 18, 34, 50, 101, 152"),
        ("train --seed", "--seed: its value is missing; give a whole number"),
        ("train --seed --json", "--seed: its value is missing; give a whole number"),
        ("train --seed 1.5", "--seed: '1.5' is not allowed; give a whole number"),
        ("train --epochs many", "--epochs: 'many' is not allowed; give a number"),
        ("train --batch.0.per-worker-batch no", "--batch.0.per-worker-batch: 'no' is not allowed; give a whole number or None"),
        ("bench allreduce --sizes 1 x", "--sizes: 'x' is not allowed; give a whole number"),
        (
            "bench allreduce --dtypes float32 bfloat61",
            "--dtypes: 'bfloat61' is not allowed; did you mean bfloat16? give float32, bfloat16, float16",
        ),
        ("train --config", "--config: its value is missing; give one"),
        ("train extra", "'extra' is not allowed there: no flag takes it; `jaxdp train --help` lists them"),
        ("plan --json=yes", "--json: 'yes' is not allowed; it takes no value; give --json alone, or leave it out"),
        ("export --workdir a", "--output: is missing; `jaxdp export --help` says what to give"),
        ("launch", "--processes: is missing; `jaxdp launch --help` says what to give"),
        ("data prepare", "NAME: is missing; `jaxdp data prepare --help` says what to give"),
        ("bench scalng", "bench: 'scalng' is not allowed; did you mean scaling? give allreduce, input, scaling, step"),
        ("data prpare", "data: 'prpare' is not allowed; did you mean prepare? give prepare"),
        ("train --config imagenet_goyal_8", "there is no such recipe; did you mean imagenet_goyal_8k?"),
    ],
)
def test_what_cannot_be_parsed_is_one_line_that_names_the_nearest(capsys, arguments, message):
    assert failing(capsys, *arguments.split()).endswith(message)


@pytest.mark.parametrize(
    "flags",
    [
        ["--data.eval-split", "None", "--logging.tensorboard", "--schedule.boundaries", "--data.source", "digits"],
        ["--batch.0.global_batch", "64", "--mesh.no-keep-memory", "--seed=3", "--checkpoint.every-epochs", "None"],
        ["--optimizer.weight-decay", "1e-5", "--schedule.end", "-0.0", "--loss-scale.name", "none"],
    ],
)
def test_what_can_be_given_is_taken(flags):
    assert load_config("digits", flags).name == "digits"


def test_a_wrong_override_from_python_is_a_config_error():
    with pytest.raises(ConfigError, match=r"^--model.dept: unknown flag; did you mean --model.depth\?$"):
        load_config("digits", ["--model.dept", "18"])


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow, id=" ".join(one)) for one in COMMANDS]
)
def test_help_at_every_level_has_examples_within_80_columns(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    out, err = capsys.readouterr()
    assert err == ""
    assert "Example" in out
    examples = out.partition("Example")[2].partition("╭")[0]
    assert f"jaxdp {' '.join(command)}" in examples
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("usage:")) <= 80  # which is tyro's own


def test_examples_are_broken_between_words_alone(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    out = capsys.readouterr().out
    examples = out.partition("Examples:")[2].partition("╭")[0].replace("\\\n", "").split()
    for flag in ("--compile-for", "--gpus-per-host", "--network"):
        assert flag in examples


@pytest.mark.parametrize("columns", ["5", "20"])
@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"]])
def test_help_is_there_in_the_narrowest_terminal(capsys, monkeypatch, arguments, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 0
    assert "jaxdp" in capsys.readouterr().out


def test_the_first_help_has_examples_within_80_columns(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "Examples:\n  jaxdp train --config digits" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_dumb_terminal_and_one_without_unicode_get_help_in_ascii():
    environment = os.environ | {"TERM": "dumb", "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    command = [sys.executable, "-m", "jaxdp", "launch", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout.isascii()
    assert b"--restarts INT" in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--version"]])
def test_the_version_is_told(capsys, arguments):
    cli.main(arguments)
    assert capsys.readouterr().out == "jaxdp 0.1.0\n"
