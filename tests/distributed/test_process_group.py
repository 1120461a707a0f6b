"""Exchange of objects by files, without processes."""

import json
from types import SimpleNamespace

from jaxdp.distributed.process_group import ALL, Exchange
from jaxdp.distributed.status import ProcessStatus


def test_a_text_that_is_read_while_it_is_replaced_counts_as_none():
    """A network file system may show the first part of the new text and the second one of the old text: valid JSON, too."""
    written = []
    board = SimpleNamespace(poll_seconds=0, write=lambda name, text: written.append(text))
    follower = SimpleNamespace(board=board, session="a")
    group = SimpleNamespace(rank=0, is_rank0=True, num_processes=1, follower=follower, status=ProcessStatus())
    writer = Exchange(group)
    board.read = lambda name: written[-1]
    for value in ("old" * 100, "new" * 100):
        writer.all_gather("word", value, lambda: None)
    collected = [text for text in written if json.loads(text.partition("\n")[2])["values"]["0 word"] and "[" in text]
    old, new = collected[0], collected[-1]
    mixed = new[: new.rindex("new") - 30] + new[new.rindex("new") - 30 :].replace("new", "old")
    json.loads(mixed.partition("\n")[2])
    assert mixed != new
    assert len(old) < len(new)  # the older text holds one value, the newer one both
    reads = iter([mixed, new[:50], new])
    board.read = lambda name: next(reads)
    assert writer._wait_for(ALL, "0 word", 2, while_waiting=lambda: None) == ["new" * 100]
