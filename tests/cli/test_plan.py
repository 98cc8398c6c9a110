"""`atoll plan`: bandwidths, tables, cost, warnings, and refused options."""

from __future__ import annotations

import json

import pytest

from atoll.cli.main import main

SMALL = ("--params", "10M", "--step-time", "500ms", "--sites", "4")
WHOLE = (
    *("--params", "12B", "--sites", "4", "--chips", "25600", "--flops", "4T", "--mfu", "0.4", "--mtbf", "365d"),
    *("--tokens-per-step", "1M", "--tokens", "1T", "--rate", "5gbit", "--price", "0.05/GB", "--delay", "20ms"),
)
METHODS = ("data-parallel", "diloco-bf16", "streaming-bf16")
DECOUPLED = ("decoupled-f32", "decoupled-bf16", "decoupled-int8", "decoupled-int4")


def run_command(capsys, *arguments: str) -> str:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return str(out)


def fields(capsys, *arguments: str):
    return json.loads(run_command(capsys, *arguments, "--json"))


def test_rates_of_every_method_at_every_utilisation(capsys):
    plan = fields(capsys, "--params", "5e9", "--step-time", "1s", "--sites", "8")
    assert list(plan["rates_gbit_s"]) == [*METHODS, *DECOUPLED]
    for row in plan["rates_gbit_s"].values():
        assert list(row) == ["0.5", "0.75", "0.9", "0.95", "0.99"]
        assert sorted(row.values()) == list(row.values())
    published = plan["published_rates_gbit_s"]
    assert list(published) == ["data-parallel", "decoupled-bf16", "decoupled-int4"]
    for method, row in published.items():
        for share, rate in row.items():
            assert plan["rates_gbit_s"][method][share] == pytest.approx(rate, rel=0.1)


def test_published_cells_are_shown_for_the_published_question_only(capsys):
    for arguments in (SMALL, ("--params", "5e9", "--step-time", "1s", "--sites", "8", "--every", "48")):
        assert fields(capsys, *arguments)["published_rates_gbit_s"] is None


def test_plan_without_links_and_budget_has_no_figures_for_them(capsys):
    plan = fields(capsys, *SMALL)
    for row in plan["methods"].values():
        assert (row["goodput"], row["days"], row["cost"], row["gb_per_site"]) == (None, None, None, None)
    assert plan["methods"]["data-parallel"]["utilisation"] is None
    assert plan["methods"]["decoupled-int4"]["effective_h"] is None


def test_a_whole_plan_adds_up(capsys):
    plan = fields(capsys, *WHOLE)
    rows = plan["methods"]
    step_s = 6 * 12e9 * 1e6 / (25600 * 4e12 * 0.4)
    assert [island["step_s"] for island in plan["islands"]] == [pytest.approx(step_s)] * 4
    dp, int4 = rows["data-parallel"], rows["decoupled-int4"]
    assert dp["gb_per_site"] == pytest.approx(12e9 * 2 * 1.5 * (1e12 / 4e6) / 1e9)
    assert int4["gb_per_site"] == pytest.approx(12e9 * 4.25 / 8 * 1.5 * (1e12 / 4e6) / 24 / 1e9)
    for row in rows.values():
        assert row["cost"] == pytest.approx(4 * 0.05 * row["gb_per_site"])
        assert row["days"] == pytest.approx(1e12 / row["tokens_per_s"] / row["goodput"] / 86_400)
    assert int4["days"] == pytest.approx(1e12 / (4e6 / step_s) / int4["goodput"] / 86_400)
    assert dp["goodput_not_elastic"] < dp["goodput"] < int4["goodput"] < 1
    assert (int4["utilisation"], int4["effective_h"]) == (1.0, 24)
    keeps = plan["keeps_h_gbit_s"]["decoupled-f32"]
    assert rows["decoupled-f32"]["effective_h"] == pytest.approx(24 * keeps / 5, rel=1e-4)


def test_bytes_of_a_budget_do_not_depend_on_whether_rates_are_known(capsys):
    arguments = (*SMALL, "--tokens-per-step", "1000", "--tokens", "1M")
    slow, unknown = (fields(capsys, *arguments, *more)["methods"] for more in (("--rate", "10mbit"), ()))
    for method in METHODS:
        assert slow[method]["gb_per_site"] == pytest.approx(unknown[method]["gb_per_site"])
    assert unknown["data-parallel"]["days"] is None
    assert unknown["decoupled-int4"]["days"] == pytest.approx(slow["decoupled-int4"]["days"])


