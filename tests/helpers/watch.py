"""A server of `jaxdp watch` for tests, and runs that grow."""

import json
import threading
from contextlib import contextmanager
from http.client import HTTPConnection

from jaxdp.report.server import listen


def training_record(step: int, *, images: int = 64, seconds: float = 1.0, **fields) -> dict:
    """The record of a step of `images` images and `seconds` seconds, in epochs of 640 images."""
    samples = step * images
    position = {"step": step, "samples": samples, "epoch": samples / 640, "wall_seconds": 10.0 + step * seconds}
    measured = {"loss": 2.0 / step, "accuracy": 0.5, "learning_rate": 0.1, "momentum": 0.9, "global_batch": images, "phase": 0}
    return position | measured | {"images_per_second": images / seconds, "input_seconds": 0.0} | fields


def append(run, *records) -> None:
    """Append records to the log of a run."""
    with open(run / "metrics.jsonl", "a") as log:
        log.writelines(json.dumps(record) + "\n" for record in records)


@contextmanager
def serving(*workdirs, host=None, port=0):
    """A `Client` of a server that watches the directories."""
    server, url = listen(workdirs, host, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Client(server, url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Client:
    """Sends requests to a server."""

    def __init__(self, server, url):
        self.server, self.url = server, url

    def get(self, path="/", host="localhost", method="GET", **headers):
        """(status, headers, body as text or, of a picture, bytes). host: the header Host without the port; None: no header."""
        connection = HTTPConnection("127.0.0.1", self.server.server_port, timeout=120)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host is not None:
            connection.putheader("Host", host)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, response.headers, data if response.headers["Content-Type"] == "image/png" else data.decode()
