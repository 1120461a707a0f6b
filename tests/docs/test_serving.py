"""The client programs of docs/weights.md, run unchanged, without jaxdp."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.served import save_random_run
from PIL import Image

import jaxdp
from jaxdp.config import Data
from jaxdp.inference.export import export

SECTION = (Path(__file__).parents[2] / "docs/weights.md").read_text().partition("\n## Serving\n")[2]
*BEGINNINGS, ENDING = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
PROGRAMS = {re.search(r"# python (\w+\.py)", beginning)[1]: f"{beginning}\n{ENDING}" for beginning in BEGINNINGS}
# Runs the program, and prints what it has imported of jaxdp.
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0]); print([m for m in sys.modules if 'jaxdp' in m])"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "format", "file"),
    [("classify.py", "stablehlo", "m.jaxexport"), ("classify_onnx.py", "onnx", "m.onnx")],
)
def test_client_program_predicts_as_jaxdp(tiny_resnet, tmp_path, program, format, file):
    for package in ("onnx", "onnxruntime") * (format == "onnx"):
        pytest.importorskip(package, reason="needs the extra onnx")
    data = Data(source="given", image_size=16, eval_resize=20, eval_interpolation="bicubic")
    save_random_run(dataclasses.replace(tiny_resnet, data=data), tmp_path / "run")
    (tmp_path / "run/classes.json").write_text(json.dumps([f"flower {number}" for number in range(6)]))
    export(tmp_path / "run", tmp_path / file, format=format)
    pictures = []
    for number, size in enumerate([(31, 47), (16, 16), (90, 33)]):
        pictures.append(str(tmp_path / f"{number}.png"))
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).convert("L" if number == 1 else "RGB").save(pictures[-1])
    predicted = jaxdp.predict(tmp_path / "run", pictures, top=1)

    (tmp_path / program).write_text(PROGRAMS[program])
    command = [sys.executable, "-c", RUN, program, file, *pictures]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment).stdout
    *lines, imported = out.splitlines()
    assert imported == "[]"
    expected = zip(pictures, predicted.names, predicted.probabilities, strict=True)
    assert lines == [f"{picture}: {names[0]} {probabilities[0]:.4f}" for picture, names, probabilities in expected]
