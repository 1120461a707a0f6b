"""The page of `jaxdp report`: its content, and its files."""

import csv
import dataclasses
import errno
import fcntl
import json
import re
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.report import write_log, write_result, write_run
from helpers.saved_run import save_run
from helpers.step import with_parts
from plotly.offline import get_plotlyjs

from jaxdp import models, train
from jaxdp.config import Data, Optimizer, Phase
from jaxdp.errors import ConfigError
from jaxdp.inference import evaluate as evaluation
from jaxdp.inference.evaluate import evaluate
from jaxdp.report import plots, write
from jaxdp.report.run_history import PARTS, read

SECTIONS = (
    *(
        "Progress",
        "Messages",
        "Results",
        "Runs in the plots",
        "Loss and metrics",
        "Learning rate, momentum, batch size and speed",
    ),
    *("Wall time", "Classes", "More numbers"),
)


def test_page_of_a_trained_run_has_all_sections_and_consistent_numbers(tiny, tmp_path):
    result = train(dataclasses.replace(tiny, epochs=1.5, batch=(Phase(16),)), tmp_path)
    text = write([tmp_path]).read_text()
    assert re.findall("<h2[^>]*>(.*?)</h2>", text) == [*SECTIONS]
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.html", "classes-1.csv", "confusions-1.csv"}
    data = data_of(text)
    assert [*data["plots"]][:2] == ["loss", "accuracy"]
    assert [*data["plots"]][-3:] == ["time", "classes", "confusions-1"]
    assert np.sum(data["plots"]["confusions-1"]["traces"][0]["text"]) == 23
    logged = [record["loss"] for record in read(tmp_path).training]
    np.testing.assert_allclose(data["plots"]["loss"]["curves"][0]["y"], logged, rtol=1e-6)
    # Classes: the matrix adds up to the accuracy of `evaluate`.
    assert f"{100 * evaluate(tiny, tmp_path)['eval_accuracy']:.2f} % of 23 held-out images" in text
    correct = sum(int(count) for count in re.findall(r"<td[^>]*>(\d+) of \d+</td>", text))
    assert correct == round(23 * result.accuracy)
    assert sum(int(count) for count in re.findall(r"<td[^>]*>\d+ of (\d+)</td>", text)) == 23
    pairs = list(csv.DictReader((tmp_path / "report/confusions-1.csv").read_text().splitlines()))
    assert sum(int(pair["images"]) for pair in pairs) == 23
    assert sum(int(pair["images"]) for pair in pairs if pair["label"] == pair["predicted"]) == correct
    classes = list(csv.DictReader((tmp_path / "report/classes-1.csv").read_text().splitlines()))
    assert sum(int(row["correct"]) for row in classes) == correct
    # Times: the parts add up to the wall time.
    history = read(tmp_path)
    seconds = history.seconds()
    assert seconds.keys() == PARTS.keys()
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(result.wall_seconds)
    assert all(after["wall_seconds"] > before["wall_seconds"] for before, after in pairwise(history.records))
    assert history.records[-1]["wall_seconds"] <= result.wall_seconds


def data_of(text):
    """The embedded data of the plots."""
    return json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', text)[1])


def test_page_needs_no_network_and_has_plotly_and_its_own_script_alone(tmp_path):
    runs = [write_run(tmp_path / "a<b", "imagenet_mlperf_8192"), write_run(tmp_path / "c")]
    text = write(runs, tmp_path / "page", evaluate=False).read_text()
    before, library, after = text.partition(get_plotlyjs())
    assert library
    own = before + after
    for source in re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"')\s>]*)""", own):
        assert source.startswith("data:"), source[:80]
    assert re.findall("<script[^>]*>", own) == ['<script type="application/json" id="data">', "<script>", "<script>"]
    assert "http:" not in own
    assert "https:" not in own
    assert " data-follow" not in own  # the script asks no server
    assert "<h1>a&lt;b, c</h1>" in own
    assert "a<b" not in own
    places = re.findall('<figure class="plot" id="plot-(.*?)">', own)
    assert places == [*data_of(own)["plots"]] != []


def test_names_of_runs_and_values_end_no_script_and_no_attribute(tmp_path):
    attack = '"><script>alert(1)'
    run = write_run(tmp_path / attack)
    write_log(run, [{"epoch": 1.0, "loss": 1.0, '"></script><script>alert(1)</script>': 1.0}])
    text = write(run, tmp_path / "page", evaluate=False).read_text().replace(get_plotlyjs(), "")
    assert text.count("<script") == text.count("</script>") == 3
    assert "<script>alert" not in text
    assert data_of(text)["lines"][0]["label"] == attack


