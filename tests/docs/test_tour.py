"""docs/tour.md lists every folder and module of the package, and only files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/tour.md").read_text()
TREE = re.search(r"```\njaxdp/\n(.*?)```", TEXT, re.DOTALL)[1]
ENTRIES = [entry for line in TREE.splitlines() if line[2] != " " for entry in re.split(r"  +", line.strip())[0].split()]


def test_tree_lists_every_folder_and_module_of_the_package():
    paths = [path for path in (ROOT / "jaxdp").iterdir() if not path.name.startswith("__")]
    folders = {f"{path.name}/" for path in paths if (path / "__init__.py").exists()}
    modules = {path.stem for path in paths if path.suffix == ".py"}
    assert sorted(ENTRIES) == sorted(folders | modules)


def test_named_files_exist():
    for name in re.findall(r"`([\w/]+\.py|[\w/]+/)`", TEXT):
        assert (ROOT / name).exists() or (ROOT / "jaxdp" / name).exists(), name
