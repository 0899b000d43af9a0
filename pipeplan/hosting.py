"""What one rank builds of a model: its own layers with memory, all others as shapes.

The code that makes the task runs twice. The *draft* has no parameter with memory; cut into layers,
it says which ones the rank hosts. The second time these are built as ever, and all others are
ghosts. Where values come from elsewhere (a checkpoint, the task's `weights`),
the draft itself gets memory for what the rank hosts. A task whose code cannot be run this way is
built whole, and `say` is told why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from pipeplan.capture import split
from pipeplan.capture.fake_tensors.ghosts import Ghosts
from pipeplan.capture.partition.rebound import rebound
from pipeplan.capture.split import module_of
from pipeplan.empty import hollow, is_empty
from pipeplan.errors import InputError
from pipeplan.fitting import fitted, limit_of
from pipeplan.nested import MicroBatch
from pipeplan.plan import Plan
from pipeplan.repeat import fingerprint
from pipeplan.runtime.transport.backend import device_of
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.units import format_bytes

Make = Callable[[], Task]
"""Makes the task anew, from the same random state at each call."""
Say = Callable[[str], None]
_Names = tuple[str, ...]

_WHOLE = "builds the whole model and not only its own layers"
_SAMPLE_BYTES = 2**20
_BUILDS = 6
"""How often a model is built at most to find out which values its code looks at."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A task and its layers; those of one rank have memory."""

    task: Task
    split: SplitModel
    blank: tuple[tuple[str, Tensor], ...]
    """What of them has no values yet, with names in the user's model."""
    witness: Mapping[str, str]
    """Fingerprints of first values of some parameters, the same ones on every rank, by name: what
    ranks compare, as none of them has what another one hosts."""


@dataclass(frozen=True, slots=True)
class _Build:
    """A task, its layers as the plan wants them, and which parameters have memory."""

    task: Task
    cut: SplitModel
    """As the model was cut."""
    split: SplitModel
    ghosts: Ghosts
    on_meta: _Names
    """Names of parameters and buffers that the user made without values."""


class _NeedsAllError(Exception):
    """Why a model must be built whole."""


