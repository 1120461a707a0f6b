"""The recipe for small sets of own images, by README's command."""

import json
import re
from pathlib import Path

from helpers.images import encode, smooth_image

from jaxdp.cli import main
from jaxdp.models import resnet

README = (Path(__file__).parents[2] / "README.md").read_text()
MINIATURE = ["--data.image-size", "32", "--model.width", "4", "--epochs", "1", "--mesh.cpu-devices", "1"]


def test_readme_trains_on_a_folder_of_classes_with_and_without_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(resnet.BLOCKS, 18, resnet.BLOCKS[resnet.TWO_BLOCKS])
    monkeypatch.chdir(tmp_path)
    for name, count in (("cat", 50), ("dog", 31)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for n in range(count):
            (tmp_path / "photos" / name / f"{n}.jpg").write_bytes(encode(smooth_image(40, 50, seed=count + n)))
    command = re.search(r"^jaxdp (train --config pictures .*?) *#", README, re.MULTILINE)[1].split()
    main.main([*command, *MINIATURE])
    main.main(["export", "--workdir", "runs/pictures", "--output", "weights.safetensors"])
    main.main([*command, *MINIATURE, "--workdir", "runs/tuned", "--finetune.weights", "weights.safetensors"])
    capsys.readouterr()
    for run in ("pictures", "tuned"):
        result = json.loads((tmp_path / "runs" / run / "result.json").read_text())
        assert result["eval_examples"] == 5 + 3
    main.main(["evaluate", "--workdir", "runs/pictures", "--json"])
    assert json.loads(capsys.readouterr().out)["eval_examples"] == 8
