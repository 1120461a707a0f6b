"""Detects which processes make up a run, from the environment variables of their launcher.

JAX's own detection works only inside `jax.distributed.initialize`, while the status files need rank and number before it. It
knows neither Kubeflow, torchrun nor Open MPI 5, and takes the tasks of a Slurm job for those of the step.
"""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxdp.errors import ConfigError, one_of, plural

DEFAULT_PORT = 29_400  # of rank 0, if the launcher names no port
MAX_PROCESSES = 2**20
COORDINATOR_HINT = "use HOST:PORT of rank 0"
Environment = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, and which one this is.

    address, port: where rank 0 listens. launcher: which launcher started the processes. job: the launcher's name of the job,
    the same for all processes, or "".
    """

    launcher: str
    address: str
    port: int
    rank: int
    num_processes: int
    job: str = ""


def _number(environment: Environment, name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        reason = "is not set, but other variables of its launcher are"
        raise ConfigError(name, reason=reason, hint="set it too") from None
    except ValueError:
        raise ConfigError(name, environment[name], reason="must be an integer") from None


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """(host, port) of HOST, HOST:PORT or [IPv6]:PORT."""
    match = re.fullmatch(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d{1,5}))?", text.strip())
    if not match or int(match["port"] or default_port) not in range(1, 65_536):
        raise ConfigError(
            "coordinator address", text, reason="is not HOST:PORT with a port from 1 to 65535", hint=COORDINATOR_HINT
        )
    return match["ipv6"] or match["host"], int(match["port"] or default_port)


def _check_host_name(host: str) -> None:
    """Raise ConfigError for a host name that cannot be looked up."""
    try:
        host.encode("idna")  # as `socket` does, which raises UnicodeError
    except UnicodeError:
        reason = "is not a host name, whose parts have 1 to 63 letters, digits and hyphens"
        raise ConfigError("coordinator address", host, reason=reason, hint=COORDINATOR_HINT) from None


def _jax(environment: Environment) -> Cluster | None:
    """JAX's variables, as Kubeflow Trainer, JobSet manifests, ssh scripts and `jaxdp launch` set them."""
    rank_variable = "JAX_PROCESS_INDEX" if "JAX_PROCESS_INDEX" in environment else "JAX_PROCESS_ID"
    if "JAX_NUM_PROCESSES" not in environment:
        if rank_variable in environment and "JAX_COORDINATOR_ADDRESS" in environment:
            _number(environment, "JAX_NUM_PROCESSES")
        return None
    if _number(environment, "JAX_NUM_PROCESSES") == 1 and rank_variable not in environment:
        return Cluster("jax", "127.0.0.1", DEFAULT_PORT, 0, 1)
    if "JAX_COORDINATOR_ADDRESS" not in environment:
        reason = "is not set, but JAX_NUM_PROCESSES is"
        raise ConfigError("JAX_COORDINATOR_ADDRESS", reason=reason, hint="set it to HOST:PORT of rank 0")
    port = _number(environment, "JAX_COORDINATOR_PORT") if "JAX_COORDINATOR_PORT" in environment else DEFAULT_PORT
    address, port = parse_address(environment["JAX_COORDINATOR_ADDRESS"], port)
    return Cluster("jax", address, port, _number(environment, rank_variable), _number(environment, "JAX_NUM_PROCESSES"))


def _kubeflow(environment: Environment) -> Cluster | None:
    """The variables of Kubeflow's JAXJob (training operator)."""
    if not {"COORDINATOR_ADDRESS", "NUM_PROCESSES"} <= environment.keys():
        return None
    port = _number(environment, "COORDINATOR_PORT") if "COORDINATOR_PORT" in environment else DEFAULT_PORT
    address, port = parse_address(environment["COORDINATOR_ADDRESS"], port)
    return Cluster("kubeflow", address, port, _number(environment, "PROCESS_ID"), _number(environment, "NUM_PROCESSES"))


def _torchrun(environment: Environment) -> Cluster | None:
    """The variables of torchrun and of launchers that imitate it."""
    if not {"WORLD_SIZE", "RANK"} <= environment.keys():
        return None
    processes = _number(environment, "WORLD_SIZE")
    if "MASTER_ADDR" not in environment:
        if processes == 1:
            return None
        reason = "is not set, but WORLD_SIZE and RANK are"
        raise ConfigError("MASTER_ADDR", reason=reason, hint="set it to the host of rank 0, or use --cluster none")
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else DEFAULT_PORT
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's agent listens at MASTER_PORT
    job = environment.get("TORCHELASTIC_RUN_ID", "")
    return Cluster("torchrun", environment["MASTER_ADDR"], port, _number(environment, "RANK"), processes, job)


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
    job, step = _number(environment, "SLURM_JOB_ID"), environment["SLURM_STEP_ID"]
    number = int(step) % 64 if re.fullmatch("[0-9]{1,18}", step) else 0
    port = 20_000 + (job * 64 + number) % 12_000  # below the ephemeral ports
    processes = _number(environment, "SLURM_STEP_NUM_TASKS")
    return Cluster("slurm", first_host(nodes), port, _number(environment, "SLURM_PROCID"), processes, f"{job}.{step}")


