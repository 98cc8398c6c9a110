"""Tables of results: means over seeds, and paired differences with intervals.

Differences are to tuned data-parallel training and to decoupled training with the default settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.many_runs import read_results, setting_from_json
from benchmarks.quality_lab.setting import Setting, describe

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % quantiles of Student's distribution by degrees of freedom."""

Losses = dict[int, float]


def interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    return T_95.get(len(values) - 1, 2.0) * stdev(values) / math.sqrt(len(values))


def by_setting(path: Path, key: str) -> dict[Setting, Losses]:
    """Return losses by seed. Lines that differ in their seeds only are one setting, whose seeds are empty."""
    found: dict[Setting, Losses] = defaultdict(dict)
    for line in read_results(path):
        setting = setting_from_json(Setting, line)
        losses = line.get(key) or line["losses"]
        for seed, loss in zip(setting.seed_list, losses, strict=True):
            found[dataclasses.replace(setting, seeds="")][seed] = loss
    return found


def _group(setting: Setting) -> tuple[object, ...]:
    """Settings that are compared: the same model, text, tokens, global batch and inner optimizer."""
    return setting.size, setting.text, setting.tokens, setting.learners * setting.batch, setting.inner, setting.mixed


def baselines(found: Mapping[Setting, Losses]) -> dict[tuple[object, ...], Losses]:
    """Return the decoupled run of each group that differs from the defaults in its inner learning rate only."""
    made: dict[tuple[object, ...], Losses] = {}
    for setting, losses in found.items():
        extra = [part for part in describe(setting).split() if part.split("=")[0] not in ("lr", "mixed")]
        if setting.method == "decoupled" and not extra and setting.lr <= 0.004:
            made[_group(setting)] = losses
    return made


def references(found: Mapping[Setting, Losses]) -> dict[tuple[object, ...], tuple[Setting, Losses]]:
    """Return the best data-parallel setting of each group, by the mean over seeds."""
    best: dict[tuple[object, ...], tuple[Setting, Losses]] = {}
    for setting, losses in found.items():
        if setting.method != "data-parallel":
            continue
        group = _group(setting)
        if group not in best or _rank(losses) < _rank(best[group][1]):
            best[group] = setting, losses
    return best


def _rank(losses: Losses) -> tuple[int, float]:
    return -len(losses), mean(losses.values())


def paired(losses: Losses, reference: Losses) -> list[float]:
    """Return differences in % of the reference, one per common seed."""
    return [100 * (losses[seed] / reference[seed] - 1) for seed in sorted(losses.keys() & reference.keys())]


def _difference(losses: Losses, reference: Losses) -> str:
    gaps = paired(losses, reference)
    if not gaps or losses is reference:
        return "-"
    shown = f"{mean(gaps):+.2f}" + (f" ± {interval(gaps):.2f}" if len(gaps) > 1 else "")
    return shown + (f" ({len(gaps)} seeds)" if len(gaps) != len(losses) else "")


def table(path: Path, wanted: Sequence[Setting] = (), key: str = "losses") -> str:
    found = by_setting(path, key)
    keys = {dataclasses.replace(setting, seeds="") for setting in wanted}
    best = references(found)
    plain = baselines(found)
    out = []
    groups: dict[tuple[object, ...], list[Setting]] = defaultdict(list)
    for setting in found:
        if not keys or setting in keys:
            groups[_group(setting)].append(setting)
    for group, settings in groups.items():
        size, text, tokens, windows, inner, mixed = group
        precision = "bf16 products" if mixed else "f32"
        out.append(
            f"\n{size}, {text}, {float(str(tokens)) / 1e6:.2f}M tokens, {windows} windows, {inner}, {precision}\n"
        )
        head = "| method | differs in | seeds | loss | against data-parallel, % | against decoupled, % |"
        out += [head, "|---|---|---|---|---|---|"]
        for setting in sorted(settings, key=lambda s: mean(found[s].values())):
            losses = found[setting]
            to_best = _difference(losses, best[group][1]) if group in best else "-"
            to_plain = _difference(losses, plain[group]) if group in plain and setting.method == "decoupled" else "-"
            seeds = ",".join(map(str, sorted(losses)))
            out.append(
                f"| {setting.method} | {describe(setting) or '-'} | {seeds} | {mean(losses.values()):.4f} | {to_best} "
                f"| {to_plain} |"
            )
    return "\n".join(out)
