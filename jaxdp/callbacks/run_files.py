"""The files of the run that a session begins with."""

from jaxdp.setup import run_dir
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run


class RunFiles(Callback):
    """Marks the directory as that of a running run, and removes the records of the log after the restored position.

    Not before the start: a session that cannot start leaves the files of a run as they were. Attached on rank 0.
    """

    def on_start(self, run: Run) -> None:
        run_dir.mark_running(run.workdir, run.config)
        run_dir.write_class_names(run.workdir, run.datasets.classes)
        source = run.workdir if run.restored is None else run.restored.path.parent.parent
        run.logged, warning = run_dir.truncate_log(source, run.workdir, samples=run.progress.samples)
        if warning:
            run.info(warning)