def _open_mpi(environment: Environment) -> Cluster | None:
    """The variables of Open MPI's mpirun. Rank 0 is assumed to run on the host of mpirun, whose address they contain."""
    if not {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= environment.keys():
        return None
    processes, rank = _number(environment, "OMPI_COMM_WORLD_SIZE"), _number(environment, "OMPI_COMM_WORLD_RANK")
    name = environment.get("OMPI_MCA_ess_base_jobid") or environment.get("PMIX_NAMESPACE", "")
    if "JAX_COORDINATOR_ADDRESS" in environment:
        address, port = parse_address(environment["JAX_COORDINATOR_ADDRESS"])
        return Cluster("openmpi", address, port, rank, processes, name)
    server = environment.get("OMPI_MCA_orte_hnp_uri") or environment.get("PMIX_SERVER_URI41") or ""
    host = re.search(r"tcp://\[?([^,:\]]+(?::[^,\]]*:[^,\]]*)?)", server)
    job = re.match(r"\D*(\d+)", environment.get("OMPI_MCA_ess_base_jobid") or server)
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(processes):
        address = "127.0.0.1"
    elif host and "OMPI_MCA_orte_hnp_uri" in environment:
        address = host[1]
    else:
        raise ConfigError(
            "JAX_COORDINATOR_ADDRESS",
            reason="is not set, and Open MPI's variables do not contain the address of rank 0",
            hint="add -x JAX_COORDINATOR_ADDRESS=HOST:PORT to mpirun, with HOST of rank 0",
        )
    return Cluster("openmpi", address, 20_000 + int(job[1] if job else 0) % 12_000, rank, processes, name)


LAUNCHERS: dict[str, Callable[[Environment], Cluster | None]] = {
    "jax": _jax,
    "kubeflow": _kubeflow,
    "torchrun": _torchrun,
    "openmpi": _open_mpi,
    "slurm": _slurm,
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
        cluster = next((cluster for cluster in (read(environment) for read in LAUNCHERS.values()) if cluster), None)
    elif launcher not in LAUNCHERS:
        raise one_of("--cluster", launcher, ["auto", "none", *LAUNCHERS])
    elif (cluster := LAUNCHERS[launcher](environment)) is None:
        raise ConfigError(
            "--cluster", launcher, reason="its variables are not set", hint=f"start the run with {START_COMMANDS[launcher]}"
        )
    if cluster is None:
        return None
    _check(cluster)
    if cluster.launcher == "slurm" and cluster.num_processes > 1 and "SLURM_PTY_PORT" in environment:
        _check_no_shell(cluster.num_processes)
    return cluster if cluster.num_processes > 1 or launcher != "auto" else None


def _check_no_shell(tasks: int) -> None:
    """Raise ConfigError in the shell of `srun --pty`. Steps that are started there inherit its variables, but no terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return
    reason = f"this command was started in a shell of `srun --pty`, and not by srun in all {tasks} tasks"
    raise ConfigError(
        "SLURM_PTY_PORT", reason=reason, hint="use --cluster none to train with this process only, or srun without --pty"
    )


def _from_flags(launcher: str, coordinator: str | None, *, processes: int | None, rank: int | None) -> Cluster:
    hint = "use --coordinator, --processes and --rank together, without --cluster"
    if processes is not None and coordinator is None and rank is None:
        hint = f"for processes on this machine use jaxdp launch --processes {processes} -- train.py; else {hint}"
    if launcher not in ("auto", "none"):
        raise ConfigError(
            "--cluster", launcher, reason="cannot be combined with --coordinator, --processes and --rank", hint=hint
        )
    if coordinator is None or processes is None or rank is None:
        values = {"--coordinator": coordinator, "--processes": processes, "--rank": rank}
        missing = next(flag for flag, value in values.items() if value is None)
        raise ConfigError(missing, reason="is missing", hint=hint)
    address, port = parse_address(coordinator)
    return Cluster("flags", address, port, rank, processes)


def _check(cluster: Cluster) -> None:
    if not 0 < cluster.port < 65_536:
        raise ConfigError("coordinator port", cluster.port, reason=f"must be from 1 to 65535 (set by {cluster.launcher})")
    if not 1 <= cluster.num_processes <= MAX_PROCESSES:
        raise ConfigError(
            "number of processes",
            cluster.num_processes,
            reason=f"must be from 1 to {MAX_PROCESSES:,} (set by {cluster.launcher})",
        )
    if not 0 <= cluster.rank < cluster.num_processes:
        raise ConfigError(
            "rank", cluster.rank, reason=f"must be from 0 to {cluster.num_processes - 1} (set by {cluster.launcher})"
        )
    _check_host_name(cluster.address)


START_COMMANDS = {
    "jax": "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set",
    "kubeflow": "a JAXJob",
    "torchrun": "torchrun",
    "openmpi": "mpirun",
    "slurm": "srun, inside sbatch or salloc",
}


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
    return (
        f"mpirun binds this process to {cores} of {total} cores: {cores} thread{'s' * (cores > 1)} decode{'s' * (cores == 1)} "
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
    """(name, identity) of this host. The identity differs between containers of a machine and machines of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True).stdout.strip()
    name = socket.gethostname()
    return name, f"{name} {boot}"
