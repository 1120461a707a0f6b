import os
import shutil
from pathlib import Path

import pytest
from helpers.checkpoints import metadata

from jaxdp.checkpoint.listing import (
    candidates,
    checkpoint_paths,
    latest_valid,
    named_checkpoints,
    quarantine,
    read_manifests,
    remove,
    rename_for_removal,
)
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import Manifest, write_manifest
from jaxdp.checkpoint.retention import Retention
from jaxdp.config import Checkpoint
from jaxdp.errors import ConfigError


def test_checkpoint_paths_ignores_names_that_are_not_plain_numbers(saved):
    folder, abstract = saved
    for name in ("²", "٣", "007", "1_0", "+1", "saving-²"):
        shutil.copytree(folder / "10", folder / name)
    assert [path.name for path in checkpoint_paths(folder)] == ["10"]
    assert CheckpointManager(folder, Checkpoint(), print).restore(lambda samples: abstract)[1].samples == 10


def test_checkpoints_are_read_newest_first_by_number_and_the_newest_intact_one_is_found(tmp_path):
    assert checkpoint_paths(tmp_path / "none") == []
    assert latest_valid(tmp_path) is None
    for samples in (9, 100, 0, 20):
        (tmp_path / str(samples)).mkdir()
        files = {"state/missing": [1, "0"]} if samples == 20 else {}
        write_manifest(Manifest(tmp_path / str(samples), samples, metadata(samples) | {"epoch": samples / 10}, {}, files))
    (tmp_path / "200").mkdir()
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["200", "100", "20", "9", "0"]
    assert [manifest.samples for manifest in read_manifests(tmp_path)] == [100, 20, 9, 0]
    for most, expected in ((None, 100), (100, 100), (99, 9), (9, 9), (8, 0), (0, 0)):
        assert latest_valid(tmp_path, most).samples == expected, most
    assert latest_valid(tmp_path, 99, below="state/other/").samples == 20
    assert latest_valid(tmp_path, -1) is None


def test_a_checkpoint_set_aside_or_removed_replaces_no_other(tmp_path):
    for suffix in ("corrupt", "corrupt-2", "corrupt-3"):
        (tmp_path / "10").mkdir()
        assert quarantine(tmp_path / "10") == tmp_path / f"10.{suffix}"
        assert (tmp_path / f"10.{suffix}").is_dir()
    (tmp_path / "10.suspect").symlink_to("nowhere")
    (tmp_path / "10").mkdir()
    assert quarantine(tmp_path / "10", "suspect").name == "10.suspect-2"
    for content in ("old", "new"):  # the first one is interrupted before the directory is removed
        (tmp_path / "10").mkdir()
        (tmp_path / "10" / content).mkdir()
        renamed = rename_for_removal(tmp_path / "10")
        assert renamed == tmp_path / "saving-10-replaced"
        assert os.listdir(renamed) == [content]
    (tmp_path / "link").symlink_to(tmp_path / "10.corrupt")
    os.mkfifo(tmp_path / "pipe")
    for path in (renamed, tmp_path / "link", tmp_path / "pipe", tmp_path / "none"):
        remove(path)
        assert not os.path.lexists(path)
    assert (tmp_path / "10.corrupt").is_dir()


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


def known(samples, accuracy=None, best=None):
    progress = {"best": {"samples": best}} if best else {}
    evaluation = accuracy and {"eval_accuracy": accuracy}
    return Manifest(Path(str(samples)), samples, {"progress": progress, "evaluation": evaluation}, {}, {})


@pytest.mark.parametrize(
    ("manifests", "result", "best", "names"),
    [
        ([], [40], [], {}),
        ([known(20), known(10)], [40, 20, 10], None, {"result": 20, "newest": 20}),
        ([known(9, 0.3), known(8, 0.9), known(7, 0.9)], [40, 9, 8, 7], [8, 7, 9], {"result": 9, "newest": 9, "best": 8}),
        (
            [known(9, best=7), known(8, 0.9, best=8), known(7, 0.5)],
            [7, 40, 9, 8],
            [8, 7],
            {"result": 7, "newest": 9, "best": 8},
        ),
        ([known(9, best=5), known(8), known(7, 0.5)], [5, 40, 9, 8, 7], [7], {"result": 9, "newest": 9, "best": 7}),
    ],
)
def test_names_mean_the_newest_the_best_and_what_early_stopping_returns_to(manifests, result, best, names):
    """40 cannot be read, but may still be the newest; 5 may be only at the URL."""
    found = {40: "cannot be read"} | {manifest.samples: manifest for manifest in manifests}
    assert candidates(found, "newest", "eval_accuracy") == [*found]
    assert candidates(found, "result", "eval_accuracy") == result
    if best is None:
        with pytest.raises(ConfigError, match=r"F='best': no checkpoint was saved right after an evaluation; use newest"):
            candidates(found, "best", "eval_accuracy", field="F")
    else:
        assert candidates(found, "best", "eval_accuracy") == best
    assert named_checkpoints(manifests, "eval_accuracy") == names


def test_continue_from_adopts_what_the_checkpoint_knows_and_keeps_it():
    retention = Retention(keep=1, metric="eval_accuracy")
    progress = {"samples": 20, "steps": 2, "retained": [10], "audited_checkpoint": None}
    retention.continue_from(Manifest(Path("20"), 20, {"progress": progress}, {}, {}))
    assert (retention.retained, retention.audited, retention.resumed) == ([10], None, 20)
    retention.retained.append(40)
    assert progress["retained"] == [10]
    retention.continue_from(Manifest(Path("20"), 20, {"progress": progress | {"audited_checkpoint": 30}}, {}, {}))
    assert (retention.retained, retention.audited) == ([10], 30)
    retention.continue_from(Manifest(Path("20"), 20, {"progress": progress}, {}, {}))
    assert expired(retention) == [50, 30]
