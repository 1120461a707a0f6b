"""The page of `jaxdp report`: what is on it, that it needs nothing else, and what it says where something is missing."""

import base64
import csv
import dataclasses
import errno
import fcntl
import json
import re
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_report import a_run

from jaxdp import TrainResult, cli, train
from jaxdp.config import ConfigError, Data, Phase
from jaxdp.report import classes, curves, page, write
from jaxdp.report.history import PARTS, read, read_all
from jaxdp.training.restored import evaluate

RESULT = TrainResult(
    accuracy=0.5,
    top5=0.9,
    loss=1.0,
    eval_examples=360,
    steps=9,
    samples=90,
    epochs=1.0,
    wall_seconds=20.0,
    seconds_to_first_step=6.0,
    training_seconds=10.0,
    evaluation_seconds=3.0,
    images_per_second=9.0,
    devices=4,
    device_kind="cpu",
    mesh=(2, 2),
    versions={"jaxdp": "0.1.0", "jax": "0.10.2"},
    workdir="run",
    input_seconds=1.5,
    saving_seconds=0.5,
    compilation_seconds=4.0,
)
SECTIONS = ("Loss and accuracy", "Learning rate, momentum, batch size and speed", "Where the time went", "Classes")


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are not drawn, which takes a second each."""
    monkeypatch.setattr(page, "_png", lambda figure: b"picture")


def text_of(path) -> str:
    return path.read_text()


def test_a_run_has_every_section_and_its_held_out_images_by_class(tiny, tmp_path):
    """The matrix adds up to what `jaxdp evaluate` counts; the times add up to the wall time."""
    result = train(dataclasses.replace(tiny, epochs=1.5, batch=(Phase(16),)), tmp_path)
    text = text_of(write([tmp_path]))
    assert re.findall("<h2>(.*?)</h2>", text) == [*SECTIONS, "All numbers"]
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        *("report.html", "curves.png", "settings.png", "time.png", "classes-1.png", "classes-1.csv", "confusions-1.csv")
    }
    assert f"{100 * evaluate(tiny, tmp_path)['eval_accuracy']:.2f} % of 23 held-out images" in text
    rights = [int(right) for right in re.findall(r"<td>(\d+) of \d+</td>", text)]
    images = [int(images) for images in re.findall(r"<td>\d+ of (\d+)</td>", text)]
    assert (sum(rights), sum(images)) == (round(23 * result.accuracy), 23)
    pairs = list(csv.DictReader((tmp_path / "report/confusions-1.csv").read_text().splitlines()))
    assert sum(int(row["images"]) for row in pairs) == 23
    assert sum(int(row["images"]) for row in pairs if row["label"] == row["predicted"]) == sum(rights)
    rows = list(csv.DictReader((tmp_path / "report/classes-1.csv").read_text().splitlines()))
    assert sum(int(row["right"]) for row in rows) == sum(rights)
    seconds = read(tmp_path).seconds()
    assert seconds.keys() == PARTS.keys()
    assert seconds.pop("exposed") is None
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(result.wall_seconds)
    assert all(after["wall_seconds"] > before["wall_seconds"] for before, after in pairwise(read(tmp_path).records))
    assert read(tmp_path).records[-1]["wall_seconds"] <= result.wall_seconds


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_script(tmp_path):
    text = text_of(write([a_run(tmp_path / "a<b"), a_run(tmp_path / "c", name="digits")], tmp_path / "page", evaluate=False))
    for source in re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"')\s>]*)""", text):
        assert source.startswith("data:"), source[:80]
    assert "<script" not in text
    assert "http" not in text
    assert "a&lt;b" in text
    assert "a<b" not in text
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]*)"', text)]
    assert pictures == [(tmp_path / "page" / name).read_bytes() for name in ("curves.png", "settings.png")]


