"""Every alert rule, evaluated by the real promtool over hours of simulated readings: trouble fires, health does not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rollbook.observe.alerts import ALERTS, to_rules

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

# Promtool's notation, one value a minute: "1x300" is 1 for 301 minutes, "0+60x300" grows by 60 a minute.
HEALTHY = {
    'run_start_time_seconds{run="r"}': "0x300",
    'run_num_steps{run="r"}': "1000x300",
    'training_global_step{run="r", metric="training/global_step"}': "0+1x300",
    'last_step_time_seconds{run="r"}': "0+60x300",
    'timing_s_step{run="r", metric="timing_s/step"}': "60x300",
    'expected_s_step{run="r", metric="expected_s/step"}': "55x300",
    'timing_s_gen{run="r", metric="timing_s/gen"}': "30x300",
    'timing_s_update_weights{run="r", metric="timing_s/update_weights"}': "2x300",
    'expected_s_update_weights{run="r", metric="expected_s/update_weights"}': "1.5x300",
    'replica_by_replica_id_weight_version{run="r", replica_id="0", metric="a"}': "1+1x300",
    'replica_by_replica_id_weight_version{run="r", replica_id="1", metric="b"}': "0+1x300",
    'sync_num_failed{run="r"}': "0x300",
    'replica_num_quarantined{run="r"}': "0x300",
    'training_logprob_gap_mean{run="r"}': "0.01x300",
    'training_off_policy_trajectory_staleness_worst_max{run="r"}': "1x300",
    'rollout_corr_rollout_is_eff_sample_size{run="r"}': "0.9x300",
    'env_capacity{run="r", metric="env/capacity"}': "128x300",
    'failures_frac{run="r"}': "0.01x300",
    'reward_by_source_zero_frac{run="r", source="add"}': "0.4x300",
    'filter_kept_frac{run="r"}': "0.8x300",
    'generated_clip_ratio{run="r"}': "0.02x300",
    'generated_response_length_p99{run="r"}': "4000+1x300",
    'idle_frac_by_side{run="r", side="train"}': "0.2x300",
    'rollout_tail_s{run="r", metric="rollout/tail_s"}': "5x300",
    'generated_num_trajectories{run="r", metric="a"}': "100x300",
    'rollout_num_preemptions{run="r", metric="b"}': "0x300",
    'memory_by_point_fragmented_bytes{run="r", point="train", metric="a"}': "2e9x300",
    'memory_by_point_reserved_bytes{run="r", point="train", metric="b"}': "60e9x300",
    'host_disk_free_bytes{run="r"}': "500e9x300",
}
TROUBLE = {
    "RunStalled": {'last_step_time_seconds{run="r"}': "0+60x200 12000x99"},
    "NoFirstStep": {'last_step_time_seconds{run="r"}': "_x300"},
    "RunGone": {
        'run_start_time_seconds{run="r"}': "0x290 stale _x8",
        'run_num_steps{run="r"}': "1000x290 stale _x8",
        'training_global_step{run="r", metric="training/global_step"}': "0+1x290 stale _x8",
    },
    "VersionDrift": {
        'replica_by_replica_id_weight_version{run="r", replica_id="1", metric="b"}': "0+1x200 200x99"
    },
    "PublicationFailed": {'sync_num_failed{run="r"}': "0x298 1x1"},
    "ReplicaOutOfService": {'replica_num_quarantined{run="r"}': "0x280 1x19"},
    "EngineMismatch": {'training_logprob_gap_mean{run="r"}': "0.01x298 0.4x1"},
    "StalenessBeyondBound": {'training_off_policy_trajectory_staleness_worst_max{run="r"}': "1x298 2x1"},
    "ImportanceWeightsCollapsed": {'rollout_corr_rollout_is_eff_sample_size{run="r"}': "0.9x200 0.1x99"},
    "SandboxPoolShrinking": {'env_capacity{run="r", metric="env/capacity"}': "128x280 64x19"},
    "TrajectoriesFail": {'failures_frac{run="r"}': "0.01x290 0.5x9"},
    "SourceAllZero": {'reward_by_source_zero_frac{run="r", source="add"}': "0.4x290 1x9"},
    "NotANumber": {'observe_nonfinite_metrics{run="r"}': "1x300"},
    "FilterStarvation": {'filter_kept_frac{run="r"}': "0.8x200 0.1x99"},
    "Truncation": {'generated_clip_ratio{run="r"}': "0.02x200 0.6x99"},
    "LengthGrowth": {'generated_response_length_p99{run="r"}': "1000+50x300"},
    "TrainerStarves": {
        'idle_frac_by_side{run="r", side="train"}': "0.8x300",
        'timing_s_gen{run="r", metric="timing_s/gen"}': "40x300",
    },
    "TailBurst": {'rollout_tail_s{run="r", metric="rollout/tail_s"}': "20x300"},
    "KVPoolFull": {'rollout_num_preemptions{run="r", metric="b"}': "7x300"},
    "MemoryFragmentation": {
        'memory_by_point_fragmented_bytes{run="r", point="train", metric="a"}': "25e9x300"
    },
    "DiskNearlyFull": {'host_disk_free_bytes{run="r"}': "1e9x300"},
    "SlowerThanPlanned": {'timing_s_step{run="r", metric="timing_s/step"}': "90x300"},
    "SyncSlow": {'timing_s_update_weights{run="r", metric="timing_s/update_weights"}': "9x300"},
}


WELL = {
    "a run that came to its end": {
        'run_start_time_seconds{run="r"}': "0x290 stale _x8",
        'run_num_steps{run="r"}': "292x290 stale _x8",
        'training_global_step{run="r", metric="training/global_step"}': "0+1x290 stale _x8",
    },
    "devices shared by both sides, busy with generation": {
        'timing_s_gen{run="r", metric="timing_s/gen"}': "50x300"
    },
    "generation beside training: the loop hardly waits": {
        'timing_s_gen{run="r", metric="timing_s/gen"}': "0.5x300",
        'idle_frac_by_side{run="r", side="train"}': "0.6x300",
    },
}
"""What looks like trouble and is none."""


def unit_test(name: str, series: dict[str, str], firing: list[str]) -> dict[str, object]:
    """Promtool's unit test that exactly `firing` fires after five hours."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": f"rollbook_{name}", "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by(alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "5h",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in firing],
            }
        ],
    }


def promtool(tmp_path: Path, tests: list[dict[str, object]]) -> str:
    """What promtool objects to; "" when every test holds. Its files may be JSON, which is YAML."""
    (tmp_path / "rules.yml").write_text(to_rules())
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "5m", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(content))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_every_alert_has_its_trouble() -> None:
    assert set(TROUBLE) == {alert.name for alert in ALERTS}


def test_a_healthy_run_wakes_nobody(tmp_path: Path) -> None:
    assert promtool(tmp_path, [unit_test("healthy", HEALTHY, [])]) == ""


def test_what_only_looks_like_trouble_wakes_nobody(tmp_path: Path) -> None:
    assert promtool(tmp_path, [unit_test(name, HEALTHY | series, []) for name, series in WELL.items()]) == ""


def test_each_trouble_fires_its_alert_and_no_other(tmp_path: Path) -> None:
    tests = [unit_test(name, HEALTHY | series, [name]) for name, series in TROUBLE.items()]
    assert promtool(tmp_path, tests) == ""


def test_a_rule_that_does_not_fire_is_noticed(tmp_path: Path) -> None:
    assert "DiskNearlyFull" in promtool(tmp_path, [unit_test("healthy", HEALTHY, ["DiskNearlyFull"])])
