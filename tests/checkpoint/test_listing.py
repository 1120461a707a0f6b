import shutil
from pathlib import Path

from jaxdp.checkpoint.listing import Retention, checkpoint_paths
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Checkpoint


def test_checkpoint_paths_ignores_names_that_are_not_plain_numbers(saved):
    folder, abstract = saved
    for name in ("²", "٣", "007", "1_0", "+1", "saving-²"):
        shutil.copytree(folder / "10", folder / name)
    assert [path.name for path in checkpoint_paths(folder)] == ["10"]
    assert CheckpointManager(folder, Checkpoint(), print).restore(lambda samples: abstract)[1].samples == 10


# Newest first; of the two most accurate ones the newer counts as the best.
MANIFESTS = [
    Manifest(Path(str(samples)), samples, {"progress": {}, "evaluation": accuracy and {"eval_accuracy": accuracy}}, {}, {})
    for samples, accuracy in [(60, None), (50, 0.1), (40, 0.9), (30, 0.5), (20, 0.9), (10, 0.2)]
]


def expired(retention):
    return [manifest.samples for manifest in retention.expired(MANIFESTS)]


def test_expired_keeps_the_newest_the_most_accurate_retained_and_audited_checkpoints():
    assert expired(Retention(keep=2, metric="eval_accuracy")) == [30, 20, 10]
    assert expired(Retention(keep=1, metric="eval_accuracy", retained=[20], audited=30)) == [50, 10]


def test_each_reason_keeps_its_checkpoint_alone():
    for reason in ("audited", "resumed", "uploading"):
        assert expired(Retention(keep=1, metric="eval_accuracy", **{reason: 20})) == [50, 30, 10], reason


def test_expired_keeps_the_best_by_another_metric_and_ignores_values_that_are_not_finite():
    values = {60: None, 50: 0.4, 40: float("nan"), 30: 0.3, 20: 0.3, 10: 0.7}
    manifests = [
        Manifest(Path(str(samples)), samples, {"progress": {}, "evaluation": value and {"eval_loss": value}}, {}, {})
        for samples, value in values.items()
    ]
    retention = Retention(keep=1, metric="eval_loss")
    assert [manifest.samples for manifest in retention.expired(manifests)] == [50, 40, 20, 10]


def test_expired_keeps_what_a_kept_checkpoint_knows_as_the_best():
    """A run that returns to the audited checkpoint 20 has its best one, 10, although 30 is better."""
    values = {40: (0.2, 30), 30: (0.9, 30), 20: (0.1, 10), 10: (0.8, 10)}
    manifests = [
        Manifest(Path(str(n)), n, {"progress": {"best": {"samples": best}}, "evaluation": {"eval_accuracy": value}}, {}, {})
        for n, (value, best) in values.items()
    ]
    retention = Retention(keep=1, metric="eval_accuracy")
    assert [manifest.samples for manifest in retention.expired(manifests)] == [20, 10]
    retention.audited = 20
    assert retention.expired(manifests) == []


def test_continue_from_adopts_what_the_checkpoint_knows_and_keeps_it():
    retention = Retention(keep=1, metric="eval_accuracy")
    progress = {"samples": 20, "steps": 2, "retained": [10], "audited_checkpoint": None}
    retention.continue_from(Manifest(Path("20"), 20, {"progress": progress}, {}, {}))
    assert (retention.retained, retention.audited, retention.resumed) == ([10], None, 20)
    assert expired(retention) == [50, 30]
