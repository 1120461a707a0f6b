"""`jaxdp report` as a command."""

import json
import os
import re

import pytest
from helpers.report import write_run

from jaxdp.cli import main


def test_report_prints_a_line_per_run_or_one_json_document(tmp_path, capsys):
    first, second = write_run(tmp_path / "a", "imagenet_mlperf_8192"), write_run(tmp_path / "b")
    main.main(["report", str(first), str(second), "--no-html"])
    assert len(capsys.readouterr().out.splitlines()) == 3
    main.main(["report", str(first), str(second), "--json", "--output", str(tmp_path / "page"), "--no-evaluate"])
    assert [summary["name"] for summary in json.loads(capsys.readouterr().out)] == ["imagenet_mlperf_8192", "digits"]
    assert (tmp_path / "page/report.html").exists()


def test_report_of_runs_with_unprintable_names_writes_the_page_and_escapes_them(tmp_path, capsys):
    run = write_run(tmp_path / os.fsdecode(b"x\xff\x1b[31m\n"))
    (write_run(tmp_path / "other") / "result.json").write_text("damaged")
    main.main(["report", str(run), str(tmp_path / "other"), "--output", str(tmp_path / "page\x1b"), "--no-evaluate"])
    shown = r"x\udcff\x1b[31m\n"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}/{shown}: ")
    assert len(lines) == 3
    assert "\x1b" not in "".join(lines)
    page = (tmp_path / "page\x1b/report.html").read_text()
    assert f"<h1>{shown}, other</h1>" in page


def test_metrics_that_are_not_registered_here_are_named(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as log:
        log.write(
            json.dumps({"samples": 5000, "epoch": 90.0, "eval_accuracy": 0.5, "eval_mine": 0.25, "eval_examples": 9}) + "\n"
        )
    main.main(["report", str(run), "--output", str(tmp_path / "page"), "--no-evaluate"])
    out, err = capsys.readouterr()
    (line,) = [line for line in (out + err).splitlines() if "--config" in line]
    assert line == "run: give the recipe that registers the metrics mine with --config"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--output", "FILE"], r"--output='.*FILE': is a file; give another directory"),
        (["RUN", "--output", "x.html"], r"--output='.*x.html': must be a directory, which receives report.html .*"),
        (["RUN", "--output", "x", "--no-html"], r"--output='.*x': has no effect with --no-html; leave one of them out"),
        (["NONE"], r"WORKDIR='.*NONE': holds no run: config.json not found; give the directory of a run"),
        ([], r"WORKDIR: missing; give the directory of at least one run"),
    ],
)
def test_report_with_unusable_arguments_exits_with_2_and_one_line(tmp_path, capsys, words, message):
    (tmp_path / "FILE").write_text("")
    write_run(tmp_path / "RUN")
    arguments = [word if word.startswith("-") or not word else str(tmp_path / word) for word in words]
    with pytest.raises(SystemExit) as stopped:
        main.main(["report", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert re.fullmatch(f"jaxdp: {message}\n", error), error