def test_several_runs_share_panels_and_differ_in_colour_and_dash(undrawn, tmp_path):
    runs = read_all([a_run(tmp_path / name) for name in "abc"])
    held_out = [line for line in curves.curves(runs).axes[2].lines if line.get_linewidth() > 2]
    assert len(held_out) == len({line.get_color() for line in held_out} & {*curves.COLOURS}) == 3
    assert [str(style["linestyle"]) for _, style in curves.styles(runs)] == [str(dash) for dash in curves.DASHES[:3]]
    styles = [(style["color"], style["linestyle"]) for _, style in curves.styles(list(range(curves.MOST_RUNS)))]
    assert len(set(styles)) == curves.MOST_RUNS
    text = text_of(write([tmp_path / name for name in "abc"], tmp_path / "page", evaluate=False))
    assert "<h1>a, b, c</h1>" in text
    assert "<h2>What differs</h2>\n<p>The configurations are the same.</p>" in text


def test_runs_of_equal_names_are_told_apart_and_a_run_given_twice_is_refused(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        a_run(tmp_path / parent / "run")
    runs = read_all([tmp_path / "x/run", tmp_path / "y/run"])
    assert [run.label for run in runs] == [str(tmp_path / "x/run"), str(tmp_path / "y/run")]
    with pytest.raises(ConfigError, match="a run is given twice"):
        write([tmp_path / "x/run", tmp_path / "x/../x/run"])


def test_what_was_not_recorded_is_not_measured_and_not_guessed(undrawn, tmp_path):
    run = a_run(tmp_path / "run", name="digits")
    assert read(run).seconds() == {}
    text = text_of(write([run], evaluate=False))
    assert "time.png" not in text
    assert "<td>not measured: jaxdp report --communication</td>" in text
    assert text.count("<td>not measured</td>") == len(PARTS)
    told = dataclasses.asdict(RESULT)
    old = {name: value for name, value in told.items() if name != "compilation_seconds"}
    (run / "result.json").write_text(json.dumps(old))
    seconds = read(run).seconds()
    assert seconds["compilation"] is None
    assert seconds["rest"] == pytest.approx(20.0 - 10.0 - 3.0 - 0.5)
    (run / "result.json").write_text(json.dumps(told))
    expected = {"input": 1.5, "steps": 8.5, "evaluation": 3.0, "saving": 0.5, "compilation": 4.0, "rest": 2.5}
    assert read(run).seconds() == expected | {"exposed": None}


def test_exposed_communication_is_measured_for_this_very_run(undrawn, tmp_path):
    """A share of the steps: 10 at 30 ms, of which 20 without reductions, and 20 at 50 ms, of which 45."""
    run = a_run(tmp_path / "run", name="digits")
    (run / "result.json").write_text(json.dumps(dataclasses.asdict(RESULT)))
    phases = [
        {"steps": 10, "step_seconds": 0.03, "without_reduction_seconds": 0.02},
        {"steps": 20, "step_seconds": 0.05, "without_reduction_seconds": 0.045},
    ]
    told = {"config": json.loads((run / "config.json").read_text()), "phases": phases}
    (run / "communication.json").write_text(json.dumps(told))
    seconds = read(run).seconds()
    assert (seconds["exposed"], seconds["steps"]) == pytest.approx((8.5 * 0.2 / 1.3, 8.5 * 1.1 / 1.3))
    assert sum(seconds.values()) == pytest.approx(20.0)
    assert f"<td>{8.5 * 0.2 / 1.3:.1f} s ({100 * 8.5 * 0.2 / 1.3 / 20:.1f} %)</td>" in text_of(write([run], evaluate=False))
    for damaged in ({"config": {}, "phases": phases}, {"phases": phases}, {"config": told["config"], "phases": 3}, [], 7):
        (run / "communication.json").write_text(json.dumps(damaged))
        assert read(run).seconds()["exposed"] is None
    (run / "result.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(RESULT, devices=1, mesh=(1, 1)))))
    assert read(run).seconds()["exposed"] == 0.0


@pytest.mark.slow
def test_the_step_of_every_phase_is_timed_with_reductions_and_without(undrawn, tiny, tmp_path):
    config = dataclasses.replace(tiny, epochs=2.0, batch=(Phase(16, until_epoch=1.0), Phase(32)))
    run, said = tmp_path / "run", []
    result = train(config, run)
    text = text_of(write([run], evaluate=False, communication=True, say=said.append))
    assert [line.partition(":")[0] for line in said] == ["run, phase 0", "run, phase 1"]
    told = json.loads((run / "communication.json").read_text())
    assert sum(row["steps"] for row in told["phases"]) == result.steps
    assert [row["global_batch"] for row in told["phases"]] == [16, 32]
    assert all(row["mesh"] == list(result.mesh) and row["strategy"] == "torus" for row in told["phases"])
    assert all(min(row["step_seconds"], row["without_reduction_seconds"]) > 0 for row in told["phases"])
    assert "not measured" not in text
    assert read(run).exposed() is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"devices": 64, "mesh": (8, 8)}, "the run was on 64 x cpu, mesh 8x8, and here"), ({"processes": 2}, "of 2 processes")],
)
def test_communication_is_measured_where_the_run_was_or_not_at_all(undrawn, tiny, tmp_path, changes, message):
    run = a_run(tmp_path / "run", name="digits", mesh=tiny.mesh)
    with pytest.raises(ConfigError, match="the run is not finished"):
        write([run], communication=True)
    (run / "result.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(RESULT, samples=1437, **changes))))
    with pytest.raises(ConfigError, match=message):
        write([run], communication=True)
    assert not (run / "communication.json").exists()


def test_speeds_are_images_by_seconds_over_several_lines():
    lines = [{"samples": 10 * n, "epoch": float(n), "images_per_second": 1e6 if n % 2 else 5.0} for n in range(1, 81)]
    found = curves.speeds(lines, most=40)
    assert [one["epoch"] for one in found] == [float(n) for n in range(2, 81, 2)]
    assert {round(one["images_per_second"], 3) for one in found} == {round(20 / (10 / 1e6 + 10 / 5.0), 3)}


@pytest.mark.parametrize("evaluations", [(), (0.5,)])
def test_a_killed_run_of_few_lines_gives_a_page(undrawn, tmp_path, evaluations):
    run = a_run(tmp_path / "run", name="digits", accuracies=evaluations)
    log = run / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 9, "epoch": 100.0, "eval_acc')
    text = text_of(write([run]))
    assert "The run is not finished." in text
    assert "missing: --workdir: &#x27;" in text
    assert "holds no sound checkpoint" in text
    assert ("no evaluation yet" in text) == (not evaluations)
    log.write_text("")
    assert "no evaluation yet after 0.00 epochs" in text_of(write([run]))


def test_a_running_run_keeps_its_devices(undrawn, tmp_path):
    run = a_run(tmp_path, name="digits")
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = text_of(write([run]))
    assert "The run is going on." in text
    assert "left out: the run is going on" in text


def test_a_loss_that_was_not_finite_leaves_a_gap(tmp_path):
    run = a_run(tmp_path, name="digits")
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "epoch": 81.0, "loss": null}\n{"step": 3, "epoch": 82.0, "loss": 2.0}\n')
    (line,) = curves.curves([read(run)]).axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), [7.0, np.nan, 2.0])


