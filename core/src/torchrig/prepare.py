"""Run the plan's steps in order; if one raises, take back those before it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from . import loaders, placement, state, tree, usercompile
from .arguments import Arguments, sort
from .errors import AlreadyPreparedError, AmbiguousPluginError
from .hookspecs import Region, Step, Wrapped
from .plan import Draft, draft, resolve
from .tree import Undo

if TYPE_CHECKING:
    import pluggy
    from torch.optim import Optimizer

    from .observe import Observation
    from .settings import Settings

Drafting = Callable[[nn.Module, Arguments, "Settings"], Draft]


def prepare(model: nn.Module, *others: Any, settings: Settings | None = None, **overrides: Any) -> Any:
    """Make a model distributed and compiled, in the right order, and leave the training loop plain PyTorch.

    Args:
        model: The model to train or to run.
        *others: Optimizers, LR schedulers, DataLoaders, loss functions, and further models, in any order.
        settings: The settings to start from; by default those of the environment
            (``TORCHRIG_*`` variables, and the YAML file that ``TORCHRIG_CONFIG`` names).
        **overrides: Single settings, such as ``backend="inductor"``; they win over everything else.

    Returns:
        What was given, in the same order: the model alone, or a tuple. Under a strategy that works in place the model
        is the very object that was given.

    Raises:
        SettingsError: A setting cannot be used; names where it came from.
        ArgumentError: Something given cannot be prepared.
        BackendError, StrategyError, PluginError: A plugin is missing, broken, or cannot run here.
        RegionError: The regions asked for are not in the model.
        AlreadyPreparedError: The model was prepared before, with other settings.

    When it raises, the model, the optimizers and the loaders are as they were. Called again with the same settings on a
    prepared model, it gives back what it made before.

    Example:
        >>> import torch, torchrig
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = torchrig.prepare(model, optimizer, backend="eager")
    """
    made = carry_out(sort(model, others), resolve(settings, overrides), draft)
    return made if others else made[0]


def carry_out(arguments: Arguments, settings: Settings, drafting: Drafting) -> tuple[Any, ...]:
    """Draft a plan for each model that is not prepared yet, carry them all out, and give back what was given."""
    undos: list[Undo] = []
    try:
        runs = _runs(arguments, settings, drafting, undos)
        for run in runs:
            run.run()
        replaced: dict[int, Any] = {id(run.given): run.model for run in runs}
        for loader in arguments.loaders if runs else ():
            replaced[id(loader)] = loaders.place(loader, runs[0].draft.plan.device)
    except BaseException:
        for undo in reversed(undos):
            undo()
        raise
    for run in runs:
        run.remember(settings)
    return tuple(_replacement(each, replaced) for each in arguments.given)


def _runs(arguments: Arguments, settings: Settings, drafting: Drafting, undos: list[Undo]) -> list[_Run]:
    """A run for each model that is not prepared yet, planned before any of them begins."""
    fresh = [each for each in arguments.models if not _prepared_alike(each, settings)]
    taken = [usercompile.take_off(each, settings, undos) for each in fresh]
    return [
        _Run(given, each.model, drafting(each.model, arguments, each.settings), arguments, undos)
        for given, each in zip(fresh, taken, strict=True)
    ]


def _prepared_alike(model: nn.Module, settings: Settings) -> bool:
    before = state.recall(model)
    if before is None:
        return False
    if before.settings != settings:
        raise AlreadyPreparedError(
            f"This {type(model).__name__} is prepared already, with other settings: "
            f"{_difference(before.settings, settings)}. "
            "Take it off first: model = torchrig.unwrap(model, keep_compile=False)."
        )
    return True


def _difference(before: Settings, now: Settings) -> str:
    old, new = before.to_dict(), now.to_dict()
    return ", ".join(
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in new if old.get(name) != new[name]
    )


def _replacement(given: Any, replaced: dict[int, Any]) -> Any:
    if id(given) in replaced:
        return replaced[id(given)]
    before = state.recall(given) if isinstance(given, nn.Module) else None
    live = None if before is None else before.live()
    return given if live is None else live


class _Run:
    """One model on its way through the steps of its plan."""

    def __init__(
        self, given: nn.Module, model: nn.Module, drafted: Draft, arguments: Arguments, undos: list[Undo]
    ) -> None:
        self.given = given
        self.original = model
        self.model = model
        self.draft = drafted
        self.optimizers: tuple[Optimizer, ...] = arguments.optimizers_of(model)
        self.undos = undos
        self.observation = _observe(drafted)

    def run(self) -> None:
        """Do each step."""
        do = {"transform": self._transform, "compile": self._compile, "wrap": self._wrap}
        for step in self.draft.plan.steps:
            if step.action in do:
                do[step.action](step)

    def _transform(self, step: Step) -> None:
        self.undos.append(tree.snapshot(self.model))
        hook = _only(self.draft.hooks, "transform", step.by)
        (self.model,) = hook(model=self.model, plan=self.draft.plan)

    def _compile(self, step: Step) -> None:
        from .regions import resolve as module_at

        region, places = step.region, tree.Places(self.model)
        assert region is not None
        assert self.observation is not None
        compiler = placement.RegionCompiler(region, self.draft.plan.compile_kwargs, self.observation)
        for instance in region.instances:
            module = module_at(self.model, instance)
            own = self._own_way(module, region)
            if own is None:
                own, undo = compiler.compile(module, self.draft.plan.settings.placement)
                self.undos.append(undo)
            if own is module:
                continue
            if region.whole:
                self.model = own
            else:
                self.undos.append(places.replace(module, own))

    def _own_way(self, module: nn.Module, region: Region) -> nn.Module | None:
        """What a plugin made of a region in a way of its own; ``None`` when every plugin left it to torchrig."""
        hooks, plan = self.draft.hooks, self.draft.plan
        if not hooks.hook.compile_region.get_hookimpls():
            return None
        assert self.observation is not None
        kwargs = {**plan.compile_kwargs, "backend": self.observation.backend_of(region), "mode": None, "options": None}
        answers: dict[str, nn.Module] = {}
        for name, _ in hooks.list_name_plugin():
            for answer in _only(hooks, "compile_region", name)(module=module, region=region, kwargs=kwargs, plan=plan):
                answers[name] = answer
        if len(answers) > 1:
            raise AmbiguousPluginError(
                f"Both {' and '.join(answers)} want to compile region {region.kind} in a way of their own; "
                "use one of them at a time."
            )
        return next(iter(answers.values()), None)

    def _wrap(self, step: Step) -> None:
        hook = _only(self.draft.hooks, "wrap_strategy", step.by)
        wrapped: Wrapped
        (wrapped,) = hook(model=self.model, optimizers=self.optimizers, plan=self.draft.plan)
        self.undos.append(wrapped.undo)
        self.model, self.optimizers = wrapped.model, wrapped.optimizers

    def remember(self, settings: Settings) -> None:
        """Keep what was made, and look at what compiled once the model has run."""
        live = weakref.ref(self.model)
        kept = state.Prepared(settings, self.draft.plan, self.observation, self.draft.hooks, live)
        for module in {id(each): each for each in (self.given, self.original, self.model)}.values():
            state.remember(module, kept)
        if self.observation is not None:
            placement.after_first_call(self.model, _check_compiled)


def _observe(drafted: Draft) -> Observation | None:
    if not drafted.plan.regions:
        return None
    from . import dynamo
    from .observe import Observation, ObservedBackend
    from .problems import Policy

    settings = drafted.plan.settings
    policy = Policy(drafted.plan.backend, settings.on_failure, settings.on_problem.model_dump())
    backend = ObservedBackend(dynamo.configured_backend(drafted.plan.compile_kwargs), policy)
    observation = Observation(backend, policy)
    for region in drafted.plan.regions:
        observation.record(region)
    return observation


def _only(hooks: pluggy.PluginManager, hook: str, name: str) -> Any:
    """The hook's implementation in the plugin of that name alone."""
    others = [plugin for plugin in hooks.get_plugins() if hooks.get_name(plugin) != name]
    return hooks.subset_hook_caller(hook, others)


def _check_compiled(model: nn.Module) -> None:
    """Report the regions that the first forward did not compile."""
    prepared = state.recall(model)
    if prepared is not None and prepared.observation is not None:
        prepared.observation.check_compiled()
