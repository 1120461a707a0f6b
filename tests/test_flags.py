"""A command line that cannot be parsed: one line that names the flag and the nearest that there is."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from jaxdp import load_config
from jaxdp.cli import main
from jaxdp.cli.bench import BENCHES
from jaxdp.cli.plan import Plan
from jaxdp.config import Config
from jaxdp.flags import parse
from jaxdp.strategies import STRATEGIES
from jaxdp.validation import to_json

ROOT = Path(__file__).parent.parent
COMMANDS = [[name] for name in main.COMMANDS] + [["bench", name] for name in BENCHES] + [["data", "prepare"]]

QUICK = (["bench"], ["data", "prepare"], ["evaluate"], ["launch"])


def failing(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        main.main(list(arguments))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("jaxdp: ").rstrip("\n")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--seed 5 --seed=6 --epochs 3 --name None --data.directory=a=b --data.eval-split None --data.threads 2",
        "--model.depth 18 --model.dtype bfloat16 --data.threads None --optimizer.name adamw --logging.profile 3,4",
        "--batch.1.global-batch 32 --batch.1.per-worker-batch 8 --batch.0.until_epoch 2.5 --mesh.vertical 1",
        "--optimizer.class-weights 1 2.5 --schedule.boundaries --data.mean 0.5 --data.std 0.1 2e-1 3",
        "--optimizer.class-weights balanced --json --reduce.no-overlap --model.remat --model.no-remat --network 5e-6,1e9",
        "--model.no-remat --model.remat --images-per-second 7 --hosts 2 --gpus-per-host=4 --stop.metric eval_loss",
    ],
)
def test_values_are_those_that_tyro_reads(words):
    default = Plan(run=load_config("digits"))
    assert parse(Plan, words.split(), "jaxdp plan", default=default) == tyro.cli(Plan, args=words.split(), default=default)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --model.dept 18", "--model.dept: unknown flag; did you mean --model.depth?"),
        ("train --lr 0.1", "--lr: unknown flag; did you mean --schedule.learning-rate 0.1?"),
        (
            "train --batch-size 8",
            "did you mean --batch.0.global-batch 8 "
            "(the global batch: that of all GPUs together; a second phase has --batch.1.global-batch)?",
        ),
        ("export --lr 0.1", "--lr: unknown flag; `jaxdp export --help` lists all flags"),
        ("plan --depth 18", "--depth: unknown flag; did you mean --model.depth?"),
        (
            "train --batch.2.global-batch 3",
            "--batch.2.global-batch: the recipe has only 2 phases; "
            "add phases in a recipe file, as batch=(Phase(...), Phase(...)) in configs/digits.py",
        ),
        (
            "train --reduce.strategy tours",
            "reduce.strategy='tours': unknown name; did you mean torus? choose from "
            f"{', '.join(STRATEGIES)}, auto, "
            "or register it with jaxdp.register_strategy('tours', ...) in Python, "
            "or give the recipe that registers it with --config",
        ),
        (
            "train --batch.global-batch 32",
            "--batch.global-batch: unknown flag; did you mean --batch.0.global-batch (every phase has its own)?",
        ),
        ("train --solver.name sgd", "--solver.name: unknown flag; `jaxdp train --help all` lists all flags"),
        ("train digits", "'digits': unexpected argument; did you mean --config digits?"),
        ("train --schedule.epochs 3", "--schedule.epochs: unknown flag; did you mean --epochs?"),
        (
            "train --reduce psum",
            "--reduce: unknown flag; its fields are --reduce.strategy, --reduce.wire-dtype, --reduce.bucket-bytes, "
            "--reduce.overlap, --reduce.no-overlap, --reduce.update",
        ),
        ("train --data pets", "did you mean --data.directory pets --data.source folder (folder: images in SPLIT/CLASS/)?"),
        ("train --resume", "--resume: missing value; expected auto|never|PATH"),
        ("launch --processes 2 train.py", "'train.py': unexpected argument; put -- before the command"),
        ("train --model.depth 20", "--model.depth='20': invalid choice; choose from 18, 34, 50, 101, 152"),
        ("train --seed", "--seed: missing value; expected an integer"),
        ("train --seed 1.5", "--seed='1.5': expected an integer"),
        ("train --epochs many", "--epochs='many': expected a number"),
        ("bench allreduce --sizes 1 x", "--sizes='x': expected an integer"),
        (
            "train --config",
            "--config: missing value; expected: Recipe: a name in configs/, a .py file with config(), or a saved config.json",
        ),
        ("plan --json=yes", "--json='yes': takes no value"),
        ("export --workdir a", "--output: required; for example --output digits.safetensors, or --card README.md"),
        ("plan --epochs many --help", "--epochs='many': expected a number"),
        ("bench scalng", "invalid choice; did you mean scaling? choose from allreduce, input, lr, scaling, step"),
    ],
)
def test_invalid_command_line_is_one_line_with_a_hint(capsys, arguments, message):
    assert failing(capsys, *arguments.split()).endswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluate", "--workdir: required; {give}"),
        ("predict runs/b a.jpg", "'runs/b': is a run; give it with --workdir runs/b"),
        ("export --workdir a w.safetensors", "'w.safetensors': unexpected argument; did you mean --output w.safetensors?"),
        ("report --workdir runs/b", "--workdir: unknown flag; give it as an argument: jaxdp report runs/b"),
    ],
)
def test_missing_or_misplaced_run_is_named_with_its_flag(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.json").write_text(to_json(Config()))
    give = "give the directory of a run, for example --workdir runs/a; ./runs holds runs/a, runs/b"
    assert failing(capsys, *arguments.split()) == message.format(give=give)


@pytest.mark.parametrize(
    "flags",
    [
        ["--data.eval-split", "None", "--logging.tensorboard", "--schedule.boundaries", "--data.source", "digits"],
        ["--batch.0.global_batch", "64", "--seed=3", "--checkpoint.every-epochs", "None"],
        ["--optimizer.weight-decay", "1e-5", "--schedule.end", "-0.0", "--loss-scale.name", "none"],
    ],
)
def test_load_config_with_valid_flags_succeeds(flags):
    assert load_config("digits", flags).name == "digits"


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow, id=" ".join(one)) for one in COMMANDS]
)
def test_help_of_every_command_has_examples_within_80_columns(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main.main([*command, "--help"])
    out, err = capsys.readouterr()
    assert err == ""
    assert "Example" in out
    examples = re.split("╭|ptions:", out.partition("Example")[2])[0]
    assert f"jaxdp {' '.join(command)}" in examples
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("usage:")) <= 80  # which is tyro's own


def test_help_in_a_terminal_without_unicode_is_ascii():
    environment = os.environ | {"TERM": "dumb", "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    command = [sys.executable, "-m", "jaxdp", "launch", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout.isascii()
    assert b"--restarts INT" in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--version"]])
def test_version_flag_prints_the_version(capsys, arguments):
    main.main(arguments)
    assert capsys.readouterr().out == "jaxdp 0.1.0\n"
