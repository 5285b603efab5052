"""How well the planner's cost model predicts published measurements.

    python benchmarks/published.py --fit ROWS --out constants.toml [--leave-out-source TITLE] [--plot FILE.svg]
    python benchmarks/published.py --constants constants.toml --rows ROWS [--json] [--leave-out-source]
                                   [--receipt smallest] [--rank] [--memory] [--baseline mfu]

`--fit` finds twelve constants and a factor for each source, from training rows of which nothing is missing (grade A).
It prints how well rows are predicted that were not in the fit: one fifth at a time (the source is known, one factor),
and one source at a time (no factor). With a TITLE, this source is left out of the constants that are written.

`--rows` predicts rows from their model, cluster, layout, batch, precision, recompute and the title of their source.
`--json` prints one JSON object for each row, in their order, with what was assumed; without it, errors are summed up
where rows have measurements. `--leave-out-source`: as if no source were known. `--receipt smallest`: the smallest row
of each source, model and device is measured, and corrects the others. `--baseline mfu`: instead, the same share of the
peak for all rows of a device and precision.

Rows are a JSON list or JSON lines, in the form of `benchmarks/data/published.jsonl`, which is fitted by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driving.options import options_of
from paceline.planner.constants import Calibration, load_calibration, write_calibration
from paceline.planner.memory import predict_memory
from tables.answers import DEFAULT_SPREADS, RECEIPT_SHARE, Answer, answer, receipts
from tables.fitting import (
    Sample,
    calibrate,
    errors_of_known,
    errors_of_unknown,
    middle,
    samples,
    spread,
)
from tables.report import Tried, error_line, held, memory_lines, rank_lines, tried
from tables.rows import load_rows, measured_gb, read_row

Row = Mapping[str, Any]
ROWS = Path(__file__).parent / "data" / "published.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, metavar="ROWS")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--constants", type=Path, metavar="FILE")
    parser.add_argument("--rows", type=Path, metavar="ROWS")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="of the fit: predicted over measured")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--leave-out-source", nargs="?", const="", metavar="TITLE")
    parser.add_argument("--receipt", choices=["smallest"])
    parser.add_argument("--baseline", choices=["mfu"])
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("--memory", action="store_true")
    args = options_of(parser, takes="20 seconds", quick={})
    if args.fit is not None and args.rows is not None:
        parser.error("give --fit ROWS, or --rows ROWS")
    if args.rows is not None:
        return try_rows(load_rows(args.rows), args)
    return fit_rows(load_rows(args.fit or ROWS), args)


# Fitting.


def is_complete(row: Row) -> bool:
    """Whether a row is one to fit to: training, grade A, no mixture of experts."""
    return row.get("kind") == "train" and row.get("grade") == "A" and not row["model"].get("experts")


def without_title(row: Row) -> Row:
    return {**row, "source": {**row["source"], "title": "unknown"}}


def fit_rows(rows: Sequence[Row], args: argparse.Namespace) -> int:
    if args.leave_out_source:
        kept = [row for row in rows if args.leave_out_source.lower() not in row["source"]["title"].lower()]
        if len(kept) == len(rows):
            sys.exit(f"no source's title contains {args.leave_out_source!r}")
        rows = kept
    complete = [row for row in rows if is_complete(row) and not read_row(row).is_special]
    found = samples(complete)
    print(f"{len(found)} rows of {len({one.title for one in found})} sources", file=sys.stderr)
    calibration = calibrate(found)
    calibration = dataclasses.replace(calibration, memory_factors=memory_factors(rows), baseline=mfu_baseline(found))
    known, unknown = errors_of_known(found), errors_of_unknown(found, samples(map(without_title, complete)))
    print("rows that are not in the fit                  rows   median   90th percentile")
    print(error_line("known source, one factor", [error for _, error in known]))
    print(error_line("unknown source and software, no factor", [error for _, error in unknown]))
    received = errors_with_receipts(known)
    print(error_line("known source, one receipt", received))
    spreads = {
        "software": spread(error for _, error in known),
        "none": spread(error for _, error in unknown),
        "receipt": spread(received),
        **special_spreads(rows, calibration),
    }
    calibration = dataclasses.replace(calibration, spreads={**DEFAULT_SPREADS, **spreads})
    if args.plot:
        from tables.plot import plot

        plot(args.plot, [("known source, one factor", known), ("unknown source and software", unknown)])
    if args.out:
        write_calibration(args.out, calibration, title="Constants of Paceline's cost model, by benchmarks/published.py")
    return 0


def errors_with_receipts(known: Sequence[tuple[Sample, float]]) -> list[float]:
    """Return errors of rows that a smaller one of the same source, model and device corrects."""
    groups: dict[tuple[Any, ...], list[tuple[Sample, float]]] = {}
    for sample, error in known:
        case = sample.case
        key = (sample.title, case.model.parameters, case.cluster.device.name)
        groups.setdefault(key, []).append((sample, error))
    corrected: list[float] = []
    for members in groups.values():
        members.sort(key=lambda one: (one[0].case.axes.workers, one[0].case.tokens, one[0].reading.id))
        corrected += [error - members[0][1] * RECEIPT_SHARE for _, error in members[1:]]
    return corrected


def memory_factors(rows: Sequence[Row]) -> dict[str, float]:
    """Return measured over predicted bytes of each source."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        gigabytes = measured_gb(row)
        if gigabytes and row.get("kind") == "train" and row.get("grade") == "A" and not row["layout"].get("offload"):
            reading = read_row(row)
            groups.setdefault(reading.title, []).append(math.log(predict_memory(reading.case).peak / 1e9 / gigabytes))
    return {
        title: math.exp(-middle(errors) * len(errors) / (len(errors) + 0.5)) for title, errors in sorted(groups.items())
    }


