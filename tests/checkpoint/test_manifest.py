import dataclasses
import hashlib
import json
import math
import zlib

import numpy as np
import pytest

from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, file_checksum, read_manifest
from jaxdp.config import Config
from jaxdp.errors import ConfigError


def rewrite_manifest(path, change):
    """Apply `change` to the content of a manifest and write it with a correct hash."""
    body = json.dumps(change(json.loads((path / MANIFEST).read_bytes().rstrip().rpartition(b"\n")[0]))).encode()
    (path / MANIFEST).write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")


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


def with_progress(**changes):
    return lambda content: content | {"metadata": content["metadata"] | {"progress": content["metadata"]["progress"] | changes}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content | {"metadata": {}}, r"metadata\.progress: Field required"),
        (with_progress(samples=20), r"samples is 10, but metadata\.progress\.samples is 20"),
        (with_progress(steps=2**63), r"metadata\.progress\.steps: .* less than 9223372036854775808"),
        (lambda content: content | {"metadata": content["metadata"] | {"epoch": math.nan}}, r"metadata\.epoch: .*finite"),
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


def test_read_manifest_with_another_hash_raises(saved):
    file = saved[0] / "10" / MANIFEST
    file.write_bytes(file.read_bytes().splitlines()[0] + b"\n" + b"0" * 64 + b"\n")
    with pytest.raises(CorruptCheckpoint, match=r"manifest.json is corrupt: wrong checksum"):
        read_manifest(file.parent)
