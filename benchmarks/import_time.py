"""What ``import torchrig`` costs on top of ``import torch``.

Fresh processes, taken in turns so that a busy machine slows both alike; the medians are compared. The last line is
measured inside one process each, torch first, and so is the less noisy figure.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

TIMED = """
from time import perf_counter as now
start = now(); import {first}; between = now(); import torchrig; print(between - start, now() - between)
"""


def main() -> None:
    rounds = parse().rounds
    torch_alone, both, on_top = [], [], []
    seconds_of("torch")  # the files are in the system's cache from here on
    for _ in range(rounds):
        torch_seconds, rest = seconds_of("torch")
        torch_alone.append(torch_seconds)
        on_top.append(rest)
        both.append(seconds_of("torchrig")[0])
    rows = {
        "import torch": statistics.median(torch_alone),
        "import torchrig": statistics.median(both),
        "difference of the medians": statistics.median(both) - statistics.median(torch_alone),
        "import torchrig after torch": statistics.median(on_top),
    }
    print(f"{rounds} fresh processes each; the aim is at most 0.4 s on top of torch")
    for name, seconds in rows.items():
        print(f"  {name:30} {seconds:7.3f} s")


def seconds_of(first: str) -> tuple[float, float]:
    """Seconds that importing ``first`` takes in a fresh process, and torchrig after it."""
    command = [sys.executable, "-c", TIMED.format(first=first)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    one, two = said.split()
    return float(one), float(two)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What 'import torchrig' costs on top of 'import torch'.")
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes for each of the two")
    return parser.parse_args()


if __name__ == "__main__":
    main()
