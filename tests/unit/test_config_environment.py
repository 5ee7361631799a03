"""Settings that a library reads from the environment alone."""

from __future__ import annotations

import os

import pytest

from rollbook.config.environment import environment


def test_a_setting_for_what_is_made_within_leaves_what_stood_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLBOOK_TEST_SET", "before")
    monkeypatch.delenv("ROLLBOOK_TEST_NEW", raising=False)
    with pytest.raises(ZeroDivisionError), environment(ROLLBOOK_TEST_SET="1", ROLLBOOK_TEST_NEW="2"):
        assert (os.environ["ROLLBOOK_TEST_SET"], os.environ["ROLLBOOK_TEST_NEW"]) == ("1", "2")
        raise ZeroDivisionError
    assert os.environ["ROLLBOOK_TEST_SET"] == "before"
    assert "ROLLBOOK_TEST_NEW" not in os.environ
