"""``torchrig explain``: run one step of a model, and say what compiled, what broke, and what recompiled."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchrig.errors import ArgumentError

from .factory import build, build_batch, told, working_directory_first
from .options import as_json, settings_of, settings_options

if TYPE_CHECKING:
    from torchrig.trial import Trial


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option(
    "--batch", required=True, metavar="MODULE:BATCH", help="The batch: a tensor, tuple or dict, or what makes one."
)
@settings_options
@click.option("--eval", "evaluate", is_flag=True, help="Run it in eval mode, without gradients, forward only.")
@as_json
def explain(
    factory: str,
    batch: str,
    file: Path | None,
    pairs: tuple[str, ...],
    strategy: str | None,
    backend: str | None,
    evaluate: bool,
    as_json: bool,
) -> None:
    """Run one training step of the model that FACTORY() in MODULE returns, and print what was compiled of it.

    BATCH is passed as model(*batch) where it is a tuple or a list, as model(**batch) where it is a dict, else as
    model(batch). The loss is the output itself where it is a scalar, its loss, or the sum of its tensors.

    Exits with 1 where a region did not compile, broke, or fell back to eager.
    """
    settings = settings_of(file, pairs, strategy, backend)
    model, given = build(factory), build_batch(batch)
    from torchrig.trial import StepFailed, try_step

    try:
        with working_directory_first(), _without_pytorchs_account():
            trial = try_step(model, given, settings, train=not evaluate)
    except StepFailed as failed:
        cause = failed.__cause__
        assert cause is not None
        raise ArgumentError(f"The {failed.stage} of {factory} on {batch} raised {told(cause)}") from cause
    click.echo(_json(trial) if as_json else _text(trial))
    sys.exit(0 if trial.ok else 1)


@contextmanager
def _without_pytorchs_account() -> Iterator[None]:
    """Keep back the traceback that PyTorch logs of an operation that failed while it was traced: the error is told."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger.addFilter(is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(is_no_error)


def _json(trial: Trial) -> str:
    return json.dumps({**json.loads(trial.report.to_json()), "notes": list(trial.notes)}, indent=2)


def _text(trial: Trial) -> str:
    return "\n".join([*(f"note: {note}" for note in trial.notes), str(trial.report)])
