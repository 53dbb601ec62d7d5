"""What every section of a run's settings is, and what several of them ask of a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from spotlight.files import check_url, shown

PX_MAX = 16384
"""Of an image's edge: beyond what any diffusion transformer draws."""
GUIDANCE_MAX = 100.0
"""Some 4 is usual; at 100 nothing is left of an image."""
WIDTH_MAX = 1024
"""Workers that one machine may have, and so a gang."""
DAY_S = 86400.0
T = TypeVar("T")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where Python would take them for 1 and 0."""
        found = value if isinstance(value, list | tuple) else [value]
        kind = cls.model_fields[info.field_name or ""].annotation
        if kind is not bool and any(isinstance(each, bool) for each in found):
            raise PydanticCustomError("truth", "input should not be true or false")
        return value


def distinct(names: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"{list(names)} names one twice")
    return names


def check_address(name: str, url: str, schemes: Sequence[str]) -> None:
    """
    Args:
        schemes: those that can be used; any, if it is empty.
    """
    try:
        check_url(url)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    scheme = url.partition("://")[0]
    if schemes and scheme not in (*schemes, "memory"):
        raise ValueError(f"{name} = {shown(url)}: expected a directory, or a URL of {', '.join(schemes)}")
