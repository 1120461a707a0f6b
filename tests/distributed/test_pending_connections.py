from jaxdp.distributed.pending_connections import PendingConnections


def test_add_at_the_limit_cancels_the_oldest_connection_of_the_busiest_address():
    cancelled = []

    class Task:
        def __init__(self, name):
            self.name = name

        def cancel(self):
            cancelled.append(self.name)

    pending = PendingConnections(1, lambda text: None, limit=4)
    for name in ("honest", "first", "second", "third", "fourth", "fifth"):
        pending.add(Task(name), "10.0.0.1" if name == "honest" else "10.0.0.66")
    assert cancelled == ["first", "second"]
    assert pending.refused == 2
