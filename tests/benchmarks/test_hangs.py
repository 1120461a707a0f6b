import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/hangs.py"
spec = importlib.util.spec_from_file_location("hangs", PATH)
hangs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hangs)


@pytest.mark.parametrize("place", hangs.PATCHED)
def test_patch_target_of_every_place_exists(place):
    owner, name = hangs.patch_target(place)
    assert callable(getattr(owner, name))
