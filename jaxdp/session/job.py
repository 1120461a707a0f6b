"""The job of a training run: what to train, where and how."""

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxdp.config import Config
from jaxdp.distributed.signal_handler import SignalHandler
from jaxdp.errors import ConfigError
from jaxdp.files import expand_user
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.loggers.notebook import default_screen
from jaxdp.models import finetune
from jaxdp.models.weights import NamedTensors
from jaxdp.training.callback import Callback
from jaxdp.validation import check_type, validate, with_choices


@dataclass(frozen=True)
class Job:
    """What to train. The first eight fields are the arguments of `jaxdp.train`; a command adds the rest.

    screen: where progress is shown (None: inline in a notebook, else on stdout). started: `time.monotonic()` at the start of
    the command, for the reported times. signals: a `SignalHandler` that the caller has entered (None: the run enters one);
    without that it receives no signals. notes: lines to show after the table at the start. cluster, coordinator, processes,
    rank: how the processes of the run start; see `jaxdp.distributed.launchers.detect`.
    """

    config: Config
    workdir: str | Path | None = None
    _: KW_ONLY
    resume: str | Path = "auto"
    accept_changes: bool = False
    schedule_from_now: bool = False
    datasets: tuple[Any, Any] | None = None
    callbacks: Sequence[Callback] = ()
    initial_params: Any = None
    screen: Screen | Quiet | None = None
    started: float = field(default_factory=time.monotonic)
    signals: SignalHandler | None = None
    notes: Sequence[str] = ()
    cluster: str = "auto"
    coordinator: str | None = None
    processes: int | None = None
    rank: int | None = None


def checked(job: Job) -> tuple[Job, NamedTensors | None]:
    """(the job with a valid configuration and a screen, the tensors of its `initial_params`). Raises ConfigError."""
    check_type(job.config)
    config = job.config if job.datasets is None else with_choices(job.config, {"data.source": "given"})
    given = None
    if job.initial_params is not None:
        given = finetune.from_tree(config, job.initial_params)
        config = finetune.with_digest(config, given.digest)
    resume, screen = expand_user(job.resume, "--resume"), job.screen or default_screen()
    return replace(job, config=validate(config), callbacks=_checked(job.callbacks), resume=resume, screen=screen), given


def _checked(callbacks: Sequence[Callback]) -> list[Callback]:
    found: list[Any] = [*callbacks] if isinstance(callbacks, (list, tuple)) else [callbacks]
    for each in found:
        if not isinstance(each, Callback):
            raise ConfigError("callbacks", each, reason="not a callback", hint="derive it from jaxdp.Callback")
    return found
