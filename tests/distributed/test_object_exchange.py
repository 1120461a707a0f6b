import time

from helpers.control import on_all


def test_all_gather_and_broadcast_in_turn_return_each_operations_values(clients):
    members = clients(3)
    for turn in range(3):
        gathered = on_all(members, lambda client, turn=turn: client.all_gather_object("a", [client.rank, turn]))
        assert gathered == [[[rank, turn] for rank in range(3)]] * 3
        values = on_all(members, lambda client, turn=turn: client.broadcast_object("b", f"{client.rank} {turn}"))
        assert values == [f"0 {turn}"] * 3


def test_broadcast_before_the_other_process_waits_is_kept_for_it(clients):
    members = clients(2)
    assert members[0].broadcast_object("early", 5) == 5
    time.sleep(0.1)
    assert members[1].broadcast_object("early", None) == 5


def test_all_gather_of_megabytes_returns_them_complete(clients):
    text = "x" * 3_000_000
    assert on_all(clients(2), lambda client: client.all_gather_object("large", text)) == [[text, text]] * 2
