"""What a plan holds of a module; whether the module still has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

from pipeplan.capture.user_model.module_attributes import is_moved
from pipeplan.errors import InputError


@dataclass(frozen=True, slots=True)
class Buffer:
    """Where a buffer is found: moving a module and loading values put other tensors there.

    A frozen parameter that forwards move is a buffer in all but its register.
    """

    owner: dict[str, Any]
    """A module's register of buffers, or of parameters."""
    name: str

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        found = self.owner[self.name]
        assert isinstance(found, Tensor)
        return found


def buffers_of(modules: Iterable[nn.Module]) -> Iterator[Buffer]:
    """Those of `modules` and all that is inside of them, each tensor once.

    Frozen parameters that forwards move are among them, once a module was captured.
    """
    seen: set[int] = set()
    for part in (part for module in modules for part in module.modules()):
        for owner in (part._buffers, part._parameters):  # noqa: SLF001
            for name, tensor in owner.items():
                if tensor is not None and id(tensor) not in seen and _is_buffer(tensor):
                    seen.add(id(tensor))
                    yield Buffer(owner, name)


def _is_buffer(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter) or is_moved(tensor)


@dataclass(frozen=True, slots=True)
class Register:
    """Names of a module's own submodules, parameters or buffers, and what they stood for."""

    path: str
    now: dict[str, Any]
    planned: dict[str, Any]

    @property
    def same(self) -> bool:
        """Whether they still do."""
        now, planned = self.now, self.planned
        return len(now) == len(planned) and all(map(is_, now.values(), planned.values()))

    @property
    def changed(self) -> str | None:
        """A name that does not."""
        names = {**self.planned, **self.now}
        return next((name for name in names if self._other(name)), None)

    def _other(self, name: str) -> bool:
        return self.now.get(name, self) is not self.planned.get(name, self)


@dataclass(frozen=True, slots=True)
class Parts:
    """What each call looks at, found once: to walk through a module takes as long as a layer.

    Nothing here holds the module itself, which holds this.
    """

    submodules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    fixed: tuple[nn.Parameter, ...]
    """The parameters that forwards let be."""
    registers: tuple[Register, ...]
    """Of what layers refer to by themselves, so that they would not see a replacement."""

    @classmethod
    def of(cls, module: nn.Module, layers: Sequence[nn.Module]) -> Parts:
        """Those of `module`, which `layers` were cut from.

        Buffers of layers that are submodules are looked up there: they may be replaced.
        """
        own = set(module.modules())
        made = [part for layer in layers for part in layer.modules() if part not in own]
        held = {id(buffer) for part in made for buffer in part.buffers(recurse=False)}
        registers = []
        for path, part in module.named_modules():
            registers.append(Register(path, part._modules, dict(part._modules)))  # noqa: SLF001
            if parameters := part._parameters:  # noqa: SLF001
                registers.append(Register(path, parameters, dict(parameters)))
            buffers = part._buffers  # noqa: SLF001
            if any(id(buffer) in held for buffer in buffers.values()):
                registers.append(Register(path, buffers, dict(buffers)))
        inside = tuple(part for part in module.modules() if part is not module)
        parameters = tuple(module.parameters())
        fixed = tuple(each for each in parameters if not is_moved(each))
        return cls(inside, parameters, fixed, tuple(registers))

    def check(self) -> None:
        """Raises InputError where something else has taken the place of what was planned for."""
        for register in self.registers:
            if not register.same and (name := register.changed) is not None:
                what = f"{register.path}.{name}" if register.path else name
                raise InputError(
                    f"rematerialized module: {what}: was replaced, need the one that was planned"
                    " for. Change it in place (load_state_dict without assign), or call"
                    " rematerialize again."
                )
