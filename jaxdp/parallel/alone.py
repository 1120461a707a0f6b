"""The twin of `jaxdp.parallel.team.Team` for a run of one process."""


class Alone:
    """One process: all values are its own, and what is asked for happens at once."""

    rank, processes, hosts, host_numbers = 0, 1, ["localhost"], [0]
    first = True
    advice = saving = ""
    failed = False
    before_exit = None

    def exchange(self, name: str, value) -> list:
        return [value]

    def share(self, name: str, value):
        return value

    def ask(self, what: str, why: str = "") -> bool:
        return True

    def point(self, asked: str | None) -> dict | None:
        return {"what": "stop", "why": asked} if asked else None

    def agreed_here(self, asked: str | None) -> dict | None:
        return self.point(asked)

    def at(self, phase: str, step: int | None = None) -> None:
        pass

    def saves(self, what: str) -> None:
        pass

    def stepped(self, step: int, asked: float, done: float) -> None:
        pass

    def waiting(self, whole: bool = False) -> dict:
        return {}

    def close(self, last: bool = False) -> None:
        pass

    def fail(self, reason: str, code: int = 1, broken: bool = False) -> None:
        pass
