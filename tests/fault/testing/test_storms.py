"""One storm of `benchmarks/storms.py`: it strikes, starts again by the printed command, and judges."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.further
@pytest.mark.timeout(300)
def test_a_storm_over_an_elastic_run_breaks_no_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from driving.runs import losses_of
    from driving.storm_judge import violations
    from driving.storm_plans import PLANS, Fault
    from driving.storm_run import Storm

    kinds = {"kill": 6, "kill in a save": 15, "supervisor": 40}
    faults = [Fault(kind=kind, step=step, after_s=0.0, victim=0.4, lasts_s=0.1) for kind, step in kinds.items()]
    storm = Storm(tmp_path / "storm", PLANS["elastic"], faults)
    storm.to_its_end()
    assert [fault.kind for fault in storm.came] == list(kinds)
    assert violations(storm, losses_of(storm.run_dir)) == []
    assert len(storm.starts) == 2
