"""Checkpoints: what a training run needs to go on, under any strategy, written so that a kill tears nothing.

The data flows one way: :mod:`.contents` (with :mod:`.names`, :mod:`.optimizers`, :mod:`.randomness`) gives a tree of
values, :mod:`.leaves` parts it into tensors and plain values, :mod:`.storage` writes and reads the tensors with
``torch.distributed.checkpoint``, and :mod:`.folder` makes files of it that are whole or not there.
:mod:`.saving` and :mod:`.loading` do it on all ranks together (:mod:`.ranks`). Loading runs no code of a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    path: str | Path, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, **extra: Any
) -> None:
    """Save a training run, in place of what ``path`` held before.

    Saved are the model under the bare model's keys, optimizers' state by the names of the parameters, the random states
    of every rank (torch, its accelerator, Python, numpy), the loss scale where there is one, and ``extra``. Every rank
    calls it, under every strategy. Of what differs from rank to rank, rank 0's is kept, the random states excepted.

    Until the new checkpoint is complete and on the disk the previous one stays, whole; then it is replaced in one move.

    Args:
        path: The folder of the checkpoint, on a disk that all ranks share; made where it is not there.
        model: The model; prepared, wrapped, or neither.
        optimizer: The optimizer, or several.
        **extra: Anything else, by name: objects with ``state_dict`` and ``load_state_dict`` (LR schedulers, averaged
            models, samplers), tensors, and plain values (numbers, strings, bytes, lists, tuples, sets, dicts).

    Raises:
        CheckpointError: Something cannot be saved in a way that is safe to load, ``path`` holds something else than a
            checkpoint, or writing failed. It is raised on every rank, and the previous checkpoint is as it was.
        ArgumentError: ``model`` is no model, or ``optimizer`` no optimizer.

    Example:
        >>> import tempfile, torch, torchrig
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> folder = tempfile.mkdtemp()
        >>> torchrig.save_checkpoint(folder, model, optimizer, epoch=3)
        >>> torchrig.load_checkpoint(folder, model, optimizer)
        {'epoch': 3}
    """
    from .saving import save

    save(Path(path), model, optimizer, extra)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, **into: Any
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` saved, under any strategy, backend and number of ranks.

    Everything is checked first: the files against their checksums, keys and shapes against the model and the
    optimizers. When it raises, nothing was changed on any rank. Every rank calls it.

    Random states are restored too. Where the number of ranks is another, every rank takes rank 0's, with a warning.

    Args:
        path: The folder of the checkpoint.
        model: The model to load into; prepared, wrapped, or neither.
        optimizer: The optimizer to load into, or as many as were saved, in the same order; with or without state.
            ``None`` loads none, as for inference.
        **into: Objects among the extras to restore in place with ``load_state_dict``, by the name they were saved
            under.

    Returns:
        The extras by name. An object that had a ``state_dict`` comes back itself where it is among ``into``, and else
        as its state dict. Tensors are on the CPU.

    Raises:
        CheckpointError: There is no complete checkpoint, a file is damaged, or it does not fit; names the keys.
        ArgumentError: ``model`` is no model, ``optimizer`` no optimizer, or one of ``into`` cannot be loaded into.
    """
    from .loading import load

    return load(Path(path), model, optimizer, into)
