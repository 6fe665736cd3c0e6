"""What becomes of a problem with compiled code, and what a person is told of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import CompileProblem, CompileProblemWarning


@dataclass(frozen=True)
class Policy:
    """What the settings say is to be done about a problem.

    Args:
        backend: The backend's name, for messages.
        on_failure: ``"raise"`` or ``"eager"``: what to do when compiling raises.
        on_problem: ``"warn"``, ``"raise"`` or ``"ignore"`` for each kind of problem.
    """

    backend: str
    on_failure: str
    on_problem: Mapping[str, str]

    def handle(self, kind: str, problem: CompileProblem) -> None:
        """Raise, warn about or ignore a problem."""
        action = self.on_problem[kind]
        if action == "raise":
            raise problem
        if action == "warn":
            self.warn(f"{type(problem).__name__}: {problem}")

    def warn(self, message: str) -> None:
        """Warn, with a category of torchrig's."""
        warnings.warn(message, CompileProblemWarning, stacklevel=2)


def first_line(text: str) -> str:
    """The first line of one of PyTorch's long messages, without the comment after a guard."""
    return text.strip().splitlines()[0].split("  # ")[0].strip() if text.strip() else text


# what a failed guard says (a regular expression) -> what can be done about it
_HINTS = (
    (r"cache", "It is a cache's state: pass use_cache=False while training; while generating, let it be static."),
    (r"past_key_value", "Pass use_cache=False while training."),
    (
        r"___check_type_id",
        "Its instances hold modules of different classes; parametrized modules have one class each.",
    ),
    (
        r"param_groups.*\['lr'\]",
        "This step makes a number of its learning rate, and a scheduler changes it. Leave the optimizer uncompiled "
        "(compile_optimizer=False) if it goes on.",
    ),
    (
        r"param_groups.*\['\w+'\]",
        "A scheduler changes this number of the optimizer's; in a compiled step only lr may change. Leave this "
        "optimizer uncompiled (compile_optimizer=False).",
    ),
    (r"self\.state\b", "The optimizer's state came to be, or was loaded: it costs one more graph."),
    (
        r"requires_grad",
        "Its inputs differ in requires_grad between calls, as behind a frozen embedding: the first block then needs no "
        "gradient for its input, and has a graph without it.",
    ),
    (
        r"^2 <= |expected 1, actual|actual 1$",
        "PyTorch gives size 1 a graph of its own: pad, or drop the last batch (drop_last=True).",
    ),
    (
        r"'NoneType' object has no attribute 'size'",
        "One instance's input is a view of another tensor, as what a Linear gives for three dimensions is, and "
        "another's is not; with open shapes PyTorch tells them apart.",
    ),
    (
        r"size mismatch at index 0",
        "Dimension 0 varies: give prepare the loader whose batches do, or mark dimension 0 dynamic with dynamic=True.",
    ),
    (r"size mismatch", "Its input's shape varies: pass dynamic=True, or pad to one shape."),
    (
        r"size\(\)\[.*==",
        "What it does depends on its input's shape: pad to few shapes.",
    ),
    (r"stride mismatch", "Its input's strides vary: make it contiguous before the block."),
    (r"grad_mode", "It runs with and without gradients; each needs a graph."),
    (r"_forward_hooks", "A hook was put on one of its children after the first call."),
    (
        r"==",
        "Its instances differ in this value, so each value needs a graph: make it an argument, or split the class.",
    ),
)


def hint_for(guard: str) -> str:
    """What can be done about a guard that failed; empty when nothing is known."""
    return next((hint for mark, hint in _HINTS if re.search(mark, guard)), "")


_BREAK_HINTS = (
    ("generic_jump", "A branch reads a tensor's value: use torch.where or torch.cond, or leave it out of the region."),
    ("Data-dependent branching", "Use torch.where or torch.cond, or leave the branch out of the region."),
    ("`print`", "Leave it out while training, or guard it with torch.compiler.is_compiling()."),
    ("_warnings.warn", "Guard the warning with torch.compiler.is_compiling()."),
    ("graph_break()", "Remove the torch._dynamo.graph_break() call."),
    ("disable", "Remove the torch.compiler.disable, or exclude the module that calls what is disabled."),
)
_NO_ADVICE = ("Please ", "It may be possible", "This graph break is fundamental")  # of no use to a user


def break_hint(reason: str) -> str:
    """What can be done about a graph break: torchrig's own advice, else Dynamo's; empty when there is none.

    Args:
        reason: Dynamo's message, all its lines.
    """
    own = next((hint for mark, hint in _BREAK_HINTS if mark in first_line(reason)), "")
    own = own or next((hint for mark, hint in _BREAK_HINTS if mark in reason.partition("Developer debug")[0]), "")
    given = [line.strip().removeprefix("Hint: ") for line in reason.splitlines() if line.strip().startswith("Hint: ")]
    return own or next((hint for hint in given if not hint.startswith(_NO_ADVICE)), "")
