"""Tests of Atoll. `tests.tidy_rules` keeps the style, everything else keeps the promises."""
