"""Types of the fields of a config, and the class of its sections."""

import inspect
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from jaxdp.registry import NAME_PATTERN

LARGEST, SMALLEST = 1e15, 1e-15  # bounds of numbers that devices use in float32, which must hold their squares
Count = Annotated[int, Field(ge=1, lt=2**31)]
Bytes = Annotated[int, Field(ge=1, le=2**60)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
Minutes = Annotated[float, Field(gt=0, le=1e6)]  # within the range of Python's timers
RegisteredName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]  # `validate` looks the name up in the registry
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
OneOrMore = BeforeValidator(
    lambda value: (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
)


class Section:
    """A group of fields of the config."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, revalidate_instances="always")

    def __init_subclass__(cls) -> None:
        names = [name for part in cls.__mro__ for name in inspect.get_annotations(part)]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise TypeError(f"{cls.__name__} has two fields {twice[0]}, and one would hide the other: rename one")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A section may be a dict; its values keep their exact types."""
        schema = handler(source)
        handler.resolve_ref_schema(schema)["strict"] = False
        return schema

    def check(self) -> None:
        """Raise ConfigError for values of its fields that do not fit together; `validation.py` has relations of sections."""
