"""Results of checks, and isolation of checks from one another."""

import threading

import pytest

from jaxdp.doctor.check_result import ResultBuilder, any_running, output_of, run_concurrently, summarize, to_dict


@pytest.fixture
def executable(tmp_path, monkeypatch):
    """executable(name, script): create a shell script on the PATH."""

    def make(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    return make


def test_result_builder_with_several_messages_keeps_the_worst_status():
    builder = ResultBuilder("disk")
    builder.ok("10 GiB free")
    builder.error("full", "free space")
    builder.warning("slow", "use another disk")
    result = builder.build()
    assert (result.status, result.message) == ("error", "10 GiB free; full; slow")
    assert result.fix == "free space; use another disk"


def test_run_concurrently_with_a_raising_and_a_hanging_check_returns_every_result():
    until = threading.Event()

    def raising(result):
        raise RuntimeError("no such device\nand more")

    checks = {"raising": raising, "hanging": lambda result: until.wait(), "working": lambda result: result.ok("fine")}
    raised, hung, worked = run_concurrently(checks, 1.0)
    assert any_running()
    until.set()
    assert (raised.status, raised.message) == ("warning", "check failed: RuntimeError: no such device")
    assert (hung.status, hung.message) == ("error", "no answer in 1 s")
    assert (worked.status, worked.message, worked.fix) == ("ok", "fine", None)


def test_output_of_a_hanging_or_failing_command_is_an_error_of_one_line(executable):
    executable("nvidia-smi", "exec sleep 30")
    with pytest.raises(OSError, match=r"^nvidia-smi: no answer in 0\.2 s$"):
        output_of(["nvidia-smi"], 0.2)
    executable("nvidia-smi", "echo one; echo the driver is gone >&2; exit 9")
    with pytest.raises(OSError, match=r"^nvidia-smi failed with exit code 9: the driver is gone$"):
        output_of(["nvidia-smi"], 5)


def test_summaries_name_the_checks_with_problems():
    disk, data, cores = ResultBuilder("disk"), ResultBuilder("data"), ResultBuilder("cores")
    disk.error("full", "free space")
    data.error("missing", "download it")
    cores.warning("few", "use more")
    results = [disk.build(), data.build(), cores.build()]
    assert summarize(results) == "2 errors: disk, data; 1 warning: cores"
    report = to_dict(results, "digits")
    assert (report["recipe"], report["ok"], report["warning"], report["error"]) == ("digits", 0, 1, 2)
    assert report["checks"][0] == {"check": "disk", "status": "error", "message": "full", "fix": "free space"}
