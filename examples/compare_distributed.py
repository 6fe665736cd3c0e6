"""The demo on several processes: train one model on one process, and under ddp and fsdp2 on two, and compare.

Runs ``train.py`` three times, one after the other, each with an empty compile cache that its ranks share and one thread
a rank. Prints the table of ``compare.py`` and what should hold; exits with 1 where the losses differ or something did
not compile. How fast a machine is on the day fails nobody.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from compare import WARM, Run, Setup, progress_of, table, training
from rich.console import Console

SETUPS = (
    Setup("single", "inductor", "auto"),
    Setup("ddp x2", "inductor", "auto", "ddp", 2),
    Setup("fsdp2 x2", "inductor", "auto", "fsdp2", 2),
)
APART = 1e-3  # nats per byte, at any step; sums over two halves of a batch are rounded otherwise than over the whole


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # for all alike, so that two ranks on two cores compare with one on one
    console = Console()
    if not console.is_terminal:
        console.width = 110
    runs = []
    with progress_of(console, options.steps) as shown:
        for setup in SETUPS:
            with training(setup, options, options.output / f"{setup.name}.pt") as each:
                each.go_on(options.steps, shown)
                runs.append(each.result())
    console.print(table(runs, "one run after the other; peak memory: a rank's, on average"))
    for line, holds in (*must_hold(runs), *timings(runs)):
        console.print(f"{'ok  ' if holds else 'MISS'}  {line}", highlight=False)
    sys.exit(not all(holds for _, holds in must_hold(runs)))


def must_hold(runs: list[Run]) -> list[tuple[str, bool]]:
    """That the runs learn the same, and compiled; with the figures seen."""
    pairs = zip(*(run.losses for run in runs), strict=True)
    apart = max(max(losses) - min(losses) for losses in pairs)
    compiled = all(run.report["ok"] and run.report["graphs"] for run in runs)
    return [
        (f"losses are {apart:.1e} apart at most, at any step (at most {APART})", apart <= APART),
        ("everything that was to be compiled was, without a break", compiled),
    ]


def timings(runs: list[Run]) -> list[tuple[str, bool]]:
    """The cold first step of two ranks that share a cache, against that of one rank."""
    single, *others = runs
    ratios = {run.name: run.first / single.first for run in others}
    return [
        (f"first step of {name} is {ratio:.2f}x of single's (at most 1.15x)", ratio <= 1.15)
        for name, ratio in ratios.items()
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare one process with ddp and fsdp2 on two.")
    parser.add_argument("--steps", type=int, default=14, help=f"training steps of each run, more than {WARM + 1}")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="where logs and checkpoints go")
    options = parser.parse_args()
    if options.steps <= WARM + 1:
        parser.error(f"--steps must be more than {WARM + 1}: so many are left out of the steady time")
    return options


if __name__ == "__main__":
    main()
