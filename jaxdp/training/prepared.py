"""A run that has been checked and planned, before anything of it is compiled."""

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from jaxdp.config import Config, ConfigError
from jaxdp.data.sources import keeps_images, open_datasets
from jaxdp.parallel import distributed
from jaxdp.planning import Plan, make_plan, model_summary


@dataclass(frozen=True)
class Prepared:
    """A config with its devices, data and plan: everything that can be wrong is known to be right."""

    config: Config
    devices: list
    datasets: tuple
    plan: Plan
    model_summary: dict
    as_begun: bool = True

    @classmethod
    def of(cls, config: Config, given=None, team=None, begun: dict | None = None, result=Future.result) -> "Prepared":
        """begun: {phase: [global batch, per-worker batch]} with which the run was begun, kept where these devices can; result:
        how to wait for a future."""
        team = team or distributed.joined()
        devices = distributed.start(config.mesh, team)
        thread = ThreadPoolExecutor(1)  # reading may take long, and signals are to be looked at
        datasets = result(thread.submit(open_datasets, config, given))
        thread.shutdown()
        keeps_images(config.data, datasets.train, devices[0].platform)  # says here what cannot be
        hosts = distributed.hosts_with_equally_many(team)
        plan, kept = make_plan(config, len(datasets.train), len(devices), hosts, team.processes), True
        if begun:
            try:
                as_begun = _as_begun(config, begun)
                plan = dataclasses.replace(
                    make_plan(as_begun, len(datasets.train), len(devices), hosts, team.processes), config=config
                )
            except ConfigError:
                kept = False
        return cls(config, devices, datasets, plan, model_summary(config), kept)


def _as_begun(config: Config, begun: dict) -> Config:
    """The config with the per-worker batches that the run has had from its beginning: batch normalisation's groups are kept."""
    batch = tuple(
        dataclasses.replace(phase, per_worker_batch=begun[str(index)][1])
        if phase.per_worker_batch is None and begun.get(str(index), [None])[0] == phase.global_batch
        else phase
        for index, phase in enumerate(config.batch)
    )
    return dataclasses.replace(config, batch=batch)
