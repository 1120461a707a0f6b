import dataclasses
import shutil
from types import SimpleNamespace

import pytest

from jaxdp.config import Config
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
