"""Results of checks, and isolation of checks from one another."""

import threading

from jaxdp.doctor.check_result import ResultBuilder, any_running, run_concurrently, summarize, to_dict


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
