"""Model cards, read by PyYAML, by a Markdown parser and by Hugging Face's library."""

import dataclasses
import hashlib
import json
import re
import shutil
from itertools import pairwise

import pytest
import yaml
from helpers.runs import train_shown
from markdown_it import MarkdownIt
from safetensors.numpy import load_file
from scipy.stats import binomtest

import jaxdp
from jaxdp.checkpoint.manifest import read_manifest
from jaxdp.cli import main
from jaxdp.config import Checkpoint, Stop
from jaxdp.errors import printable
from jaxdp.inference.export import export
from jaxdp.inference.model_card import write_card
from jaxdp.loggers.console import Screen
from jaxdp.models import weights

NASTY = [
    "a|b",
    "<script>alert(1)</script>",
    "[x](http://e.vil)",
    "*b* _i_ `c` ~~s~~ $m$",
    "two\nlines\t\x1b[0m",
    "- # 1. \\| &amp;",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def trained(tiny, folder, tmp_path):
    """A finished run of a linear network, with checkpoints at 56, 80 (without an evaluation), 112 and 160 samples."""
    if not (folder / "run").exists():
        config = dataclasses.replace(
            tiny,
            name="1.5",
            checkpoint=Checkpoint(keep=9),
            optimizer=dataclasses.replace(tiny.optimizer, average_decay=0.5),
            stop=Stop("eval_loss", patience=9),
            data=dataclasses.replace(tiny.data, mean=(0.1, 0.2, 0.3)),
        )
        train_shown(config, folder / "run", screen=Screen(quiet=True))
    shutil.copytree(folder / "run", tmp_path / "run")
    return tmp_path / "run"


def card_of(workdir, checkpoint="result", **options):
    return write_card(workdir, workdir.parent / "card.md", checkpoint, overwrite=True, **options).read_text()


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def body(card):
    """(tokens of the Markdown after the metadata, cells of its tables as shown)."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(card.split("---\n", 2)[2])
    inner = [tokens[index + 1] for index, token in enumerate(tokens) if token.type in ("td_open", "th_open")]
    return tokens, ["".join(child.content for child in cell.children) for cell in inner]


def rows(card):
    """The first cells of rows with two -> the second ones."""
    _, cells = body(card)
    return dict(pairwise(cells))


def test_card_has_the_facts_of_the_run(trained):
    result = train_shown(jaxdp.load_config(trained / "config.json"), trained, screen=Screen(quiet=True))
    manifest = read_manifest(trained / f"checkpoints/{result.best_samples}")
    card = card_of(trained)
    correct, images = round(result.accuracy * result.eval_examples), result.eval_examples
    low, high = binomtest(correct, images).proportion_ci(0.95, method="wilson")
    _, cells = body(card)
    at = cells.index("accuracy")
    interval = f"{100 * low:.2f} % to {100 * high:.2f} %"
    assert cells[at + 1 : at + 4] == [f"{100 * result.accuracy:.2f} %", interval, str(correct)]
    shown = rows(card)
    assert shown["training data, fingerprint"] == manifest.metadata["data"]["training data"] != ""
    assert shown["held-out data, fingerprint"].startswith("23 images, ")
    assert shown["jax"] == result.versions["jax"]
    assert shown["throughput of the steps"] == f"{result.images_per_second:,.0f} images/s"
    assert shown["devices"] == "4 x cpu, mesh 2x2, 1 process on 1 host"
    assert f"Held-out loss (mean cross entropy): {result.loss:.4f}" in card
    assert "chosen among the checkpoints of its run by eval\\_loss on the same held-out images" in card
    assert "normalized with mean 0.1, 0.2, 0.3 and standard deviation" in card
    assert f"checkpoint {result.best_samples})" in card
    assert card_of(trained) == card


def test_card_lists_the_fields_that_differ_from_the_defaults(trained):
    _, _, training = card_of(trained).partition("## Training\n")
    fields = rows(f"---\n---\n{training.partition('## Devices')[0]}")
    assert fields["epochs"] == "3.0"
    assert fields["batch.1.global_batch"] == "16"
    assert fields["stop.metric"] == "eval_loss"
    assert fields["data.mean"] == "(0.1, 0.2, 0.3)"
    assert not {"name", "seed", "data.directory", "batch.1.image_size", "optimizer.name"} & fields.keys()


def test_metadata_is_yaml_with_an_index_of_the_results(trained):
    data = front_matter(card_of(trained, "160"))
    evaluation = read_manifest(trained / "checkpoints/160").metadata["evaluation"]
    assert (data["library_name"], data["pipeline_tag"]) == ("jaxdp", "image-classification")
    assert {"image-classification", "jax", "flax", "normalized_linear"} == set(data["tags"])
    (index,) = data["model-index"]
    (entry,) = index["results"]
    assert index["name"] == "1.5"  # text, not a number
    assert entry["dataset"] == {"type": "synthetic", "name": "synthetic"}
    values = {metric["type"]: metric["value"] for metric in entry["metrics"]}
    assert values == {"accuracy": evaluation["eval_accuracy"], "top_5_accuracy": evaluation["eval_top5"]}


@pytest.mark.slow
def test_hugging_face_reads_the_metadata(trained):
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra peers")
    card = hub.ModelCard(card_of(trained, "160"))
    (first, _) = card.data.eval_results
    evaluation = read_manifest(trained / "checkpoints/160").metadata["evaluation"]
    assert (first.metric_type, first.metric_value, first.task_type) == (
        "accuracy",
        evaluation["eval_accuracy"],
        "image-classification",
    )
    assert (card.data.model_name, card.data.library_name) == ("1.5", "jaxdp")


def test_names_with_special_characters_are_shown_as_they_are(trained):
    (trained / "classes.json").write_text(json.dumps(NASTY))
    tokens, cells = body(card_of(trained))
    assert cells[-2 * len(NASTY) :] == [cell for number, name in enumerate(NASTY) for cell in (str(number), printable(name))]
    kinds = {child.type for token in tokens for child in token.children or []} | {token.type for token in tokens}
    assert not kinds & {"html_inline", "html_block", "link_open", "image", "em_open", "strong_open", "s_open"}


def edit_manifest(path, edit):
    """Change the text of a manifest, and its digest."""
    text = edit(path.read_text().rpartition("\n")[0].rpartition("\n")[0])
    path.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")


def test_card_of_a_run_at_a_url_is_that_of_its_directory(trained):
    for manifest in (trained / "checkpoints").glob("*/manifest.json"):  # as of a run without early stopping
        edit_manifest(manifest, lambda text: re.sub(r'"best": {[^}]*}', '"best": null', text))
    there = trained.parent / "there.md"
    for checkpoint in ("best", "160"):
        card = write_card(trained.as_uri(), there, checkpoint, overwrite=True).read_text()
        assert card == card_of(trained, checkpoint)
        assert ("chosen among the checkpoints of its run" in card) == (checkpoint == "best")
    exported = export(trained.as_uri(), trained / "w.safetensors", "best")
    card = write_card(trained.as_uri(), there, "best", exported=exported, overwrite=True).read_text()
    assert "chosen among the checkpoints of its run" in card
    assert digests(card) == [hashlib.sha256((trained / "w.safetensors").read_bytes()).hexdigest()]


def test_card_has_no_paths_and_addresses_of_the_machine(trained):
    def add(text):
        document = json.loads(text)
        config = document["metadata"]["config"]
        config["storage"]["directory"], config["logging"]["mlflow"] = "/secret", "http://secret:5000"
        config["data"] |= {"source": "folder", "directory": "/secret/pets", "train_examples": 4096, "eval_examples": 1000}
        document["metadata"]["progress"]["bad_images"] = {"/secret/pets/1.jpg": "truncated", "/secret/pets/2.jpg": "empty"}
        return json.dumps(document)

    edit_manifest(trained / "checkpoints/160/manifest.json", add)
    card = card_of(trained, "160")
    assert "secret" not in card
    assert (rows(card)["directory"], rows(card)["left out"]) == ("pets", "2 images that could not be read")


def test_card_without_an_evaluation_or_the_end_of_the_run_says_so(trained):
    card = card_of(trained, "80")
    assert "These weights have not been evaluated" in card
    assert "model-index" not in front_matter(card)
    assert "confidence" not in card
    (trained / "result.json").unlink()
    assert rows(card_of(trained, "112"))["the run"] == "not finished; 12 steps up to this checkpoint"


def digests(card):
    return re.findall(r"^[0-9a-f]{64}$", card, re.MULTILINE)


def test_digest_is_that_of_the_exported_tensors_or_of_the_exported_file(trained):
    export(trained, trained / "w.safetensors", "112")
    digest = f"```text\n{weights.digest_of(load_file(trained / 'w.safetensors'))}\n```"
    assert digest in card_of(trained, "112")
    assert digest not in card_of(trained, "160")
    card = card_of(trained, exported=export(trained, trained / "x y.safetensors", "112"))
    assert digests(card) == [hashlib.sha256((trained / "x y.safetensors").read_bytes()).hexdigest()]
    assert "sha256sum 'x y.safetensors'" in card
    assert "(checkpoint 112)" in card


def test_export_writes_weights_and_card_or_only_a_card(trained, tmp_path, capsys):
    main.main(["export", "--workdir", str(trained), "--card", str(tmp_path / "hub/README.md"), "--json"])
    assert json.loads(capsys.readouterr().out) == {"card": str(tmp_path / "hub/README.md")}
    main.main(
        [
            *("export", "--workdir", str(trained), "--card", str(tmp_path / "hub/README.md"), "--overwrite"),
            *("--output", str(tmp_path / "hub/w.safetensors")),
        ]
    )
    out = capsys.readouterr().out
    assert "w.safetensors: 4 tensors" in out
    assert out.endswith(f"card: {tmp_path / 'hub/README.md'}\n")
    assert "sha256sum w.safetensors" in (tmp_path / "hub/README.md").read_text()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "--output"),
        (["--card", "x.txt"], "--card"),
        (["--card", "{old}", "--output", "{new}"], "--card"),
        (["--card", "x.md", "--format", "timm"], "--format"),
    ],
)
def test_unusable_options_exit_with_2_and_one_line_and_write_nothing(trained, tmp_path, capsys, words, field):
    old, new = tmp_path / "old.md", tmp_path / "new.safetensors"
    old.write_text("mine")
    words = [word.format(old=old, new=new) for word in words]
    with pytest.raises(SystemExit) as stopped:
        main.main(["export", "--workdir", str(trained), *words])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"jaxdp: {field}")
    assert old.read_text() == "mine"
    assert not new.exists()
