"""A model in eval mode for a while, whatever its own `train()` and `eval()` do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.eval_switch import switch_to_eval, switched


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts weights, buffers, attributes and modes of `model` back behind the block.

    Inside, attributes are as its own `eval()` leaves them. Modules whose switch changes weights
    (LoRA that is merged) are as in training but for their flags: a stage evaluates with the
    weights that it trains.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        with restored([model]):
            if type(model).eval is nn.Module.eval:
                switch_to_eval([model])
            else:
                switched(model, lambda whole: whole.eval())
            yield
    finally:
        for module, training in modes.items():
            module.training = training
