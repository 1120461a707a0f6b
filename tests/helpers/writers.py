"""A writer that records what it receives."""


class RecordingWriter:
    def __init__(self):
        self.records, self.examples, self.closed = [], [], 0

    def write(self, record):
        self.records.append(dict(record))
        record.clear()  # must not change what other writers receive

    def write_examples(self, record, images, labels, predicted):
        self.examples.append((record["samples"], images, labels, predicted))

    def close(self):
        self.closed += 1
