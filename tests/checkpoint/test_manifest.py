import dataclasses
import math
import zlib

import numpy as np
import pytest
from helpers.checkpoints import rewrite_manifest

from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, file_checksum, read_manifest
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import Config
from jaxdp.errors import ConfigError


def test_file_checksum_is_the_crc_of_the_whole_file(tmp_path):
    """Also of one that is read in several pieces."""
    content = np.random.default_rng(0).bytes(2**23 + 5)
    for size in (0, 9, len(content)):
        (tmp_path / "file").write_bytes(content[:size])
        assert file_checksum(tmp_path / "file") == [size, f"{zlib.crc32(content[:size]):08x}"]


def test_config_of_a_version_with_other_fields_names_the_checkpoint(tmp_path):
    stored = dataclasses.asdict(Config())
    manifest = Manifest(tmp_path / "96", 96, {"config": stored}, arrays={}, files={})
    assert manifest.config == Config()
    stored["guard"]["stuck_minutes"] = 3
    reason = rf"checkpoint='{tmp_path}/96': its config cannot be read \(guard.stuck_minutes.*unknown field.*\); use the version"
    with pytest.raises(ConfigError, match=reason):
        assert manifest.config


def with_metadata(**changes):
    return lambda content: content | {"metadata": content["metadata"] | changes}


def with_progress(**changes):
    return lambda content: with_metadata(progress=content["metadata"]["progress"] | changes)(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content | {"metadata": {}}, r"metadata\.progress: Field required"),
        (with_progress(samples=20), r"samples is 10, but metadata\.progress\.samples is 20"),
        (with_progress(steps=2**63), r"metadata\.progress\.steps: .* less than 9223372036854775808"),
        (lambda content: content | {"metadata": content["metadata"] | {"epoch": math.nan}}, r"metadata\.epoch: .*finite"),
        (with_metadata(epoch=-1.0), r"metadata\.epoch: "),
        (with_metadata(epoch=1e300), r"metadata\.epoch is 1e\+300 after 10 samples"),
        (with_metadata(epoch=0.0), r"metadata\.epoch is 0 after 10 samples"),
        (with_metadata(data=[1]), r"metadata\.data: "),
        (with_metadata(per_worker_batch={"0": [8, 0]}), r"metadata\.per_worker_batch\."),
        (with_progress(best={"samples": 10}), r"metadata\.progress\.best: .*lacks step"),
        (with_progress(last_evaluation=["x"]), r"metadata\.progress\.last_evaluation: "),
        (with_progress(retained=[[]]), r"metadata\.progress\.retained\.0: "),
        (with_progress(wall_seconds=math.inf), r"metadata\.progress\.wall_seconds: "),
        (lambda content: content | {"parts": 0}, "parts: "),
        (lambda content: content | {"files": {"state/\0": [1, "0"]}}, "is not a path in state/"),
        (lambda content: content | {"files": {"state/\ud800": [1, "0"]}}, "content: Invalid JSON"),
        (lambda content: content | {"samples": -10}, "samples: "),
        (lambda content: content | {"files": {"/dev/zero": [1, "0"]}}, "is not a path in state/"),
        (lambda content: content | {"files": {"state/../../other": [1, "0"]}}, "is not a path in state/"),
        (lambda content: content | {"samples": 20}, "its manifest.json belongs to the checkpoint of 20 samples"),
    ],
)
def test_read_manifest_with_invalid_content_raises_even_if_its_hash_matches(saved, change, message):
    folder, _ = saved
    rewrite_manifest(folder / "10", lambda content: content)
    assert read_manifest(folder / "10").samples == 10
    rewrite_manifest(folder / "10", change)
    with pytest.raises(CorruptCheckpoint, match=f"10.* is corrupt: .*{message}"):
        read_manifest(folder / "10")


def test_fields_of_progress_that_a_manifest_lacks_have_their_defaults(saved):
    rewrite_manifest(saved[0] / "10", with_metadata(progress={"samples": 10}))
    assert read_manifest(saved[0] / "10").metadata["progress"] == dataclasses.asdict(Progress(samples=10))


def test_read_manifest_with_another_hash_raises(saved):
    file = saved[0] / "10" / MANIFEST
    file.write_bytes(file.read_bytes().splitlines()[0] + b"\n" + b"0" * 64 + b"\n")
    with pytest.raises(CorruptCheckpoint, match=r"manifest.json is corrupt: wrong checksum"):
        read_manifest(file.parent)
