"""Detects which processes make up a run, from the environment variables of their launcher.

JAX's own detection works only inside `jax.distributed.initialize`, but the status files need the rank and the number of
processes before. JAX does not know Kubeflow, torchrun or Open MPI 5, and takes the tasks of a Slurm job for the step's tasks.
"""

import errno
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxdp.cores import usable_cores
from jaxdp.distributed import tpu
from jaxdp.errors import ConfigError, one_of, plural

DEFAULT_PORT = 29_400  # of rank 0, if the launcher names no port
FIRST_PORT, PORTS = 20_000, 12_000  # of Slurm and Open MPI jobs, by job number; below the ephemeral ports
MAX_PROCESSES = 2**20
REACH_SECONDS = 2.0  # for the host of rank 0 to answer
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
COORDINATOR_HINT = "use HOST:PORT of rank 0"
ALONE = "--cluster none"  # for a process that has a launcher's variables but was not started by it
Environment = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, and which one this is.

    address, port: where rank 0 listens. launcher: which launcher started the processes.
    """

    launcher: str
    address: str
    port: int
    rank: int
    num_processes: int

    @cached_property
    def rank0_addresses(self) -> set[str]:
        """IP addresses of rank 0's host, resolved once: without a network, a name server takes long to fail."""
        return {str(info[4][0]) for info in socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)}

    def reaches_rank0(self) -> bool:
        """Whether the host of rank 0 answers a connection to the coordinator's port, even by refusing it.

        True if this cannot be determined.
        """
        try:
            return self.rank == 0 or any(_answers(address, self.port) for address in self.rank0_addresses)
        except OSError:
            return True


