"""A study file beside the storage of an earlier start: what may have changed, and what may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.sweep.study_file import read_study_file
from paceline.sweep.trial_store import TrialStore
from simulated_trials import STUDY, write_study

optuna = pytest.importorskip("optuna")
MORE = STUDY.replace("x = {", 'how = ["a", "b"]\nn = { kind = "int", low = 1, high = 9 }\nz = 0.5\nx = {')


def opened(folder: Path, text: str) -> TrialStore:
    study = read_study_file(write_study(folder, text))
    study.folder.mkdir(parents=True, exist_ok=True)
    return TrialStore(study)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder whose study has a finished trial."""
    store = opened(tmp_path, MORE)
    store.finish(store.ask(), 1.0)
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('"maximize"', '"minimize"', "objective.direction was maximize, and is minimize"),
        ("eval/score", "loss", "'metric': 'loss'"),
        ("--x {x}", "--x {x} --more", "arguments was '--x {x}', and is '--x {x} --more'"),
        ('["a", "b"]', '["a", "c"]', "parameters.how was one of a, b, and is one of a, c"),
        ('"int", low = 1', '"float", low = 1', "parameters.n was int 1 to 9, and is float 1.0 to 9.0"),
        ("low = 1,", "log = true, low = 1,", "parameters.n was int 1 to 9, and is int 1 to 9, log"),
        ("z = 0.5", "z = 0.6", "parameters.z was 0.5, and is 0.6"),
        ("z = 0.5", "", "parameters.z is gone"),
        ("z = 0.5", "z = 0.5\ny = [1, 2]", "parameters.y is new"),
    ],
)
def test_a_change_after_which_trials_cannot_be_compared_is_refused_with_what_differs(
    begun: Path, before: str, after: str, says: str
) -> None:
    with pytest.raises(PlanError) as refused:
        opened(begun, MORE.replace(before, after))
    assert says in str(refused.value)
    assert "Give the study another name to begin anew, or change it back." in str(refused.value)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('API_KEY = "s3cret-two"', "environment.API_KEY has changed."),
        ("", "environment.API_KEY is gone."),
        ('API_KEY = "s3cret-one"\nMODE = "s3cret-two"', "environment.MODE is new."),
    ],
)
def test_values_of_the_environment_are_compared_and_are_neither_in_the_storage_nor_in_a_message(
    tmp_path: Path, lines: str, says: str
) -> None:
    text = f'{MORE}[environment]\nAPI_KEY = "s3cret-one"\n'
    store = opened(tmp_path, text)
    store.finish(store.ask(), 1.0)
    assert opened(tmp_path, text).notes == []
    with pytest.raises(PlanError) as refused:
        opened(tmp_path, f"{MORE}[environment]\n{lines}\n")
    assert says in str(refused.value)
    assert "s3cret" not in str(refused.value)
    stored = (tmp_path / "trials.log").read_text()
    assert "API_KEY" in stored
    assert "s3cret" not in stored


def test_a_wider_range_and_everything_that_no_value_depends_on_may_change(begun: Path) -> None:
    text = MORE.replace("high = 1.0", "high = 2.0").replace("trials = 4", "trials = 9\nretries = 1")
    store = opened(begun, text.replace('kind = "random"', 'kind = "tpe"'))
    assert store.notes == ["parameters.x was float 0.0 to 1.0, and is float 0.0 to 2.0: new trials follow it"]
    assert store.wanted() == 9
    assert store.ask().params.keys() == {"how", "n", "x"}
    assert opened(begun, text).notes == [], "said once"


def test_before_there_is_a_trial_that_counts_everything_may_change(tmp_path: Path) -> None:
    store = opened(tmp_path, MORE)
    store.fail(store.ask(), "it reports something else")
    opened(tmp_path, MORE.replace("eval/score", "loss").replace("z = 0.5", ""))


def test_a_study_that_others_have_begun_is_taken_once_none_of_its_trials_runs(tmp_path: Path) -> None:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "trials.log")))
    study = optuna.create_study(study_name="study", storage=storage, direction="maximize")
    trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
    with pytest.raises(PlanError, match="with running trials that no sweep has started"):
        opened(tmp_path, STUDY)
    study.tell(trial, 0.5)
    assert [one.value for one in opened(tmp_path, STUDY).trials()] == [0.5]


@pytest.mark.parametrize(("unit", "keys"), [("evaluations", [1, 2, 3]), ("steps", [40, 80, 95])])
def test_values_are_counted_in_evaluations_or_in_steps(tmp_path: Path, unit: str, keys: list[int]) -> None:
    store = opened(tmp_path, STUDY.replace('"maximize"', f'"maximize"\nunit = "{unit}"'))
    trial = store.ask()
    assert store.values.last(trial)[0] == 0
    for step in (40, 80, 95):
        store.values.report(trial, step, step / 2)
        assert store.values.last(trial) == (step, step / 2)
    assert list(store.trials()[0].intermediate_values) == keys


def test_a_trial_that_was_half_proposed_gets_the_rest_of_its_parameters(tmp_path: Path) -> None:
    store = opened(tmp_path, MORE)
    trial = store._study.ask({"n": optuna.distributions.IntDistribution(1, 9)})
    store.refresh()
    (half,) = store.running()
    whole = store.complete(half)
    assert whole.params.keys() == {"how", "n", "x"}
    assert whole.params["n"] == trial.params["n"]
    assert store.complete(whole) is whole


def test_the_study_in_optunas_own_eyes(begun: Path) -> None:
    """Optuna's tools find what they look for: names of metrics, user attributes, distributions."""
    store = opened(begun, MORE)
    study = optuna.load_study(study_name="study", storage=store._storage)
    assert study.metric_names == ["eval/score"]
    assert study.best_trial.params.keys() == {"how", "n", "x"}
    assert study.user_attrs["paceline:folder"].endswith(str(begun / "runs" / "study"))
