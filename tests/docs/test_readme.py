"""Links, commands, Python code and figures in README, docs and `--help` are valid."""

import ast
import functools
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

import jaxdp
from jaxdp.analysis import aot
from jaxdp.bench import allreduce, input, lr, scaling, step
from jaxdp.choices import SOURCES
from jaxdp.cli import bench as bench_command
from jaxdp.cli import main
from jaxdp.cli import plan as plan_command
from jaxdp.config import Config, Model
from jaxdp.data import sources
from jaxdp.models import resnet
from jaxdp.recipes import load_config
from jaxdp.validation import to_json

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/errors.md"})  # which the build of the site makes


@pytest.mark.slow
def test_tables_match_the_measured_results():
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub generates them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_and_named_files_exist(page):
    text = page.read_text()
    for path in re.findall(r"`((?:jaxdp|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}#{anchor}"
    for source in re.findall(r'src="(?!https?:)([^"]+)"', text):
        assert (page.parent / source).exists(), source


def documented_lines(helps: bool = True):
    """Lines of the shell code blocks on all pages, without comments; helps: also of the examples in `--help`."""
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.split("#")[0].strip()
    for module in sorted((ROOT / "jaxdp/cli").glob("*.py")) if helps else ():
        for examples in re.findall(r"\n +Examples:\n((?: +(?:jaxdp|python) .*\n)+)", module.read_text()):
            yield from map(str.strip, examples.splitlines())


def documented_commands(*kinds: str, helps: bool = True):
    """Documented commands of jaxdp that are "planned", "parsed", "wrapped" (started by another program on several hosts), or
    show "help". helps: see `documented_lines`."""
    for line in dict.fromkeys(documented_lines(helps)):
        started = re.sub(r"^jaxdp launch --processes \d+ (?:--restarts \d+ )?-- (?=jaxdp)", "", line)
        started = re.sub(r"^jaxdp launch --processes \d+ (?:--restarts \d+ )?-- ", "python ", started)
        if within := re.search(r"^(?:srun|mpirun|ssh) .*?(?:python (train)\.py|jaxdp (\w+))([^&\"]*)", started):
            kind, name, flags = "wrapped", within[1] or within[2], within[3].replace("$rank", "1").split()
        elif match := re.match(r"(?:python train\.py|jaxdp (\w+))(?![\w:])(.*)", started):
            name, flags = match[1] or "train", shlex.split(match[2])
            kind = "help" if "--help" in flags else "planned" if name in ("train", "plan", "bench") else "parsed"
        else:
            continue
        if kind in kinds:
            traces = kind == "planned" and "--wire" in flags  # a second or more
            yield pytest.param(name, flags, id=line, marks=pytest.mark.slow if traces else [])


def test_every_documented_shell_line_is_a_tested_command_or_a_known_other():
    ours = {parameter.id for parameter in documented_commands("planned", "parsed", "wrapped", "help")}
    known = r"python3 -m venv |\.venv/bin/(python -m pytest|ruff|pip install|sphinx-build) |\.ci/run$|pip install|source "
    known += r"|nvidia-smi|gcloud |tmux |tensorboard |sbatch |scancel |tail |cd |srun [^&]*(rsync|apptainer run) |aws s3 "
    known += r"|docker (build|run) |apptainer build |status=|\[ |exit |for |done$|wait$|run=\$!$|trap |while |wait \$run$|$"
    for line in documented_lines():
        assert line in ours or re.match(known, line), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_scripts_exist_and_have_the_flags(page):
    for name, flags in re.findall(r"python (benchmarks/[\w/]+\.py)([^`\n#|]*)", page.read_text()):
        source = (ROOT / name).read_text()
        for flag in re.findall(r"--[\w-]+", flags):
            assert f'"{flag}"' in source, f"{name} {flag}"


def names_of_jaxdp(tree):
    """(dotted name in jaxdp, its call or None) for each name in a program."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"jaxdp(\.\w+)+", name := ast.unparse(node)):
            yield name, called.get(id(node))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_python_uses_existing_names_and_parameters(page):
    """In code blocks, and in calls within the text."""
    text = page.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for source in [*blocks, *re.findall(r"`(jaxdp\.[\w.]+\([^`\n]*\))`", text.replace("...", "None"))]:
        for name, call in names_of_jaxdp(ast.parse(textwrap.dedent(source))):
            found = functools.reduce(getattr, name.split(".")[1:], jaxdp)
            if call:
                starred = any(isinstance(given, ast.Starred) for given in call.args)
                assert not starred
                inspect.signature(found).bind(*call.args, **{one.arg: one.value for one in call.keywords})


@pytest.mark.parametrize(("command", "flags"), [*documented_commands("planned")])
def test_documented_commands_can_be_planned(command, flags, capsys, monkeypatch, tmp_path):
    """Parsed and planned, with a small network, without training or compiling."""
    from jaxdp.session import train
    from jaxdp.setup import prepare

    monkeypatch.setitem(resnet.BLOCKS, 50, resnet.BLOCKS[resnet.TWO_BLOCKS])
    monkeypatch.setattr(plan_command, "_compiled", lambda *_: ("", "compiled"))
    monkeypatch.setattr(aot, "unavailable_reason", lambda _: None)
    monkeypatch.setattr(aot, "devices_of", lambda _: jax.devices())
    planned, opened = [], sources.open_datasets
    digits = Config(model=Model(classes=10))  # instead of data sets that are not on this machine
    monkeypatch.setattr(
        prepare,
        "open_datasets",
        lambda config, given, **_: opened(config if SOURCES[config.data.source].in_memory else digits, given),
    )
    monkeypatch.setattr(train, "train_job", lambda job: planned.append(prepare.prepare(job.config)))
    record = {"stopped": False}
    monkeypatch.setattr(
        scaling,
        "run",
        lambda config, counts, **_: planned.append(scaling.check(config, counts, available=counts[-1])) or record,
    )
    monkeypatch.setattr(allreduce, "run", lambda config, mesh, *_, **__: planned.append(mesh) or {"wrong_sums": []})
    monkeypatch.setattr(step, "run", lambda config, mesh, *_, **__: planned.append(mesh))
    monkeypatch.setattr(lr, "run", lambda config, **_: planned.append(config))
    monkeypatch.setattr(bench_command, "_bench_result", lambda *_, **__: None)
    if flags[:1] == ["input"]:
        monkeypatch.setattr(sources, "open_split", lambda *_: None)
        monkeypatch.setattr(input, "run", lambda config, *_, **__: planned.append(config))
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    if "runs/first/config.json" in flags:  # of an earlier run
        Path("runs/first").mkdir(parents=True)
        Path("runs/first/config.json").write_text(to_json(load_config("digits")))
    main.main([command, *flags])
    assert planned or capsys.readouterr().out


@pytest.mark.parametrize(("command", "flags"), [*documented_commands("help")])
def test_documented_help_is_shown(command, flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main([command, *flags])
    assert not stopped.value.code
    assert "usage: jaxdp" in capsys.readouterr().out


class Parsed(Exception):
    """A command line was parsed; the command stops."""


@pytest.mark.parametrize(("command", "flags"), [*documented_commands("parsed", "wrapped")])
def test_other_documented_commands_are_parsed(command, flags, monkeypatch):
    """Commands about runs, and those that another program starts on several hosts."""
    from jaxdp import flags as parsing
    from jaxdp.inference import load_run
    from jaxdp.setup import run_dir

    def parse_and_stop(*args, parse=parsing.parse, **kwargs):
        parse(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(run_dir, "run_config", lambda _: Config())
    monkeypatch.setattr(load_run, "weights_config", lambda _: Config())
    for place in (parsing, importlib.import_module(f"jaxdp.cli.{command}")):  # train imports it when it runs
        monkeypatch.setattr(place, "parse", parse_and_stop, raising=False)
    with pytest.raises(Parsed):
        main.main([command, *flags])


def test_figures_of_the_gpu_are_those_of_the_records():
    results = ROOT / "benchmarks" / "results"
    run, best = (json.loads((results / f"gpu_{name}.json").read_text()) for name in ("run", "best"))
    ours = best["cases"][0]["rows"]["jaxdp"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{100 * run['accuracy']:.2f} %" in text
    assert f"[{ours['images_per_second']:,.0f} images/s]" in text
    assert f"{ours['to_pytorchs_best']:.2f} times the faster of PyTorch's compiled modes" in text