def test_tables_name_methods_in_full_choose_a_unit_and_are_the_same_twice(capsys):
    small, complete = run_command(capsys, *SMALL), run_command(capsys, *WHOLE)
    assert run_command(capsys, *WHOLE) == complete
    assert "Mbit/s that a site's link needs" in small
    assert "Gbit/s that a site's link needs" in complete
    for method in (*METHODS, *DECOUPLED):
        assert small.count(f"\n {method} ") == 1
        assert complete.count(f"\n {method} ") == 2
    assert max(map(len, complete.splitlines())) <= 80


# --------------------------------------------------------------------------------------------------------------------
# Unequal islands


def test_synchronous_methods_run_at_the_slowest_pace_and_decoupled_at_each_own_pace(capsys, tmp_path):
    options = fields(
        capsys,
        *("--params", "1B", "--step-time", "1s", "--rate", "1gbit", "--tokens-per-step", "1k"),
        *("--island", "name=north,count=2", "--island", "name=south,step-time=2s,rate=200mbit,tokens-per-step=500"),
    )
    assert [island["name"] for island in options["islands"]] == ["north 1", "north 2", "south"]
    dp, int4 = options["methods"]["data-parallel"], options["methods"]["decoupled-int4"]
    factor = 4 / 3
    assert dp["step_s"] == pytest.approx(2 * (1 - (2 / 3) * (55 / 56)) + 1e9 * 16 * factor / 200e6)
    assert dp["tokens_per_s"] == pytest.approx(2500 / dp["step_s"])
    assert int4["tokens_per_s"] == pytest.approx(1000 + 1000 + 250)
    assert int4["effective_h"] == pytest.approx(1e9 * 4.25 * factor / 200e6)
    file = tmp_path / "islands.toml"
    file.write_text(
        '[[island]]\nname = "north"\ncount = 2\n\n'
        '[[island]]\nname = "south"\nstep_time = "2s"\nrate = "200mbit"\ntokens_per_step = 500\n'
    )
    arguments = (
        "--params",
        "1B",
        "--step-time",
        "1s",
        "--rate",
        "1gbit",
        "--tokens-per-step",
        "1k",
        "--islands",
        str(file),
    )
    assert fields(capsys, *arguments) == options


def test_an_island_with_flops_takes_no_step_time_from_the_options(capsys):
    arguments = (
        "--params",
        "1B",
        "--step-time",
        "1s",
        "--tokens-per-step",
        "1M",
        "--island",
        "chips=4,flops=1P,mfu=0.5",
    )
    plan = fields(capsys, *arguments, "--island", "name=b")
    assert [island["step_s"] for island in plan["islands"]] == [pytest.approx(3.0), 1.0]


# --------------------------------------------------------------------------------------------------------------------
# Warnings


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--params 5e9 --step-time 1s --sites 8", "models of up to 10.7 M"),
        ("--params 1M --step-time 1s --sites 2 --every 100", "measured with H from 8 to 48"),
        ("--params 1M --step-time 1s --sites 65", "up to 64 learners"),
        ("--params 1M --step-time 1s --sites 2 --fragments 48", "several rounds per step"),
        ("--params 1M --step-time 1s --sites 2 --rate 500kbit", "a fragment has a round every 32 steps, not 24"),
        ("--params 1M --step-time 1s --sites 2 --rate 100kbit", "160 steps, not 24, longer than was measured"),
        ("--params 1M --step-time 1s --sites 2 --rate 1gbit --delay 1s", "longer than tau = 2 steps"),
        ("--params 1M --step-time 1s --sites 2 --rate 1mbit", "16.3 times slower per step than decoupled"),
        ("--params 1M --step-time 1s --sites 4 --star", "its link carries 4 models in and out"),
    ],
)
def test_it_warns_where_a_plan_is_beyond_what_was_measured_or_what_links_carry(capsys, arguments, sentence):
    assert any(sentence in warning for warning in fields(capsys, *arguments.split())["warnings"])


def test_a_modest_plan_has_no_warning(capsys):
    assert fields(capsys, *SMALL, "--rate", "2gbit", "--delay", "20ms")["warnings"] == []


# --------------------------------------------------------------------------------------------------------------------
# Figure and refusals


