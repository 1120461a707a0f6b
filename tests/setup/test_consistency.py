import dataclasses
import shutil
from types import SimpleNamespace

import google_crc32c
import numpy as np
import pytest
from helpers.images import encode, noise

from jaxdp.config import Config, Data
from jaxdp.data.batch_sources import ArraySource
from jaxdp.data.image_folder import ImageFolder
from jaxdp.data.table import Table, TableItems
from jaxdp.errors import ConfigError
from jaxdp.setup import consistency
from jaxdp.validation import flatten

HOSTS = ["a", "b", "c"]


def group_of(by_rank: list[dict[str, str]]) -> SimpleNamespace:
    """The processes with these facts, seen by rank 0. Digests differ where facts do."""
    digests = [f"{fact}" for fact in by_rank]
    gathered = {str: digests, dict: by_rank}
    return SimpleNamespace(num_processes=len(by_rank), hosts=HOSTS, all_gather_object=lambda _, value: gathered[type(value)])


def test_check_sanitizes_facts_of_other_hosts_in_its_error():
    with pytest.raises(ConfigError) as error:
        consistency.check(group_of([{"data": "mine"}, {"data": "\x1b[2J"}]), lambda: {"data": "mine"})
    assert str(error.value).isprintable()


def test_check_names_the_first_rank_that_differs_and_each_difference():
    facts = {"seed": "0", "code": "1", "of rank 0": "2"}
    consistency.check(group_of([facts, facts, facts]), lambda: facts)
    other = {"seed": "7", "code": "1", "of rank 2": "3"}
    with pytest.raises(ConfigError) as error:
        consistency.check(group_of([facts, facts, other]), lambda: facts)
    assert error.value.reason == (
        "rank 2 on c differs from rank 0 on a (of rank 0: 2 on rank 0, None on rank 2; "
        "of rank 2: None on rank 0, 3 on rank 2; seed: 0 on rank 0, 7 on rank 2)"
    )
    consistency.check(SimpleNamespace(num_processes=1), lambda: pytest.fail("one process has nothing to compare"))


def test_fingerprint_has_every_field_and_flag_that_processes_share():
    facts = consistency.fingerprint(Config(), "auto")
    paths_and_threads = {"data.directory", "data.threads", "finetune.weights", "storage.directory"}
    assert facts.keys() >= flatten(dataclasses.asdict(Config())).keys() - paths_and_threads
    assert paths_and_threads.isdisjoint(facts)
    assert {"code of jaxdp", "version of jax"} <= facts.keys()
    others = {
        "seed": consistency.fingerprint(Config(seed=1)),
        "--resume": consistency.fingerprint(Config(), "never"),
        "--accept-changes": consistency.fingerprint(Config(), "auto", True),
        "--schedule-from-now": consistency.fingerprint(Config(), "auto", schedule_from_now=True),
    }
    for name, other in others.items():
        assert {key for key in facts if facts[key] != other[key]} == {name}


def test_digest_of_code_depends_on_names_and_contents(monkeypatch, tmp_path):
    contents = ({"x.py": "1"}, {"x.py": "2"}, {"y.py": "1"}, {"sub/x.py": "1"}, {"x.py": "1", "y.py": ""})
    digests = []
    for number, files in enumerate(contents):
        for name, text in files.items():
            file = tmp_path / f"{number}/jaxdp" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(consistency, "__file__", str(tmp_path / f"{number}/jaxdp/setup/consistency.py"))
        digests.append(consistency.code_digest())
    assert len({*digests}) == len(contents)
    shutil.copytree(tmp_path / "0/jaxdp", tmp_path / "elsewhere/jaxdp")
    monkeypatch.setattr(consistency, "__file__", str(tmp_path / "elsewhere/jaxdp/setup/consistency.py"))
    assert consistency.code_digest() == digests[0]


