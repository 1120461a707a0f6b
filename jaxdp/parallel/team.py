"""The processes of a run among themselves: values shared, points agreed on, and an end for all when one of them fails.

It is a line beside JAX's own, from every process to rank 0 (`TeamServer`): the collectives of a step wait for ever when a
process is gone, and this line tells which one, and where it stood. Dead is told from slow by a beat a second from a thread of
its own, never by how long a step takes.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict

from jaxdp.errors import EXIT_FAILURE, EXIT_STOPPED, first_line
from jaxdp.parallel.cluster import Cluster, host_identity
from jaxdp.parallel.stragglers import Stragglers
from jaxdp.parallel.team_server import LINE_BYTES, START, TeamServer, encode

BEAT_SECONDS = 1.0
CONNECT_SECONDS = 5.0
VERDICT_SECONDS = 5.0  # a collective that breaks may be heard of before the reason is


class Team:
    """This process and the others.

    rank, processes: this process's place; first: whether it is rank 0, which alone writes what people read. hosts: host name by
    rank; local_rank, local_processes: the place among the processes of this host. advice: how to go on, for the last line.
    look: called by the main thread while it waits for others; may raise.

    All methods may be called by any thread. When a process fails, every other one prints which, where and why, and exits.
    """

    def __init__(self, cluster: Cluster, start_seconds: float, silence_seconds: float, gpus: list[str], look=lambda: None):
        """gpus: what this process sees of them. look: called while the others are waited for; may raise to give up.

        Raises OSError where rank 0 cannot listen, or does not answer.
        """
        self.rank, self.processes, self.first = cluster.rank, cluster.processes, cluster.rank == 0
        self.silence_seconds = silence_seconds
        self.advice = ""
        self.before_exit = lambda: None
        self.place = dict(START)
        self.hosts = [None] * self.processes
        self.host, identity = host_identity()
        self.changed = threading.Condition()
        self.sending = threading.Lock()
        self.got: dict[str, object] = {}
        self.turns: dict[str, int] = defaultdict(int)
        self.points, self.holding, self.agreed, self.asked = 0, False, None, set()
        self.verdict, self.failing, self.failed = None, False, False
        self.joined: list[dict] | None = None
        self.place_of_first = START
        self.moved = threading.Event()  # to another phase, of which the others are to know at once
        self.offset, self.round_trip = 0.0, float("inf")
        self.steps: list[tuple[int, float, float]] = []
        self.stragglers = Stragglers(self.processes)
        address, port = cluster.address, cluster.port
        self.address = address
        if self.first:
            try:
                self.server = TeamServer(address, port, self.processes, start_seconds, silence_seconds, self.stragglers.include)
            except OSError as error:
                reason = f"rank 0 cannot listen at port {port} on {self.host} ({error.strerror}); another run may be using it: "
                raise OSError(error.errno or errno.EADDRINUSE, f"{reason}give another port") from None
        self.look = look
        self.socket = self._connect("127.0.0.1" if self.first and address != "::1" else address, port, start_seconds)
        self.outgoing = self.socket.dup()  # with a time-out of its own
        self.outgoing.settimeout(silence_seconds)
        hello = {"rank": self.rank, "processes": self.processes, "host": self.host, "identity": identity, "gpus": gpus}
        self._send(hello | {"jax_port": _free_port() if self.first else None})
        threading.Thread(target=self._listen, name="team-listen", daemon=True).start()
        threading.Thread(target=self._beat, name="team-beat", daemon=True).start()
        try:
            self._wait(lambda: self.joined is not None, look)
        except BaseException as error:
            self.failing = True  # it says so itself
            self._fail(first_line(error), EXIT_STOPPED)
            self._let_the_others_go()
            self.socket.close()
            self.outgoing.close()
            raise
        self.hosts = [one["host"] for one in self.joined]
        here = [rank for rank, one in enumerate(self.joined) if one["identity"] == identity]
        self.local_rank, self.local_processes = here.index(self.rank), len(here)
        self.jax_address = f"[{address}]" if ":" in address else address
        self.jax_address += f":{self.joined[0]['jax_port']}"

    @property
    def gpus_here(self) -> list[list[str]]:
        """What each process of this host sees of its GPUs."""
        mine = self.joined[self.rank]["identity"]
        return [one["gpus"] for one in self.joined if one["identity"] == mine]

    @property
    def host_numbers(self) -> list[int]:
        """By rank: which host, counted in the order in which the ranks name them."""
        numbers = {}
        return [numbers.setdefault(one["identity"], len(numbers)) for one in self.joined]

    def _connect(self, address: str, port: int, seconds: float):
        """The line to rank 0, tried until it is there."""
        end, reason = time.monotonic() + seconds, ""
        while (left := end - time.monotonic()) > 0:
            try:
                line = socket.create_connection((address, port), min(CONNECT_SECONDS, left))
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.settimeout(BEAT_SECONDS)
                return line
            except OSError as error:
                reason = error.strerror or str(error)
                time.sleep(0.2)
                self.look()
        raise TimeoutError(
            errno.ETIMEDOUT,
            f"rank {self.rank} on {self.host}: rank 0 does not answer at {address}:{port} within {seconds:g} s ({reason}); see "
            "whether it has started, and whether the port is open between the hosts",
        )

    def _send(self, message: dict) -> None:
        with self.sending, contextlib.suppress(OSError):  # a broken line is noticed by who listens to it
            self.outgoing.sendall(encode(message))

    # What comes from rank 0.

    def _listen(self) -> None:
        received, ticks = b"", 0.0
        while len(received) <= LINE_BYTES:
            try:
                more = self.socket.recv(2**16)
            except TimeoutError:
                ticks += BEAT_SECONDS  # counted here, so that a process that was stopped does not blame rank 0
                if ticks > self.silence_seconds:
                    self._lost(f"has not been heard of for {self.silence_seconds:g} s: stopped, or a host is cut off")
                continue
            except OSError:
                more = b""
            if not more:
                self._lost("has ended without a word: killed, or crashed")
                return
            ticks, received = 0.0, received + more
            *lines, received = received.split(b"\n")
            try:
                for line in lines:
                    self._heard(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                break
        self._lost(f"what answers at {self.address} sends what cannot be understood")

    def _heard(self, message: dict) -> None:
        with self.changed:
            match message:
                case {"beat": place}:
                    self.place_of_first = place
                case {"pong": then, "now": now}:
                    round_trip = time.monotonic() - then
                    if round_trip < self.round_trip:
                        self.round_trip, self.offset = round_trip, now - (then + round_trip / 2)
                case {"joined": members}:
                    self.joined = members
                case {"got": name, "value": value}:
                    self.got[name] = value
                case {"hold": _}:
                    self.holding = True
                    self._send({"held": self.points})
                case {"agreed": _}:
                    self.agreed = message
                case {"verdict": verdict}:
                    self._judged(verdict)
            self.changed.notify_all()

    def _lost(self, reason: str) -> None:
        with self.changed:
            first = {"rank": 0, "host": self.hosts[0], "place": self.place_of_first}
            self._judged(first | {"reason": reason, "code": EXIT_FAILURE})
            self.changed.notify_all()

    def _judged(self, verdict: dict) -> None:
        self.verdict = self.verdict or verdict
        if not self.failing:
            threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        """Say who failed, and leave: nothing that JAX has under way would ever end."""
        self._let_the_others_go()
        verdict = self.verdict
        late = threading.Timer(VERDICT_SECONDS, os._exit, [verdict["code"]])  # nobody may be reading what is said
        late.daemon = True
        late.start()
        advice = f"; {self.advice}" if self.advice else ""
        with contextlib.suppress(Exception):  # what is said may go to a disk that is full: the end comes all the same
            self.before_exit()
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            print(f"jaxdp: {in_words(verdict)}{advice}", file=sys.stderr, flush=True)
        os._exit(verdict["code"])

    def _let_the_others_go(self, gone=lambda server: server.only_silent_left) -> None:
        """Rank 0 is the last to leave: it holds JAX's own line too, and JAX aborts whoever is there when that is cut."""
        end = time.monotonic() + VERDICT_SECONDS
        while self.first and time.monotonic() < end and not gone(self.server):
            time.sleep(0.02)

    # What goes to rank 0.

    def _beat(self) -> None:
        while True:
            with self.changed:
                steps, self.steps = self.steps, []
                steps = [(step, asked + self.offset, done + self.offset) for step, asked, done in steps]
                place = dict(self.place)
            self._send({"beat": place, "steps": steps, "ping": time.monotonic()})
            self.moved.wait(BEAT_SECONDS)
            self.moved.clear()

    def _wait(self, ready, look=lambda: None) -> None:
        with self.changed:
            while not ready():
                self.changed.wait(0.5)
                look()

    def _turn(self, name: str) -> str:
        with self.changed:
            self.turns[name] += 1
            return f"{name} {self.turns[name]}"

    def _take(self, name: str, look=None):
        self._wait(lambda: name in self.got, look or (self.look if _in_main() else lambda: None))
        with self.changed:
            return self.got.pop(name)

    def exchange(self, name: str, value, look=None) -> list:
        """What every process gives under this name, by rank; waits for all. The n-th of a name meets the n-th of the others.

        look: in place of this team's own.
        """
        name = self._turn(name)
        self._send({"put": name, "value": value, "alone": _in_main()})
        return self._take(name, look)

    def share(self, name: str, value):
        """Rank 0's value, which JSON can hold; what the others give does not matter."""
        name = self._turn(f"rank 0's {name}")
        if self.first:
            self._send({"tell": name, "value": value})
        elif _in_main():
            self._send({"await": name})
        return self._take(name)

    def at(self, phase: str, step: int | None = None) -> None:
        """Where this process stands, for the case that it fails."""
        with self.changed:
            moved = phase != self.place["phase"]
            self.place |= {"phase": phase} if step is None else {"phase": phase, "step": step}
        if moved:
            self.moved.set()

    def saves(self, what: str) -> None:
        """What is saved beside the phase from now on, nothing where it is empty."""
        with self.changed:
            self.place["saving"] = what
        self.moved.set()

    def stepped(self, step: int, asked: float, done: float) -> None:
        """When this process asked for a step, and saw it done, by its monotonic clock."""
        with self.changed:
            self.steps.append((step, asked, done))

    def waiting(self, whole: bool = False) -> dict:
        """On rank 0: what the processes have waited for one another, since this was last asked or in all (see
        `Stragglers.report`)."""
        return self.stragglers.report(self.hosts, whole) if self.first else {}

    # Doing something at the same point.

    def ask(self, what: str, why: str = "") -> bool:
        """Let all processes do something at the same point: `point` will say which. False: it is not to be done yet."""
        with self.changed:
            if what not in self.asked:
                self.asked.add(what)
                self._send({"ask": {"what": what, "why": why}})
        return False

    def point(self, asked: str | None) -> dict | None:
        """To be called by all in the same order: pass a point, or do here what all have agreed to do, {"what", "why"}.

        asked: the signal, if any, by which this process was asked to stop. A process that has gone further than the others when
        something is asked for waits until they have told how far they are.
        """
        if asked:
            self.ask("stop", f"{asked} to rank {self.rank} on {self.host}")
        self._wait(lambda: not self.holding or self.agreed)
        with self.changed:
            if self.agreed and self.points >= self.agreed["agreed"]:
                return self._take_agreed()
            self.points += 1
        return None

    def agreed_here(self, asked: str | None) -> dict | None:
        """While waiting for something between two points: what is to be done at this one, if all have agreed on it."""
        if asked:
            self.ask("stop", f"{asked} to rank {self.rank} on {self.host}")
        with self.changed:
            if self.agreed and self.agreed["what"] == "stop" and self.points >= self.agreed["agreed"]:
                return self._take_agreed()
        return None

    def _take_agreed(self) -> dict:
        agreed, self.agreed, self.holding = self.agreed, None, False
        self.asked.discard(agreed["what"])
        self._send({"done": agreed["what"]})
        return agreed

    # The end.

    def fail(self, reason: str, code: int = EXIT_FAILURE, broken: bool = False) -> None:
        """Tell the others that this process cannot go on, and wait until they know; then it is free to say so itself and end.

        broken: a collective has failed, most likely because another process has: if one has, this process ends as they do.
        """
        if broken:
            with self.changed:
                self.changed.wait_for(lambda: self.verdict, self.silence_seconds + VERDICT_SECONDS)
            if self.verdict:
                time.sleep(60)  # `_end` is under way
        with self.changed:
            self.failing = self.failed = True
        self._fail(reason, code)
        with self.changed:
            self.changed.wait_for(lambda: self.verdict, VERDICT_SECONDS)
        self._let_the_others_go()

    def give_up(self, reason: str) -> None:
        """Let all processes end, this one too, whatever its threads are doing."""
        self._fail(reason, EXIT_FAILURE)
        time.sleep(60)  # `_end` is under way

    def _fail(self, reason: str, code: int) -> None:
        self._send({"fail": reason, "code": code, "place": self.place})

    def close(self, last: bool = False) -> None:
        """All is done: wait for the others to be, so that no one is taken for lost.

        last: the process ends at once; rank 0, which holds JAX's own line too, then is the last to leave.
        """
        if self.failing:
            return
        self.exchange("the end of the others", None, look=lambda: None)
        with self.changed:
            self.failing = True  # what comes now is no failure
        self._send({"bye": self.rank})
        self._let_the_others_go(lambda server: server.all_gone if last else server.all_said_bye)


def in_words(verdict: dict) -> str:
    """One line: which process, where, why."""
    if verdict.get("missing"):
        return verdict["reason"]
    host = f" on {verdict['host']}" if verdict["host"] else ""
    phase, step, saving = (verdict["place"][name] for name in ("phase", "step", "saving"))
    place = f" in phase {phase}" + ("" if step is None else f", step {step}") + (f", saving {saving}" if saving else "")
    what = "was stopped" if verdict["code"] == EXIT_STOPPED else "failed"
    return f"rank {verdict['rank']}{host} {what}{place}: {verdict['reason']}"


def _in_main() -> bool:
    """Whether this is the main thread, which has nothing else to do while it waits, and hears signals."""
    return threading.current_thread() is threading.main_thread()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
