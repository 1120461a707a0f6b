"""A validated run: its configuration with devices, data sets and plan, before anything is compiled."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Config, at_image_size
from jaxdp.data.chunks import rows_per_chunk
from jaxdp.data.loader import DataError
from jaxdp.data.prefetch import DeviceIterator
from jaxdp.data.sources import Datasets, is_resident, open_datasets, with_classes
from jaxdp.distributed import runtime
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import ConfigError, plural
from jaxdp.planning import Plan, PlannedPhase, make_plan
from jaxdp.sizes import model_summary
from jaxdp.storage.location import StorageError
from jaxdp.training.consistency import data_fingerprint


@dataclass(frozen=True)
class RunSetup:
    """A validated config with its devices, data sets and plan.

    data_fingerprint: digests of the data. keeps_per_worker_batch: whether the per-worker batches are those with which the run
    began.
    """

    config: Config
    devices: list[jax.Device]
    datasets: Datasets
    data_fingerprint: dict[str, str]
    plan: Plan
    model_summary: dict[str, Any]
    keeps_per_worker_batch: bool = True

    @classmethod
    def create(
        cls,
        config: Config,
        *,
        datasets: tuple[Any, Any] | None = None,
        group: ProcessGroup | None = None,
        saved_batches: dict[str, list[int]] | None = None,
        run: Callable[[Callable[[], Any]], Any] = lambda function: function(),
    ) -> "RunSetup":
        """Start JAX, open the data and make the plan. Raises ConfigError if the run cannot be planned.

        datasets: (training, evaluation) in place of the config's. saved_batches: {phase: [global batch, per-worker batch]} with
        which the run began, kept if these devices allow it. run: calls the function that opens the data, which may take long.
        """
        group = group or runtime.current_group()
        devices = runtime.start(config.mesh, group, config.compile)

        def open_data() -> tuple[Datasets, dict[str, str]]:
            opened = open_datasets(config, datasets)
            try:
                return opened, data_fingerprint(opened)
            except DataError as error:
                if not (isinstance(error.__cause__, StorageError) and error.__cause__.permanent):
                    raise
                hint = "check the credentials and permissions"
                raise ConfigError("data.directory", config.data.directory, reason=str(error), hint=hint) from None

        opened, fingerprint = run(open_data)
        config = with_classes(config, opened.class_count)
        sizes = {
            "examples": len(opened.train),
            "devices": len(devices),
            "hosts": runtime.uniform_host_count(group),
            "processes": group.num_processes,
        }
        saved, plan = _with_saved_batches(config, saved_batches or {}), None
        if saved != config:
            with contextlib.suppress(ConfigError):
                plan = make_plan(saved, **sizes)
        keeps_batch = plan is not None or saved == config
        plan = plan or make_plan(config, **sizes)
        _check_profile(config, plan)
        plan = dataclasses.replace(plan, config=config)
        return cls(config, devices, opened, fingerprint, plan, model_summary(config), keeps_batch)

    @property
    def images_on_device(self) -> bool:
        """Whether the training images are resident on the devices."""
        return is_resident(self.datasets, self.devices[0].platform)

    def open_batches(self, phase: PlannedPhase, mesh: Mesh, first_sample: int, *, resident: bool) -> DeviceIterator:
        """The batches of the steps of a phase from `first_sample` on, loaded in the background. Close it when done.

        resident: the training images are on the devices, so only their indices are loaded.
        """
        data, chunk = at_image_size(self.config, phase.image_size).data, None
        if not resident:
            chunk = rows_per_chunk(phase.per_device_batch, devices=phase.local_devices, image_bytes=data.image_bytes)
        return DeviceIterator(
            self.datasets.train_at(phase.image_size),
            mesh,
            seed=self.config.seed,
            first=first_sample,
            end=phase.end,
            global_batch=phase.global_batch,
            chunk_rows=chunk,
            resident=resident,
            repeats=data.repeats,
        )

    def check_fits(self, manifest: Manifest, accept_changes: bool) -> None:
        """Raise ConfigError if a checkpoint is of other data, unless accepted, or of a position after the end of the run."""
        saved, current = manifest.metadata.get("data"), self.data_fingerprint
        if saved not in (None, current) and not accept_changes:
            different = "; ".join(
                f"{name}: {saved.get(name)} -> {current[name]}" for name in current if saved.get(name) != current[name]
            )
            raise ConfigError(
                "data",
                reason=f"{manifest.path} is of a run on other data ({different})",
                hint="restore the data, start over with --resume never, or resume on the new data with --accept-changes",
            )
        if manifest.samples > self.plan.total_samples:
            raise ConfigError(
                "epochs",
                self.config.epochs,
                reason=f"{manifest.path} is at epoch {manifest.epoch:g} already",
                hint="use more epochs, or another --workdir",
            )


def _check_profile(config: Config, plan: Plan) -> None:
    """Raise ConfigError if the profile has steps after the last step of the run."""
    steps = config.logging.profiled_steps
    if steps and steps[-1] > plan.total_steps:
        raise ConfigError(
            "logging.profile",
            config.logging.profile,
            reason=f"steps {steps[0]} to {steps[-1]} are not all among the {plural(plan.total_steps, 'step')} of the run",
            hint="use FIRST,COUNT within them",
        )


def _with_saved_batches(config: Config, saved: dict[str, list[int]]) -> Config:
    """The config with the per-worker batches of the run's beginning, which keep the groups of batch normalization."""
    batch = tuple(
        dataclasses.replace(phase, per_worker_batch=saved[str(index)][1])
        if phase.per_worker_batch is None and saved.get(str(index), [None])[0] == phase.global_batch
        else phase
        for index, phase in enumerate(config.batch)
    )
    return dataclasses.replace(config, batch=batch)
