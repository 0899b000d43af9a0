"""The user's model as a whole: its state_dict's keys, and what no layer holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from pipeplan.runtime.checkpoint import named_state
from pipeplan.split_model import SplitModel


class UserModel:
    """Which checkpoint name each key of `model.state_dict()` has; keeps what no layer holds."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], split: SplitModel) -> None:
        """Call before anything of the model is forgotten."""
        module = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        names = _names(split)
        state = module.state_dict(keep_vars=True)
        self._names = {key: names[id(value)] for key, value in state.items() if id(value) in names}
        self._rest = {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in state.items()
            if key not in self._names
        }

    def write(self, source: Path, target: Path) -> None:
        """Write `model.pt`, which `model.load_state_dict(torch.load(...))` loads."""
        named_state.export_weights(source, target, self._names, self._rest)


def _names(split: SplitModel) -> dict[int, str]:
    return {
        id(tensor): fqns[local]
        for layer, fqns in zip(split.layers, split.fqns, strict=True)
        for local, tensor in [*layer.named_parameters(), *layer.named_buffers()]
    }
