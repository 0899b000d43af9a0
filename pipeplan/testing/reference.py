"""One-process trainers, written as plainly as possible: what every pipelined run must equal.

They share the seed rule (`layer_seed`) with the runtime and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeplan.plan import Semantics
from pipeplan.runtime.stages.random_state import layer_seed
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


@dataclass(frozen=True)
class Trained:
    """Losses of all micro-batches in order, and the final parameters by name."""

    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float]
    """Of the gradient of each step that is not skipped, before clipping."""
    rates: list[tuple[float, ...]]
    """Learning rates of each step that is not skipped, each once, the largest first."""
    skipped: list[int]
    """Steps whose gradients were not finite."""
    evaluated: list[float]
    """Losses of the final weights in eval mode on the micro-batches given to `train`."""


def train_flush(
    split: SplitModel, task: Task, steps: int, microbatches: int, seed: int
) -> Trained:
    """Ordinary training: accumulate the gradients of m micro-batches, divide by m, update."""
    return train("flush", split, task, steps, microbatches, seed)


def train_2bw(split: SplitModel, task: Task, steps: int, microbatches: int, seed: int) -> Trained:
    """W(t+1) = opt(W(t), grad f(W(t-1))) with W(-1) = W(0), as the formula reads."""
    return train("2bw", split, task, steps, microbatches, seed)


def train(
    semantics: Semantics,
    split: SplitModel,
    task: Task,
    steps: int,
    microbatches: int,
    seed: int,
    evaluate: int = 0,
    replicas: Sequence[int] = (),
) -> Trained:
    """All steps in one process, then the losses of micro-batches 0..evaluate-1 in eval mode.

    `replicas`: how many average their gradients in each step; empty for one.
    """
    alone = _Alone(split, task, microbatches, seed)
    drawn = 0
    previous = alone.values()
    for step in range(steps):
        newest = alone.values()
        alone.zero()
        if semantics == "2bw":
            alone.load(previous)
        scale = alone.scales[step if semantics == "flush" else max(0, step - 1)]
        count = replicas[step] if replicas else 1
        alone.average(drawn, count, scale)
        drawn += count * microbatches
        alone.load(newest)
        alone.update(step)
        previous = newest
    weights = alone.named()
    evaluated = alone.evaluate(evaluate)
    told = alone.norms, alone.rates
    return Trained(alone.losses, weights, *told, alone.skipped, evaluated)


class _Alone:
    """Every layer has parameters of its own; those of one name are kept equal by hand."""

    def __init__(self, split: SplitModel, task: Task, microbatches: int, seed: int) -> None:
        self.split, self.task, self.m, self.seed = split, task, microbatches, seed
        self.layers = [copy.deepcopy(layer) for layer in split.layers]
        for layer, user in zip(self.layers, split.layers, strict=True):
            for own, parameter in zip(layer.parameters(), user.parameters(), strict=True):
                _hook(own, parameter)
        self.uses: dict[str, list[nn.Parameter]] = {}
        for names, layer in zip(split.fqns, self.layers, strict=True):
            for local, parameter in layer.named_parameters():
                self.uses.setdefault(names[local], []).append(parameter)
        owners = (self.uses[name][0] for name in split.in_order(self.uses))
        self.owners = [owner for owner in owners if owner.requires_grad]
        self.stepped = [self._stepped(owner) for owner in self.owners]
        self.optimizer = task.optimizer(self.stepped)
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.scheduler = task.scheduler(self.optimizer) if task.scheduler else None
        self.scales = [task.loss_scale.initial if task.loss_scale else 1.0]
        self.good = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[tuple[float, ...]] = []
        self.skipped: list[int] = []

    def _stepped(self, owner: nn.Parameter) -> nn.Parameter:
        """A master weight in 32 bits, where the task wants one."""
        if not self.task.master_weights or owner.dtype.itemsize > 2:
            return owner
        return nn.Parameter(owner.detach().float())

    def zero(self) -> None:
        """A sum that is as wide as its parameter is torch's own, .grad."""
        for uses in self.uses.values():
            for parameter in uses:
                wide = self.task.accumulate if parameter.dtype.itemsize == 2 else None
                self.sums[parameter] = torch.zeros_like(parameter, dtype=wide)
                parameter.grad = None if wide else self.sums[parameter]

    def values(self) -> list[Tensor]:
        return [uses[0].detach().clone() for uses in self.uses.values()]

    def load(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for uses, value in zip(self.uses.values(), values, strict=True):
                for parameter in uses:
                    parameter.copy_(value)

    def run(self, microbatch: int) -> Tensor:
        """Its loss; under autocast as a plain loop is, which keeps casts for one micro-batch."""
        if self.task.autocast:
            with torch.autocast("cpu", self.task.autocast):
                return self._loss(microbatch)
        return self._loss(microbatch)

    def _loss(self, microbatch: int) -> Tensor:
        source, target = self.task.microbatch(microbatch)
        given = [leaf for leaf in tree_leaves(source) if isinstance(leaf, Tensor)]
        first = self.split.entering or range(len(given))
        boundary = tuple(given[place] for place in first)
        for index, layer in enumerate(self.layers):
            _seed(layer_seed(self.seed, index, microbatch))
            fed = [given[i] for i in self.split.fed_to(index)]
            result = layer(*boundary, *fed)
            boundary = result if isinstance(result, tuple) else (result,)
        if self.task.loss is not None:
            returned = self.split.returned
            result = self.task.loss(returned.filled(result) if returned else result, target)
        loss: Tensor = result
        return loss

    def average(self, first: int, replicas: int, scale: float) -> None:
        """Mean over replicas of m micro-batches each; running statistics are the first one's."""
        self.accumulate(first, scale)
        told = len(self.losses)
        buffers = [(b, b.clone()) for layer in self.layers for b in layer.buffers()]
        for replica in range(1, replicas):
            sums = [self.sums[owner].clone() for owner in self.owners]
            self.zero()
            self.accumulate(first + replica * self.m, scale)
            for owner, before in zip(self.owners, sums, strict=True):
                self.sums[owner] = before + self.sums[owner]
        for owner in self.owners if replicas > 1 else ():
            self.sums[owner] /= replicas
        for buffer, value in buffers:
            buffer.copy_(value)
        del self.losses[told:]

    def accumulate(self, first: int, scale: float) -> None:
        for microbatch in range(first, first + self.m):
            loss = self.run(microbatch)
            (loss * scale).backward()
            self.losses.append(loss.item())
            for parameter, total in self.sums.items():
                if parameter.grad is not None and parameter.grad is not total:
                    total += parameter.grad.to(total.dtype)
                    parameter.grad = None
        for uses in self.uses.values():
            for other in uses[1:]:
                self.sums[uses[0]] += self.sums[other]
        for owner in self.owners:
            self.sums[owner] /= self.m
            self.sums[owner] /= scale

    def update(self, step: int) -> None:
        sums = [self.sums[owner] for owner in self.owners]
        finite = all(bool(total.isfinite().all()) for total in sums)
        if self.task.loss_scale is None:
            finite = True
        self._rescale(finite)
        if finite:
            self.norms.append(nn.utils.get_total_norm(sums).item())
            rates = {float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group}
            self.rates.append(tuple(sorted(rates, reverse=True)))
            if self.task.clip_norm is not None:
                holders = [nn.Parameter(torch.zeros_like(total)) for total in sums]
                for holder, total in zip(holders, sums, strict=True):
                    holder.grad = total
                nn.utils.clip_grad_norm_(holders, self.task.clip_norm)
            for stepped, total in zip(self.stepped, sums, strict=True):
                stepped.grad = total.to(stepped.dtype)
            self.optimizer.step()
            with torch.no_grad():
                for owner, stepped in zip(self.owners, self.stepped, strict=True):
                    owner.copy_(stepped)
        else:
            self.skipped.append(step)
        if self.scheduler:
            self.scheduler.step()
        self.load(self.values())

    def _rescale(self, finite: bool) -> None:
        """As torch.amp.GradScaler does."""
        rule, scale = self.task.loss_scale, self.scales[-1]
        self.good = self.good + 1 if finite else 0
        if rule is None:
            pass
        elif not finite:
            scale *= rule.backoff
        elif self.good == rule.interval:
            scale, self.good = scale * rule.growth, 0
        self.scales.append(scale)

    def evaluate(self, count: int) -> list[float]:
        for layer in self.layers:
            layer.eval()
        with torch.no_grad():
            return [self.run(microbatch).item() for microbatch in range(count)]

    def named(self) -> dict[str, Tensor]:
        return {
            names[local]: value.detach().clone()
            for names, layer in zip(self.split.fqns, self.layers, strict=True)
            for local, value in [*layer.named_parameters(), *layer.named_buffers()]
        }


def _hook(own: nn.Parameter, parameter: nn.Parameter) -> None:
    """Gives a copy the hooks of the user's parameter, which copying leaves out."""
    for hook in (parameter._backward_hooks or {}).values():  # noqa: SLF001  torch lists them nowhere else
        own.register_hook(hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # noqa: SLF001
        own.register_post_accumulate_grad_hook(hook)


def _seed(value: int) -> None:
    """What `torch.manual_seed` does, but for devices that have not started.

    For each kind of those it would write down the stack of calls: a millisecond a layer.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