class Draft:
    """A task whose model has no memory yet, cut into the layers of the plan."""

    def __init__(
        self, make: Make, plan: Plan, say: Say, *, anew: bool = True, evaluates: bool = True
    ) -> None:
        """Makes the task.

        Args:
            make: see `Make`.
            plan: what the model is for.
            say: told, in one line, why a model is built whole.
            anew: False where `make` gives a task that is there already.
            evaluates: whether the layers run in eval mode, too.

        Raises:
            InputError: if the task cannot be made, or its model is not the plan's.
        """
        self._make, self._plan, self._say, self._anew = make, plan, say, anew
        self._evaluates = evaluates
        if not anew or len({stage.gpu for stage in plan.stages}) == 1:
            self._build = self._whole()
            return
        try:
            self._build = self._built(frozenset(), draws=False)
        except _NeedsAllError as reason:
            self._build = self._whole(str(reason))
        else:
            if not self._build.ghosts.parameters and not self._build.on_meta:
                self._anew = False  # nor may it be taken apart
                say(f"{_WHOLE}: it is there before the code that makes the task is called")

    @property
    def task(self) -> Task:
        """The task; its model is not to be computed with."""
        return self._build.task

    @property
    def split(self) -> SplitModel:
        """Its layers; likewise."""
        return self._build.split

    def hosted(self, gpu: int, *, seeded: bool, rest: bool = False) -> Hosted:
        """The task with memory for what `gpu` hosts; the draft is used up.

        Args:
            gpu: of the plan.
            seeded: whether parameters get the values that the code gives them; if not, there is
                only room for them.
            rest: whether parameters that no layer uses get their values, too.

        Raises:
            InputError: if the task is another one when it is made again, or has no values.
        """
        if seeded and self._build.on_meta:
            raise InputError(
                f"task: model: {self._build.on_meta[0]!r} is on the meta device, where it has no"
                " values, and nothing gives it any. Name their source with Task(weights=..), or"
                " make the model in the function that makes the task, without meta: every rank"
                " then builds only what it hosts."
            )
        numbers = self._numbers()
        layers = {name for name, _ in states_of(self.split, self._plan, gpu)}
        used = set().union(*(fqns.values() for fqns in self.split.fqns))
        sample = self._sample() if seeded else []
        layers.update(sample)
        wanted = {
            number
            for name, number in numbers.items()
            if (seeded and name in layers) or (rest and name not in used)
        }
        if numbers and (seeded or wanted or self._build.ghosts.drifted):
            self._again(frozenset(wanted), numbers)
        found = {name: module_of(self.task).get_parameter(name) for name in sample}
        return self._filled(gpu, {x: fingerprint([found[x]]) for x in found}, rest=rest)

    def _sample(self) -> list[str]:
        """Names of the smallest parameters, together no larger than the largest one, or 1 MiB."""
        sizes = {name: each.nbytes for name, each in module_of(self.task).named_parameters()}
        room, chosen = max(_SAMPLE_BYTES, *sizes.values()) if sizes else 0, []
        for name in sorted(sizes, key=lambda name: (sizes[name], name)):
            room -= sizes[name]
            if room < 0:
                break
            chosen.append(name)
        return chosen

    def _again(self, wanted: frozenset[int], numbers: dict[str, int]) -> None:
        """Build with values for what is `wanted`."""
        digest, draft = self.split.digest(), self._build
        exact = not draft.ghosts.drifted and not draft.ghosts.keep and not draft.on_meta
        del self._build
        try:
            self._build = self._built(wanted, draws=True, draft=draft if exact else None)
            if self._numbers() != numbers or self.split.digest() != digest:
                raise _NeedsAllError("its code makes other parameters at each call")
        except _NeedsAllError as reason:
            self._build = self._whole(str(reason))
        ghosts = self._build.ghosts
        extra = {name: n for name, n in numbers.items() if n in ghosts.keep - wanted}
        if extra:
            size = sum(ghosts.parameters[number].nbytes for number in set(extra.values()))
            self._say(
                f"has memory for parameters of others, too ({format_bytes(size)}), such as"
                f" {next(iter(extra))}: the code that makes the model looks at their values later"
            )

    def _filled(self, gpu: int, witness: Mapping[str, str], *, rest: bool) -> Hosted:
        """Room for what of the rank's layers has none; nothing for all others."""
        build, blank = self._build, []
        for name, tensor in states_of(build.split, self._plan, gpu):
            if is_empty(tensor):
                build.ghosts.fill(tensor)
                tensor.detach().zero_()  # ranks compare what two of them hold
                blank.append((name, tensor))
        for parameter in build.ghosts.parameters:
            if is_empty(parameter):
                hollow(parameter)
        kept = _forgotten(build, self._plan, gpu, rest=rest) if self._anew else build.split
        return Hosted(build.task, kept, tuple(blank), witness)

    def _numbers(self) -> dict[str, int]:
        """Names of the model's parameters -> in which order they were made."""
        known = {id(each): n for n, each in enumerate(self._build.ghosts.parameters)}
        named = module_of(self.task).named_parameters(remove_duplicate=False)
        return {name: known[id(each)] for name, each in named if id(each) in known}

    def _built(self, keep: frozenset[int], *, draws: bool, draft: _Build | None = None) -> _Build:
        """The task with memory for the parameters to `keep`, and for what its code looks at."""
        for attempt in range(_BUILDS):
            ghosts = Ghosts(keep, draws=draws or attempt > 0)
            reason = ""
            try:
                with ghosts.building():
                    task = self._make()
                on_meta = _adopted(task, ghosts)
                ghosts.want_what_outlives()
            except Exception as error:
                reason = str(error)
            if ghosts.wanted:
                keep |= ghosts.wanted
            elif reason:
                raise _NeedsAllError(reason)
            else:
                _check_new(task, ghosts)
                return self._cut(task, ghosts, on_meta, draft)
        raise _NeedsAllError(f"its code looks at values of parameters after {_BUILDS} attempts")

    def _cut(self, task: Task, ghosts: Ghosts, meta: _Names, draft: _Build | None) -> _Build:
        """The task's layers: those of the draft, with other tensors, where they are graphs."""
        if draft and rebound(draft.cut.layers, module_of(draft.task), module_of(task)):
            cut = draft.cut
        else:
            try:
                with ghosts.looking():
                    cut = self._split(task)
            except Exception as error:
                raise _NeedsAllError(str(error)) from error
            if ghosts.wanted:
                raise _NeedsAllError("its forward looks at values of parameters past torch")
        return self._fitted(task, cut, ghosts, meta)

    def _split(self, task: Task) -> SplitModel:
        return split(task, limit_of(self._plan), evaluates=self._evaluates)

    def _fitted(self, task: Task, cut: SplitModel, ghosts: Ghosts, meta: _Names) -> _Build:
        ready = fitted(self._plan, task, cut, ghosts.guarding())
        return _Build(task, cut, ready, ghosts, meta)

    def _whole(self, reason: str = "") -> _Build:
        """The task with memory for everything that has values."""
        ghosts, task = Ghosts(draws=True), self._make()
        on_meta = _adopted(task, ghosts)
        _check_new(task, ghosts)
        build = self._fitted(task, self._split(task), ghosts, on_meta)
        if reason:
            self._say(f"{_WHOLE}: {reason}")
        return build


