"""Which processes make up a run, read from what their launcher has put into the environment."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxdp.errors import ConfigError
from jaxdp.flags import one_of

PORT = 29_400  # where rank 0 is asked for if the launcher names no port


@dataclass(frozen=True)
class Cluster:
    """This process's place among those of a run. address, port: where rank 0 can be reached; launcher: who says so."""

    launcher: str
    address: str
    port: int
    rank: int
    processes: int


def _number(environment: Mapping, name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise ConfigError(f"{name}: is not set, and the other variables of its launcher are; set it too") from None
    except ValueError:
        raise ConfigError(f"{name}: {environment[name]!r} is not allowed; it must be a whole number") from None


def split_address(text: str, port: int = PORT) -> tuple[str, int]:
    """(host, port) of HOST, HOST:PORT or [IPv6]:PORT."""
    found = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d{1,5}))?", text.strip())
    if not found or int(found["port"] or port) not in range(1, 65_536):
        raise ConfigError(f"coordinator address: {text!r} is not allowed; give HOST:PORT of rank 0")
    return found["six"] or found["host"], int(found["port"] or port)


def _jax(environment: Mapping) -> Cluster | None:
    """JAX's own names, as Kubeflow Trainer, JobSet manifests, ssh scripts and `jaxdp launch` set them."""
    place = "JAX_PROCESS_INDEX" if "JAX_PROCESS_INDEX" in environment else "JAX_PROCESS_ID"
    if "JAX_NUM_PROCESSES" not in environment:
        if place in environment and "JAX_COORDINATOR_ADDRESS" in environment:
            _number(environment, "JAX_NUM_PROCESSES")
        return None
    if _number(environment, "JAX_NUM_PROCESSES") == 1 and place not in environment:
        return Cluster("jax", "127.0.0.1", PORT, 0, 1)
    if "JAX_COORDINATOR_ADDRESS" not in environment:
        raise ConfigError("JAX_COORDINATOR_ADDRESS: is not set, and JAX_NUM_PROCESSES is; set it to HOST:PORT of rank 0")
    port = _number(environment, "JAX_COORDINATOR_PORT") if "JAX_COORDINATOR_PORT" in environment else PORT
    address, port = split_address(environment["JAX_COORDINATOR_ADDRESS"], port)
    return Cluster("jax", address, port, _number(environment, place), _number(environment, "JAX_NUM_PROCESSES"))


def _kubeflow(environment: Mapping) -> Cluster | None:
    """The names of Kubeflow's JAXJob (training operator)."""
    if not {"COORDINATOR_ADDRESS", "NUM_PROCESSES"} <= environment.keys():
        return None
    port = _number(environment, "COORDINATOR_PORT") if "COORDINATOR_PORT" in environment else PORT
    address, port = split_address(environment["COORDINATOR_ADDRESS"], port)
    return Cluster("kubeflow", address, port, _number(environment, "PROCESS_ID"), _number(environment, "NUM_PROCESSES"))


def _torchrun(environment: Mapping) -> Cluster | None:
    """The names of torchrun and of everything that imitates it."""
    if not {"WORLD_SIZE", "RANK"} <= environment.keys():
        return None
    processes = _number(environment, "WORLD_SIZE")
    if "MASTER_ADDR" not in environment:
        if processes == 1:
            return None
        raise ConfigError(
            "MASTER_ADDR: is not set, and WORLD_SIZE and RANK are; set it to the host of rank 0, or --cluster none"
        )
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else PORT
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens at the port that it names
    return Cluster("torchrun", environment["MASTER_ADDR"], port, _number(environment, "RANK"), processes)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: node[03-05,09],other -> node03."""
    first = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes).split(",")[0]
    if not first:
        raise ConfigError(f"SLURM_STEP_NODELIST: {nodes!r} is not allowed; it must name the hosts of the step")
    return first


def _slurm(environment: Mapping) -> Cluster | None:
    """A step that srun has started; a batch script or an allocation's shell is none."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    job, step = _number(environment, "SLURM_JOB_ID"), environment["SLURM_STEP_ID"]
    port = 20_000 + (job * 64 + int(step) % 64 if step.isdigit() else job * 64) % 12_000  # below the ephemeral ports
    processes = _number(environment, "SLURM_STEP_NUM_TASKS")
    return Cluster("slurm", first_host(nodes), port, _number(environment, "SLURM_PROCID"), processes)


