"""Messages of the control channel: the schema of each kind, checked on receipt before a message is used.

Text in messages is sanitized (see `jaxdp.errors.printable`), because other hosts print it.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxdp.errors import EXIT_FAILURE, printable

REASON_CHARS, TEXT_CHARS, NAME_CHARS = 2000, 300, 300
MAX_THREADS, MAX_FRAMES, MAX_REPORT_LINES = 20, 100, 1000  # stack traces of one process, and a report on several
MAX_STEPS = 100_000  # step times in one heartbeat
MAX_RANKS = 2**20
Check = Callable[[Any], Any]


class InvalidMessage(Exception):
    """A message that does not fit its schema: one line with the reason."""


def failure_code(value: object) -> int:
    """The exit code of a failure, 1 to 255; 1 for any other value, so that no failure exits with 0."""
    return value if type(value) is int and 0 < value < 256 else EXIT_FAILURE


def _any(value: object) -> object:
    return value


def _text(limit: int, empty: bool = False) -> Check:
    def check(value: object) -> str:
        if not isinstance(value, str) or not (value or empty):
            raise InvalidMessage("expected text")
        return printable(value, limit)

    return check


def _name(value: object) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= NAME_CHARS and value.isprintable()):
        raise InvalidMessage("expected a name")
    return value


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise InvalidMessage("expected a non-negative integer")
    return value


def _number(value: object) -> float:
    if not ((type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))):
        raise InvalidMessage("expected a finite number")
    return value


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidMessage("expected true or false")
    return value


def _one_of(*choices: str) -> Check:
    def check(value: object) -> str:
        if value not in choices:
            raise InvalidMessage(f"expected one of {choices}")
        return value

    return check


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _list(check: Check, limit: int) -> Check:
    def check_list(value: object) -> list:
        if not isinstance(value, list) or len(value) > limit:
            raise InvalidMessage(f"expected a list of at most {limit}")
        return [check(entry) for entry in value]

    return check_list


def _tuple(*checks: Check) -> Check:
    def check_tuple(value: object) -> list:
        if not isinstance(value, list) or len(value) != len(checks):
            raise InvalidMessage(f"expected a list of {len(checks)}")
        return [check(entry) for check, entry in zip(checks, value, strict=True)]

    return check_tuple


def _record(**fields: Check) -> Check:
    def check_record(value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != fields.keys():
            raise InvalidMessage(f"expected an object with {', '.join(fields)}")
        checked = {}
        for name, check in fields.items():
            try:
                checked[name] = check(value[name])
            except InvalidMessage as error:
                raise InvalidMessage(f"{name}: {error}") from None
        return checked

    return check_record


LOCATION = _record(activity=_text(TEXT_CHARS), step=_optional(_natural), background_save=_text(TEXT_CHARS, empty=True))
HEARTBEAT = _record(  # see `jaxdp.distributed.status.Heartbeat`
    activity=_text(TEXT_CHARS),
    step=_optional(_natural),
    detail=_text(TEXT_CHARS, empty=True),
    position=_tuple(_natural, _natural, _natural),
    idle_seconds=_number,
    typical_seconds=_optional(_number),
    longest_seconds=_number,
    background_save=_text(TEXT_CHARS, empty=True),
    save_seconds=_number,
    longest_save_seconds=_number,
)
MEMBER = _record(
    rank=_natural,
    processes=_natural,
    host=_text(TEXT_CHARS),
    identity=_text(TEXT_CHARS),
    gpus=_list(_text(TEXT_CHARS), 1024),
    jax_port=_optional(_natural),
)
STACK = _record(name=_text(TEXT_CHARS), frames=_list(_text(TEXT_CHARS), MAX_FRAMES), waits_for=_text(TEXT_CHARS, empty=True))
ACTION = _one_of("stop", "save")
FAILURE = _record(
    rank=_optional(_natural),
    host=_optional(_text(TEXT_CHARS)),
    location=_optional(LOCATION),
    reason=_text(REASON_CHARS),
    code=failure_code,
    missing=_list(_natural, MAX_RANKS),
)
STEP_TIMES = _list(_tuple(_natural, _number, _number), MAX_STEPS)

# Each message is recognized by its first key.
TO_RANK_0 = {
    "heartbeat": _record(heartbeat=HEARTBEAT, steps=STEP_TIMES, ping=_number),
    "broadcast": _record(broadcast=_name, value=_any),
    "wait": _record(wait=_name),
    "all_gather": _record(all_gather=_name, value=_any, main_thread=_boolean),
    "request": _record(request=ACTION, reason=_text(REASON_CHARS, empty=True)),
    "paused_at": _record(paused_at=_natural),
    "done": _record(done=ACTION),
    "fail": _record(fail=_text(REASON_CHARS), code=failure_code, location=LOCATION),
    "stacks": _record(stacks=_list(STACK, MAX_THREADS)),
    "goodbye": _record(goodbye=_natural),
}
FROM_RANK_0 = {
    "heartbeat": _record(heartbeat=LOCATION),
    "pong": _record(pong=_number, now=_number),
    "members": _record(members=_list(MEMBER, MAX_RANKS)),
    "result": _record(result=_name, value=_any),
    "pause": _record(pause=ACTION),
    "agreed": _record(agreed=_natural, action=ACTION, reason=_text(REASON_CHARS, empty=True)),
    "send_stacks": _record(send_stacks=_natural),
    "report": _record(report=_list(_text(REASON_CHARS), MAX_REPORT_LINES)),
    "failure": _record(failure=FAILURE),
}


def validate(message: dict[str, Any], schemas: dict[str, Check]) -> dict[str, Any]:
    """The sanitized message. schemas: `TO_RANK_0` or `FROM_RANK_0`. Raises InvalidMessage if it fits none of them."""
    kind = next((key for key in message if key in schemas), None)
    if kind is None:
        raise InvalidMessage(f"unknown message ({printable(', '.join(message), 100)})")
    try:
        return schemas[kind](message)
    except InvalidMessage as error:
        raise InvalidMessage(f"invalid message {kind!r} ({error})") from None
