"""The base of every config section: frozen, closed to unknown keys, documented field by field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the config file. A field's default lives here and nowhere else; its docstring is its help.

    A section checks its own bounds (`Field(ge=...)` or a validator that raises ValueError: "what is wrong, with values;
    what to do");
    relations between sections are checked by `RunConfig.check()`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
