"""The demo: train one model eager, compiled whole and compiled by regions, and compare.

Runs ``train.py`` three times, each in a fresh process with an empty compile cache of its own. Their first steps come
one after the other, each alone on the machine; after that the three take turns, a few steps each, so that a machine
that grows slower meanwhile is as slow for all. Prints one table, draws the losses and the times, then loads the
checkpoint into the bare model and lets it continue a line of code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
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
WARM = 8  # steps left out of the steady time: compiling, allocating, settling
TURN = 6  # steps that a training makes before it is stopped and the next one goes on
PROMPT = "def __init__(self, "


@dataclass(frozen=True)
class Setup:
    """One way to train: its name in the table, and the flags of ``train.py`` that choose it."""

    name: str
    backend: str
    regions: str
    strategy: str = "single"
    processes: int = 1

    @property
    def launcher(self) -> list[str]:
        """What starts ``train.py``: this Python, or torchrun on this machine alone."""
        if self.processes == 1:
            return [sys.executable]
        here = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.processes), *here]


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
        """Milliseconds of a step once warm: the median, which a busy moment of the machine does not move.

        The first step of each turn is left out: it had begun when the training was stopped.
        """
        return 1e3 * statistics.median(own for index, own in enumerate(self.seconds[WARM:]) if index % TURN)


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    started = time.perf_counter()
    checkpoint = options.output / "model.pt"
    with progress_of(console, options.steps) as shown, contextlib.ExitStack() as stack:
        trainings = [stack.enter_context(training(setup, options, checkpoint)) for setup in SETUPS]
        runs = take_turns(trainings, shown)
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
    # How fast a machine is on the day fails nobody; that the runs learn the same, and compiled, must hold everywhere.
    sys.exit(not all(holds for line, holds in met if "step of" not in line))


class Shown:
    """Progress of the three trainings: bars on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, steps: int, bars: Progress | None) -> None:
        self.console, self.steps, self.bars = console, steps, bars
        self.tasks: dict[str, TaskID] = {}

    def start(self, name: str) -> None:
        """A training begins; its first step compiles, so nothing may move for a while."""
        if self.bars is not None:
            self.tasks[name] = self.bars.add_task(name, total=self.steps, note="first step")
        else:
            self.console.print(f"{name}: first step ...", highlight=False)

    def step(self, name: str, number: int, line: str) -> None:
        """Step ``number`` is done; ``line`` is what ``train.py`` says of it."""
        if self.bars is not None:
            self.bars.update(self.tasks[name], completed=number, note=line.partition("  ")[2])
        elif number == 1 or number % 20 == 0:
            self.console.print(f"  {name:8} {line}", highlight=False)


@contextmanager
def progress_of(console: Console, steps: int) -> Iterator[Shown]:
    if not console.is_terminal:
        yield Shown(console, steps, None)
        return
    columns = (TextColumn("{task.description:8}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as bars:
        yield Shown(console, steps, bars)


@dataclass
class Training:
    """``train.py`` in a process of its own, which can be made to wait."""

    name: str
    command: list[str]
    variables: dict[str, str]
    log: Path
    steps: int
    done: int = 0
    process: subprocess.Popen[str] | None = None

    def go_on(self, until: int, shown: Shown) -> None:
        """Run until step ``until`` is done, then wait; if the training fails, say everything that it said and stop."""
        if self.process is None:
            shown.start(self.name)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(self.command, env=self.variables, text=True, **pipes)  # type: ignore[call-overload]
        else:
            self.process.send_signal(signal.SIGCONT)
        said: list[str] = []
        for line in self.process.stdout or ():
            said.append(line)
            if line.startswith("step "):
                self.done = int(line.split()[1].partition("/")[0])
                shown.step(self.name, self.done, line.rstrip())
                if self.done == until < self.steps:
                    self.process.send_signal(signal.SIGSTOP)
                    return
        if self.process.wait():
            sys.exit(f"{''.join(said)}\n{' '.join(self.command)} failed with exit status {self.process.returncode}")

    def result(self) -> Run:
        """What was measured."""
        return Run(self.name, **json.loads(self.log.read_text()))


@contextmanager
def training(setup: Setup, options: argparse.Namespace, checkpoint: Path) -> Iterator[Training]:
    """A training with an empty Inductor cache; ended with the block, if it has not ended by itself."""
    log = options.output / f"{setup.name}.json"
    flags = ["--backend", setup.backend, "--regions", setup.regions, "--steps", str(options.steps)]
    flags += ["--strategy", setup.strategy]
    command = [*setup.launcher, str(TRAIN), *flags, "--checkpoint", str(checkpoint), "--json", str(log)]
    with tempfile.TemporaryDirectory(prefix="torchrig-demo-", ignore_cleanup_errors=True) as cache:
        made = Training(setup.name, command, environment(cache), log, options.steps)
        try:
            yield made
        finally:
            if made.process is not None and made.process.poll() is None:
                end(made.process)


def end(process: subprocess.Popen[str]) -> None:
    """End a training that may have been stopped; torchrun gets the time to end its ranks."""
    process.terminate()
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def take_turns(trainings: list[Training], shown: Shown) -> list[Run]:
    """Warm each training up alone, then let them go on in turns until all are done."""
    for each in trainings:
        each.go_on(WARM, shown)
    while any(each.done < each.steps for each in trainings):
        for each in trainings:
            if each.done < each.steps:
                each.go_on(each.done + TURN, shown)
    return [each.result() for each in trainings]


def environment(cache: str) -> dict[str, str]:
    """This process's variables with a cache of its own, and without settings that would change what is compared."""
    foreign = ("TORCHRIG_", "ACCELERATE_DYNAMO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "TORCHINDUCTOR_CACHE_DIR": cache}


def table(runs: list[Run], how: str = "in turns") -> Table:
    caption = f"first step: compiling included; steady: median of the steps after the first {WARM}, {how}"
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
        (f"first step of regions is {first:.3f}x of whole's (at most 0.45x)", first <= 0.45),
        (f"steady step of regions is {steady:.3f}x of the better of eager and whole (at most 1.05x)", steady <= 1.05),
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
            likely = torch.softmax(model(tokens[:, -CONTEXT:])[:, -1] / 0.9, dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(likely, 1, generator=generator)), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare eager training, whole-model compile and compiled regions.")
    parser.add_argument("--steps", type=int, default=38, help=f"training steps of each run, more than {WARM}")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="where plots, logs and checkpoint go")
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}: the first {WARM} are left out of the steady time")
    return options


if __name__ == "__main__":
    main()