def special_spreads(rows: Sequence[Row], calibration: Calibration) -> dict[str, float]:
    """Return the widths of bands of memory, and of rows that are incomplete or of another kind."""
    special: list[float] = []
    memory: dict[str, list[float]] = {"memory software": [], "memory none": [], "memory special": []}
    for row in rows:
        one = Tried(answer(read_row(row), calibration), row)
        if row.get("kind") not in ("train", "memory_oom") or row.get("grade") not in ("A", "B"):
            continue
        is_special = one.reading.is_special or one.reading.is_incomplete
        if is_special and one.log_error is not None and row["kind"] == "train":
            special.append(one.log_error)
        if row["layout"].get("offload"):
            continue
        kind = "memory special" if is_special else "memory software"
        if one.memory_error is not None:
            memory[kind].append(one.memory_error)
            memory["memory none"].append(Tried(answer(one.reading, calibration, known=False), row).memory_error or 0.0)
        elif one.is_oom:  # at least the device's memory was needed
            device = one.reading.case.cluster.device.memory
            memory[kind].append(min(0.0, math.log(one.answer.memory / device)))
    return {"special": spread(special), **{kind: spread(errors) for kind, errors in memory.items()}}


def mfu_baseline(found: Sequence[Sample]) -> dict[str, float]:
    """Return the share of the peak of each device and precision: what one would take without a model."""
    groups: dict[str, list[float]] = {}
    for one in found:
        groups.setdefault(baseline_key(one.case), []).append(math.log(baseline_s(one.case, 1.0) / one.seconds))
    return {key: math.exp(middle(values)) for key, values in sorted(groups.items())}


def baseline_key(case: Any) -> str:
    return f"{case.cluster.device.name}/{case.precision}"


def baseline_s(case: Any, share: float) -> float:
    """Seconds of a step at a share of the peak in 16 bit."""
    peak = case.cluster.device.peak["bf16"] * case.axes.workers
    return case.model.model_flops(case.tokens) / (peak * share)


# Trying.


def try_rows(rows: Sequence[Row], args: argparse.Namespace) -> int:
    calibration = load_calibration(args.constants) if args.constants else Calibration()
    known = args.leave_out_source is None
    receipt_of = receipts(rows, calibration) if args.receipt else {}
    answers: list[Answer] = []
    for row in rows:
        reading = read_row(row)
        one = answer(reading, calibration, known=known, receipt=receipt_of.get(reading.id))
        if args.baseline:
            share = calibration.baseline.get(baseline_key(reading.case), 0.4)
            seconds = baseline_s(reading.case, share)
            scale = one.step_s / seconds
            one = dataclasses.replace(
                one,
                step_s=seconds,
                parts={},
                tokens_per_s=one.tokens_per_s * scale,
                samples_per_s=one.samples_per_s * scale,
                mfu=one.mfu * scale,
            )
        answers.append(one)
    if args.json:
        for one in answers:
            print(json.dumps(one.to_json()))
        return 0
    found = tried(answers, rows)
    if args.receipt:  # a receipt says nothing of itself, nor of rows that have none
        found = [one for one in found if one.answer.receipt not in (None, one.reading.id)]
    print_tables(found, args)
    return 0


def print_tables(found: Sequence[Tried], args: argparse.Namespace) -> None:
    timed = [
        one
        for one in found
        if one.log_error is not None and one.row.get("kind", "train") == "train" and one.row.get("grade", "A") != "C"
    ]
    complete = [one for one in timed if not one.reading.is_special and one.row.get("grade", "A") == "A"]
    others = [one for one in timed if one not in complete]
    print("seconds of a step                             rows   median   90th percentile")
    for name, group in (("complete rows", complete), ("experts, Blackwell, incomplete rows", others)):
        print(error_line(name, [one.log_error or 0.0 for one in group]))
        if group:
            share = held([(one.log_error or 0.0, one.answer.band) for one in group])
            print(f"  80 % bands hold {share * 100:.0f} %")
    for title in sorted({one.reading.title for one in complete}):
        print(error_line("  " + title[:40], [one.log_error or 0.0 for one in complete if one.reading.title == title]))
    if args.rank:
        print(*rank_lines(complete), sep="\n")
    if args.memory:
        fitting = [one for one in found if not one.row["layout"].get("offload") and one.row.get("grade", "A") != "C"]
        print(*memory_lines([one for one in fitting if one.row.get("kind") != "memory_model"]), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
