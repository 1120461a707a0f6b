"""`jaxdp watch` in headless Chromium: during a real run, and its page for keyboards, phones and dark rooms."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from helpers.browser import Browser
from helpers.processes import CACHE_EVERYTHING, ROOT, TINY
from helpers.report import write_result, write_run
from helpers.watch import append, serving, training_record

from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.loggers.events import EventLog
from jaxdp.loggers.smoothing import moving_average
from jaxdp.report import follow, page
from jaxdp.run_records import read_log
from jaxdp.setup import run_dir

pytestmark = pytest.mark.slow

PHONE = 375
STATUS = "(document.querySelector('.status')?.textContent ?? '')"
PERCENT = "(document.querySelector('progress')?.value ?? 0)"
LOSS = "document.querySelector('#plot-loss > div')"
DRAWN = "(boxes => boxes.length >= 6 && boxes.every(box => box.data))([...document.querySelectorAll('.plot > div')])"


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    """Runs are read and drawn often, pages ask often, and a page without scripts loads itself again soon."""
    monkeypatch.setattr(follow, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(follow, "SHARE", 1.0)
    monkeypatch.setattr(page, "REFRESH_SECONDS", 1)


@pytest.fixture
def browse(tmp_path):
    """browse(url, ...): a `Browser` that has opened a page."""

    @contextmanager
    def browse(url, **options):
        with Browser(tmp_path / "profile", **options) as browser:
            browser.open(url)
            yield browser
            assert browser.messages == []  # no error, and nothing that the content security policy refused

    return browse


@pytest.fixture
def runs(tmp_path):
    """A run that trains, which several processes do, and a finished one."""
    training, finished = write_run(tmp_path / "training", accuracies=(0.5,)), write_run(tmp_path / "finished", epochs=9.0)
    append(training, *(training_record(step, waiting_share=0.2, slowest_rank=3) for step in range(20, 50)))
    write_result(finished)
    log = EventLog(training)
    log.write("message", "input-bound: 40 % of the time was spent waiting for images")
    log.close()
    with run_dir.lock_run_dir(training):
        yield training, finished


@contextmanager
def training(workdir, epochs):
    """A process that trains a tiny run."""
    flags = [*TINY, "--mesh.cpu-devices", "2", "--checkpoint.every-epochs", "20", "--epochs", str(epochs), "--accept-changes"]
    command = [sys.executable, "train.py", "--workdir", str(workdir), *flags]
    environment = os.environ | CACHE_EVERYTHING
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_real_run_is_followed_from_before_its_start_over_its_death_to_its_result(browse, tmp_path):
    path = tmp_path / "run"
    with serving(path) as client, browse(client.url) as browser:
        assert browser.evaluate(STATUS) == "waiting for a run in this directory"
        with training(path, 3000) as process:  # more than it trains before it is killed
            seen = [browser.wait(f"{STATUS} === 'training' && {PERCENT}")]
            seen.append(browser.wait(f"{PERCENT} > {seen[-1]} && {PERCENT}"))
            assert "images/s" in browser.evaluate("document.querySelector('article').textContent")
            browser.wait("document.title.startsWith(document.querySelector('progress').value + ' % · run')")
            browser.wait(DRAWN)
            while not checkpoint_paths(path / "checkpoints"):
                assert process.poll() is None
                time.sleep(0.1)
        assert browser.wait(f"{STATUS}.startsWith('killed, or its process was lost') && {PERCENT}") < 100
        with training(path, int(read_log(path / "metrics.jsonl")[-1]["epoch"]) + 20) as process:
            browser.wait(f"{STATUS} === 'training'")
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
        browser.wait(f"{STATUS} === 'finished'")
        accuracy = json.loads((path / "result.json").read_text())["accuracy"]
        text = browser.evaluate("document.querySelector('article').textContent")
        assert f"held-out accuracy{100 * accuracy:.2f}\N{NO-BREAK SPACE}%" in text
        browser.wait(f"document.querySelector('main').textContent.includes('{100 * accuracy:.2f} %')")
        browser.wait("document.querySelector('#plot-time > div')?.data")
        assert "resuming from" in browser.evaluate("document.querySelector('#section-1').textContent")


def test_updates_keep_the_focus_and_the_scrolling(browse, runs):
    with serving(*runs) as client, browse(client.url, width=PHONE, height=800) as browser:
        browser.wait(DRAWN)
        table = "[...document.querySelectorAll('.wide')].at(-1)"
        browser.evaluate(f"{table}.focus(), {table}.scrollLeft = 50")
        append(runs[0], training_record(60))
        browser.wait("document.querySelector('dd').textContent === '6.00 of 7'")
        browser.wait("[...document.querySelectorAll('td')].some(cell => cell.textContent === '6.00')")
        assert browser.evaluate(f"[document.activeElement === {table}, {table}.scrollLeft]") == [True, 50]


def test_values_of_all_curves_are_shown_wherever_the_pointer_is(browse, runs):
    with serving(*runs) as client, browse(client.url) as browser:
        browser.wait(DRAWN)
        box = f"{LOSS}.scrollIntoView({{block: 'center'}}), (box => [box.x, box.y])({LOSS}.getBoundingClientRect())"
        x, y = browser.evaluate(box)
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 150, y=y + 60)
        text = browser.wait(f"{LOSS}.querySelector('.hoverlayer .legend')?.textContent")
        assert "training: training" in text
        assert "finished: training" in text


def test_legend_axes_and_smoothing_hold_for_all_plots_and_survive_updates(browse, runs):
    with serving(*runs) as client, browse(client.url, width=PHONE, height=800) as browser:
        browser.wait(DRAWN)
        names = f"new Set({LOSS}.data.map(trace => trace.name.split(':')[0]))"
        browser.wait(f"{names}.size === 2")
        for name, value in (("line finished", ".checked = false"), ("axis", ".value = 'samples'"), ("smoothing", ".value = 0")):
            field = f"document.querySelector('[name=\"{name}\"]')"
            browser.evaluate(f"{field}{value}, {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        last = f"Math.max(...{LOSS}.data.map(trace => trace.x.at(-1)))"
        browser.wait(f"{last} === {49 * 64} && {LOSS}.data.every(trace => trace.name === 'training')")
        raw = browser.evaluate(f"{LOSS}.data[0].y")
        assert raw == pytest.approx([record["loss"] for record in read_log(runs[0] / "metrics.jsonl") if "loss" in record])
        append(runs[0], training_record(60))
        browser.wait(f"{last} === {60 * 64} && {LOSS}.data.every(trace => trace.name === 'training')")


def test_smoothing_is_the_moving_average_of_training_png(browse, runs):
    with serving(runs[0]) as client, browse(client.url) as browser:
        browser.wait(DRAWN)
        found = f"{LOSS}.data.find(trace => trace.hoverinfo !== 'skip').y"
        losses = [record["loss"] for record in read_log(runs[0] / "metrics.jsonl") if "loss" in record]
        assert browser.evaluate(found) == pytest.approx(moving_average(losses).tolist(), rel=1e-6)


def test_page_says_when_the_server_has_ended_and_goes_on_when_it_is_back(browse, runs):
    with serving(*runs) as client, browse(client.url) as browser:
        port = client.server.server_port
        browser.wait(DRAWN)
        client.server.shutdown()
        client.server.server_close()
        lost = "document.querySelector('#connection').textContent"
        assert "does not answer" in browser.wait(lost)
        browser.messages.clear()
        with serving(*runs, port=port):
            browser.wait(f"{lost} === ''")
            browser.messages.clear()


def test_page_without_scripts_is_complete_and_loads_itself_again(browse, runs):
    with serving(*runs) as client, browse(client.url, scripts=False) as browser:
        document = "document.querySelector('article').textContent"
        assert "training" in browser.evaluate(document)
        append(runs[0], training_record(64))
        browser.wait("document.querySelector('dd')?.textContent === '6.40 of 7'")  # no document while it loads again
        assert "Plots need JavaScript" in browser.evaluate("document.querySelector('.plot').textContent")


def test_token_of_the_address_opens_the_page_and_leaves_the_address(browse, runs):
    with serving(*runs, host="0.0.0.0") as client:
        token = client.server.access.token
        address = f"http://127.0.0.1:{client.server.server_port}/"
        with browse(f"{address}?token={token}") as browser:
            browser.wait(DRAWN)
            assert browser.evaluate("location.href") == address
            assert browser.evaluate("document.cookie") == ""
            browser.open(address)
            browser.wait(DRAWN)
