"""Tests of jaxdp.checkpoint.retention."""

from pathlib import Path

from jaxdp.checkpoint.manifest import Manifest
from jaxdp.checkpoint.retention import Retention

# Newest first; of the two most accurate ones the newer counts as the best.
MANIFESTS = [
    Manifest(Path(str(samples)), samples, {"progress": {}, "evaluation": accuracy and {"eval_accuracy": accuracy}}, {}, {})
    for samples, accuracy in [(60, None), (50, 0.1), (40, 0.9), (30, 0.5), (20, 0.9), (10, 0.2)]
]


def expired(retention):
    return [manifest.samples for manifest in retention.expired(MANIFESTS)]


def test_expired_keeps_the_newest_and_the_most_accurate():
    assert expired(Retention(keep=2, metric="eval_accuracy")) == [30, 20, 10]


def test_expired_keeps_retained_and_audited_checkpoints():
    retention = Retention(keep=1, metric="eval_accuracy")
    retention.retain(20)
    retention.retain(20)
    retention.mark_audited(30)
    assert retention.retained == [20]
    assert expired(retention) == [50, 10]


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
    retention.mark_audited(20)
    assert retention.expired(manifests) == []


def test_rollback_samples_is_the_audited_checkpoint_or_the_resumed_one():
    retention = Retention(keep=1, metric="eval_accuracy")
    assert retention.rollback_samples is None
    retention.resume([10], None, resumed=20)
    assert retention.rollback_samples == 20
    assert expired(retention) == [50, 30]
    retention.mark_audited(50)
    assert retention.rollback_samples == 50
    assert expired(retention) == [30, 20]
