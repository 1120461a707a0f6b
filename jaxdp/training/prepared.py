"""A run that has been checked and planned, before anything of it is compiled."""

import dataclasses
from dataclasses import dataclass

from jaxdp.config import Config, ConfigError
from jaxdp.data.sources import Datasets, keeps_images, open_datasets
from jaxdp.parallel import distributed
from jaxdp.planning import Plan, make_plan, model_summary
from jaxdp.training.agreement import data_facts
from jaxdp.validation import profiled_steps


@dataclass(frozen=True)
class Prepared:
    """A config with its devices, data and plan: everything that can be wrong is known to be right."""

    config: Config
    devices: list
    datasets: Datasets
    data_facts: dict[str, str]
    plan: Plan
    model_summary: dict
    as_begun: bool = True

    @classmethod
    def of(cls, config: Config, given=None, team=None, begun: dict | None = None, run=lambda work: work()) -> "Prepared":
        """begun: {phase: [global batch, per-worker batch]} with which the run was begun, kept where these devices can; run:
        how to do what may take long, which is to read the data."""
        team = team or distributed.joined()
        devices = distributed.start(config.mesh, team, config.compile)
        datasets, facts = run(lambda: _opened(config, given))
        keeps_images(config.data, datasets.train, devices[0].platform)  # says here what cannot be
        hosts = distributed.hosts_with_equally_many(team)
        sizes = len(datasets.train), len(devices), hosts, team.processes
        try:
            plan, kept = make_plan(_as_begun(config, begun or {}), *sizes), True
        except ConfigError:
            plan, kept = make_plan(config, *sizes), False
        _check_profile(config, plan)
        return cls(config, devices, datasets, facts, dataclasses.replace(plan, config=config), model_summary(config), kept)

    def check_fits(self, sealed, accept_changes: bool) -> None:
        """Raise ConfigError where a sound checkpoint is of other data, or lies beyond the run's end."""
        then, now = sealed.told.get("data"), self.data_facts
        if then not in (None, now) and not accept_changes:
            different = "; ".join(f"{name}: {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name])
            raise ConfigError(
                f"{sealed.path} is of a run on other data ({different}); restore them, give --resume never to begin anew, or "
                "--accept-changes to go on with the new ones"
            )
        if sealed.samples > self.plan.total_samples:
            raise ConfigError(
                f"epochs: {self.config.epochs:g} is not allowed; {sealed.path} is at epoch {sealed.told['epoch']:g} already; "
                "give more epochs, or another --workdir"
            )


def _check_profile(config: Config, plan: Plan) -> None:
    """Raise ConfigError where steps that the run does not have are to be traced."""
    steps = profiled_steps(config.logging.profile)
    if steps and steps[-1] > plan.total_steps:
        raise ConfigError(
            f"logging.profile: {config.logging.profile!r} is not allowed; these are the steps {steps[0]} to {steps[-1]}, "
            f"and the run has {plan.total_steps}; give FIRST,COUNT within them"
        )


def _opened(config: Config, given) -> tuple[Datasets, dict[str, str]]:
    datasets = open_datasets(config, given)
    return datasets, data_facts(datasets)


def _as_begun(config: Config, begun: dict) -> Config:
    """The config with the per-worker batches that the run has had from its beginning: batch normalisation's groups are kept."""
    batch = tuple(
        dataclasses.replace(phase, per_worker_batch=begun[str(index)][1])
        if phase.per_worker_batch is None and begun.get(str(index), [None])[0] == phase.global_batch
        else phase
        for index, phase in enumerate(config.batch)
    )
    return dataclasses.replace(config, batch=batch)