@pytest.mark.parametrize("before", [None, "of another run"])
@pytest.mark.parametrize(("seconds", "shared"), [(0.1, True), (19.5, True), (30.0, False)])
def test_directory_is_shared_if_what_rank_0_wrote_is_seen_in_time(monkeypatch, tmp_path, before, seconds, shared):
    """before: config.json as this process sees it until the seconds have passed."""
    ours, rank0s = tmp_path / "ours", tmp_path / "rank0"
    ours.mkdir()
    rank0s.mkdir()
    (rank0s / "config.json").write_text("new")
    if before is not None:
        (ours / "config.json").write_text(before)
    sent, now = [], [0.0]

    def broadcast(name, value):
        sent.append(value)
        return sent[0]

    def sleep(duration):
        now[0] += duration
        if now[0] >= seconds:
            shutil.copy(rank0s / "config.json", ours)

    monkeypatch.setattr(consistency, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    rank0, rank1 = (
        SimpleNamespace(num_processes=2, hosts=HOSTS, rank=rank, is_rank0=rank == 0, broadcast_object=broadcast)
        for rank in range(2)
    )
    consistency.check_shared_directory(rank0, rank0s)
    assert now == [0.0]
    if shared:
        consistency.check_shared_directory(rank1, ours)
    else:
        with pytest.raises(ConfigError, match=r"rank 1 on b does not see the files that rank 0 on a wrote"):
            consistency.check_shared_directory(rank1, ours)
    consistency.check_shared_directory(SimpleNamespace(num_processes=1), tmp_path / "none")


def test_digest_of_data_depends_on_every_image_in_memory():
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (50, 4, 4, 3), np.uint8), np.arange(50)
    digest = consistency.data_digest(ArraySource(images, labels))
    for row in range(50):
        changed = images.copy()
        changed[row, 3, 3, 2] ^= 1
        assert consistency.data_digest(ArraySource(changed, labels)) != digest
    assert consistency.data_digest(ArraySource(images[::-1][::-1], labels.astype(np.int64))) == digest


@pytest.mark.parametrize("rows_in_group", [1, 7, 1000])
def test_checksums_have_each_image_in_one_group_up_to_a_limit(monkeypatch, rows_in_group):
    images = np.arange(20 * 12, dtype=np.uint8).reshape(20, 2, 2, 3)
    monkeypatch.setattr(consistency, "GROUP_BYTES", 12 * rows_in_group)
    expected = [google_crc32c.value(bytes(images[at : at + rows_in_group])) for at in range(0, 20, rows_in_group)]
    assert consistency._checksums(images).tolist() == expected
    assert consistency._checksums(images[:0]).tolist() == []
    monkeypatch.setattr(consistency, "DIGEST_BYTES", 12 * 7)  # a third of them
    every_third = images[::3]
    expected = [google_crc32c.value(bytes(every_third[at : at + rows_in_group])) for at in range(0, 7, rows_in_group)]
    assert consistency._checksums(images).tolist() == expected


@dataclasses.dataclass
class Unread:
    """Images that all look the same, so that what is known without them counts."""

    source: ImageFolder | TableItems

    def __len__(self):
        return len(self.source)

    def batch(self, indices, positions):
        return np.zeros((len(indices), 8, 8, 3), np.uint8), np.zeros(len(indices), np.int32)


@pytest.mark.parametrize("change", ["path", "label", "order", "another image", "a file replaced"])
@pytest.mark.parametrize("kind", ["table", "folder"])
def test_digest_of_files_depends_on_names_labels_and_sizes_but_not_on_their_place(tmp_path, kind, change):
    def make(root, change=None):
        for number in range(30):
            file = root / "train" / ("a", "b")[number % 2] / f"{number}.png"
            if change == "path" and number == 11:
                file = file.with_name("other.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode(np.full((8, 8, 3), number, np.uint8), "PNG"))
            if change == "a file replaced" and number == 11:
                file.write_bytes(encode(noise(8, 8), "PNG"))
        files = sorted(path for path in (root / "train").rglob("*.png"))
        if change == "another image":
            (root / "train/b/29.png").unlink()
            files = files[:-1]
        labels = [path.parent.name for path in files]
        if change == "label":
            labels[11] = "ab"[labels[11] == "a"]
            target = root / "train" / labels[11] / files[11].name
            files[11].rename(target)
            files[11] = target
        if change == "order":
            files[11], files[12] = files[12], files[11]
            labels[11], labels[12] = labels[12], labels[11]
        rows = [f"{path.relative_to(root)},{label}" for path, label in zip(files, labels, strict=True)]
        (root / "train.csv").write_text("\n".join(["path,label", *rows]) + "\n")
        if kind == "folder":
            items = ImageFolder.open(root / "train")
        else:
            items = Table.whole([Table(root / "train.csv", Data())], None)
        return consistency.data_digest(Unread(items))

    digest = make(tmp_path / "1")
    assert make(tmp_path / "2/below") == digest
    if (kind, change) != ("folder", "order"):  # a folder has no order but the order of the names
        assert make(tmp_path / "3", change) != digest
