import pytest
from helpers.control import close_all, join_all

from jaxdp.distributed.control_client import ControlClient


@pytest.fixture
def clients(free_port):
    """clients(n): n clients of one run, by rank."""
    joined = []

    def make(number: int) -> list[ControlClient]:
        joined.extend(join_all(free_port, number))
        return joined

    yield make
    close_all(joined)
    for client in joined:
        client.channel.close()  # a client that failed would otherwise report its state during later tests
