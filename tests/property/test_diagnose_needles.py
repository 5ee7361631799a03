"""A pattern is only asked where one of its words stands: every line that it finds must hold one of them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.diagnose.readers.ending_words import DEATHS
from rollbook.diagnose.readers.trouble import _STAGES, _TROUBLE


@pytest.mark.parametrize(
    ("needles", "pattern"),
    [pytest.param(*entry[1:], id=entry[0]) for entry in (*DEATHS, *_TROUBLE, *_STAGES)],
)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_a_pattern_finds_holds_one_of_its_words(
    needles: tuple[str, ...], pattern: re.Pattern[str], data: st.DataObject
) -> None:
    line = data.draw(st.from_regex(pattern, alphabet=st.characters(codec="ascii")))
    assert any(needle in line for needle in needles)
