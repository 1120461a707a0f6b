"""Writers and profile of a run: rank 0 writes the log and traces steps, the other ranks write nothing."""

from pathlib import Path

from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.loggers.tensorboard import RunInfo, mesh_table
from jaxdp.loggers.writers import Writer, create_writers
from jaxdp.training.run_setup import RunSetup
from jaxdp.training.step_compiler import StepCompiler
from jaxdp.xla.profiler import NoProfiler, Profiler, create_profiler


def open_writers(
    setup: RunSetup, workdir: Path, *, compiler: StepCompiler, samples: int, group: ProcessGroup, screen: Screen | Quiet
) -> list[Writer]:
    """The writers of a run that has seen `samples` samples; none on other ranks than 0."""
    if not group.is_rank0:
        return []
    table = mesh_table(setup.plan.phases, setup.devices[0].device_kind, compiler.shown_strategy)
    run_info = RunInfo(setup.config, table, setup.datasets.classes)
    return create_writers(
        workdir,
        tensorboard=setup.config.logging.tensorboard,
        samples=samples,
        buffer_when_full=group.num_processes == 1,
        info=screen.info,
        run_info=run_info,
    )


def open_profile(
    setup: RunSetup, workdir: Path, *, steps: int, group: ProcessGroup, screen: Screen | Quiet
) -> Profiler | NoProfiler:
    """The profile that the config asks for, of a run that has taken `steps` steps; it traces nothing on other ranks than 0."""
    if not group.is_rank0:
        return NoProfiler()
    return create_profiler(setup.config, workdir, steps_done=steps, info=screen.info)
