"""The manual: its navigation, its generated pages and its strict build."""

import ast
import dataclasses
import inspect
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from pydantic import TypeAdapter

import jaxdp
from jaxdp.cli.main import main
from jaxdp.config import Config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def module(name: str):
    """A module of docs/, which is no package."""
    spec = spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def generated():
    return module("generated")


def test_every_page_is_in_the_navigation_once():
    pages = [path for links in module("conf").navigation((DOCS / "index.md").read_text()).values() for _, path in links]
    listed = sorted((DOCS / path).resolve() for path in pages)
    top = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"))
    others = {DOCS / "index.md", DOCS / "errors.md"}  # the page of errors is made by the build, which adds it to the navigation
    assert listed == sorted([*top, *ROOT.glob("notebooks/*.ipynb"), *(set(DOCS.glob("*.md")) - others)])


def test_fields_page_documents_every_config_field(generated):
    def leaves(schema: dict, path: str = ""):
        if "$ref" in schema:
            schema = document["$defs"][schema["$ref"].rpartition("/")[2]]
        if "$ref" in schema.get("items", {}):
            yield from leaves(schema["items"], f"{path}.N")
        elif "properties" in schema and not path.startswith("optimizer.groups"):  # one field, whose values are groups
            for name, inner in schema["properties"].items():
                yield from leaves(inner, f"{path}.{name}" if path else name)
        else:
            yield path.removesuffix(".N")

    document = TypeAdapter(Config).json_schema()
    expected = list(leaves(document))
    assert len(expected) > 100
    assert sorted(generated.field_names()) == sorted(expected)


@pytest.mark.parametrize(
    ("field", "lines"),
    [
        ("seed", [":type: integer, at least 0, below 2^32", ":default: `0`", "Seed for initialization, data order and"]),
        ("model.depth", [":type: `18` or `34` or `50` or `101` or `152`", ":default: `50`"]),
        ("optimizer.clip_norm", [":type: number, at least 1e-15, at most 1e15 or None", ":default: `None`"]),
        ("optimizer.name", ["Update rule.", "- `sgd`: stochastic gradient descent with momentum"]),
        ("batch.N.global_batch", [":type: integer, at least 1, below 2^31", ":default: `256`"]),
        ("mesh.vertical", ["A run may resume with another value."]),
    ],
)
def test_field_has_type_range_default_and_meaning(generated, field, lines):
    (entry,) = re.findall(rf"\{{confval\}} {re.escape(field)}\n(.*?)````", generated.fields(), re.DOTALL)
    for line in lines:
        assert line in entry


@pytest.mark.parametrize("command", ["train", "bench step"])
def test_commands_page_documents_the_flags_that_help_shows(command, generated, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help", "all"])
    starts = re.findall(r"^\W (--\w.*)", capsys.readouterr().out, re.MULTILINE)
    shown = {flag for line in starts for flag in re.findall(r"^--[\w.-]+|(?<=, )--[\w.-]+", line)}
    page = generated.commands().partition(f" jaxdp {command}\n")[2].partition("\n#")[0]
    documented = {flag for spellings in re.findall(r"\{option\} (--.*)", page) for flag in re.findall(r"--[\w-]+", spellings)}
    names = [field.name for field in dataclasses.fields(Config)]  # on the page of fields, as those with a dot
    others = {one for one in shown if "." not in one and one.removeprefix("--no-").lstrip("-").replace("-", "_") not in names}
    assert len(documented) > 1
    assert documented == others - {"--help"}


def test_api_page_documents_every_public_name(generated):
    documented = set(re.findall(r"auto\w+:: jaxdp\.(\w+)$", generated.api(), re.MULTILINE))
    modules = {name for name in jaxdp.__all__ if inspect.ismodule(getattr(jaxdp, name))}  # their functions are documented
    assert documented == set(jaxdp.__all__) - modules
    rows = re.findall(r"^\| .* \| (`.*) \|$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(jaxdp.__all__)


def test_type_checkers_see_the_public_names():
    (block,) = [node for node in ast.parse(Path(jaxdp.__file__).read_text()).body if isinstance(node, ast.If)]
    seen = {alias.asname: node.module for node in block.body for alias in node.names if alias.asname}
    places = {name: getattr(getattr(jaxdp, name), "__module__", "jaxdp") for name in jaxdp.__all__}  # modules: in jaxdp
    assert seen == {name: place for name, place in places.items() if name != "plan"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with the command in CONTRIBUTING.md: warnings, for example of a broken link, are errors."""
    if find_spec("sphinx") is None:
        pytest.skip("needs the extra docs")
    (line,) = re.findall(r"^\.venv/bin/(sphinx-build .*)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    _, *flags = shlex.split(line, comments=True)
    assert {"-W", "--keep-going"} <= set(flags)
    assert flags.pop() == "site/html"
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", *flags, "-d", str(out / "doctrees"), str(out / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.slow
def test_strict_build_has_every_page_and_index(site):
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    pages = {
        path.relative_to(ROOT).with_suffix("").as_posix() for path in [*DOCS.glob("*.md"), *ROOT.glob("notebooks/*.ipynb")]
    }
    assert pages | {"README", "CONTRIBUTING", "CHANGELOG", "index"} <= built
    assert 'url=docs/index.html"' in (site / "index.html").read_text()
    assert "schedule.learning_rate" in (site / "docs/reference.html").read_text()
