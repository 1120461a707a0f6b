import pytest

from jaxdp.errors import ConfigError
from jaxdp.setup import consistency


def test_check_sanitizes_facts_of_other_hosts_in_its_error():
    class TwoProcesses:
        num_processes, hosts = 2, ["a", "b"]

        def all_gather_object(self, name, value):
            return [value, {"data": "\x1b[2J"} if isinstance(value, dict) else "other"]

    with pytest.raises(ConfigError) as error:
        consistency.check(TwoProcesses(), lambda: {"data": "mine"})
    assert str(error.value).isprintable()
