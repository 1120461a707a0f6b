"""Launchers' variables, as those systems set them."""

import pytest

from jaxdp.config import ConfigError
from jaxdp.parallel.cluster import Cluster, alone_in_a_larger_job, find, first_host, own_gpus, split_address, visible_gpus

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


@pytest.mark.parametrize(
    ("environment", "launcher", "address", "rank", "processes"),
    [
        (SLURM, "slurm", "node1", 1, 2),
        (TORCHRUN, "torchrun", "trainer-0", 5, 8),
        (PYTORCHJOB, "torchrun", "job-master-0", 0, 3),
        (TRAINER, "jax", "job-node-0-0.job", 1, 2),
        (JAXJOB, "kubeflow", "job-worker-0", 3, 4),
        (OPEN_MPI, "openmpi", "10.96.0.1", 3, 4),
    ],
)
def test_each_launcher_is_found_by_its_own_variables(environment, launcher, address, rank, processes):
    found = find("auto", environment)
    assert (found.launcher, found.address, found.rank, found.processes) == (launcher, address, rank, processes)
    assert find(launcher, environment) == found
    assert find("none", environment) is None


def test_the_port_is_the_one_named_and_the_next_where_torchruns_agent_has_it():
    assert find("auto", TRAINER).port == 29500
    assert find("auto", JAXJOB).port == 6666
    assert find("auto", PYTORCHJOB).port == 23456
    assert find("auto", TORCHRUN).port == 29501


def test_all_tasks_of_a_slurm_step_take_the_same_port_and_another_step_another():
    ports = [find("auto", SLURM | {"SLURM_PROCID": str(rank)}).port for rank in range(2)]
    assert len(set(ports)) == 1
    assert find("auto", SLURM | {"SLURM_STEP_ID": "1"}).port not in ports
    assert find("auto", SLURM | {"SLURM_JOB_ID": "3"}).port not in ports


def test_no_variables_and_a_single_process_are_one_process_alone():
    assert find("auto", {}) is None
    assert find("auto", SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_batch_script_without_srun_is_alone_and_is_told_so():
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find("auto", batch) is None
    assert "start it with srun" in alone_in_a_larger_job(batch)
    assert alone_in_a_larger_job(SLURM) is None
    assert alone_in_a_larger_job({}) is None


@pytest.mark.parametrize(
    ("asked", "environment", "given", "message"),
    [
        ("slurm", {}, {}, "--cluster: 'slurm' is not allowed; its variables are not set: start the run with srun"),
        ("openmpi", SLURM, {}, "its variables are not set: start the run with mpirun"),
        ("lsf", {}, {}, "--cluster: 'lsf' is not allowed; give auto, none, jax, kubeflow, torchrun, openmpi, slurm"),
        ("auto", {"JAX_COORDINATOR_ADDRESS": "a", "JAX_PROCESS_ID": "1"}, {}, "JAX_NUM_PROCESSES: is not set, and the other"),
        ("auto", {"WORLD_SIZE": "4", "RANK": "1"}, {}, "MASTER_ADDR: is not set, and WORLD_SIZE and RANK are"),
        ("auto", {"COORDINATOR_ADDRESS": "a", "NUM_PROCESSES": "2"}, {}, "PROCESS_ID: is not set, and the other"),
        ("auto", {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2"}, {}, "JAX_PROCESS_ID: is not set, and the other"),
        ("auto", {"MASTER_ADDR": "a", "MASTER_PORT": "99999", "WORLD_SIZE": "2", "RANK": "0"}, {}, "port 99999 is not allowed"),
        ("auto", {**SLURM, "SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""}, {}, "SLURM_STEP_NODELIST: '' is not allowed"),
        ("auto", {"JAX_NUM_PROCESSES": "2"}, {}, "JAX_COORDINATOR_ADDRESS: is not set, and JAX_NUM_PROCESSES is"),
        ("auto", {**TRAINER, "JAX_PROCESS_ID": "two"}, {}, "JAX_PROCESS_ID: 'two' is not allowed; it must be a whole number"),
        ("auto", {**TRAINER, "JAX_PROCESS_ID": "2"}, {}, "rank 2 of 2 processes is not allowed"),
        ("auto", {}, {"processes": 2}, "--coordinator: is missing; give --coordinator, --processes and --rank together"),
        ("slurm", SLURM, {"coordinator": "a:1", "processes": 2, "rank": 0}, "is not allowed with --coordinator"),
        ("auto", {}, {"coordinator": "a:99999", "processes": 2, "rank": 0}, "'a:99999' is not allowed; give HOST:PORT"),
    ],
)
def test_a_cluster_that_was_asked_for_and_is_not_there_is_an_error(asked, environment, given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find(asked, environment, **given)
    assert "\n" not in str(caught.value)


def test_flags_stand_above_the_environment():
    assert find("auto", SLURM, coordinator="host:1234", processes=3, rank=2) == Cluster("flags", "host", 1234, 2, 3)


def test_open_mpi_over_hosts_of_which_it_says_nothing_asks_for_the_address():
    environment = {name: value for name, value in OPEN_MPI.items() if not name.startswith("OMPI_MCA")}
    with pytest.raises(ConfigError, match="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        find("auto", environment)
    assert find("auto", environment | {"JAX_COORDINATOR_ADDRESS": "a:7"}) == Cluster("openmpi", "a", 7, 3, 4)
    assert find("auto", environment | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-2]", "node1"),
        ("node[03-05,09],other", "node03"),
        ("gpu[7,9-12]", "gpu7"),
        ("a-b[01-02]-ib,c", "a-b01-ib"),
        ("login,node[1-2]", "login"),
        ("rack[1-2]node[3-4]", "rack1node3"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes, first):
    assert first_host(nodes) == first


def test_addresses_with_and_without_a_port():
    assert split_address("host:12") == ("host", 12)
    assert split_address("10.0.0.1") == ("10.0.0.1", 29400)
    assert split_address("[fe80::1]:7") == ("fe80::1", 7)


def test_gpus_that_all_processes_of_a_host_see_are_dealt_out():
    eight = [str(n) for n in range(8)]
    assert own_gpus(eight, [eight], 0) is None  # one process has the host to itself
    assert [own_gpus(eight, [eight] * 8, place) for place in range(8)] == [[n] for n in range(8)]
    assert own_gpus(eight, [eight] * 2, 1) == [4, 5, 6, 7]
    assert own_gpus(["0"], [["0"], ["1"]], 0) is None  # the launcher has dealt them out
    with pytest.raises(ConfigError, match="8 GPUs cannot be shared evenly by the 3 processes of this host"):
        own_gpus(eight, [eight] * 3, 0)
    assert own_gpus([], [[], []], 1) is None  # CPUs


def test_visible_gpus_are_those_that_cuda_is_given():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}) == ["2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
