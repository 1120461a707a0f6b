"""`jaxdp watch`: serve a page that shows runs while they train."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Annotated

from jaxdp.cli.options import Switch
from jaxdp.errors import print_safe, printable
from jaxdp.files import check_local, is_run
from jaxdp.flags import Arg, parse
from jaxdp.recipes import register_from

NICE = 10  # training goes first
POLL_SECONDS = 0.25  # between looks for a signal


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
    stop = _Stop()
    with stop.at_signals(), contextlib.suppress(KeyboardInterrupt):
        _serve(stop, options.workdir, host=options.host, port=options.port, open_browser=options.open)


class _Stop:
    """Whether SIGINT or SIGTERM has come. The second, or with `raises` each one, interrupts the main thread wherever it is."""

    requested = False
    raises = True

    @contextlib.contextmanager
    def at_signals(self) -> Iterator[None]:
        numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
        before = [signal.signal(number, self._request) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        interrupts = self.raises or self.requested
        self.requested = True
        if interrupts:
            raise KeyboardInterrupt


def _serve(stop: _Stop, workdirs: Sequence[str], *, host: str | None, port: int | None, open_browser: bool) -> None:
    from jaxdp.report.server import listen

    for workdir in workdirs:
        check_local(workdir, "WORKDIR")
    server, url = listen(workdirs, host, port)
    os.nice(NICE)
    with server:
        for workdir in workdirs:
            if not is_run(workdir):
                print_safe(f"{printable(workdir)} holds no run yet; the page will show it")
        print_safe(f"watching at {url} (Ctrl-C ends)")
        if open_browser:
            import webbrowser

            webbrowser.open(url)
        server.timeout = POLL_SECONDS
        stop.raises = False  # an interrupted start of a thread would leave the server unable to close
        while not stop.requested:
            server.handle_request()
