"""The demo: train one model eager, compiled whole and compiled by regions, and compare.

Runs ``train.py`` three times, each in a fresh process with an empty compile cache of its own; prints one table, draws
the losses and the times, then loads the checkpoint into the bare model and lets it continue a line of code.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

TRAIN = Path(__file__).with_name("train.py")
WARM = 10  # steps left out of the steady time: compiling, allocating, settling
PROMPT = "def __init__(self, "


@dataclass(frozen=True)
class Setup:
    """One way to train: its name in the table, and the flags of ``train.py`` that choose it."""

    name: str
    backend: str
    regions: str


SETUPS = (Setup("eager", "no", "auto"), Setup("whole", "inductor", "whole"), Setup("regions", "inductor", "auto"))


@dataclass(frozen=True)
class Run:
    """What was measured of one training: losses, seconds of each step, peak memory in MB, torchrig's report."""

    name: str
    losses: list[float]
    seconds: list[float]
    peak_mb: float
    report: dict[str, Any]

    @property
    def first(self) -> float:
        """Seconds of the first step, compiling included."""
        return self.seconds[0]

    @property
    def steady(self) -> float:
        """Milliseconds of a step once warm: the median, which a busy moment of the machine does not move."""
        return 1e3 * statistics.median(self.seconds[WARM:])


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    started = time.perf_counter()
    checkpoint = options.output / "model.pt"
    with progress_of(console, options.steps) as shown:
        runs = [train(setup, options, checkpoint, shown) for setup in SETUPS]
    console.print(table(runs))
    draw(runs, options.output)
    console.print(f"The regions' checkpoint, in the bare model, continues {PROMPT!r}:")
    console.print(continue_text(checkpoint), markup=False, highlight=False, style="green")
    met = verdicts(runs)
    for line, holds in met:
        console.print(f"{'ok  ' if holds else 'MISS'}  {line}", highlight=False)
    console.print(
        f"Plots and logs are in {options.output}/. All took {time.perf_counter() - started:.0f} s.", highlight=False
    )
    sys.exit(not all(holds for _, holds in met))


class Shown:
    """Progress of the three trainings: bars on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, steps: int, bars: Progress | None) -> None:
        self.console, self.steps, self.bars = console, steps, bars
        self.task: TaskID | None = None

    def start(self, name: str) -> None:
        """A training begins; its first step compiles, so nothing may move for a while."""
        if self.bars is not None:
            self.task = self.bars.add_task(name, total=self.steps, note="first step")
        else:
            self.console.print(f"{name}: first step ...", highlight=False)

    def step(self, number: int, line: str) -> None:
        """Step ``number`` is done; ``line`` is what ``train.py`` says of it."""
        if self.bars is not None and self.task is not None:
            self.bars.update(self.task, completed=number, note=line.partition("  ")[2])
        elif number == 1 or number % 20 == 0:
            self.console.print(f"  {line}", highlight=False)


@contextmanager
def progress_of(console: Console, steps: int) -> Iterator[Shown]:
    if not console.is_terminal:
        yield Shown(console, steps, None)
        return
    columns = (TextColumn("{task.description:8}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as bars:
        yield Shown(console, steps, bars)


def train(setup: Setup, options: argparse.Namespace, checkpoint: Path, shown: Shown) -> Run:
    """Run ``train.py`` in a process of its own, with an empty Inductor cache."""
    log = options.output / f"{setup.name}.json"
    flags = ["--backend", setup.backend, "--regions", setup.regions, "--steps", str(options.steps)]
    command = [sys.executable, str(TRAIN), *flags, "--checkpoint", str(checkpoint), "--log", str(log)]
    shown.start(setup.name)
    with tempfile.TemporaryDirectory(prefix="torchrig-demo-") as cache:
        follow(command, environment(cache), shown)
    return Run(setup.name, **json.loads(log.read_text()))


def environment(cache: str) -> dict[str, str]:
    """This process's variables with a cache of its own, and without settings that would change what is compared."""
    foreign = ("TORCHRIG_", "ACCELERATE_DYNAMO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "TORCHINDUCTOR_CACHE_DIR": cache}


def follow(command: list[str], variables: dict[str, str], shown: Shown) -> None:
    """Run a command and show its steps as they come; if it fails, say everything that it said and stop."""
    said: list[str] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=variables, text=True, **pipes) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            said.append(line)
            if line.startswith("step "):
                shown.step(int(line.split()[1].partition("/")[0]), line.rstrip())
    if process.returncode:
        sys.exit(f"{''.join(said)}\n{' '.join(command)} failed with exit status {process.returncode}")


def table(runs: list[Run]) -> Table:
    caption = f"first step: compiling included; steady: median of the steps after the first {WARM}"
    made = Table(title="12-layer byte-level Llama, trained on the standard library", caption=caption)
    for name in ("run", "first step s", "steady ms/step", "graphs", "breaks", "peak memory MB", "final loss"):
        made.add_column(name, justify="left" if name == "run" else "right")
    for run in runs:
        counts = (str(run.report["graphs"]), str(run.report["breaks"]))
        made.add_row(
            run.name, f"{run.first:.2f}", f"{run.steady:.1f}", *counts, f"{run.peak_mb:.0f}", f"{run.losses[-1]:.5f}"
        )
    return made


def verdicts(runs: list[Run]) -> list[tuple[str, bool]]:
    """What the comparison should show, with the figures seen, and whether it does."""
    eager, whole, regions = runs
    first = regions.first / whole.first
    steady = regions.steady / min(eager.steady, whole.steady)
    final = [run.losses[-1] for run in runs]
    apart = max(final) - min(final)
    compiled = all(run.report["ok"] and run.report["graphs"] for run in (whole, regions))
    return [
        (f"first step of regions is {first:.2f}x of whole's (at most 0.45x)", first <= 0.45),
        (f"steady step of regions is {steady:.2f}x of the better of eager and whole (at most 1.05x)", steady <= 1.05),
        (f"final losses are {apart:.1e} apart (at most 1e-3)", apart <= 1e-3),
        ("everything that was to be compiled was, without a break", compiled),
    ]


def draw(runs: list[Run], output: Path) -> None:
    """Write ``loss.png`` and ``time.png``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run, style in zip(runs, ("-", "--", ":"), strict=True):
        axes.plot(range(1, len(run.losses) + 1), run.losses, style, linewidth=2, label=run.name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The three runs learn the same")
    axes.legend()
    figure.savefig(output / "loss.png", dpi=120)

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    names = [run.name for run in runs]
    left.bar_label(left.bar(names, [run.first for run in runs]), fmt="%.1f")
    left.set(ylabel="seconds", title="First step, compiling included")
    right.bar_label(right.bar(names, [run.steady for run in runs]), fmt="%.0f")
    right.set(ylabel="milliseconds", title="Steady step (median)")
    figure.savefig(output / "time.png", dpi=120)


def continue_text(checkpoint: Path, length: int = 80) -> str:
    """Load the checkpoint into the bare model, strictly, and sample what follows the prompt."""
    import torch
    from train import CONTEXT, ByteLlama

    model = ByteLlama().eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True), strict=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        for _ in range(length):
            likely = torch.softmax(model(tokens[:, -CONTEXT:])[:, -1] / 0.5, dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(likely, 1, generator=generator)), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare eager training, whole-model compile and compiled regions.")
    parser.add_argument("--steps", type=int, default=60, help=f"training steps of each run, more than {WARM}")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="where plots, logs and checkpoint go")
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}: the first {WARM} are left out of the steady time")
    return options


if __name__ == "__main__":
    main()
