"""Who may see the page."""

import pytest

from jaxdp.report.access import Access, is_loopback

REBOUND = "only for this machine"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8600", "127.0.0.1:9000", "[::1]", "[::1]:8600"])
def test_own_names_are_answered_without_a_token(host):
    assert Access.for_address("127.0.0.1", 8600).refusal(host, "", None) is None


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8600", "localhost:8600@evil", "[::2]"]
)
def test_other_names_are_refused_on_the_loopback_interface(host):
    assert REBOUND in Access.for_address("::1", 8600).refusal(host, "", None)


def test_token_is_required_on_other_interfaces():
    access = Access.for_address("0.0.0.0", 8600)
    assert len(access.token) >= 32
    assert access.token != Access.for_address("0.0.0.0", 8600).token
    cookie = f"other=1; jaxdp_watch_8600={access.token}; x=y"
    for query, cookies in ((f"token={access.token}", None), (f"a=b&token={access.token}", ""), ("", cookie)):
        assert access.refusal("any.example", query, cookies) is None
    other_port = cookie.replace("8600", "8601")
    for query, cookies in (
        *(("", None), ("token=", None), (f"token={access.token}x", None), ("token=é", None), ("token=%ff", None)),
        *(("", other_port), ("", "jaxdp_watch_8600="), ("", "nonsense;;==\x00"), (f"tokens={access.token}", None)),
    ):
        assert "token is missing or wrong" in access.refusal("localhost", query, cookies)
    assert access.set_cookie() == f"jaxdp_watch_8600={access.token}; HttpOnly; SameSite=Strict; Path=/"


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("fe80::1%eth0", False)],
)
def test_loopback_addresses(address, loopback):
    assert is_loopback(address) == loopback
