"""The settings under ``fsdp2``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from torchrig import Plan

NAME = "fsdp2"


def _word(value: Any) -> Any:
    """What a variable of the environment can say for ``None`` and the truth values."""
    words = {"none": None, "null": None, "true": True, "false": False}
    return words.get(value.strip().casefold(), value) if isinstance(value, str) else value


class FSDP2Settings(BaseModel):
    """How a model is sharded.

    Args:
        reshard_after_forward: As ``fully_shard`` takes it. ``True`` frees the gathered parameters of a unit after its
            forward, and gathers them again in the backward; ``False`` keeps them; a number is the size of the group
            that keeps them together. ``None`` is ``True``, but for the root, whose backward comes at once.
        units: What is gathered at one time. ``"regions"``: each repeated block, and the rest with the root.
            ``"large"``: also each module outside the blocks, such as an embedding or a head, that has as many
            parameters as a block. ``"root"``: the whole model.
        replicate: How many replicas of the sharded model there are (HSDP). It divides the number of processes.
        tensor_parallel: The size of the mesh dimension ``"tp"`` that ``parallelize`` is given.
        cpu_offload: Keep the shards, their gradients and the optimizer's state in the memory of the host.
        offload_pin_memory: Whether that memory is pinned; where there is no accelerator it never is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reshard_after_forward: Annotated[bool | int | None, BeforeValidator(_word)] = None
    units: Literal["regions", "large", "root"] = "regions"
    replicate: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    cpu_offload: bool = False
    offload_pin_memory: bool = True


def of(plan: Plan) -> FSDP2Settings:
    """The settings of a plan."""
    return plan.settings.validate_block(NAME, FSDP2Settings)
