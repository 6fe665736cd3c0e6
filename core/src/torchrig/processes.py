"""The processes of a run: which one this is, which device is its own, and the process group that joins them.

What ``torchrun`` starts is told by its variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
``MASTER_PORT``). A group that somebody else started, the user's script or a library, is used as it is.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import SettingsError, StrategyUnavailable
from .tree import Undo

RANK, WORLD_SIZE, LOCAL_RANK = "RANK", "WORLD_SIZE", "LOCAL_RANK"
_WHERE = ("MASTER_ADDR", "MASTER_PORT")
_HOST = ("cpu", "meta")  # device types that are not counted


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Args:
        rank: Which one this is, from 0.
        size: How many there are.
        local_rank: Which one this is of those on this machine, from 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def world() -> World:
    """The processes of this run: those of the process group, else those of torchrun's variables, else this one alone.

    Starts nothing.

    Raises:
        StrategyUnavailable: A variable is missing.
        SettingsError: A variable is no number that it can be.
    """
    if has_group():
        rank = dist.get_rank()
        return World(rank, dist.get_world_size(), _number(LOCAL_RANK, default=rank))
    if not launched():
        return World()
    size = _number(WORLD_SIZE, least=1)
    rank = _number(RANK, default=0 if size == 1 else None, below=size, of=WORLD_SIZE)
    return World(rank, size, _number(LOCAL_RANK, default=0 if size == 1 else None))


def has_group() -> bool:
    """Whether the default process group is there."""
    return dist.is_available() and dist.is_initialized()


def launched() -> bool:
    """Whether a launcher such as torchrun says how many processes there are."""
    return bool(os.environ.get(WORLD_SIZE))


def own_device(device: torch.device) -> torch.device:
    """The device of this process, where one was named without an index: that of its local rank.

    Args:
        device: Such as ``cuda``, ``cuda:1`` or ``cpu``.

    Raises:
        StrategyUnavailable: There are more processes on this machine than devices.
    """
    if device.index is not None or device.type in _HOST or not launched():
        return device
    local_rank, count = world().local_rank, torch.accelerator.device_count()
    if local_rank >= count:
        raise StrategyUnavailable(
            f"This process has LOCAL_RANK={local_rank}, and this machine has {count} {device.type} devices. "
            f"Start as many processes as there are devices: torchrun --nproc-per-node {count}."
        )
    return torch.device(device.type, local_rank)


def start(device: torch.device) -> Undo:
    """Start the default process group where there is none: by torchrun's variables, else of this process alone.

    It uses gloo for tensors on the CPU, and for those on ``device`` what PyTorch has for it, NCCL on CUDA. It is
    destroyed when the interpreter exits.

    Args:
        device: The device of this process. It is made the current one of its type.

    Returns:
        A function that takes it back; one that does nothing where a group was there already.

    Raises:
        StrategyUnavailable: This PyTorch has no distributed package, a variable is missing, or the processes do not
            find each other.
        SettingsError: A variable is no number that it can be.
    """
    if not dist.is_available():
        raise StrategyUnavailable("This PyTorch was built without torch.distributed.")
    if has_group():
        return lambda: None
    here = world()
    restore = _make_current(device)
    try:
        _start(here, device)
    except BaseException:
        restore()
        raise
    atexit.register(_destroy_at_exit)

    def undo() -> None:
        destroy()
        restore()

    return undo


def destroy() -> None:
    """Destroy the group that :func:`start` started."""
    atexit.unregister(_destroy_at_exit)
    if has_group():
        dist.destroy_process_group()


def _start(here: World, device: torch.device) -> None:
    backend, bound = "gloo", None
    if device.type not in _HOST:
        backend, bound = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}", device
    missing = [name for name in _WHERE if not os.environ.get(name)]
    if here.size == 1 and missing:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public by its documentation
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound)
        return
    if missing:
        raise StrategyUnavailable(
            f"WORLD_SIZE={here.size} is set, and {' and '.join(missing)} not: the processes cannot find each other. "
            f"Start the script with torchrun --nproc-per-node {here.size}, or set them."
        )
    try:
        dist.init_process_group(backend, rank=here.rank, world_size=here.size, device_id=bound)
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ[name] for name in _WHERE)
        raise StrategyUnavailable(
            f"Process {here.rank} of {here.size} could not join the others at {where} (MASTER_ADDR:MASTER_PORT): "
            f"{str(error).splitlines()[0]}"
        ) from error


def _make_current(device: torch.device) -> Undo:
    if device.type in _HOST:
        return lambda: None
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device)
    return lambda: torch.accelerator.set_device_index(before)


def _destroy_at_exit() -> None:
    # After an error the other processes may wait for this one in a collective, and NCCL's destruction for them:
    # exiting is what ends all of them.
    if not hasattr(sys, "last_value") and has_group():
        dist.destroy_process_group()


def _number(name: str, *, default: int | None = None, least: int = 0, below: int | None = None, of: str = "") -> int:
    text = os.environ.get(name) or ("" if default is None else str(default))
    if not text:
        raise StrategyUnavailable(
            f"{WORLD_SIZE}={os.environ.get(WORLD_SIZE)} is set, and {name} not. Start the script with torchrun, which "
            "sets both, or unset the one."
        )
    if not text.isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        wanted = f"a number from {least}" + (" up" if below is None else f" to {below - 1}, as {of} is {below}")
        message = f"{name} is {text!r}, and must be {wanted}; torchrun sets it."
        raise SettingsError(message, setting="strategy", origin=f"variable {name}")
    return int(text)
