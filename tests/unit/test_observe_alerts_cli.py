"""`rollbook alerts`: thresholds that no run can mean are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.cli.main import main


@pytest.mark.parametrize("gap", ["nan", "inf", "0", "-1"])
def test_a_gap_that_is_no_threshold_is_refused_and_writes_nothing(
    gap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["alerts", "-o", str(tmp_path / "out"), "--max-logprob-gap-nats", gap])
    assert ended.value.code == 2
    assert "--max-logprob-gap-nats is" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", ["nan", "-0.1", "1", "5"])
def test_a_share_of_failures_is_one(share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["alerts", "-o", str(tmp_path / "out"), "--max-failed-frac", share])
    assert ended.value.code == 2
    assert "--max-failed-frac is" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_share_of_failures_stands_in_the_rules(tmp_path: Path) -> None:
    """Typed as the duty manual prints it."""
    with pytest.raises(SystemExit) as ended:
        main(["alerts", "-o", str(tmp_path), "--max-failed-frac", "0.02"])
    assert ended.value.code == 0
    assert "rollbook_failures_frac > 0.02" in (tmp_path / "rollbook.rules.yml").read_text()


def test_a_bound_of_staleness_is_not_below_zero(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["alerts", "-o", str(tmp_path / "out"), "--max-staleness-steps", "-1"])
    assert ended.value.code == 2
    assert not (tmp_path / "out").exists()
