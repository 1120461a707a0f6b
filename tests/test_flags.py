"""A command line that cannot be parsed: one line that names the flag and the nearest that there is."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdp import ConfigError, load_config
from jaxdp.cli import main
from jaxdp.cli.bench import BENCHES
from jaxdp.config import Config
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
    ("arguments", "message"),
    [
        ("train --model.dept 18", "--model.dept: unknown flag; did you mean --model.depth?"),
        ("train --sede 1", "--sede: unknown flag; did you mean --seed?"),
        ("train --lr 0.1", "--lr: unknown flag; did you mean --schedule.learning-rate 0.1?"),
        (
            "train --batch-size 8",
            "did you mean --batch.0.global-batch 8 "
            "(the global batch: that of all GPUs together; a second phase has --batch.1.global-batch)?",
        ),
        ("plan --wd 0", "--wd: unknown flag; did you mean --optimizer.weight-decay 0 (not of biases and normalization)?"),
        ("export --lr 0.1", "--lr: unknown flag; `jaxdp export --help` lists all flags"),
        ("train --tyro-foo", "--tyro-foo: unknown flag; `jaxdp train --help all` lists all flags"),
        ("plan --depth 18", "--depth: unknown flag; did you mean --model.depth?"),
        ("plan --logging.no-tensorboar", "--logging.no-tensorboar: unknown flag; did you mean --logging.no-tensorboard?"),
        (
            "train --batch.2.global-batch 3",
            "--batch.2.global-batch: the recipe has only 2 phases; "
            "add phases in a recipe file, as batch=(Phase(...), Phase(...)) in configs/digits.py",
        ),
        ("train --batch.1.global-batc 3", "--batch.1.global-batc: unknown flag; did you mean --batch.1.global-batch?"),
        ("checkpoints --workdr a", "--workdr: unknown flag; did you mean --workdir?"),
        ("bench step --kernel", "--kernel: unknown flag; did you mean --kernels?"),
        ("doctor --verfy", "--verfy: unknown flag; did you mean --verify?"),
        ("report --qqqq", "--qqqq: unknown flag; `jaxdp report --help` lists all flags"),
        (
            "train --reduce.strategy tours",
            "reduce.strategy='tours': unknown name; did you mean torus? choose from "
            f"{', '.join(STRATEGIES)}, auto, "
            "or register it with jaxdp.register_strategy('tours', ...) in Python, "
            "or give the recipe that registers it with --config",
        ),
        ("train --wandb", "did you mean --logging.wandb, for example --logging.wandb digits (takes the project)?"),
        ("plan --output x", "--output: unknown flag; `jaxdp plan --help all` lists all flags"),
        (
            "train --batch.global-batch 32",
            "--batch.global-batch: unknown flag; did you mean --batch.0.global-batch (every phase has its own)?",
        ),
        ("train --optimzer.name sgd", "--optimzer.name: unknown flag; did you mean --optimizer.name?"),
        ("train --optimzer.nam sgd", "--optimzer.nam: unknown flag; did you mean --optimizer.name?"),
        ("train --solver.name sgd", "--solver.name: unknown flag; `jaxdp train --help all` lists all flags"),
        ("train --eval.batch 8", "--eval.batch: unknown flag; did you mean --evaluation.batch?"),
        ("plan --memory", "--memory: unknown flag; jaxdp plan always prints the memory of a run"),
        ("predict --batch-size 8", "--batch-size: unknown flag; `jaxdp predict --help all` lists all flags"),
        ("train digits", "'digits': unexpected argument; did you mean --config digits?"),
        ("train mine/x.py", "'mine/x.py': unexpected argument; did you mean --config mine/x.py?"),
        ("train --schedule.epochs 3", "--schedule.epochs: unknown flag; did you mean --epochs?"),
        (
            "train --lr 0.1 --seed 1 --wd 0 --sede 2",
            "--lr: unknown flag; did you mean --schedule.learning-rate 0.1?; --wd: unknown flag; did you mean "
            "--optimizer.weight-decay 0 (not of biases and normalization)?; --sede: unknown flag; did you mean --seed?",
        ),
        (
            "train --reduce psum",
            "--reduce: unknown flag; its fields are --reduce.strategy, --reduce.wire-dtype, --reduce.bucket-bytes, "
            "--reduce.overlap, --reduce.no-overlap, --reduce.update",
        ),
        ("train --data pets", "did you mean --data.directory pets --data.source folder (folder: images in SPLIT/CLASS/)?"),
        ("train --no-resume", "--no-resume: unknown flag; use --resume never"),
        ("train --resume", "--resume: missing value; expected auto|never|PATH"),
        ("launch -n 2", "-n: unknown flag; did you mean --processes 2?"),
        ("launch --processes 2 train.py", "'train.py': unexpected argument; put -- before the command"),
        ("train --config imagenet", "or use the path of a .py or .json file"),
        ("train --model.depth 20", "--model.depth='20': invalid choice; choose from 18, 34, 50, 101, 152"),
        ("train --model.depth=20", "--model.depth='20': invalid choice; choose from 18, 34, 50, 101, 152"),
        ("train --seed", "--seed: missing value; expected an integer"),
        ("train --seed --json", "--seed: missing value; expected an integer"),
        ("train --seed 1.5", "--seed='1.5': expected an integer"),
        ("train --epochs many", "--epochs='many': expected a number"),
        ("train --batch.0.per-worker-batch no", "--batch.0.per-worker-batch='no': expected an integer or None"),
        ("bench allreduce --sizes 1 x", "--sizes='x': expected an integer"),
        (
            "bench allreduce --dtypes float32 bfloat61",
            "--dtypes='bfloat61': invalid choice; did you mean bfloat16? choose from float32, bfloat16, float16",
        ),
        (
            "train --config",
            "--config: missing value; expected: Recipe: a name in configs/, a .py file with config(), or a saved config.json",
        ),
        (
            "plan --gpu",
            "expected: GPU whose memory must hold the run, such as a100, h100 or rtx4090 (None: those of this machine)",
        ),
        ("train extra", "'extra': unexpected argument; `jaxdp train --help all` lists all flags"),
        ("plan --json=yes", "--json='yes': takes no value"),
        ("export --workdir a", "--output: required; for example --output digits.safetensors, or --card README.md"),
        ("import r18.pth", "--output: required; for example --output resnet50-jaxdp.safetensors"),
        ("train --epochs --help", "--epochs: missing value; expected a number"),
        ("evaluate --workdir -h", "--workdir: missing value; expected: Working directory of the run"),
        ("launch --processes --help", "--processes: missing value; expected an integer"),
        ("plan --epochs many --help", "--epochs='many': expected a number"),
        ("launch", "--processes: required; for example --processes 2"),
        ("data prepare", "NAME: required; see `jaxdp data prepare --help`"),
        ("bench scalng", "invalid choice; did you mean scaling? choose from allreduce, input, lr, scaling, step"),
        ("data prpare", "data='prpare': invalid choice; did you mean prepare? choose from prepare"),
        ("train --config imagenet_goyal_8", "or use the path of a .py or .json file"),
    ],
)
def test_invalid_command_line_is_one_line_with_a_hint(capsys, arguments, message):
    assert failing(capsys, *arguments.split()).endswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluate", "--workdir: required; {give}"),
        ("checkpoints", "--workdir: required; {give}"),
        ("predict a.jpg", "--workdir: required; {give}"),
        ("export --output w.safetensors", "--workdir: required; {give}"),
        ("predict runs/b a.jpg", "'runs/b': is a run; give it with --workdir runs/b"),
        ("evaluate runs/b", "'runs/b': is a run; give it with --workdir runs/b"),
        ("checkpoints runs/none", "'runs/none': unexpected argument; did you mean --workdir runs/none?"),
        ("export --workdir a w.safetensors", "'w.safetensors': unexpected argument; did you mean --output w.safetensors?"),
        ("export --workdir a card.md", "'card.md': unexpected argument; did you mean --card card.md?"),
        ("evaluate --workdir runs/b -b 8", "-b: unknown flag; did you mean --evaluation.batch 8 (of all GPUs together)?"),
        ("train runs", "'runs': unexpected argument; did you mean --data.source folder --data.directory runs?"),
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


def test_load_config_with_an_unknown_flag_raises_config_error():
    with pytest.raises(ConfigError, match=r"^--model.dept: unknown flag; did you mean --model.depth\?$"):
        load_config("digits", ["--model.dept", "18"])


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


def test_help_shows_one_default_per_flag_and_wraps_to_the_terminal_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main.main(["train", "--help", "all"])
    lines = [line.strip("\u2502 |") for line in capsys.readouterr().out.splitlines()]
    text = " ".join(lines)
    assert not re.search(r"\(default: [^)]*\) \(default: ", text)
    assert "{None}" not in text
    assert not re.search(r"\(default: (None)?\)", text)
    start = lines.index(next(line for line in lines if line.startswith("Checkpoint to resume from.")))
    first, second, third = lines[start : start + 3]
    assert min(len(first) + len(second.split()[0]), len(second) + len(third.split()[0])) > 70, "a line ends early"


def test_help_breaks_examples_only_at_spaces(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main.main(["plan", "--help"])
    out = capsys.readouterr().out
    examples = out.partition("Examples:")[2].partition("ptions:")[0].replace("\\\n", "").split()
    for flag in ("--compile-for", "--gpus-per-host", "--network"):
        assert flag in examples


@pytest.mark.parametrize("columns", ["5", "20"])
@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"]])
def test_help_in_a_very_narrow_terminal_is_printed(capsys, monkeypatch, arguments, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)
    assert stopped.value.code == 0
    assert "jaxdp" in capsys.readouterr().out


def test_main_help_has_examples_within_80_columns(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "Examples:\n  jaxdp train --config digits" in out
    assert max(map(len, out.splitlines())) <= 80


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
