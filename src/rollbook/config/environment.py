"""Writing environment variables for libraries that take a setting from nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def set_environment(**values: str) -> None:
    """For this process and those it starts, where the user has not set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """For what is made within: a library reads them then, and what is made later finds what stood there before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