def _open_mpi(environment: Mapping) -> Cluster | None:
    """Open MPI's mpirun. Rank 0 is taken to be on the first of the hosts that its own messages name."""
    if not {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= environment.keys():
        return None
    processes, rank = _number(environment, "OMPI_COMM_WORLD_SIZE"), _number(environment, "OMPI_COMM_WORLD_RANK")
    if "JAX_COORDINATOR_ADDRESS" in environment:
        address, port = split_address(environment["JAX_COORDINATOR_ADDRESS"])
        return Cluster("openmpi", address, port, rank, processes)
    where = environment.get("OMPI_MCA_orte_hnp_uri") or environment.get("PMIX_SERVER_URI41") or ""
    found = re.search(r"tcp://\[?([^,:\]]+(?::[^,\]]*:[^,\]]*)?)", where)
    job = re.match(r"\D*(\d+)", environment.get("OMPI_MCA_ess_base_jobid") or where)
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(processes):
        address = "127.0.0.1"
    elif found and "OMPI_MCA_orte_hnp_uri" in environment:
        address = found[1]
    else:
        raise ConfigError(
            "Open MPI does not say where rank 0 is: give mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT, HOST being rank 0's"
        )
    return Cluster("openmpi", address, 20_000 + int(job[1] if job else 0) % 12_000, rank, processes)


LAUNCHERS: dict[str, Callable[[Mapping], Cluster | None]] = {
    "jax": _jax,
    "kubeflow": _kubeflow,
    "torchrun": _torchrun,
    "openmpi": _open_mpi,
    "slurm": _slurm,
}


def find(asked: str = "auto", environment: Mapping = os.environ, **given) -> Cluster | None:
    """The processes of this run, or None where it is one process alone.

    asked: auto, none, or a launcher's name, which then must have set its variables. given: coordinator (HOST:PORT), processes
    and rank, all of which together stand above the environment. Raises ConfigError where a cluster was asked for and is not
    found, and where what is found cannot be.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        missing = [name for name in ("coordinator", "processes", "rank") if name not in given]
        if missing or asked not in ("auto", "none"):
            what = f"--{missing[0]}: is missing" if missing else f"--cluster: {asked!r} is not allowed with --coordinator"
            raise ConfigError(f"{what}; give --coordinator, --processes and --rank together, without --cluster")
        address, port = split_address(given["coordinator"])
        found = Cluster("flags", address, port, given["rank"], given["processes"])
    elif asked == "auto":
        found = next((one for one in (read(environment) for read in LAUNCHERS.values()) if one), None)
    elif asked == "none":
        return None
    elif asked not in LAUNCHERS:
        raise one_of("--cluster", asked, ["auto", "none", *LAUNCHERS])
    elif (found := LAUNCHERS[asked](environment)) is None:
        raise ConfigError(f"--cluster: {asked!r} is not allowed; its variables are not set: start the run with {_HOW[asked]}")
    if found is None:
        return None
    if not 0 < found.port < 65_536:
        raise ConfigError(f"port {found.port} is not allowed ({found.launcher}); give one from 1 to 65535")
    if found.processes < 1 or not 0 <= found.rank < found.processes:
        raise ConfigError(
            f"rank {found.rank} of {found.processes} processes is not allowed ({found.launcher}); ranks count from 0"
        )
    return found if found.processes > 1 or asked != "auto" else None


_HOW = {
    "jax": "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set",
    "kubeflow": "a JAXJob",
    "torchrun": "torchrun",
    "openmpi": "mpirun",
    "slurm": "srun, inside sbatch or salloc",
}


def alone_in_a_larger_job(environment: Mapping = os.environ) -> str | None:
    """A remark where Slurm has given several tasks and this process was not started by srun; None otherwise."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment and tasks not in ("", "1"):
        return f"this Slurm job has {tasks} tasks, and one process trains alone: start it with srun to use all"
    return None


def visible_gpus(environment: Mapping = os.environ) -> list[str]:
    """The GPUs that this process may use, by CUDA_VISIBLE_DEVICES or else by the driver; JAX is not started for it."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [one for one in named.split(",") if one not in ("", "-1")]
    try:
        return sorted(name[6:] for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    except OSError:
        return []


def own_gpus(mine: list[str], neighbours: list[list[str]], place: int) -> list[int] | None:
    """The places in `mine` of the GPUs that are for this process; None for all of them.

    neighbours: what each process of this host sees, this one being number `place` of them. GPUs that all of them see are
    dealt out evenly. Raises ConfigError where they cannot be.
    """
    if not mine or len(neighbours) == 1 or any(one != mine for one in neighbours):
        return None
    share, over = divmod(len(mine), len(neighbours))
    if over:
        raise ConfigError(
            f"{len(mine)} GPUs cannot be shared evenly by the {len(neighbours)} processes of this host; start one process for "
            "each GPU or one for the host, or set CUDA_VISIBLE_DEVICES for each"
        )
    return list(range(place * share, (place + 1) * share))


def host_identity() -> tuple[str, str]:
    """(name, identity) of this host. Containers of one machine differ in their names, machines of one name in their boots."""
    import socket

    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True).stdout.strip()
    name = socket.gethostname()
    return name, f"{name} {boot}"
