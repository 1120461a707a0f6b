"""Help of commands with config fields: an overview, the flags of a group, all flags."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from jaxdp.cli import main
from jaxdp.cli.options import EVERYDAY, Launch
from jaxdp.flag_help import asks_for_help
from jaxdp.recipes import load_config
from jaxdp.validation import to_json

TREE = json.loads(to_json(load_config("digits")))
SECTIONS = [name for name, value in TREE.items() if isinstance(value, (dict, list))]


def shown(capsys, monkeypatch, *arguments) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main.main(list(arguments))
    out, err = capsys.readouterr()
    assert (stopped.value.code or 0, err) == (0, "")
    return out


def flags_of(text: str) -> set[str]:
    """The flags that begin a line."""
    return set(re.findall(r"^[│| ] (--[a-z][\w.-]*)", text, re.MULTILINE))


def config_flags(part, prefix="--") -> set[str]:
    """The flags of a config as JSON, found without the parser."""
    if isinstance(part, list) and part and isinstance(part[0], dict):
        part = dict(enumerate(part))
    if isinstance(part, dict):
        return {flag for name, inner in part.items() for flag in config_flags(inner, f"{prefix}{name}.")}
    return {prefix[:-1].replace("_", "-")}


def test_help_of_train_shows_the_everyday_flags_and_the_groups(capsys, monkeypatch):
    out = shown(capsys, monkeypatch, "train", "--help")
    assert flags_of(out) & config_flags(TREE) == set(EVERYDAY)
    assert {"--config", "--workdir", "--resume"} <= flags_of(out)
    assert not flags_of(out) & {f"--{field.name}" for field in dataclasses.fields(Launch)}
    groups = re.findall(r"^  ([a-z-]+) ", out.partition("--help GROUP):")[2], re.MULTILINE)
    assert groups == ["general", *(name.replace("_", "-") for name in SECTIONS), "launch", "all"]


@pytest.mark.parametrize("name", SECTIONS)
def test_help_of_a_group_shows_its_flags_only(capsys, monkeypatch, name):
    out = shown(capsys, monkeypatch, "train", "--help", name)
    assert flags_of(out) == config_flags({name: TREE[name]})


def test_general_group_has_the_flags_of_no_other_group(capsys, monkeypatch):
    everything = flags_of(shown(capsys, monkeypatch, "train", "--help", "all"))
    general = flags_of(shown(capsys, monkeypatch, "train", "--help", "general"))
    launch = flags_of(shown(capsys, monkeypatch, "train", "--help", "launch"))
    assert launch == {f"--{field.name}" for field in dataclasses.fields(Launch)}
    sections = {flag for flag in config_flags(TREE) if "." in flag}
    assert everything == general | launch | sections
    assert not general & (launch | sections)


@pytest.mark.parametrize("words", [["--help=evaluation"], ["-h", "evaluation"], ["--seed", "1", "--help", "evaluation"]])
def test_help_of_a_group_can_be_spelled_in_several_ways(capsys, monkeypatch, words):
    assert "--evaluation.every-epochs" in shown(capsys, monkeypatch, "plan", *words)


@pytest.mark.parametrize(("topic", "near"), [("dta", "data"), ("depth", "model")])
def test_help_of_an_unknown_group_is_one_line_with_the_nearest(failing, topic, near):
    line = failing("train", "--help", topic)
    assert line.startswith(f"--help {topic}: no such group of options; did you mean {near}? choose from general, data, ")


def test_help_command_shows_the_help_of_a_command(capsys, monkeypatch):
    for words in (["launch"], ["bench", "step"], []):
        assert shown(capsys, monkeypatch, "help", *words) == shown(capsys, monkeypatch, *words, "--help")


def test_help_has_characters_that_a_terminal_lacks_as_escapes():
    command = [sys.executable, "-m", "jaxdp", "train", "--help", "all"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\xfc" in done.stdout


def test_help_is_asked_for_by_whole_words():
    assert [words for words in ("-h", "--help", "a --help=data") if not asks_for_help(words.split())] == []
    assert [words for words in ("", "a", "--helpful", "-hx", "help") if asks_for_help(words.split())] == []


@pytest.mark.parametrize("topic", [[], ["optimizer"]])
def test_help_fits_the_terminal_and_loses_no_word(capsys, monkeypatch, topic):
    shown = {}
    for columns in (40, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit):
            main.main(["train", "--help", *topic])
        shown[columns] = capsys.readouterr().out
    words = {columns: [word for word in text.split() if word != "\\"] for columns, text in shown.items()}
    assert words[40] == words[200]
    assert not [line for line in shown[40].splitlines() if len(line) > 40 and not line.startswith("  --")]
    if topic:
        flag = " ".join(words[40]).partition("--optimizer.momentum-rule ")[2].partition(" --")[0]
        assert re.fullmatch(r"\{constant,noise_scale,as_printed\} Momentum as a function .* \(default: constant\)", flag)