@pytest.mark.parametrize("evaluations", [(), (0.5,)])
def test_page_of_a_killed_run_without_a_checkpoint_shows_what_was_logged(tmp_path, evaluations):
    run = write_run(tmp_path / "run", accuracies=evaluations)
    log = run / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 9, "epoch": 100.0, "eval_acc')
    text = write([run]).read_text()
    assert ">killed</td>" in text
    assert '<article class="killed"' in text
    assert "Accuracy by class and confusion matrix missing: " in text
    assert ("no evaluation yet" in text) == (not evaluations)
    log.write_text("")
    assert "no evaluation yet after 0.00 epochs" in write([run]).read_text()


def test_page_says_how_many_values_of_callbacks_have_no_plot(tmp_path):
    run = write_run(tmp_path)
    recalls = {f"recall {number}": 0.5 for number in range(plots.MAX_LOGGED + 2)}
    write_log(run, [{"epoch": 1.0, "eval_accuracy": 0.5} | recalls])
    text = write(run, evaluate=False).read_text()
    assert f"2 more values without a plot, from recall {plots.MAX_LOGGED} on" in text


def test_page_says_why_a_run_is_not_evaluated(tmp_path):
    run = write_run(tmp_path)
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = write([run]).read_text()
    assert ">still training</td>" in text
    assert "skipped: the run is still training and uses its devices" in text
    write_run(tmp_path, data=Data(source="given", eval_split=None))
    assert "missing: the run was given its images from Python" in write(str(tmp_path)).read_text()


def test_page_of_a_run_on_several_labels_has_its_metrics_and_no_classes(tmp_path):
    shown, task = [], {"task": "labels", "data": Data(source="given"), "optimizer": Optimizer(loss="binary")}
    run = write_run(tmp_path / "labels", **task)
    for evaluated in (False, True):
        html = write(run, evaluate=evaluated, info=shown.append).read_text()
        assert "Results" in html
        assert "Classes</h2>" not in html
        assert "by class" not in html
    assert shown == []


def test_page_of_a_run_with_other_classes_is_written_without_them(tiny, tmp_path):
    config = dataclasses.replace(with_parts(tiny, model={"classes": 10}), data=Data(source="digits", image_size=16))
    run = tmp_path / "run"
    save_run(config, run, *models.create(config.model).init(jax.random.key(0), (16, 16, 3)))
    (run / "metrics.jsonl").write_text("")
    (run / "classes.json").write_text(json.dumps([*"0123", "five", *"56789"][:10]))
    progress = []
    text = write([run], info=progress.append).read_text()
    assert "classes" not in data_of(text)["plots"]
    assert progress[0].startswith(
        "run: accuracy by class missing: data.source='digits': the training set is of other classes: its class '4' "
    )


def test_names_of_classes_and_of_values_that_are_not_unicode_are_escaped(tmp_path, monkeypatch):
    run, counts = write_run(tmp_path / "run"), np.array([[3, 1], [0, 4]])
    write_log(run, [{"epoch": 1.0, "eval_accuracy": 0.5, "recall\udcff": 0.5}])
    metrics = {"checkpoint": "x\udcff/1", "epoch": 1.0, "eval_accuracy": 0.875, "eval_examples": 8}
    monkeypatch.setattr(evaluation, "confusion_matrix", lambda *_, **__: (metrics, counts, ["a\udcff", "b\x1b"]))
    text = write([run]).read_text()
    assert r"<th>a\udcff</th>" in text
    assert r"<figcaption>recall\udcff</figcaption>" in text
    assert "\x1b" not in text
    assert (run / "report/classes-1.csv").read_text().splitlines()[1] == r"a\udcff,4,3,0.75,b\x1b,1"


def test_write_on_a_full_disk_keeps_the_earlier_report(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    before = write([run], evaluate=False).read_bytes()
    write_bytes = Path.write_bytes

    def fail(path, data):
        if path.name == "report.html":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*report"):
        write([run], evaluate=False)
    monkeypatch.undo()
    assert (run / "report/report.html").read_bytes() == before
    assert {path.name for path in (run / "report").iterdir()} == {"report.html"}


def test_write_replaces_files_of_an_earlier_report_only(tmp_path):
    run, folder = write_run(tmp_path / "run"), tmp_path / "page"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "report.html").write_text("mine")
    with pytest.raises(ConfigError) as error:
        write([run], folder, evaluate=False)
    assert (error.value.field, error.value.reason) == ("--output", "contains a report.html that no report has written")
    assert {path.read_text() for path in folder.iterdir()} == {"mine"}
    (folder / "report.html").unlink()
    write([run], folder, evaluate=False)
    write_result(run)
    assert ">finished</td>" in write([run], folder, evaluate=False).read_text()
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "report.html"}
    assert (folder / "notes.txt").read_text() == "mine"


def test_write_with_an_unknown_checkpoint_raises_before_writing(tmp_path):
    run = write_run(tmp_path / "run")
    for checkpoint in ("bset", "99", "", ".."):
        with pytest.raises(ConfigError) as error:
            write([run], checkpoint=checkpoint)
        assert (error.value.field, error.value.value, error.value.reason) == ("--checkpoint", checkpoint, "not found")
    assert not (run / "report/report.html").exists()
