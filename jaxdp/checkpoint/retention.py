"""Which checkpoints of a run are kept."""

from dataclasses import dataclass, field

from jaxdp.checkpoint.listing import by_metric
from jaxdp.checkpoint.manifest import Manifest


@dataclass
class Retention:
    """Keeps the newest `keep` checkpoints, the best one by `metric`, the retained ones and the last audited one.

    With early stopping, also keeps the best checkpoint in the progress of each of these: the run may return to it.
    Checkpoints are identified by their number of samples. metric: a name in `jaxdp.metrics.METRICS`. retained: checkpoints
    that are never removed. audited: the newest checkpoint when an audit last passed. resumed: the checkpoint this session
    started from, kept until an audit passes. uploading: the checkpoint that is being uploaded.
    """

    keep: int
    metric: str
    retained: list[int] = field(default_factory=list)
    audited: int | None = None
    resumed: int | None = None
    uploading: int | None = None

    def continue_from(self, manifest: Manifest) -> None:
        """Adopt the retained and audited checkpoints of the run at the time of this checkpoint."""
        progress = manifest.metadata["progress"]
        self.retained, self.audited = [*progress.get("retained", [])], progress.get("audited_checkpoint")
        self.resumed = manifest.samples

    def expired(self, manifests: list[Manifest]) -> list[Manifest]:
        """The checkpoints to remove. manifests: all of the run's, newest first."""
        kept = {self.audited, self.resumed, self.uploading, *self.retained}
        kept |= {manifest.samples for manifest in [*manifests[: self.keep], *by_metric(manifests, self.metric)[:1]]}
        kept |= {best["samples"] for m in manifests if m.samples in kept and (best := m.metadata["progress"].get("best"))}
        return [manifest for manifest in manifests if manifest.samples not in kept]
