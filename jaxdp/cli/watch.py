"""`jaxdp watch`: serve a page that shows runs while they train."""

import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from jaxdp.cli.options import Switch
from jaxdp.errors import printable
from jaxdp.files import check_local, is_run
from jaxdp.flags import Arg, parse
from jaxdp.recipes import register_from

NICE = 10  # training goes first


@dataclasses.dataclass(frozen=True)
class Watch:
    """Serve the page of `jaxdp report` on localhost, which follows runs while they train: progress, remaining time, speed,
    messages, curves. Runs may start, resume and end meanwhile. Ctrl-C ends it.

    Examples:
      jaxdp watch runs/digits
      jaxdp watch runs/first runs/second --open
      jaxdp watch runs/digits --host 0.0.0.0 --port 8080
    """

    workdir: Annotated[tuple[str, ...], Arg("WORKDIR ...", positional=True)]
    """Directories of runs; a run may begin later"""
    port: int | None = None
    """Port of the page (None: the first free one from 8600 on; 0: any free one)"""
    host: str | None = None
    """Address or host name of this machine to listen on (None: 127.0.0.1); other machines then need the printed token"""
    open: Switch = False
    """Opening of the page in a browser"""
    config: str | None = None
    """Recipe file (.py) that registers the model or strategy of the runs, if they are not jaxdp's"""


def run(arguments: list[str], program: str) -> None:
    options = parse(Watch, arguments, program)
    register_from(options.config)
    with _ended_by_signals():
        _serve(options.workdir, host=options.host, port=options.port, open_browser=options.open)


def _serve(workdirs: Sequence[str], *, host: str | None, port: int | None, open_browser: bool) -> None:
    from jaxdp.report import plots
    from jaxdp.report.run_history import check_workdirs
    from jaxdp.report.server import listen

    check_workdirs(workdirs)
    plots.check_number(workdirs)
    for workdir in workdirs:
        check_local(workdir, "WORKDIR")
    server, url = listen(workdirs, host, port)
    os.nice(NICE)
    with server:
        for workdir in workdirs:
            if not is_run(workdir):
                print(f"{printable(workdir)} holds no run yet; the page will show it")
        print(f"watching at {url} (Ctrl-C ends)", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(url)
        server.serve_forever()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the block, without an error."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
