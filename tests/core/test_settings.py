"""Settings of dataclasses: declaration, construction and checks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from atoll.core.settings import check_settings, declared_settings, make_settings, same_setting, setting


@dataclass(frozen=True)
class Link:
    rate: float = setting(1.0, "Rate of the link.", "RATE", above=0)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class Site:
    name: str
    chips: int = setting(8, "Chips of the site.", "N", min=1)
    link: Link = field(default_factory=lambda: Link(rate=2.0))


def test_nested_settings_have_the_defaults_of_the_outer_dataclass():
    assert [(each.name, each.default) for each in declared_settings(Site)] == [("chips", 8), ("rate", 2.0)]
    assert [each.default for each in declared_settings(Site("a", 4, Link(3.0)))] == [4, 3.0]


def test_values_reach_the_dataclass_that_declares_them():
    assert make_settings(Site, {"name": "a", "rate": 5.0}) == Site("a", 8, Link(5.0))
    assert make_settings(Site, {"name": "a"}) == Site("a")


def test_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="Site has no setting 'speed'"):
        make_settings(Site, {"name": "a", "speed": 1})


def test_bounds_of_nested_settings_are_checked():
    with pytest.raises(ValueError, match=r"rate is 0\.0; give a number above 0"):
        make_settings(Site, {"name": "a", "rate": 0.0})


def test_same_setting_has_another_default_and_the_same_bounds():
    @dataclass(frozen=True)
    class Thin:
        rate: float = same_setting(Link, "rate", 0.5)

    assert Thin().rate == 0.5
    with pytest.raises(ValueError, match=r"rate is -1\.0; give a number above 0"):
        check_settings(Thin(-1.0))
