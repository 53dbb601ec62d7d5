"""The base class of all sections of a run's settings, and the checks that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from spotlight.files import check_url, shown

PX_MAX = 16384
"""Largest edge of an image: beyond what any diffusion transformer draws."""
GUIDANCE_MAX = 100.0
"""Largest guidance. Some 4 is usual; at 100 nothing is left of an image."""
WIDTH_MAX = 1024
"""Most workers of one machine, and so of a gang."""
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
        raise PydanticCustomError("distinct", "names one twice")
    return names


def check_address(name: str, url: str, schemes: Sequence[str]) -> None:
    """
    Args:
        schemes: URL schemes that can be used; empty: any.
    """
    try:
        check_url(url)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    scheme = url.partition("://")[0]
    if schemes and scheme not in (*schemes, "memory"):
        raise ValueError(f"{name} = {shown(url)}: expected a directory, or a URL of {', '.join(schemes)}")