def _answers(address: str, port: int) -> bool:
    """Whether a host accepts or refuses a connection. Raises OSError if this host cannot ask."""
    try:
        socket.create_connection((address, port), REACH_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno in UNREACHABLE:
            return False
        raise
    return True


def _number(environment: Environment, name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        reason = "is not set, but other variables of its launcher are"
        raise ConfigError(name, reason=reason, hint="set it too") from None
    except ValueError:
        raise ConfigError(name, environment[name], reason="must be an integer") from None


def _index(environment: Environment, name: str, count: int) -> int:
    """A number from 0 to `count` - 1."""
    if (number := _number(environment, name)) not in range(count):
        raise ConfigError(name, number, reason=f"must be from 0 to {count - 1}")
    return number


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """(host, port) of HOST, HOST:PORT or [IPv6]:PORT."""
    match = re.fullmatch(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d{1,5}))?", text.strip())
    if not match or int(match["port"] or default_port) not in range(1, 65_536):
        reason = "is not HOST:PORT with a port from 1 to 65535"
        raise ConfigError("coordinator address", text, reason=reason, hint=COORDINATOR_HINT)
    return match["ipv6"] or match["host"], int(match["port"] or default_port)


def _read(environment: Environment, launcher: str, *, address: str, port: str, rank: str, processes: str) -> Cluster:
    """The cluster that the variables of these names describe; the port's variable may be missing."""
    number = _number(environment, port) if port in environment else DEFAULT_PORT
    host, number = parse_address(environment[address], number)
    return Cluster(launcher, host, number, _number(environment, rank), _number(environment, processes))


def _jax(environment: Environment) -> Cluster | None:
    """JAX's variables, as Kubeflow Trainer, JobSet manifests, ssh scripts and `jaxdp launch` set them."""
    address, processes = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"
    rank = "JAX_PROCESS_INDEX" if "JAX_PROCESS_INDEX" in environment else "JAX_PROCESS_ID"
    if processes not in environment:
        if rank in environment and address in environment:
            _number(environment, processes)
        return None
    if _number(environment, processes) == 1 and rank not in environment:
        return Cluster("jax", "127.0.0.1", DEFAULT_PORT, 0, 1)
    if address not in environment:
        raise ConfigError(address, reason="is not set, but JAX_NUM_PROCESSES is", hint="set it to HOST:PORT of rank 0")
    return _read(environment, "jax", address=address, port="JAX_COORDINATOR_PORT", rank=rank, processes=processes)


def _kubeflow(environment: Environment) -> Cluster | None:
    """The variables of Kubeflow's JAXJob (training operator)."""
    address, processes = "COORDINATOR_ADDRESS", "NUM_PROCESSES"
    if not {address, processes} <= environment.keys():
        return None
    return _read(environment, "kubeflow", address=address, port="COORDINATOR_PORT", rank="PROCESS_ID", processes=processes)


def _torchrun(environment: Environment) -> Cluster | None:
    """The variables of torchrun and of launchers that imitate it."""
    if not {"WORLD_SIZE", "RANK"} <= environment.keys():
        return None
    processes = _number(environment, "WORLD_SIZE")
    if "MASTER_ADDR" not in environment:
        if processes == 1:
            return None
        reason = "is not set, but WORLD_SIZE and RANK are"
        raise ConfigError("MASTER_ADDR", reason=reason, hint="set it to the host of rank 0")
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else DEFAULT_PORT
    port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent listens at MASTER_PORT
    return Cluster("torchrun", environment["MASTER_ADDR"], port, _number(environment, "RANK"), processes)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: node[03-05,09],other -> node03."""
    first = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes).split(",")[0]
    if not first:
        raise ConfigError("SLURM_STEP_NODELIST", nodes, reason="must name the hosts of the step")
    return first


def _slurm(environment: Environment) -> Cluster | None:
    """The variables of a step that srun started; batch scripts and allocation shells do not have them all."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    step = environment["SLURM_STEP_ID"]
    number = int(step) % 64 if re.fullmatch("[0-9]{1,18}", step) else 0
    port = FIRST_PORT + (_number(environment, "SLURM_JOB_ID") * 64 + number) % PORTS
    processes = _number(environment, "SLURM_STEP_NUM_TASKS")
    return Cluster("slurm", first_host(nodes), port, _number(environment, "SLURM_PROCID"), processes)


def _open_mpi(environment: Environment) -> Cluster | None:
    """The variables of Open MPI's mpirun. Rank 0 is assumed to run on the host of mpirun, whose address they contain."""
    rank, processes = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if not {rank, processes} <= environment.keys():
        return None
    if (address := "JAX_COORDINATOR_ADDRESS") in environment:
        return _read(environment, "openmpi", address=address, port="JAX_COORDINATOR_PORT", rank=rank, processes=processes)
    server = environment.get("OMPI_MCA_orte_hnp_uri") or environment.get("PMIX_SERVER_URI41") or ""
    host = re.search(r"tcp://\[?([^,:\]]+(?::[^,\]]*:[^,\]]*)?)", server)
    job = re.match(r"\D*(\d+)", environment.get("OMPI_MCA_ess_base_jobid") or server)
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment[processes]:
        name = "127.0.0.1"
    elif host and "OMPI_MCA_orte_hnp_uri" in environment:
        name = host[1]
    else:
        hint = "add -x JAX_COORDINATOR_ADDRESS=HOST:PORT to mpirun, with HOST of rank 0"
        reason = "is not set, and Open MPI's variables do not contain the address of rank 0"
        raise ConfigError(address, reason=reason, hint=hint)
    port = FIRST_PORT + int(job[1] if job else 0) % PORTS
    return Cluster("openmpi", name, port, _number(environment, rank), _number(environment, processes))


def _tpu(environment: Environment) -> Cluster | None:
    """The workers of a TPU slice or of several, numbered as in JAX."""
    found, hint = tpu.slice_variables(environment), "set it to the workers: HOST,HOST,..."
    name = tpu.ADDRESSES if found.get(tpu.ADDRESSES) else tpu.HOSTNAMES
    if not (listed := found.get(name)):
        if tpu.WORKER not in found:
            return None
        raise ConfigError(name, reason=f"is not set, but {tpu.WORKER} is", hint=hint)
    hosts = [host.strip() for host in listed.split(",")]
    if not all(hosts):
        raise ConfigError(name, listed, reason="has a worker without a name", hint=hint)
    rank = _index(found, tpu.WORKER, len(hosts)) if len(hosts) > 1 else 0
    slices, first = _number(found, tpu.SLICES) if found.get(tpu.SLICES) else 1, hosts[0]
    if slices > 1:
        rank += len(hosts) * _index(found, tpu.SLICE, slices)
        if not (first := found.get(tpu.COORDINATOR, "")):
            hint = "set it to the first worker of slice 0"
            raise ConfigError(tpu.COORDINATOR, reason=f"is not set, but {tpu.SLICES} is", hint=hint)
    return Cluster("tpu", parse_address(first)[0], DEFAULT_PORT, rank, slices * len(hosts))


LAUNCHERS: dict[str, Callable[[Environment], Cluster | None]] = {
    "jax": _jax,
    "kubeflow": _kubeflow,
    "torchrun": _torchrun,
    "openmpi": _open_mpi,
    "slurm": _slurm,
    "tpu": _tpu,
}


def detect(
    launcher: str = "auto",
    environment: Environment = os.environ,
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
) -> Cluster | None:
    """The processes of this run, or None for a single process.

    launcher: auto, none, or the name of a launcher whose variables must be set. coordinator (HOST:PORT), processes and rank
    must be given together, and take precedence over the environment. Raises ConfigError if the requested launcher is not
    detected or its values are invalid.
    """
    flags = {"coordinator": coordinator, "processes": processes, "rank": rank}
    cluster: Cluster | None
    if any(value is not None for value in flags.values()):
        cluster = _from_flags(launcher, coordinator, processes=processes, rank=rank)
    elif launcher == "none":
        return None
    elif launcher == "auto":
        cluster = _found(environment)
    elif launcher not in LAUNCHERS:
        raise one_of("--cluster", launcher, ["auto", "none", *LAUNCHERS])
    elif (cluster := LAUNCHERS[launcher](environment)) is None:
        hint = "start the run with that launcher, or omit --cluster"
        raise ConfigError("--cluster", launcher, reason="the variables of this launcher are not set", hint=hint)
    if cluster is None:
        return None
    _check(cluster)
    return cluster if cluster.num_processes > 1 or launcher != "auto" else None


def _found(environment: Environment) -> Cluster | None:
    """The first cluster that the environment describes. Its variables may be left over from another command."""
    try:
        cluster = next((cluster for cluster in (read(environment) for read in LAUNCHERS.values()) if cluster), None)
        if cluster is not None:
            _check(cluster)
    except ConfigError as error:
        hint = f"{error.hint}{', or ' if error.hint else ''}use {ALONE} to train with this process alone"
        raise ConfigError(error.field, error.value, reason=error.reason, hint=hint) from None
    return cluster


def _from_flags(launcher: str, coordinator: str | None, *, processes: int | None, rank: int | None) -> Cluster:
    hint = "use --coordinator, --processes and --rank together, without --cluster"
    if processes is not None and coordinator is None and rank is None:
        hint = f"for processes on this machine use jaxdp launch --processes {processes} -- train.py; else {hint}"
    if launcher not in ("auto", "none"):
        reason = "cannot be combined with --coordinator, --processes and --rank"
        raise ConfigError("--cluster", launcher, reason=reason, hint=hint)
    if coordinator is None or processes is None or rank is None:
        values = {"--coordinator": coordinator, "--processes": processes, "--rank": rank}
        missing = next(flag for flag, value in values.items() if value is None)
        raise ConfigError(missing, reason="is missing", hint=hint)
    address, port = parse_address(coordinator)
    return Cluster("flags", address, port, rank, processes)


def _check(cluster: Cluster) -> None:
    rank, processes, launcher = cluster.rank, cluster.num_processes, cluster.launcher
    for field, value, least, most in (
        ("coordinator port", cluster.port, 1, 65_535),
        ("number of processes", processes, 1, MAX_PROCESSES),
        ("rank", rank, 0, processes - 1),
    ):
        if not least <= value <= most:
            raise ConfigError(field, value, reason=f"must be from {least} to {most} (set by {launcher})")
    try:
        cluster.address.encode("idna")  # as `socket` does, which raises UnicodeError
    except UnicodeError:
        reason = "is not a host name, whose parts have 1 to 63 letters, digits and hyphens"
        raise ConfigError("coordinator address", cluster.address, reason=reason, hint=COORDINATOR_HINT) from None


def unused_tasks_warning(environment: Environment = os.environ) -> str | None:
    """A warning if Slurm allocated several tasks and this process was not started by srun, else None."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment and tasks not in ("", "1"):
        return f"this Slurm job has {tasks} tasks, but only one process trains: start it with srun to use all"
    return None


def core_binding_warning(environment: Environment = os.environ) -> str | None:
    """A warning if mpirun has bound this process to a part of the machine's cores, as it does by default, else None."""
    cores, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    bound = "OMPI_MCA_orte_bound_at_launch" in environment or len(os.sched_getaffinity(os.getppid())) > cores
    if "OMPI_COMM_WORLD_RANK" not in environment or not bound or cores >= total:
        return None
    threads = usable_cores()
    return (
        f"mpirun binds this process to {cores} of {total} cores: {plural(threads, 'thread')} decode{'s' * (threads == 1)} "
        "images, and on CPUs results can differ by rounding; mpirun --bind-to none gives each process all cores"
    )


def visible_gpus(environment: Environment = os.environ) -> list[str]:
    """The GPUs that this process can see, by CUDA_VISIBLE_DEVICES or else by the driver, without starting JAX."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    try:
        return sorted(name[6:] for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    except OSError:
        return []


def assign_gpus(visible: list[list[str]], local_rank: int) -> list[int] | None:
    """The indices of the GPUs that this process uses, among those it can see; None for all of them.

    visible: the GPUs that each process of this host can see. If all processes see the same ones, these are divided evenly.
    Raises ConfigError if that is not possible.
    """
    gpus, processes = visible[local_rank], len(visible)
    if not gpus or processes == 1 or any(other != gpus for other in visible):
        return None
    share, remainder = divmod(len(gpus), processes)
    if remainder:
        raise ConfigError(
            "GPUs",
            reason=f"{plural(len(gpus), 'GPU')} cannot be divided evenly among the {plural(processes, 'process')} of this host",
            hint="start one process for each GPU or one for the host, or set CUDA_VISIBLE_DEVICES for each",
        )
    return list(range(local_rank * share, (local_rank + 1) * share))


def host_identity() -> tuple[str, str]:
    """(name, identity) of this host. Containers of one machine, and machines of the same name, have different identities."""
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return name, f"{name} {file.read().strip()}"
    except OSError:
        return name, name