def test_a_thousand_classes_show_the_worst_and_the_most_frequent_mistakes():
    counts = np.diag(np.full(1000, 50))
    counts[7] = np.roll(counts[7], 1)  # all 50 of class 7 are taken for class 8
    counts[500, [500, 3]] = 30, 20
    found = classes.Classes(counts, [f"c{n}" for n in range(1000)], "a checkpoint")
    rows = found.rows()
    assert rows[0] == {"name": "c7", "images": 50, "right": 0, "accuracy": 0.0, "taken_for": ("c8", 50)}
    assert rows[1] == {"name": "c500", "images": 50, "right": 30, "accuracy": 0.6, "taken_for": ("c3", 20)}
    assert rows[2]["taken_for"] is None
    assert found.confusions() == [("c7", "c8", 50), ("c500", "c3", 20)]
    bars, mistakes = classes.by_class(found).axes
    assert [label.get_text() for label in bars.get_yticklabels()][:2] == ["c7", "c500"]
    assert len(bars.get_yticklabels()) == classes.MOST_IN_A_LIST
    assert [label.get_text() for label in mistakes.get_yticklabels()] == ["c7 → c8", "c500 → c3"]


def test_names_are_no_formulas(tmp_path):
    """And letters that the font lacks warn nobody."""
    run = a_run(tmp_path / "$run$ \\frac", name="digits")
    a_run(tmp_path / "$b", name="digits")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write([run, tmp_path / "$b"], tmp_path / "page", evaluate=False)
        names = ["$5_$10", "$x^2$", "日本"]
        found = page._pictures(read_all([run]), [classes.Classes(np.eye(3, dtype=np.int64), names, "some")])
    assert found["classes-1.png"].startswith(b"\x89PNG")


