import threading
import time
from dataclasses import replace

import pytest
from helpers.processes import wait_until

from jaxdp.cloud.lease import Lease, LeaseHeld, LeaseLost, newest_lease
from jaxdp.cloud.location import open_location
from jaxdp.errors import StorageError


@pytest.fixture
def location(tmp_path):
    return open_location(f"file://{tmp_path}/run", "--workdir")


@pytest.fixture
def leases():
    """Leases that are given up at the end of the test."""
    held = []
    yield held
    for lease in held:
        lease.abandon()


def acquire(location, leases, seconds=0.4, **options):
    leases.append(Lease.acquire(location, seconds, adopt=lambda _: [], **options))
    return leases[-1]


def test_a_second_process_is_refused_while_the_first_renews(location, leases):
    first = acquire(location, leases, seconds=4)  # longer than this thread waits for a core
    with pytest.raises(LeaseHeld, match=r"process \d+ on "):
        acquire(location, leases)
    first.verify()


def test_a_lease_that_another_process_has_meanwhile_taken_and_released_is_free(location, leases):
    first = acquire(location, leases, seconds=0.5)
    first.abandon()

    def take_and_release(lease):
        Lease.acquire(location, 0.5, token=lease.token, adopt=lambda _: []).release({})

    second = acquire(location, leases, seconds=0.1, on_wait=take_and_release)
    assert second.record.number == 3


def test_a_lease_that_is_no_longer_renewed_is_taken_over_after_its_time_and_not_before(location, leases):
    first, waited_for = acquire(location, leases), []
    first.abandon()
    began = time.monotonic()
    second = acquire(location, leases, seconds=0.1, on_wait=waited_for.append)
    assert time.monotonic() - began > 0.4  # the seconds of its holder
    assert [lease.token for lease in waited_for] == [first.record.token]
    assert second.record.number == 2
    with pytest.raises(LeaseLost):
        first.verify()
    with pytest.raises(LeaseLost):
        first.release({})
    second.verify()


def test_a_released_lease_is_taken_over_at_once_with_what_its_holder_left(location, leases):
    first = acquire(location, leases, seconds=60)
    first.release({"result.json": [10]})
    assert newest_lease(location).final == {"result.json": [10]}
    assert acquire(location, leases, seconds=60).record.number == 2


def test_of_many_processes_that_start_at_once_exactly_one_gets_the_lease(location, leases):
    """In each of 10 rounds, the winner ends without a release, as the next ones know."""
    token = None

    def refuse(record):
        raise LeaseHeld(record)

    for _ in range(10):
        outcomes, start = [], threading.Barrier(4)

        def compete(start=start, outcomes=outcomes, token=token):
            start.wait()
            try:
                outcomes.append(Lease.acquire(location, 60, token=token, adopt=lambda _: [], on_wait=refuse))
            except LeaseHeld as error:
                outcomes.append(error)

        threads = [threading.Thread(target=compete) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
        assert len(winners) == 1
        winners[0].verify()
        winners[0].abandon()
        token = winners[0].record.token


def test_an_answer_that_was_lost_does_not_lose_the_lease(location, leases):
    """A client repeats the request, and the server answers that the object exists."""
    create = type(location).create
    place = replace(location)
    object.__setattr__(place, "create", lambda name, data: create(location, name, data) and False)
    waited_for = []
    acquire(place, leases, seconds=60, on_wait=waited_for.append)
    assert waited_for == []


def test_storage_that_overwrites_existing_objects_is_noticed(location, leases):
    place = replace(location)
    object.__setattr__(place, "create", lambda name, data: location.write(name, data) or True)
    assert not acquire(place, leases).is_exclusive
    assert acquire(open_location(f"{location.url}/other", "--workdir"), leases).is_exclusive


def test_renewal_survives_an_outage(location, leases):
    lease, write, failing = acquire(location, leases), type(location).write, [True]

    def fail(name, data):
        if failing:
            raise StorageError("outage", location.url)
        write(location, name, data)

    object.__setattr__(lease.location, "write", fail)
    time.sleep(0.5)
    failing.clear()
    before = newest_lease(location).renewals
    wait_until(lambda: newest_lease(location).renewals > before)
    lease.check()


def test_a_damaged_lease_is_refused(location):
    location.write(".lease/000001.json", b"{")
    with pytest.raises(StorageError, match="damaged"):
        newest_lease(location)
