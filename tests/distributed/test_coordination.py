import socket
from dataclasses import replace

from jaxdp.distributed import coordination
from jaxdp.distributed.launchers import Cluster


def test_a_host_that_accepts_or_refuses_a_connection_is_reached_one_that_does_not_answer_is_not(free_port, monkeypatch):
    cluster = Cluster("jax", "127.0.0.1", free_port, rank=1, num_processes=3)
    assert coordination.reaches_rank0(cluster)  # refused: nothing listens
    with socket.create_server((cluster.address, cluster.port)) as server:
        assert coordination.reaches_rank0(cluster)
        server.listen(0)  # the connection above fills the queue: the system drops all others
        monkeypatch.setattr(coordination, "REACH_SECONDS", 0.2)
        assert not coordination.reaches_rank0(cluster)
        assert coordination.reaches_rank0(replace(cluster, rank=0))  # itself
