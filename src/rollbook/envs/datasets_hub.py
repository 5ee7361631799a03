"""Rows by a name of the Hugging Face hub, through the `datasets` library (extra `datasets`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollbook.errors import ConfigError, DataError


def hub_records(name: str, *, config: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, columns) of each row; the library's own cache and offline switch apply.

    Raises:
        ConfigError: the library is missing.
        DataError: it cannot load the dataset, configuration or split.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"the data source {name!r} is a dataset of the hub, and the library for it is not installed",
            "pip install 'rollbook[datasets]', or download its files and give their folder as path",
        ) from None
    try:
        table = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # network, hub, cache and format errors share no base class
        raise DataError(
            f"the dataset {name!r} (configuration {config or 'default'!r}, split {split!r}) cannot be loaded: "
            f"{type(error).__name__}: {error}",
            "check hub, hub_config and split; without a network give a local folder as path",
        ) from None
    for number, record in enumerate(table):
        yield f"{name} {split} row {number}", record
