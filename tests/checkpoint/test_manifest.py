import dataclasses
import errno
import math
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import metadata, rewrite_manifest

from jaxdp.checkpoint import manifest as manifests
from jaxdp.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    file_checksum,
    part_folder,
    read_manifest,
    state_files,
    verify_files,
    write_manifest,
)
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import Config
from jaxdp.errors import ConfigError


def test_file_checksum_is_the_crc_of_the_whole_file(tmp_path):
    """Also of one that is read in several pieces."""
    content = np.random.default_rng(0).bytes(2**23 + 5)
    for size in (0, 9, len(content)):
        (tmp_path / "file").write_bytes(content[:size])
        expected = [size, f"{zlib.crc32(content[:size]):08x}"]
        assert file_checksum(tmp_path / "file") == file_checksum(tmp_path / "file", size) == expected
        assert file_checksum(tmp_path / "file", size + 1) == [size, None]
    assert file_checksum(Path("/proc/self/maps"))[0] > 0  # longer than its size says, as a file that grows is


@pytest.mark.parametrize("parts", [1, 12])
def test_state_files_of_each_part_are_those_below_its_folder(tmp_path, parts):
    names = {part: [f"{part_folder(part, parts)}/{name}" for name in ("a", "b/c", "d")] for part in range(parts)}
    for name in sum(names.values(), [MANIFEST]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert {part: state_files(tmp_path, part, parts) for part in range(parts)} == names


@pytest.mark.parametrize("name", ["10", "saving-10"])
def test_a_manifest_is_read_as_it_was_written(tmp_path, name):
    evaluation = {"eval_accuracy": 0.5, "eval_loss": 2.0}
    stored = metadata(10) | {"progress": dataclasses.asdict(Progress(10, 1, wall_seconds=0.1)), "evaluation": evaluation}
    arrays, files = {"['x']": ["float32", [2, 3], "0" * 16]}, {"state/a": [7, "0" * 8], "state/b/c": [5, "1" * 8]}
    written = Manifest(tmp_path / name, 10, stored, arrays, files, parts=2**31 - 1)
    written.path.mkdir()
    write_manifest(written)
    assert read_manifest(written.path) == written
    assert (*map(written.evaluation.get, ("eval_accuracy", "eval_loss", "other")),) == (0.5, 2.0, None)
    assert (written.num_bytes, written.epoch, written.location) == (12, 1.0, f"{tmp_path}/{name}")
    assert dataclasses.replace(written, url="gs://bucket/10", metadata={}).location == "gs://bucket/10"
    assert dataclasses.replace(written, metadata={}).evaluation == {}
    write_manifest(dataclasses.replace(written, parts=2**31))
    with pytest.raises(CorruptCheckpoint, match=r"parts: .* less than 2147483648"):
        read_manifest(written.path)


@pytest.mark.parametrize(
    ("samples", "epoch", "valid"),
    [(0, 0.0, True), (1, 0.0, False), (10, 10.0, True), (10, 10.5, False), (10, 10 / 2**63, True), (10, 8 / 2**63, False)],
)
def test_an_epoch_has_an_image_or_more_and_fewer_than_two_to_the_63(tmp_path, samples, epoch, valid):
    (tmp_path / str(samples)).mkdir()
    write_manifest(Manifest(tmp_path / str(samples), samples, metadata(samples) | {"epoch": epoch}, {}, {}))
    if valid:
        assert read_manifest(tmp_path / str(samples)).epoch == epoch
    else:
        with pytest.raises(CorruptCheckpoint, match=r"metadata\.epoch is .* after"):
            read_manifest(tmp_path / str(samples))


def test_only_an_error_that_lasts_means_that_a_file_is_corrupt(saved, monkeypatch):
    def fail(path, *more):
        raise OSError(number, os.strerror(number), str(path))

    manifest = read_manifest(saved[0] / "10")
    for number in errno.errorcode:
        kind = CorruptCheckpoint if number in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EFBIG) else UnreadableCheckpoint
        with monkeypatch.context() as patch:
            patch.setattr(manifests, "read_regular", fail)
            with pytest.raises(kind, match=f"10/{MANIFEST} cannot be read: {re.escape(os.strerror(number))}"):
                read_manifest(manifest.path)
            patch.setattr(manifests, "open_regular", fail)
            with pytest.raises(kind, match=f"10/state/.* cannot be read: {re.escape(os.strerror(number))}"):
                verify_files(manifest)


@pytest.mark.parametrize(
    ("defect", "change"),
    [
        ("made longer", lambda content: content + b"x"),
        ("truncated", lambda content: content[:-1]),
        ("changed", lambda content: bytes([content[0] ^ 1]) + content[1:]),
    ],
)
def test_verify_files_says_how_a_file_differs(saved, defect, change):
    file = saved[0] / "10/state/_METADATA"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CorruptCheckpoint, match=f"{file} is corrupt: it was {defect} after it was written"):
        verify_files(read_manifest(saved[0] / "10"))


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
        *(
            (lambda content, name=name: content | {"files": {name: [1, "0"]}}, "is not a path in state/")
            for name in ("state/../../other", "other/x", "state//x", "state/")
        ),
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
