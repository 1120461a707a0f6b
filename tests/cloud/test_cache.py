"""Local copies: intact or absent, never above the limit, and never removed while they are used."""

import errno
import fcntl
import os
import subprocess
import sys
import zlib

import google_crc32c
import pytest

from jaxdp.cloud.cache import Cache
from jaxdp.cloud.location import ObjectInfo
from jaxdp.errors import ConfigError

BLOCK = 4096
DATA = os.urandom(3000)
INFO = ObjectInfo(len(DATA), "etag:1")


@pytest.fixture
def notices():
    return []


@pytest.fixture
def make(tmp_path, notices):
    """Makes caches in one directory: make(url, blocks=limit in blocks of the file system)."""
    caches = []

    def make(url="s3://bucket/data", blocks=100):
        caches.append(Cache(tmp_path / "cache", url, limit=blocks * BLOCK, notice=notices.append))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def stored(cache):
    return sum(-(-file.stat().st_size // BLOCK) * BLOCK for file in cache.root.rglob("copies/*/*"))


def test_a_copy_is_read_by_another_process_until_the_object_changes(make):
    make().write("a.jpg", INFO, DATA)
    other = make()
    assert other.read("a.jpg", INFO) == DATA
    assert other.read("a.jpg", ObjectInfo(len(DATA), "etag:2")) is None
    assert other.read("b.jpg", INFO) is None
    changed = os.urandom(3000)
    other.write("a.jpg", ObjectInfo(len(changed), "etag:2"), changed)
    assert other.read("a.jpg", ObjectInfo(len(changed), "etag:2")) == changed


def test_a_directory_without_locks_is_refused_with_its_file_system(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=r"storage.directory=.*the file system /.* has no locks; give a directory on a local"):
        Cache(tmp_path, "s3://bucket/data", limit=BLOCK, notice=print)


def test_a_damaged_copy_is_not_read(make):
    cache = make()
    cache.write("a.jpg", INFO, DATA)
    (file,) = cache.root.rglob("copies/*/*")
    flipped = bytearray(file.read_bytes())
    flipped[100] ^= 1
    for damaged in (flipped, flipped[:-1], b"", bytes(len(flipped))):
        file.write_bytes(damaged)
        assert cache.read("a.jpg", INFO) is None


def test_a_file_is_absent_until_it_is_finished_and_verified_on_request(make):
    cache, info = make(), ObjectInfo(len(DATA), "crc32c:x")
    descriptor = cache.begin_file("shard", info.size)
    assert os.fstat(descriptor).st_size == info.size
    with pytest.raises(BlockingIOError):
        make().begin_file("shard", info.size)
    os.pwrite(descriptor, DATA, 0)
    assert cache.file("shard", info) is None
    path = cache.finish_file(descriptor, "shard", info, crc=google_crc32c.value(DATA))
    assert make().file("shard", info, verify=True) == path
    assert path.read_bytes() == DATA
    path.write_bytes(bytes(len(DATA)))
    assert cache.file("shard", info) == path
    assert cache.file("shard", info, verify=True) is None


def test_the_limit_holds_and_what_was_used_least_recently_is_removed_first(make):
    first, second = make("s3://bucket/first", 8), make("s3://bucket/second", 8)
    for number in range(4):
        first.write(f"{number}", INFO, DATA)
        second.write(f"{number}", INFO, DATA)
    for cache in (first, second):
        cache.close()
    make("s3://bucket/first", 8).close()  # used more recently now
    third = make("s3://bucket/third", 8)
    for number in range(4):
        third.write(f"{number}", INFO, DATA)
    assert stored(third) <= 8 * BLOCK
    assert [third.read(f"{number}", INFO) for number in range(4)] == [DATA] * 4
    assert [first.read(f"{number}", INFO) for number in range(4)] == [DATA] * 4
    assert [second.read(f"{number}", INFO) for number in range(4)] == [None] * 4
    third.close()
    assert stored(make("s3://bucket/fourth", 3)) <= 3 * BLOCK  # a lower limit


def test_copies_in_use_stay_and_a_full_cache_stores_nothing_more(make, notices):
    used, late = make("s3://bucket/used", 4), make("s3://bucket/late", 4)
    for number in range(6):
        used.write(f"{number}", INFO, DATA)
    for number in range(6):
        late.write(f"{number}", INFO, DATA)
    assert stored(used) == 4 * BLOCK
    assert [used.read(f"{number}", INFO) is not None for number in range(6)] == [True] * 4 + [False] * 2
    assert all(late.read(f"{number}", INFO) is None for number in range(6))
    assert late.begin_file("shard", 100) is None
    assert notices == []


def test_a_full_disk_is_reported_once_and_leaves_nothing_incomplete(make, notices, monkeypatch):
    cache = make()
    cache.write("kept", INFO, DATA)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    cache.write("a", INFO, DATA)
    cache.write("b", INFO, DATA)
    assert cache.begin_file("shard", 100) is None
    assert [line.partition(": ")[2] for line in notices] == [
        "No space left on device; images without a copy are read from the URL"
    ]
    assert (cache.read("kept", INFO), cache.read("a", INFO)) == (DATA, None)
    assert not list(cache.path.joinpath("partial").iterdir())


def test_a_file_in_place_of_the_directory_raises_one_line(make, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"storage.directory='.*cache': Not a directory"):
        make()


WRITER = """
import os, sys, zlib
from pathlib import Path
from jaxdp.cloud.cache import Cache
from jaxdp.cloud.location import ObjectInfo

cache = Cache(Path(sys.argv[1]), "s3://bucket/data", limit=int(sys.argv[2]), notice=print)
print("ready", flush=True)
for number in range(10**9):
    data = os.urandom(3000)
    cache.write(f"{number % 300}", ObjectInfo(3000, f"crc:{zlib.crc32(data)}"), data)
    descriptor = cache.begin_file("shard", 50_000)
    if descriptor:
        cache.abandon_file(descriptor, "shard", 50_000) if number % 3 else cache.finish_file(
            descriptor, "shard", ObjectInfo(50_000, "x"), crc=0)
"""


def test_killed_writers_leave_only_intact_copies_and_the_size_is_counted_again(make, tmp_path):
    limit = 60 * BLOCK
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "cache"), str(limit)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for process in processes:
            process.stdout.readline()
        for process in processes:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()
    cache = make(blocks=60)
    assert not list(cache.path.joinpath("partial").iterdir())
    for file in cache.root.rglob("copies/*/*"):
        if file.suffix != ".tag" and not file.with_suffix(".tag").exists() and file.stat().st_size < 4000:
            data = file.read_bytes()[:3000]
            name = next(f"{n}" for n in range(300) if cache._file(f"{n}") == file)
            assert cache.read(name, ObjectInfo(3000, f"crc:{zlib.crc32(data)}")) == data
    other = make("s3://bucket/other", 60)
    cache.close()
    for number in range(40):
        other.write(f"{number}", INFO, DATA)
    assert [other.read(f"{number}", INFO) for number in range(40)] == [DATA] * 40
    assert stored(other) <= limit