def test_the_figure_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plan.svg"
    assert fields(capsys, "--params", "5e9", "--step-time", "1s", "--sites", "8", "--plot", str(plot))["plot"] == str(
        plot
    )
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--params 5e9 --step-time 1s", "give --sites 8"),
        ("--params 5e9 --step-time 1s --sites 1", "give 2 to 4096: one site has nothing to synchronize"),
        ("--params big --step-time 1s --sites 2", "give one such as 5e9, 5B or 1.5T"),
        ("--params 0 --step-time 1s --sites 2", "give a number above 0"),
        ("--params=-5 --step-time 1s --sites 2", "not a number above 0"),
        ("--params 1B --sites 2", "the step time of site 1 is missing; give --step-time 1s"),
        ("--params 1B --sites 2 --step-time 1", "give one with its unit, such as 40ms, 1s"),
        ("--params 1B --sites 2 --step-time 0s", "give a number above 0"),
        ("--params 1B --sites 2 --step-time inf", "give seconds above 0"),
        ("--params 1B --sites 2 --flops 4T", "give --chips and --tokens-per-step"),
        ("--params 1B --sites 2 --flops 4T --step-time 1s", "give one of --step-time and --flops"),
        ("--params 1B --sites 2 --flops 4X --chips 1 --tokens-per-step 1", "such as 400T, 1P or 4e14"),
        ("--params 1B --sites 2 --flops 4T --chips 1 --tokens-per-step 1 --mfu 2", "such as 0.4"),
        ("--params 1B --sites 2 --step-time 1s --chips 2.5", "not a whole number"),
        ("--params 1B --sites 2 --step-time 1s --mtbf 365d", "give --chips"),
        ("--params 1B --sites 2 --step-time 1s --rate 2", "give one with its unit, such as 2gbit"),
        ("--params 1B --sites 2 --step-time 1s --rate=-2gbit", "is not a rate"),
        ("--params 1B --sites 2 --step-time 1s --rate 2Gb", "may be bits or bytes; write 2Gbit or 2GB/s"),
        ("--params 1B --sites 2 --step-time 1s --delay 40", "such as 40ms"),
        ("--params 1B --sites 2 --step-time 1s --price cheap", "such as 0.05/GB"),
        ("--params 1B --sites 2 --step-time 1s --price 0.05/GB", "give --tokens and --tokens-per-step"),
        ("--params 1B --sites 2 --step-time 1s --tokens 1T", "give --tokens-per-step"),
        ("--params 1B --sites 2 --step-time 1s --codec int3", "give one of f32, bf16, int8, int4"),
        ("--params 1B --sites 2 --step-time 1s --every 0", "give at least 1 step"),
        ("--params 1B --sites 2 --step-time 1s --fragments 0", "at least 1 fragment"),
        ("--params 1B --sites 2 --step-time 1s --tau 0", "give at least 1 step"),
        ("--params 1B --sites 2 --step-time 1s --slice-chips 0", "give at least 1"),
        ("--params 1B --step-time 1s --island name=a", "one island has nothing to synchronize"),
        ("--params 1B --step-time 1s --island a", "write KEY=VALUE with commas"),
        ("--params 1B --step-time 1s --island color=red", "has the unknown key 'color'; the keys are name, count"),
        ("--params 1B --step-time 1s --sites 3 --island count=2", "omit --sites"),
        ("--params 1B --step-time 1s --islands gone.toml", "gone.toml: No such file"),
        ("--params 1B --step-time 1s --island count=9 --islands gone.toml", "give only one of them"),
        ("--params 1B --step-time 1s --island count=5000", "more than 4096 islands"),
        ("--params 1B --sites 2 --step-time 1s --plot plan.gif", "end its name with .png, .svg or .pdf"),
    ],
)
def test_invalid_option_is_refused_with_one_line_and_the_fix(arguments, sentence, capsys):
    assert main(["plan", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("atoll: ")
    assert sentence in err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sites = 3", "begin each with a line [[island]]"),
        ("[[island]]\nrates = 3", "has the unknown key 'rates'"),
        ("[[island]]\nrate = [3]", "give a number, or a string with a unit"),
        ("island = [3]", "is not a table"),
        ("[[island", "is not TOML"),
    ],
)
def test_invalid_file_is_refused_with_its_name(text, sentence, capsys, tmp_path):
    file = tmp_path / "islands.toml"
    file.write_text(text)
    assert main(["plan", "--params", "1B", "--step-time", "1s", "--islands", str(file)]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert str(file) in err
