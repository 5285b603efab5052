"""The typed reader: what fits becomes a dataclass; an error names the path, the value, what is legal and the remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import config, settings
from paceline.errors import PlanError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tea:
    kind_of_leaf: Literal["green", "black"] = "green"
    grams: float = 2.5
    minutes: int | None = None
    sugar: bool = False

    def __post_init__(self) -> None:
        config.check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Coffee:
    origin: str

    def __post_init__(self) -> None:
        config.check_fields(self)

    @staticmethod
    def refusal(name: str, value: object) -> str | None:
        return f"{name}={value} is not served yet" if name in ("decaf", "Cocoa") else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tray:
    drink: Tea | Coffee = dataclasses.field(default_factory=Tea)
    spare: Tea = dataclasses.field(default_factory=Tea)
    labels: tuple[str, ...] = ()
    seats: int = 1
    table: str | None = None

    def __post_init__(self) -> None:
        config.check_fields(self)
        if self.seats > 4 and self.table is None:
            raise PlanError("more than 4 seats need a table")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kettle:
    heat: Literal["none", "gas"] = "none"
    minutes: int = 0

    def __post_init__(self) -> None:
        if self.minutes and self.heat == "none":
            raise PlanError("a kettle without heat boils nothing")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kitchen:
    kettle: Kettle = dataclasses.field(default_factory=Kettle)
    seats: int = 1


def test_tables_short_forms_and_arrays_become_dataclasses() -> None:
    read = config.read(
        Tray, {"drink": {"kind": "Coffee", "origin": "Peru"}, "spare": {"grams": 3}, "labels": ["a", "b"]}
    )
    assert read == Tray(drink=Coffee(origin="Peru"), spare=Tea(grams=3.0), labels=("a", "b"))
    assert isinstance(read.spare.grams, float)
    assert config.read(Tray, {"drink": "coffee(origin=Peru)"}).drink == Coffee(origin="Peru")


def test_a_path_is_text() -> None:
    assert config.read(Tray, {"table": Path("a/b")}).table == "a/b"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"seat": 2}, "tray.seat: Tray has no field 'seat'. Did you mean 'seats'?"),
        ({"grams": 2}, "Did you mean 'tray.spare.grams'?"),
        ({"seats": "2"}, "tray.seats is '2'; it must be a whole number."),
        ({"seats": True}, "tray.seats is True; it must be a whole number."),
        ({"seats": 2.0}, "tray.seats is 2.0; it must be a whole number."),
        ({"spare": {"sugar": 1}}, "tray.spare.sugar is 1; it must be true or false."),
        ({"spare": {"minutes": "x"}}, "tray.spare.minutes is 'x'; it must be a whole number or none."),
        ({"spare": {"kind_of_leaf": "blak"}}, "it must be 'green' or 'black'. Did you mean 'black'?"),
        ({"spare": 3}, "tray.spare is 3; it must be Tea."),
        ({"labels": ["a", 1]}, "tray.labels is ('a', 1); it must be a tuple (in TOML an array) of text."),
        ({"drink": {"grams": 1.0}}, "tray.drink does not say which kind it is: add kind = 'Tea' or 'Coffee'."),
        ({"drink": {"kind": "Cofee"}}, "tray.drink.kind is 'Cofee'; it must be Tea or Coffee. Did you mean 'Coffee'?"),
        ({"drink": {"kind": 7}}, "tray.drink.kind is 7; it must be 'Tea' or 'Coffee'."),
        ({"drink": {"kind": "Coffee"}}, "tray.drink.origin is missing: Coffee needs origin, which must be text."),
        ({"drink": {"kind": "cocoa"}}, "tray.drink.kind is 'cocoa'; it must be Tea or Coffee."),
        ({"drink": {"kind": "Cocoa"}}, "Cocoa=Cocoa is not served yet"),
        ({"drink": "coffee(decaf=true)"}, "decaf=true is not served yet"),
        ({"drink": "coffee(Peru)"}, "'Peru' in 'coffee(Peru)' has no name"),
        ({"drink": "coffee(origin=a,origin=b)"}, "origin is given twice"),
        ({"drink": "coffee(origin"}, "written as name(field=value,...)"),
        ({"spare": {"grams": float("nan")}}, "tray.spare.grams is nan; it must be a number."),
    ],
)
def test_a_mistake_names_path_value_and_what_is_legal(table: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        config.read(Tray, table, path="tray")
    assert says in str(caught.value)


def test_a_constructor_checks_types_like_the_reader() -> None:
    with pytest.raises(PlanError, match=r"Tea\.minutes is 1\.5; it must be a whole number or none"):
        Tea(minutes=1.5)  # pyright: ignore[reportArgumentType]  # that is refused


def test_overrides_change_nested_fields_in_order() -> None:
    tray = settings.apply(
        Tray(), "tray.spare.minutes=4", "spare.sugar=true", "drink=coffee(origin=Peru)", "drink.origin=Togo"
    )
    assert tray == Tray(spare=Tea(minutes=4, sugar=True), drink=Coffee(origin="Togo"))


def test_overrides_that_need_each_other_may_come_in_any_order() -> None:
    with pytest.raises(PlanError, match="need a table"):
        settings.apply(Tray(), "seats=6")
    assert settings.apply(Tray(), "seats=6", "table=long").seats == 6


def test_overrides_of_one_part_that_need_each_other_may_come_in_any_order() -> None:
    with pytest.raises(PlanError, match="without heat"):
        settings.apply(Kitchen(), "kettle.minutes=4")
    wanted = ["kettle.minutes=4", "seats=3", "kettle.heat=gas"]
    for overrides in (wanted, wanted[::-1]):
        assert settings.apply(Kitchen(), *overrides) == Kitchen(kettle=Kettle(heat="gas", minutes=4), seats=3)


def test_an_override_whose_part_is_replaced_by_a_later_one_is_checked_all_the_same() -> None:
    assert settings.apply(Tray(), "spare.grams=3", "spare=tea(sugar=true)").spare == Tea(sugar=True)
    with pytest.raises(PlanError, match=r"tray\.spare\.gramms: Tea has no field"):
        settings.apply(Tray(), "spare.gramms=3", "spare=tea(sugar=true)")


def test_an_override_leaves_the_original_alone() -> None:
    before = Tray()
    settings.apply(before, "seats=2")
    assert before == Tray()
    assert settings.apply(before) is before


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seats", "'seats' sets nothing: write it as name=value"),
        ("spare.minuts=3", "tray.spare.minuts: Tea has no field 'minuts'. Did you mean 'minutes'?"),
        (
            "drink.origin=Peru",
            "tray.drink is Tea, which has no field 'origin'; Coffee has: use tray.drink=coffee(origin=Peru).",
        ),
        ("seats.x=1", "tray.seats is 1, which has no fields"),
        ("seats=many", "tray.seats is 'many'; it must be a whole number."),
        ("spare.sugar=1", "tray.spare.sugar is '1'; it must be true or false."),
    ],
)
def test_a_wrong_override_says_what_to_write(override: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        settings.apply(Tray(), override)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("8", int, 8),
        ("-3", int | None, -3),
        ("none", int | None, None),
        ("none", str | None, None),
        ("8", str, "8"),
        ("1e-3", float, 1e-3),
        ("8", float, 8.0),
        ("false", bool, False),
        ("bf16", Literal["bf16", "fp16"], "bf16"),
        ("1,2,3", tuple[int, ...], (1, 2, 3)),
        ("", tuple[str, ...], ()),
        ("tea(grams=1)", Tea | Coffee, Tea(grams=1.0)),
    ],
)
def test_text_is_read_by_the_annotation(text: str, annotation: Any, value: object) -> None:
    parsed = config.parse_value(text, annotation, path="x")
    assert parsed == value
    assert type(parsed) is type(value)


teas = st.builds(
    Tea,
    kind_of_leaf=st.sampled_from(["green", "black"]),
    grams=st.floats(allow_nan=False),
    minutes=st.none() | st.integers(),
    sugar=st.booleans(),
)


@given(teas)
def test_the_short_form_reads_back(tea: Tea) -> None:
    assert config.read_short(config.to_short(tea), Tea | Coffee, path="x") == tea


@given(teas.filter(lambda tea: abs(tea.grams) != float("inf")))
def test_the_python_form_reads_back(tea: Tea) -> None:
    assert eval(config.to_python(tea)) == tea


def test_defaults_are_left_out() -> None:
    assert config.to_short(Tea()) == "tea"
    assert config.to_short(Tea(sugar=True)) == "tea(sugar=true)"
    assert config.to_python(Tea(minutes=3)) == "Tea(minutes=3)"


def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("workers = \n")
    with pytest.raises(PlanError, match=r"job\.toml is not valid TOML: .*line 1"):
        config.load_toml(path)
    with pytest.raises(PlanError, match=r"Cannot read .*none\.toml: No such file"):
        config.load_toml(tmp_path / "none.toml")
