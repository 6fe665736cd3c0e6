"""What a person sees while regions are compiled ahead: a bar for each kind, or plain lines where nobody watches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Task
    from rich.text import Text

    from .records import KindRecord


class Progress(Protocol):
    """Is told of each mode that all kinds were run in."""

    def done(self, mode: str) -> None:
        """Every kind was run in ``mode``."""


@contextmanager
def shown(records: Mapping[str, KindRecord], modes: Sequence[str], *, speaks: bool) -> Iterator[Progress]:
    """Show on standard error how far each region kind is.

    Args:
        records: What is seen of each kind.
        modes: The modes they are to be run in.
        speaks: Whether this process shows anything; ``TORCHRIG_QUIET=1`` silences it too.
    """
    if not speaks or os.environ.get("TORCHRIG_QUIET", "") not in ("", "0"):
        yield _Silent()
    elif sys.stderr.isatty():
        with _bars(records, modes) as bars:
            yield bars
    else:
        yield _Lines(records)


class _Silent:
    def done(self, mode: str) -> None:
        """Say nothing."""


class _Lines:
    """One line for each kind and mode."""

    def __init__(self, records: Mapping[str, KindRecord]) -> None:
        self._records = records

    def done(self, mode: str) -> None:
        """Print a line for each kind."""
        for name, record in self._records.items():
            print(f"warm-up, {mode}: {_label(name, record)}: {_state(record)}", file=sys.stderr, flush=True)


@contextmanager
def _bars(records: Mapping[str, KindRecord], modes: Sequence[str]) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class StateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_state(records[task.fields["kind"]]))

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), StateColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as rich:
        tasks = [rich.add_task(_label(name, record), total=len(modes), kind=name) for name, record in records.items()]

        class Bars:
            def done(self, mode: str) -> None:
                for task in tasks:
                    rich.advance(task)

        yield Bars()


def _label(name: str, record: KindRecord) -> str:
    return name if record.region.whole else f"{name} x{len(record.region.instances)}"


def _state(record: KindRecord) -> str:
    graphs = f"{record.graphs} graph{'' if record.graphs == 1 else 's'}"
    return f"{graphs}, {record.seconds:.1f} s{', runs eager' if record.fallbacks else ''}"
