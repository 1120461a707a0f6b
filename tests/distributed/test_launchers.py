"""The variables of each launcher, as those systems set them."""

import socket
from dataclasses import replace

import pytest

from jaxdp.distributed import launchers
from jaxdp.distributed.launchers import (
    Cluster,
    assign_gpus,
    detect,
    first_host,
    parse_address,
    unused_tasks_warning,
    visible_gpus,
)
from jaxdp.errors import NO_VALUE, ConfigError
from jaxdp.recipes import is_rank0

# What srun -N2 -n2 of Slurm 22.05 sets for the second task, among others.
SLURM = {
    "SLURM_JOB_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "node2",
}
# What torchrun --nnodes 2 --nproc-per-node 4 sets for a worker; MASTER_PORT is the one at which the agent listens itself.
TORCHRUN = {
    "MASTER_ADDR": "trainer-0",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "8",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# Kubeflow's PyTorchJob starts no agent: rank 0's pod has the port to itself.
PYTORCHJOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "0", "PET_NNODES": "3"}
# Kubeflow Trainer's runtime jax-distributed.
TRAINER = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:29500"}
# The training operator's JAXJob.
JAXJOB = {"COORDINATOR_ADDRESS": "job-worker-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}
# mpirun of Open MPI 4.1, two hosts.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_MCA_ess_base_jobid": "1531576321",
}
# GKE's webhook for a multi-host TPU slice.
GKE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "job-0.svc,job-1.svc"}
# And for three slices.
SLICES = {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "job-a:8080"}


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        (SLURM, Cluster("slurm", "node1", 20_128, 1, 2)),
        (TORCHRUN, Cluster("torchrun", "trainer-0", 29_501, 5, 8)),  # its agent listens at MASTER_PORT
        (PYTORCHJOB, Cluster("torchrun", "job-master-0", 23_456, 0, 3)),
        (TRAINER, Cluster("jax", "job-node-0-0.job", 29_500, 1, 2)),
        (JAXJOB, Cluster("kubeflow", "job-worker-0", 6_666, 3, 4)),
        (OPEN_MPI, Cluster("openmpi", "10.96.0.1", 20_000 + 1531576321 % 12_000, 3, 4)),
        (GKE, Cluster("tpu", "job-0.svc", 29_400, 1, 2)),
        (GKE | {"TPU_PROCESS_ADDRESSES": "a:8476, b:8476,c:8476"}, Cluster("tpu", "a", 29_400, 1, 3)),
        (GKE | SLICES, Cluster("tpu", "job-a", 29_400, 2 * 2 + 1, 3 * 2)),
        (SLICES | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, Cluster("tpu", "job-a", 29_400, 2, 3)),
    ],
)
def test_detect_with_the_variables_of_a_launcher_returns_its_cluster(environment, cluster):
    assert detect("auto", environment) == cluster
    assert detect(cluster.launcher, environment) == cluster
    assert is_rank0(environment) == (cluster.rank == 0)
    assert detect("none", environment) is None


def test_detect_with_slurm_returns_the_same_port_for_all_tasks_of_a_step_only():
    ports = [detect("auto", SLURM | {"SLURM_PROCID": str(rank)}).port for rank in range(2)]
    assert len(set(ports)) == 1
    assert detect("auto", SLURM | {"SLURM_STEP_ID": "1"}).port not in ports
    assert detect("auto", SLURM | {"SLURM_JOB_ID": "3"}).port not in ports
    for step in ("²", "batch", "9" * 5000):  # no number
        assert detect("auto", SLURM | {"SLURM_STEP_ID": step}).port in ports


