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


def test_a_bound_of_staleness_is_not_below_zero(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["alerts", "-o", str(tmp_path / "out"), "--max-staleness-steps", "-1"])
    assert ended.value.code == 2
    assert not (tmp_path / "out").exists()
