"""A tracker in a file: what it receives is appended to WORKDIR/tracker.jsonl. Its target chooses how it behaves: http://is-down."""

import json
import os
import time

from jaxdp.trackers.run_files import NO_POINT, Rejected, Unavailable, picture_path, position

CLIENT = "helpers.fake_tracker:FakeClient"


class FakeClient:
    place = "a file"

    def __init__(self, workdir, state, warn):
        self.workdir, self.path, self.state = workdir, workdir / "tracker.jsonl", state
        self.behavior = state.target.removeprefix("http://").replace("-", " ")
        self.failures = 0

    def _store(self, kind, value):
        with open(self.path, "a") as file:
            file.write(json.dumps({kind: value}) + "\n")

    def connect(self, name):
        self.state.identify()
        if self.behavior == "hangs":
            time.sleep(3600)
        if self.behavior == "rejects":
            raise Rejected("it is not known", "use another")
        if self.behavior == "crashes":
            os._exit(3)
        if self.behavior == "is down":
            raise Unavailable("no route")
        if self.behavior == "is in the directory":
            self.place = str(self.path)
        self._store("name", name)
        return max((position(record) for record in received(self.path)), default=NO_POINT)

    def describe(self, facts):
        if self.behavior == "refuses the configuration":
            raise Rejected("too long", "shorten it")
        self._store("config", facts.config)

    def send(self, records):
        for number, record in enumerate(records):
            if self.behavior == "fails in the middle" and number == len(records) // 2 and self.failures < 3:
                self.failures += 1
                raise Unavailable("broken pipe")
            self._store("record", record)
            picture = picture_path(self.workdir, record["samples"])
            if picture.exists() and "eval_accuracy" in record:
                self._store("picture", picture.name)

    def finish(self, outcome, facts):
        self._store("outcome", outcome)
        self._store("result", facts.result)
        self._store("about", facts.about)
        self._store("best", facts.best and str(facts.best))


def stored(path, kind) -> list:
    entries = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [entry[kind] for entry in entries if kind in entry]


def received(path) -> list[dict]:
    """The records in the order of their arrival."""
    return stored(path, "record")
