"""A tracker in a file: what it receives is appended to WORKDIR/tracker.jsonl. `behavior` says how it fails."""

import json
import threading

from jaxdp.loggers.tracker import NO_POSITION, Record, Tracker


class FakeTracker(Tracker):
    name, settings = "json", {}  # a package that can be imported
    failures = 0

    def __init__(self, target):
        super().__init__(target)
        self.behavior = target.removeprefix("http://").replace("-", " ")

    def _store(self, kind, value):
        with open(self.workdir / "tracker.jsonl", "a") as file:
            file.write(json.dumps({kind: value}) + "\n")

    def open(self):
        if self.behavior == "hangs":
            threading.Event().wait()
        if self.behavior == "is down":
            raise OSError("no route to http://me:secret@host")
        self.place = "a file"
        self._store("open", self.config | self.about | {"name": self.run_name})
        return max((Record(record).position for record in received(self.workdir)), default=NO_POSITION)

    def send(self, records):
        for number, record in enumerate(records):
            if self.behavior == "fails in the middle" and number == len(records) // 2 and self.failures < 3:
                self.failures += 1
                raise OSError("broken pipe")
            self._store("record", dict(record.values))
            if record.picture is not None:
                self._store("picture", record.picture().shape)

    def close(self, ending):
        self._store("outcome", ending.outcome)
        self._store("ending", self.about | ending.result | {"best": ending.checkpoint and str(ending.checkpoint)})


def stored(workdir, kind) -> list:
    path = workdir / "tracker.jsonl"
    entries = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [entry[kind] for entry in entries if kind in entry]


def received(workdir) -> list[dict]:
    """The records in the order of their arrival."""
    return stored(workdir, "record")
