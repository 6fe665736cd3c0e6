"""One model on its way through the steps of its plan. Every change comes with how to take it back."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from . import besides, logs, placement, processes, state, trace, tree
from . import optimizers as rebinding
from .arguments import Arguments, kind_of
from .errors import AlreadyPreparedError, AmbiguousPluginError, ArgumentError, StrategyError, TorchrigWarning
from .hookspecs import Region, Share, StrategyInfo, Wrapped
from .plan import Draft
from .report import report
from .tree import Undo

if TYPE_CHECKING:
    from .observe import Observation
    from .records import KindRecord
    from .settings import Settings


BESIDES = ("compile loss", "compile optimizer")


class Run:
    """Carries out the plan of one model.

    Args:
        given: What ``prepare`` was given; a wrapper of the user's where there was one.
        model: The model itself.
        arguments: What prepare was given; the model's optimizers and losses are among it.
        drafting: Drafts the plan for a model.
        undos: Gets how to take back each thing done.
    """

    def __init__(
        self,
        given: nn.Module,
        model: nn.Module,
        arguments: Arguments,
        drafting: Callable[[nn.Module], Draft],
        undos: list[Undo],
    ) -> None:
        self.given = given
        self.model = model
        self.draft = drafting(model)
        self.optimizers = self._given_optimizers = arguments.optimizers_of(model)
        self.losses = self._given_losses = arguments.losses_of(given)
        self.share = Share()
        self._original = model
        self._drafting = drafting
        self._undos = undos
        self._observation: Observation | None = None

    def join_processes(self) -> None:
        """Start the process group that the strategy needs, where there is none."""
        info = self.draft.strategy.info
        assert isinstance(info, StrategyInfo)
        wanted = processes.launched() if info.process_group is None else info.process_group
        wrapping = any(step.action == "wrap" for step in self.draft.plan.steps)
        if wrapping and wanted and info.capabilities.distributed:
            self._undos.append(processes.start(self.draft.plan.device))

    def run(self) -> None:
        """Do each step."""
        if self.draft.transforms:
            self._transform()
        if self.draft.parallelize is not None:
            self._parallelize(self.draft.parallelize)
        self._observation = _observe(self.draft)
        places, instances = tree.Places(self.model), self._instances()
        for step in self.draft.plan.steps:
            if step.action == "compile":
                assert step.region is not None
                self._compile(step.region, instances[step.action, step.region.kind], places)
            elif step.action == "checkpoint":
                assert step.region is not None
                self._checkpoint(instances[step.action, step.region.kind])
            elif step.action == "wrap":
                self._wrap()
            logs.did(step)
        self._compile_besides()

    def replaced(self) -> dict[int, Any]:
        """What takes the place of what was given, by the identity of the latter."""
        given = (self.given, *self._given_optimizers, *self._given_losses)
        made = (self.model, *self.optimizers, *self.losses)
        return {id(old): new for old, new in zip(given, made, strict=True)}

    def remember(self, settings: Settings) -> None:
        """Keep what was made, and look at what compiled once the model has run."""
        live = weakref.ref(self.model)
        kept = state.Prepared(settings, self.draft.plan, self._observation, self.draft.hooks, live, self.share)
        for module in {id(each): each for each in (self.given, self._original, self.model)}.values():
            state.remember(module, kept)
        for module in self.model.modules():
            placement.drop_pending(module)  # of a part prepared before; it would be compiled along
        trace.artifact("torchrig_plan", self.draft.plan.to_json)
        if self._observation is not None:
            placement.after_first_call(self.model, _check_compiled)
        if self.model is not self._original:
            finalizer = weakref.finalize(self.model, _warn_when_run, weakref.ref(self._original), self._observation)
            finalizer.atexit = False

    def _transform(self) -> None:
        """Convert the model, then plan again: what repeats in it is what the transforms made."""
        from .plugins import ask

        self._undos.append(tree.snapshot(self.model))
        before = rebinding.parameters_by_name(self.model)
        for each in self.draft.transforms:
            self.model = ask(self.draft.hooks, each, "transform", nn.Module, model=self.model, plan=self.draft.plan)
        self._changed(before)

    def _parallelize(self, function: Callable[..., Any]) -> None:
        """Have the user's function parallelize the model over the strategy's mesh, then plan again."""
        from torch.distributed.device_mesh import DeviceMesh

        from .plugins import ask

        mesh = ask(self.draft.hooks, self.draft.strategy, "device_mesh", DeviceMesh, plan=self.draft.plan)
        self._undos.append(tree.snapshot(self.model))
        before = rebinding.parameters_by_name(self.model)
        made = function(self.model, mesh)
        if made is not None and not isinstance(made, nn.Module):
            raise ArgumentError(f"parallelize must return the model or None, and returned {kind_of(made)}.")
        self.model = self.model if made is None else made
        self._changed(before)

    def _changed(self, before: Mapping[str, nn.Parameter]) -> None:
        """Bind the optimizers to the model as it is now, and plan again."""
        after = rebinding.parameters_by_name(self.model)
        for optimizer in self.optimizers:
            self._undos.append(rebinding.rebind(optimizer, before, after))
        self.draft = self._drafting(self.model)

    def _instances(self) -> dict[tuple[str, str], list[nn.Module]]:
        """The modules of each step's region, looked up before a strategy wraps the model and their names change."""
        from .regions import resolve

        asked = [(step.action, step.region) for step in self.draft.plan.steps if step.region is not None]
        return {
            (action, region.kind): [resolve(self.model, name) for name in region.instances]
            for action, region in asked
            if action not in BESIDES
        }

    def _checkpoint(self, instances: list[nn.Module]) -> None:
        from . import recompute

        checkpointer = recompute.Checkpointer(recompute.saved(self.draft.plan.settings))
        self._undos += [checkpointer.put(module) for module in instances]

    def _compile(self, region: Region, instances: list[nn.Module], places: tree.Places) -> None:
        assert self._observation is not None
        compiler = self._compiler(region)
        known = {id(module): layer.record for module in instances if (layer := placement.compile_layer(module))}
        self._adopt(region, list(known.values()), whole=len(known) == len(instances))
        for module in instances:
            if id(module) in known:
                continue
            own = self._own_way(module, region)
            if own is None:
                own, undo = compiler.compile(module, self._placement())
                self._undos.append(undo)
            if own is module:
                continue
            if module is self.model:
                self.model = own
            else:
                self._undos.append(places.replace(module, own))

    def _placement(self) -> str:
        """As asked; on the ``forward`` in any case where a checkpoint is to go around what is compiled."""
        steps = [step.action for step in self.draft.plan.steps]
        around = "checkpoint" in steps and steps.index("compile") < steps.index("checkpoint")
        return "forward" if around else self.draft.plan.settings.placement

    def _compile_besides(self) -> None:
        """Compile the losses and the optimizers' steps, where the plan says so."""
        regions = {
            action: [step.region for step in self.draft.plan.steps if step.action == action and step.region is not None]
            for action in BESIDES
        }
        compiled: list[Callable[..., Any]] = []
        for region, loss in zip(regions["compile loss"], self.losses, strict=False):
            made, undo = besides.compile_loss(loss, self._compiler(region))
            self._undos.append(undo)
            compiled.append(made)
        self.losses = tuple(compiled) or self.losses
        steps = [each for each in self.optimizers if not besides.is_fused(each)]
        for region, optimizer in zip(regions["compile optimizer"], steps, strict=False):
            self._undos.append(besides.compile_step(optimizer, self._compiler(region)))

    def _compiler(self, region: Region) -> placement.RegionCompiler:
        assert self._observation is not None
        plan = self.draft.plan
        varies = None if plan.dynamic_batch is None else plan.dynamic_batch.varies
        return placement.RegionCompiler(region, plan.compile_kwargs, self._observation, varies)

    def _adopt(self, region: Region, records: list[KindRecord], whole: bool) -> None:
        """Report under this model too what was compiled before: by a copy, or as part of another model."""
        assert self._observation is not None
        for record in {id(each): each for each in records}.values():
            if not self._observation.adopt(region, record, whole):
                raise AlreadyPreparedError(
                    f"Some {region.kind} of this {self.draft.plan.model} are compiled already, with backend "
                    f"{record.policy.backend!r} and other settings. Take that off first: "
                    "torchrig.unwrap(model, keep_compile=False)."
                )

    def _own_way(self, module: nn.Module, region: Region) -> nn.Module | None:
        """What a plugin made of an instance in a way of its own; ``None`` when every plugin left it to torchrig."""
        hooks, plan = self.draft.hooks, self.draft.plan
        if not hooks.hook.compile_region.get_hookimpls():
            return None
        assert self._observation is not None
        self._undos.append(tree.snapshot(module))
        kwargs = {**plan.compile_kwargs, "backend": self._observation.backend_of(region), "mode": None, "options": None}
        answers: dict[str, nn.Module] = {}
        for name, plugin in hooks.list_name_plugin():
            alone = hooks.subset_hook_caller(
                "compile_region", [each for each in hooks.get_plugins() if each is not plugin]
            )
            for answer in alone(module=module, region=region, kwargs=kwargs, plan=plan):
                answers[name] = answer
        if len(answers) > 1:
            raise AmbiguousPluginError(
                f"Both {' and '.join(answers)} want to compile region {region.kind} in a way of their own; "
                "use one of them at a time."
            )
        return next(iter(answers.values()), None)

    def _wrap(self) -> None:
        from .plugins import ask

        strategy, plan = self.draft.strategy, self.draft.plan
        arguments = {"model": self.model, "optimizers": self.optimizers, "plan": plan}
        wrapped: Wrapped = ask(self.draft.hooks, strategy, "wrap_strategy", Wrapped, **arguments)
        self._undos.append(wrapped.undo)
        if len(wrapped.optimizers) != len(self.optimizers):
            raise StrategyError(
                f"Strategy {strategy.name!r} was given {len(self.optimizers)} optimizers and gave back "
                f"{len(wrapped.optimizers)}; it must give back one for each, in the same order."
            )
        self.model, self.optimizers = wrapped.model, tuple(wrapped.optimizers)
        self.share = self._own_share() if wrapped.share is None else wrapped.share

    def _own_share(self) -> Share:
        """One part of the samples for each process."""
        if not self.draft.strategy.info.capabilities.distributed:
            return Share()
        here = processes.world()
        return Share(here.rank, here.size)


