"""Rules for which checkpoints of a run are kept."""

from jaxdp.checkpoint.listing import by_metric
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import Config


class Retention:
    """Keeps the newest `keep` checkpoints, the best one by `metric`, the retained ones and the last audited one.

    With early stopping also the best one that each of these names in its progress: the run may return to that position.
    Checkpoints are identified by their number of samples. metric: a name in `jaxdp.choices.STOP_METRICS`. retained:
    checkpoints that are never removed. audited: the newest checkpoint when an audit last passed. resumed: the checkpoint this
    session started from, kept until an audit passes. uploading: the checkpoint that is being uploaded.
    """

    def __init__(self, keep: int, metric: str) -> None:
        self.keep, self.metric = keep, metric
        self.retained: list[int] = []
        self.audited: int | None = None
        self.resumed: int | None = None
        self.uploading: int | None = None

    @classmethod
    def of_run(cls, config: Config, newest: Manifest | None) -> "Retention":
        """The rules for a run whose newest checkpoint is `newest`; None if it has none."""
        retention = cls(config.checkpoint.keep, config.stop.metric)
        if newest is not None:
            retention.continue_from(newest)
        return retention

    def continue_from(self, manifest: Manifest) -> None:
        """Adopt the retained and audited checkpoints that the run had when it saved this checkpoint."""
        progress = Progress(**manifest.metadata["progress"])
        self.resume(progress.retained, progress.audited_checkpoint, resumed=manifest.samples)

    def resume(self, retained: list[int], audited: int | None, *, resumed: int) -> None:
        """Continue with the retained and audited checkpoints of the run's earlier sessions."""
        self.retained, self.audited, self.resumed = [*retained], audited, resumed

    def retain(self, samples: int) -> None:
        """Never remove the checkpoint of `samples` samples."""
        if samples not in self.retained:
            self.retained.append(samples)

    def mark_audited(self, samples: int | None) -> None:
        """Record the newest checkpoint when an audit passed; None if there was none."""
        self.audited, self.resumed = samples, None

    @property
    def rollback_samples(self) -> int | None:
        """The checkpoint to return to if an audit fails: the last audited one, else the one this session started from."""
        return self.resumed if self.audited is None else self.audited

    def expired(self, manifests: list[Manifest]) -> list[Manifest]:
        """The checkpoints to remove. manifests: all of the run's, newest first."""
        kept = {self.audited, self.resumed, self.uploading, *self.retained}
        kept |= {manifest.samples for manifest in [*manifests[: self.keep], *by_metric(manifests, self.metric)[:1]]}
        kept |= {best["samples"] for m in manifests if m.samples in kept and (best := m.metadata["progress"].get("best"))}
        return [manifest for manifest in manifests if manifest.samples not in kept]
