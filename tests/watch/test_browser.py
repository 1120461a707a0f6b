"""`jaxdp watch` in headless Chromium: during a real run, and its page for keyboards, phones and dark rooms."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from helpers.browser import Browser
from helpers.processes import CACHE_EVERYTHING, RESNET, ROOT, TINY
from helpers.report import write_result, write_run
from helpers.watch import append, serving, training_record

from jaxdp.loggers.events import EventLog
from jaxdp.setup import run_dir
from jaxdp.watch import board, page

pytestmark = pytest.mark.slow

PHONE = 375
STATUS = "(document.querySelector('.status')?.textContent ?? '')"
PERCENT = "(document.querySelector('progress')?.value ?? 0)"
DRAWN = "document.querySelectorAll('.plot[tabindex]').length >= 2"
FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.tagName"


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    """Figures are drawn with the priority of the tests; a page without scripts loads itself again soon."""
    monkeypatch.setattr(board, "NICE", 0)
    monkeypatch.setattr(board, "SCAN_SECONDS", 0.2)
    monkeypatch.setattr(board, "DRAW_SECONDS", 1.0)
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
    training, finished = write_run(tmp_path / "training", accuracies=(0.5,)), write_run(tmp_path / "finished", seed=1)
    append(training, *(training_record(step, waiting_share=0.2, slowest_rank=3) for step in range(20, 50)))
    write_result(finished)
    log = EventLog(training)
    log.write("message", "input-bound: 40 % of the time was spent waiting for images")
    log.close()
    with run_dir.lock_run_dir(training):
        yield training, finished


@contextmanager
def training(workdir):
    """A process that trains a tiny run."""
    flags = [*TINY, *RESNET, "--mesh.cpu-devices", "2", "--epochs", "60"]
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
        with training(path) as process:
            seen = [browser.wait(f"{STATUS} === 'training' && {PERCENT}")]
            seen.append(browser.wait(f"{PERCENT} > {seen[-1]} && {PERCENT}"))
            assert "images/s" in browser.evaluate("document.querySelector('article').textContent")
            browser.wait("document.title.startsWith(document.querySelector('progress').value + ' % · run')")
            browser.wait(DRAWN)
            browser.wait(f"{PERCENT} >= 10")  # there are checkpoints of six epochs to resume from
        assert browser.wait(f"{STATUS}.startsWith('not running, last log line') && {PERCENT}") < 100
        with training(path) as process:
            browser.wait(f"{STATUS} === 'training'")
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
        browser.wait(f"{STATUS} === 'finished'")
        accuracy = json.loads((path / "result.json").read_text())["accuracy"]
        text = browser.evaluate("document.querySelector('article').textContent")
        assert f"held-out accuracy{100 * accuracy:.2f}\N{NO-BREAK SPACE}%" in text
        browser.wait(f"document.querySelector('#numbers').textContent.includes('accuracy, last{100 * accuracy:.2f} %')")
        browser.wait("document.querySelector('#time img') !== null")
        assert "resuming from" in browser.evaluate("document.querySelector('#messages').textContent")


def test_everything_is_reached_with_the_keyboard_in_the_order_of_the_page(browse, runs):
    with serving(*runs) as client, browse(client.url, width=PHONE, height=800) as browser:
        browser.wait(DRAWN)
        scrolling = "[...document.querySelectorAll('.wide')].filter(box => box.scrollWidth > box.clientWidth).length"
        browser.wait(f"{scrolling} >= 4")  # the pictures have their sizes
        order = []
        for _ in range(20):
            browser.press("Tab")
            if (name := browser.evaluate(FOCUSED)) == "BODY" or name in order:
                break
            order.append(name)
            assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert order[:3] == [
            "Results: table, scrolls sideways",
            "Loss and accuracy against epochs and against time; arrow keys show the values",
            "Learning rate, momentum, global batch and images per second against epochs; arrow keys show the values",
        ]
        assert len(order) == browser.evaluate(scrolling)
        browser.evaluate("document.querySelector('#curves .plot').focus()")
        shown = "(tip => tip.hidden ? '' : tip.textContent)(document.querySelector('#curves output'))"
        values = []
        for key in ("ArrowRight", "ArrowLeft", "ArrowDown", "Escape"):
            browser.press(key)
            values.append(browser.evaluate(shown))
        assert values[0].startswith("training: training loss 0.0408")
        assert values[1].startswith("training: training loss 0.04")
        assert values[1] != values[0]
        assert values[2] == "finished: training loss 7 after 0.1 epochs"
        assert values[3] == ""


def test_updates_keep_the_focus_the_scrolling_and_the_value_that_is_read(browse, runs):
    with serving(*runs) as client, browse(client.url, width=PHONE, height=800) as browser:
        browser.wait(DRAWN)
        table, digest = "document.querySelector('#results .wide')", "document.querySelector('#{}').dataset.digest"
        before = browser.evaluate(digest.format("results"))
        browser.evaluate(f"{table}.focus(), {table}.scrollLeft = 50, window.scrollTo(0, 400)")
        append(runs[0], training_record(60))
        browser.wait(f"{digest.format('results')} !== '{before}'")
        assert browser.evaluate(f"[document.activeElement === {table}, {table}.scrollLeft, window.scrollY]") == [True, 50, 400]
        browser.evaluate("document.querySelector('#curves .plot').focus()")
        browser.press("ArrowLeft")
        curves = browser.evaluate(digest.format("curves"))
        write_result(runs[0])  # the curves are drawn at once
        browser.wait(f"{digest.format('time')} !== '' && document.querySelector('.status').textContent === 'finished'")
        server_has_new = f"(await (await fetch('blocks?have=')).json()).blocks.curves.digest !== '{curves}'"
        browser.wait(f"(async () => {server_has_new})()")
        assert browser.evaluate(digest.format("curves")) == curves
        browser.press("Escape")
        browser.wait(f"{digest.format('curves')} !== '{curves}'")


CONTRAST = """
(() => {
  const light = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
    const [red, green, blue] = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const texts = document.querySelectorAll("h1, h2, h3, p, dt, dd, li, th, td");
  return Math.min(...[...texts].filter(element => element.textContent.trim()).map(element => {
    const text = light(getComputedStyle(element).color);
    return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05);
  }));
})()
"""


def test_page_fits_phones_and_is_readable_in_light_and_dark(browse, runs, tmp_path):
    failed = write_run(tmp_path / "a_long_name_without_a_space_that_is_wider_than_the_screen_of_a_phone")
    with pytest.raises(ValueError, match="x"), EventLog(failed).session(KeyError):
        raise ValueError("x" * 300)
    with serving(*runs, failed) as client:
        for width in (PHONE, 1280):
            with browse(client.url, width=width, height=800) as browser:
                browser.wait(DRAWN)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                for scheme in ("light", "dark"):
                    browser.media(prefers_color_scheme=scheme)
                    assert browser.evaluate(CONTRAST) >= 4.5
                assert browser.evaluate("document.getAnimations().length") == 0


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
    with serving(*runs) as client:
        client.blocks()
        with browse(client.url, scripts=False) as browser:
            document = "document.querySelector('article').textContent"
            assert "training" in browser.evaluate(document)
            append(runs[0], training_record(64))
            browser.wait(
                "document.querySelector('#curves img')?.complete && document.querySelector('dd').textContent === '6.40 of 7'"
            )


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