def test_detect_of_a_single_process_returns_none_and_a_warning_names_srun_if_it_is_missing():
    assert detect("auto", {}) is unused_tasks_warning({}) is unused_tasks_warning(SLURM) is None
    assert detect("auto", {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert detect("auto", batch) is None
    assert "start it with srun" in unused_tasks_warning(batch)


FLAGS = {"coordinator": "a:1", "processes": 2, "rank": 0}


@pytest.mark.parametrize(
    ("launcher", "environment", "flags", "field", "value"),
    [
        ("slurm", {}, {}, "--cluster", "slurm"),
        ("tpu", {}, {}, "--cluster", "tpu"),
        ("auto", {"TPU_WORKER_ID": "0"}, {}, "TPU_WORKER_HOSTNAMES", NO_VALUE),
        ("auto", {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": ""}, {}, "TPU_WORKER_HOSTNAMES", NO_VALUE),
        ("auto", {"TPU_WORKER_HOSTNAMES": "a,b"}, {}, "TPU_WORKER_ID", NO_VALUE),
        ("auto", GKE | {"TPU_WORKER_ID": "2"}, {}, "TPU_WORKER_ID", 2),
        ("auto", GKE | SLICES | {"MEGASCALE_SLICE_ID": "3"}, {}, "MEGASCALE_SLICE_ID", 3),
        ("auto", GKE | SLICES | {"MEGASCALE_NUM_SLICES": "0"}, {}, "number of processes", 0),
        ("auto", GKE | {"TPU_WORKER_HOSTNAMES": "a,,b"}, {}, "TPU_WORKER_HOSTNAMES", "a,,b"),
        ("auto", GKE | {"MEGASCALE_NUM_SLICES": "2"}, {}, "MEGASCALE_SLICE_ID", NO_VALUE),
        ("auto", GKE | SLICES | {"MEGASCALE_COORDINATOR_ADDRESS": ""}, {}, "MEGASCALE_COORDINATOR_ADDRESS", NO_VALUE),
        ("auto", {"JAX_COORDINATOR_ADDRESS": "a", "JAX_PROCESS_ID": "1"}, {}, "JAX_NUM_PROCESSES", NO_VALUE),
        ("auto", SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""}, {}, "SLURM_STEP_NODELIST", ""),
        ("auto", {**TRAINER, "JAX_PROCESS_ID": "two"}, {}, "JAX_PROCESS_ID", "two"),
        ("auto", {**TRAINER, "JAX_PROCESS_ID": "2"}, {}, "rank", 2),
        ("auto", {"WORLD_SIZE": "4", "RANK": "0"}, {}, "MASTER_ADDR", NO_VALUE),
        ("auto", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, {}, "JAX_COORDINATOR_ADDRESS", NO_VALUE),
        ("auto", {}, {"processes": 2}, "--coordinator", NO_VALUE),
        ("slurm", SLURM, FLAGS, "--cluster", "slurm"),
        ("auto", {}, FLAGS | {"coordinator": f"{'a' * 70}:1"}, "coordinator address", "a" * 70),
    ],
)
def test_detect_with_incomplete_or_invalid_values_raises(launcher, environment, flags, field, value):
    with pytest.raises(ConfigError) as error:
        detect(launcher, environment, **flags)
    assert (error.value.field, error.value.value) == (field, value)
    assert "\n" not in str(error.value)
    is_found = launcher == "auto" and not flags  # the variables may be left over
    assert error.value.hint.endswith("use --cluster none to train with this process alone") == is_found


def test_detect_with_flags_ignores_the_environment():
    cluster = detect("auto", SLURM, coordinator="host:1234", processes=3, rank=2)
    assert cluster == Cluster("flags", "host", 1234, 2, 3)


def test_detect_with_open_mpi_on_unnamed_hosts_requires_the_address():
    environment = {name: value for name, value in OPEN_MPI.items() if not name.startswith("OMPI_MCA")}
    with pytest.raises(ConfigError) as error:
        detect("auto", environment)
    assert error.value.field == "JAX_COORDINATOR_ADDRESS"
    assert "-x JAX_COORDINATOR_ADDRESS=HOST:PORT to mpirun" in error.value.hint
    assert detect("auto", environment | {"JAX_COORDINATOR_ADDRESS": "a:7"}) == Cluster("openmpi", "a", 7, 3, 4)
    assert detect("auto", environment | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[7,9-12]", "gpu7"),
        ("a-b[01-02]-ib,c", "a-b01-ib"),
        ("rack[1-2]node[3-4]", "rack1node3"),
    ],
)
def test_first_host_of_a_slurm_node_list_is_its_first(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("text", "expected"),
    [("host:12", ("host", 12)), ("10.0.0.1", ("10.0.0.1", 29400)), ("[fe80::1]:7", ("fe80::1", 7))],
)
def test_parse_address_with_and_without_a_port_returns_host_and_port(text, expected):
    assert parse_address(text) == expected


def test_assign_gpus_divides_gpus_that_all_processes_of_a_host_see():
    gpus = [str(number) for number in range(8)]
    assert assign_gpus([gpus], 0) is None  # one process has the host to itself
    assert [assign_gpus([gpus] * 8, rank) for rank in range(8)] == [[number] for number in range(8)]
    assert assign_gpus([gpus] * 2, 1) == [4, 5, 6, 7]
    assert assign_gpus([["0"], ["1"]], 0) is None  # the launcher has assigned them
    assert assign_gpus([[], []], 1) is None  # CPUs
    with pytest.raises(ConfigError, match="8 GPUs cannot be divided evenly among the 3 processes of this host"):
        assign_gpus([gpus] * 3, 0)


def test_visible_gpus_with_cuda_visible_devices_returns_those():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}) == ["2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_a_host_that_accepts_or_refuses_a_connection_is_reached_one_that_does_not_answer_is_not(free_port, monkeypatch):
    cluster = Cluster("jax", "127.0.0.1", free_port, rank=1, num_processes=3)
    assert cluster.reaches_rank0()  # refused: nothing listens
    with socket.create_server((cluster.address, cluster.port)) as server:
        assert cluster.reaches_rank0()
        server.listen(0)  # the connection above fills the queue: the system drops all others
        monkeypatch.setattr(launchers, "REACH_SECONDS", 0.2)
        assert not cluster.reaches_rank0()
        assert replace(cluster, rank=0).reaches_rank0()  # itself
    monkeypatch.setattr(socket, "create_connection", lambda *_: open("/dev/null/none"))
    assert cluster.reaches_rank0()  # an error of this host says nothing


@pytest.mark.parametrize(
    ("field", "cluster"),
    [
        ("coordinator port", Cluster("flags", "a", 65_536, 0, 2)),
        ("coordinator port", Cluster("flags", "a", 0, 0, 2)),
        ("number of processes", Cluster("flags", "a", 1, 0, 0)),
        ("number of processes", Cluster("flags", "a", 1, 0, 2**20 + 1)),
        ("rank", Cluster("flags", "a", 1, -1, 2)),
        ("rank", Cluster("flags", "a", 1, 2, 2)),
        (None, Cluster("flags", "a", 65_535, 1, 2)),
        (None, Cluster("flags", "a", 1, 2**20 - 1, 2**20)),
    ],
)
def test_ports_processes_and_ranks_have_bounds(monkeypatch, field, cluster):
    monkeypatch.setitem(launchers.LAUNCHERS, "jax", lambda environment: cluster)
    if field is None:
        assert detect("jax", {}) == detect("auto", {}) == cluster
        return
    for launcher in ("jax", "auto"):
        with pytest.raises(ConfigError) as error:
            detect(launcher, {})
        assert error.value.field == field


@pytest.mark.parametrize("text", ["host:0", "host:65536", "host:", "", "a:b:1", "[::1", "host:123456"])
def test_parse_address_refuses(text):
    with pytest.raises(ConfigError, match=r"HOST:PORT with a port from 1 to 65535|coordinator address"):
        parse_address(text)
    assert [parse_address(f"host:{port}") for port in (1, 65_535)] == [("host", 1), ("host", 65_535)]


def test_variables_that_are_no_run_of_several_processes_and_ports_that_are_given_apart():
    assert detect("jax", {"JAX_NUM_PROCESSES": "1"}) == Cluster("jax", "127.0.0.1", 29_400, 0, 1)
    assert detect("auto", {"JAX_NUM_PROCESSES": "1"}) is None
    assert detect("auto", {"WORLD_SIZE": "1", "RANK": "0"}) is None
    apart = {"JAX_COORDINATOR_ADDRESS": "a", "JAX_COORDINATOR_PORT": "7", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_INDEX": "1"}
    assert detect("auto", apart | {"JAX_PROCESS_ID": "0"}) == Cluster("jax", "a", 7, 1, 2)
    del apart["JAX_COORDINATOR_PORT"]
    assert detect("auto", apart).port == 29_400
    torchrun = {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}
    assert detect("auto", torchrun).port == 29_401
    assert detect("auto", {"COORDINATOR_ADDRESS": "a"}) is None


@pytest.mark.parametrize(("cores", "of_parent", "total", "warns"), [(1, 4, 4, True), (1, 1, 4, False), (4, 8, 4, False)])
def test_a_process_that_mpirun_binds_to_some_cores_is_told_so(monkeypatch, cores, of_parent, total, warns):
    sizes = {0: cores, launchers.os.getppid(): of_parent}
    monkeypatch.setattr(launchers.os, "sched_getaffinity", lambda pid: set(range(sizes[pid])))
    monkeypatch.setattr(launchers.os, "cpu_count", lambda: total)
    monkeypatch.setattr(launchers, "usable_cores", lambda: cores)
    assert launchers.core_binding_warning({}) is None
    text = launchers.core_binding_warning(OPEN_MPI)
    assert bool(text) == warns
    if warns:
        assert text.startswith("mpirun binds this process to 1 of 4 cores: 1 thread decodes images")
    bound = OPEN_MPI | {"OMPI_MCA_orte_bound_at_launch": "1"}
    assert bool(launchers.core_binding_warning(bound)) == (cores < total)


def test_a_warning_names_srun_only_for_several_tasks_outside_of_a_step():
    batch = {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "3"}
    assert "this Slurm job has 3 tasks" in unused_tasks_warning(batch)
    for fewer in ({"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": ""}, {"SLURM_STEP_ID": "0"}):
        assert unused_tasks_warning(batch | fewer) is None
    assert unused_tasks_warning({"SLURM_JOB_ID": "2"}) is unused_tasks_warning({"SLURM_NTASKS": "3"}) is None


def test_visible_gpus_without_the_variable_are_those_of_the_driver(monkeypatch):
    monkeypatch.setattr(launchers.os, "listdir", lambda folder: ["nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm", "null"])
    assert visible_gpus({}) == ["0", "1"]