def _observe(drafted: Draft) -> Observation | None:
    if not drafted.plan.regions:
        return None
    from . import dynamo
    from .observe import Observation, ObservedBackend
    from .problems import Policy

    plan, settings = drafted.plan, drafted.plan.settings
    policy = Policy(plan.backend, settings.on_failure, settings.on_problem.model_dump())
    backend = ObservedBackend(dynamo.configured_backend(plan.compile_kwargs), policy)
    beside = [step.region for step in plan.steps if step.action in BESIDES and step.region is not None]
    return Observation(backend, policy, plan.compile_kwargs, plan.regions, beside)


def _warn_when_run(original: weakref.ref[nn.Module], observation: Observation | None) -> None:
    """What prepare gave back is gone, and was never run: say so if the model it was made of runs instead."""
    model = original()
    if model is None or (observation is not None and any(record.graphs for record in observation.records.values())):
        return
    placement.after_first_call(model, _result_dropped)


def _result_dropped(model: nn.Module) -> None:
    warnings.warn(
        f"This {type(model).__name__} was given to prepare, and what prepare gave back was dropped: the model runs as "
        "it was. Write model = torchrig.prepare(model, ...).",
        TorchrigWarning,
        stacklevel=2,
    )


def _check_compiled(model: nn.Module) -> None:
    """Report the regions that the first forward did not compile."""
    prepared = state.recall(model)
    if prepared is not None and prepared.observation is not None:
        try:
            prepared.observation.check_compiled()
        finally:
            report(model)  # into the structured trace