def _forgotten(build: _Build, plan: Plan, gpu: int, *, rest: bool) -> SplitModel:
    """The layers, where meta tensors are in the places of all that no layer of `gpu` holds."""
    model, layers = module_of(build.task), build.split
    kept = {id(tensor) for _, tensor in states_of(layers, plan, gpu)}
    used = {id(tensor) for module in layers.layers for tensor in _tensors(module)}
    if rest:
        kept |= {id(tensor) for tensor in _tensors(model)} - used
    device = str(device_of(layers))
    gone: dict[int, Tensor] = {}
    for module in (*model.modules(), *nn.ModuleList(layers.layers).modules()):
        tables = [module._parameters, module._buffers]  # noqa: SLF001
        for slots in cast("list[dict[str, Tensor | None]]", tables):
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) not in kept and not tensor.is_meta:
                    slots[name] = gone.setdefault(id(tensor), _on_meta(tensor))
    return replace(layers, device=device)


def _tensors(module: nn.Module) -> tuple[Tensor, ...]:
    return (*module.parameters(), *module.buffers())


def _on_meta(tensor: Tensor) -> Tensor:
    moved = tensor.detach().to("meta")
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def states_of(layers: SplitModel, plan: Plan, gpu: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the layers on `gpu`, with their names in the user's model."""
    for stage in plan.stages:
        if stage.gpu == gpu:
            for layer in range(stage.first, stage.last + 1):
                module, fqns = layers.layers[layer], layers.fqns[layer]
                for local, tensor in (*module.named_parameters(), *module.named_buffers()):
                    yield fqns[local], tensor


def _adopted(task: Task, ghosts: Ghosts) -> _Names:
    """Let what the user made on `meta` be empty where the data are; its names."""
    model = module_of(task)
    states = (*model.named_parameters(), *model.named_buffers())
    names = tuple(name for name, tensor in states if tensor.is_meta)
    if names:
        ghosts.adopt(model, MicroBatch.of(task, 0).inputs[0].device)
    return names


def _check_new(task: Task, ghosts: Ghosts) -> None:
    """Refuse a model that another call made, whose parameters may be without values."""
    for name, parameter in module_of(task).named_parameters():
        if is_empty(parameter) and not ghosts.lacks(parameter):
            raise InputError(
                f"task: model: got the same parameter {name!r} from two calls of the function that"
                " makes the task, need a new model at each call. Take the cache away."
            )
