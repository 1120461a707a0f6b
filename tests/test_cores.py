"""The cores that a process may use, from files as the kernel writes them for control groups."""

import pytest

from jaxdp import cores

V1 = {"cpu/cpu.cfs_period_us": "100000\n", "cpu/cpu.cfs_quota_us": "250000\n"}


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),  # rounded up
        ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),  # more than the affinity
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),  # of the group around it
        ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "100000 50000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "400000 100000\n", "b/cpu.max": "100000 100000\n"}, 4),  # not of another group
        ("4:memory:/\n2:cpu:/\n0::/\n", V1, 3),
        ("4:cpu,cpuacct:/docker/x:y\n", V1, 3),  # the host's path, which the container does not see
        ("4:cpuacct,cpu:/\n", {f"cpuacct,{name}": text for name, text in V1.items()}, 3),
        ("2:cpu:/\n", V1 | {"cpu/cpu.cfs_quota_us": "-1\n"}, 8),
        ("2:cpu:/\n", V1 | {"cpu/cpu.cfs_quota_us": "0\n"}, 8),
        ("2:cpu:/\n", V1 | {"cpu/cpu.cfs_period_us": "0\n"}, 8),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "250000\n"}, 8),
        ("0::/a\n", {"unified/a/cpu.max": "150000 100000\n"}, 2),  # both versions at once
        ("2:cpuset:/\n", V1, 8),
        ("", {}, 8),
    ],
)
def test_usable_cores_are_the_affinity_or_the_smallest_quota(tmp_path, monkeypatch, own, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert cores.usable_cores() == expected
