"""Writing environment variables for libraries that take a setting from nowhere else."""

from __future__ import annotations

import os


def set_environment(**values: str) -> None:
    """For this process and those it starts, where the user has not set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)
