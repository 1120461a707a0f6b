"""The README says what is so."""

import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdp import aot, cli
from jaxdp.bench import allreduce, scaling, step
from jaxdp.commands import bench as bench_command
from jaxdp.config import IN_MEMORY, Config, Model
from jaxdp.data import sources

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_figures_are_those_that_were_measured():
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_its_links_lead_to_files():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README) + re.findall(r'src="(?!https?:)([^"]+)"', README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


RUN_HERE = ("train", "plan", "bench")  # those that are parsed and planned


def documented_commands(others: bool = False):
    """Lines of the code blocks of README and docs that call jaxdp, without comments: those of RUN_HERE, or the others."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split("#")[0].strip()
                started = re.sub(r"^jaxdp launch --processes \d+ (?:--restarts \d+ )?-- ", "python ", command)
                if match := re.match(r"(?:python train\.py|jaxdp (\w+))(?![\w:])(.*)", started):
                    name = match[1] or "train"
                    if (name in RUN_HERE) != others:
                        yield pytest.param(name, match[2].split(), id=command)


def test_documented_training_commands_do_not_meet_in_one_directory():
    """Run one after the other, each trains: no two share a directory, unless asked for a new one."""
    directories = []
    for parameter in documented_commands():
        command, flags = parameter.values
        named = dict(itertools.pairwise(flags))
        if command == "train" and "--resume" not in flags:
            directories.append(named.get("--workdir", f"runs/{named.get('--name', 'digits')}"))
    assert len(directories) == len(set(directories))
    assert "runs/digits" not in directories  # that of the line above them


@pytest.mark.parametrize(("command", "flags"), list(documented_commands()))
def test_documented_commands_are_understood(command, flags, capsys, monkeypatch):
    """Each is parsed and planned; a training run itself is not begun."""
    from jaxdp.training import prepared, session

    if "--compile-for" in flags and aot.available():
        pytest.skip(aot.available())
    planned, opened = [], sources.open_datasets
    digits = Config(model=Model(classes=10))  # in place of data that are not here
    monkeypatch.setattr(
        prepared, "open_datasets", lambda config, given: opened(config if config.data.source in IN_MEMORY else digits, given)
    )
    monkeypatch.setattr(session, "train", lambda config, *_, **__: planned.append(prepared.Prepared.of(config)))
    monkeypatch.setattr(scaling, "run", lambda config, counts, *_: planned.append(scaling.check(config, counts, counts[-1])))
    monkeypatch.setattr(allreduce, "run", lambda config, mesh, *_: planned.append(mesh))
    monkeypatch.setattr(step, "run", lambda config, mesh, *_: planned.append(mesh))
    monkeypatch.setattr(step, "first_steps", lambda *_: None)
    monkeypatch.setattr(step, "devices_there", lambda *_: 1)
    monkeypatch.setattr(bench_command, "_bench_result", lambda *_: None)
    cli.main([command, *flags])
    assert planned or capsys.readouterr().out


class Parsed(Exception):
    """A command line was understood; what it asks for is not begun."""


@pytest.mark.parametrize(("command", "flags"), list(documented_commands(others=True)))
def test_documented_commands_about_runs_are_parsed(command, flags, monkeypatch):
    from jaxdp.training import workdir

    module = importlib.import_module(f"jaxdp.commands.{command}")
    really = module.parse

    def parse_only(*given, **named):
        really(*given, **named)
        raise Parsed

    monkeypatch.setattr(workdir, "run_config", lambda _: Config())
    monkeypatch.setattr(module, "parse", parse_only)
    with pytest.raises(Parsed):
        cli.main([command, *flags])
