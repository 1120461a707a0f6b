"""Rank 0's side of the line between the processes of a run: who is there, who has gone, what all of them have said.

One JSON object a line over TCP. It runs in a thread of its own, so that it answers while the run compiles or waits.
"""

import asyncio
import json
import socket
import threading
import time

from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE

TICK_SECONDS = 1.0
LINE_BYTES = 2**26
HELLO_SECONDS = 10.0
MANY_TICKS = 3  # without a beat, of which one comes every second
START = {"phase": "start", "step": None, "saving": ""}  # where a process stands; saving: what is saved beside the phase


def encode(message: dict) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _listener(address: str, port: int) -> socket.socket:
    """Bound to what `address` says: to the loopback alone, or to all networks of this host, by IPv6 as well where it has it."""
    if address == "::1":
        return socket.create_server((address, port), family=socket.AF_INET6)
    if address == "localhost" or address.startswith("127."):
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class Member:
    """What is known of one process."""

    def __init__(self, hello: dict, writer):
        self.rank, self.host, self.hello, self.writer = hello["rank"], hello["host"], hello, writer
        self.silent_ticks = 0
        self.place = START
        self.said_bye = self.gone = False


class TeamServer:
    """Waits for all processes, passes on what they say, and tells all of them when one is gone.

    start_seconds: for which the missing are waited for; silence_seconds: after which one that says nothing is given up.
    arrivals: called with (step, when each rank asked for it, when each saw it done) when all have told.
    """

    def __init__(self, address: str, port: int, processes: int, start_seconds: float, silence_seconds: float, arrivals):
        self.processes, self.start_seconds, self.silence_seconds = processes, start_seconds, silence_seconds
        self.arrivals = arrivals
        self.members: dict[int, Member] = {}
        self.verdict: dict | None = None
        self.values: dict[str, dict[int, object]] = {}
        self.steps: dict[int, dict[int, tuple[float, float]]] = {}
        self.wanted: list[dict] = []  # agreements asked for; the first is under way where `answers` is not None
        self.answers: dict[int, int] | None = None
        self.done: set[int] = set()
        self.waiting: dict[int, str] = {}  # for what the main thread of each process waits
        self.told: set[str] = set()
        self.listener = _listener(address, port)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="team-server", daemon=True)
        self.thread.start()

    async def _serve(self):
        server = await asyncio.start_server(self._connected, sock=self.listener, limit=LINE_BYTES)
        async with server:
            started = 0.0
            while True:
                await asyncio.sleep(TICK_SECONDS)
                started += TICK_SECONDS
                if len(self.members) < self.processes and started >= self.start_seconds:
                    await self._refuse_start()
                for member in self.members.values():
                    member.silent_ticks += 1
                silent = [one for one in self.members.values() if self._is_silent(one)]
                if silent:
                    reason = f"has not been heard of for {self.silence_seconds:g} s: stopped, or its host is cut off"
                    if len(silent) == self.processes - 1 > 1 and 0 in self.members:
                        reason += f" (no other process is heard either: this host, {self.members[0].host}, may be the one)"
                    self._fail(silent[0], reason)
                self._tell_all({"beat": self.members[0].place if 0 in self.members else START})

    def _is_silent(self, member: Member) -> bool:
        return member.silent_ticks * TICK_SECONDS > self.silence_seconds and not member.said_bye

    async def _refuse_start(self):
        missing = [rank for rank in range(self.processes) if rank not in self.members]
        named = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        there = ", ".join(f"{rank} on {member.host}" for rank, member in sorted(self.members.items())[:20])
        reason = f"of {self.processes} processes these did not come within {self.start_seconds:g} s: {named}"
        self._judge({"missing": missing, "reason": f"{reason} (there are {there})", "code": EXIT_FAILURE})

    @property
    def all_said_bye(self) -> bool:
        return all(member.said_bye for member in list(self.members.values()))

    @property
    def all_gone(self) -> bool:
        """All but rank 0, in whose process this runs."""
        return all(member.gone for rank, member in list(self.members.items()) if rank)

    @property
    def only_silent_left(self) -> bool:
        """Whether of all but rank 0 those that are still there say nothing: stopped, or cut off."""
        others = [member for rank, member in list(self.members.items()) if rank]
        return all(member.gone or member.silent_ticks > MANY_TICKS for member in others)

    def _tell(self, member: Member, message: dict):
        if not (member.gone or member.writer.is_closing()):  # gone: its own reader says so
            member.writer.write(encode(message))

    def _tell_all(self, message: dict):
        for member in self.members.values():
            self._tell(member, message)

    def _judge(self, verdict: dict):
        """The first failure is the one that counts."""
        if self.verdict is None:
            self.verdict = verdict
            self._tell_all({"verdict": verdict})

    def _fail(self, member: Member, reason: str, code: int = EXIT_FAILURE):
        self._judge({"rank": member.rank, "host": member.host, "place": member.place, "reason": reason, "code": code})

    async def _connected(self, reader, writer):
        member = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), HELLO_SECONDS))
            member = self._welcome(hello, writer)
            while member and (line := await reader.readline()):
                member.silent_ticks = 0
                self._heard(member, json.loads(line))
        except (TimeoutError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # a stranger, or a line that was cut
        if member is not None:
            member.gone = True
        if member is not None and self.members.get(member.rank) is member and not member.said_bye:
            self._fail(member, "has ended without a word: killed, or crashed")
        writer.close()

    def _welcome(self, hello: dict, writer) -> Member | None:
        rank, processes = hello["rank"], hello["processes"]
        refused = None
        if processes != self.processes:
            refused = f"it was started as one of {processes} processes, and rank 0 as one of {self.processes}"
        elif rank in self.members:
            refused = f"another process, on {self.members[rank].host}, is rank {rank} already"
        elif rank not in range(processes):
            refused = f"there is no rank {rank} of {processes} processes"
        if refused:
            verdict = {"rank": rank, "host": hello["host"], "place": START, "reason": refused, "code": EXIT_CONFIG}
            writer.write(encode({"verdict": verdict}))
            if len(self.members) < self.processes:  # of a run that is complete it is no part
                self._judge(verdict)
            return None
        member = self.members[rank] = Member(hello, writer)
        if self.verdict:
            self._tell(member, {"verdict": self.verdict})
        elif len(self.members) == self.processes:
            told = [self.members[rank].hello for rank in range(self.processes)]
            self._tell_all({"joined": told})
        return member

    def _heard(self, member: Member, message: dict):
        match message:
            case {"beat": place, "steps": steps, "ping": ping}:
                member.place = place
                self._tell(member, {"pong": ping, "now": time.monotonic()})
                for step, asked, done in steps:
                    self._arrived(member.rank, step, asked, done)
            case {"tell": name, "value": value}:  # from rank 0, whether the others wait for it yet or not
                self.told.add(name)
                self._got(name, value)
            case {"await": name} if name not in self.told:
                self._waits(member, name)
            case {"put": name, "value": value, "alone": alone}:
                self._put(member, name, value, alone)
            case {"ask": what}:
                if what["what"] not in [one["what"] for one in self.wanted]:
                    self.wanted.append(what)
                    self._next_agreement()
            case {"held": point}:
                self.answers[member.rank] = point
                if len(self.answers) == self.processes:
                    self.done = set()
                    self._tell_all({"agreed": max(self.answers.values())} | self.wanted[0])
            case {"done": _}:
                self.done.add(member.rank)
                self.waiting.pop(member.rank, None)
                if len(self.done) == self.processes:
                    self.wanted.pop(0)
                    self.answers = None
                    self._next_agreement()
            case {"fail": reason, "code": code, "place": place}:
                member.place = place
                self._fail(member, reason, code)
            case {"bye": _}:
                member.said_bye = True

    def _next_agreement(self):
        if self.wanted and self.answers is None:
            self.answers = {}
            self._tell_all({"hold": self.wanted[0]["what"]})

    def _put(self, member: Member, name: str, value, alone: bool):
        values = self.values.setdefault(name, {})
        values[member.rank] = value
        if len(values) == self.processes:
            del self.values[name]
            self._got(name, [values[rank] for rank in range(self.processes)])
        elif alone:
            self._waits(member, name)

    def _got(self, name: str, value):
        self.waiting = {rank: one for rank, one in self.waiting.items() if one != name}
        self._tell_all({"got": name, "value": value})

    def _waits(self, member: Member, name: str):
        """Note that a process does nothing else than wait for `name`: if all do, and not for the same, they would for ever."""
        self.waiting[member.rank] = name
        if len(self.waiting) < self.processes or len(set(self.waiting.values())) == 1 or self.wanted:
            return
        rank = next(rank for rank, one in sorted(self.waiting.items()) if one != self.waiting[0])
        here, there = (self.waiting[one].rpartition(" ")[0] for one in (rank, 0))
        self._fail(self.members[rank], f"it waits for {here} and rank 0 for {there}: they do different things")

    def _arrived(self, rank: int, step: int, asked: float, done: float):
        here = self.steps.setdefault(step, {})
        here[rank] = (asked, done)
        if len(here) == self.processes:
            self.arrivals(step, *zip(*(here[rank] for rank in range(self.processes)), strict=True))
            for old in [one for one in self.steps if one <= step]:
                del self.steps[old]