def test_a_report_that_finds_no_space_leaves_the_last_one(undrawn, tmp_path, monkeypatch):
    run = a_run(tmp_path / "run", name="digits")
    before = write([run], evaluate=False).read_bytes()
    write_bytes = Path.write_bytes

    def full(path, data):
        if path.name == "settings.png":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*report"):
        write([run], evaluate=False)
    monkeypatch.undo()
    assert (run / "report/report.html").read_bytes() == before
    assert {path.name for path in (run / "report").iterdir()} == {"report.html", "curves.png", "settings.png"}
    write([run], evaluate=False)


@pytest.mark.parametrize("checkpoint", ["bset", "99", "", ".."])
def test_a_checkpoint_that_cannot_be_is_refused(undrawn, tmp_path, checkpoint):
    run = a_run(tmp_path / "run", name="digits")
    with pytest.raises(ConfigError, match=f"--checkpoint: {checkpoint!r} is not allowed; give newest, best, or the samples"):
        write([run], checkpoint=checkpoint)
    assert not (run / "report/report.html").exists()


def test_classes_that_are_others_than_the_runs_are_told_and_not_counted(undrawn, tiny, tmp_path):
    config = dataclasses.replace(tiny, epochs=1.1, batch=(Phase(16),), data=Data(source="digits", image_size=16))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, classes=10))
    train(config, tmp_path / "run")
    file, said = tmp_path / "run/classes.json", []
    file.write_text(json.dumps([*"0123", "five", *"56789"][:10]))
    with pytest.raises(ConfigError, match=r"its class 4 is '4', and the run was trained with 'five' there"):
        evaluate(None, tmp_path / "run")
    text = text_of(write([tmp_path / "run"], say=said.append))
    assert "classes-1.png" not in text
    assert said[0].startswith("run: accuracy by class and confusion matrix missing: data.directory: ")


def test_nothing_but_an_earlier_report_is_overwritten(undrawn, tmp_path):
    run, folder = a_run(tmp_path / "run", name="digits"), tmp_path / "page"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for name in ("curves.png", "report.html"):
        (folder / name).write_text("mine")
        with pytest.raises(ConfigError, match=f"page' is not allowed; it holds a {name} that no report has written"):
            write([run], folder, evaluate=False)
        assert {path.read_text() for path in folder.iterdir()} == {"mine"}
        (folder / name).unlink()
    (run / "result.json").write_text(json.dumps(dataclasses.asdict(RESULT)))
    write([run], folder, evaluate=False)
    assert (folder / "time.png").exists()
    (run / "result.json").unlink()
    write([run], folder, evaluate=False)
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "report.html", "curves.png", "settings.png"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--output", "FILE"], r"--output: '.*FILE' is not allowed; it is a file; give another directory"),
        (["RUN", "--output", "FILE/x"], r"--output: '.*FILE/x' is not allowed; Not a directory"),
        (["RUN", "--output", ""], r"--output: '' is not allowed; give a directory"),
        (["RUN", "--output", "x", "--no-html"], r"--output: '.*x' is not allowed with --no-html"),
        (["NONE"], r"'.*NONE' holds no run: there is no config.json with metrics.jsonl; give a run's directory"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, words, message):
    (tmp_path / "FILE").write_text("")
    a_run(tmp_path / "RUN", name="digits")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", *(word if word.startswith("-") or not word else str(tmp_path / word) for word in words)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert re.fullmatch(f"jaxdp: {message}.*\n", error), error


def test_a_damaged_result_is_one_line(tmp_path):
    run = a_run(tmp_path, name="digits")
    (run / "result.json").write_text('{"accuracy": 1}')
    with pytest.raises(ConfigError, match=r"its result\.json is damaged"):
        write([run])


def test_images_from_python_are_asked_for(undrawn, tmp_path):
    config = read(a_run(tmp_path, name="digits")).config
    a_run(tmp_path, name="digits", data=dataclasses.replace(config.data, source="given", eval_split=None))
    assert "missing: the run&#x27;s images were handed over from Python" in text_of(write([tmp_path]))
