"""The outcome of a search on one contracted chain, comparable with those on other ones."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeplan.chain import Chain
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute.contracted_chain import ContractedChain
from pipeplan.plan import Remat, Stage


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A search that is over; with recomputation it was one on a contracted chain."""

    state: Incumbent
    contracted: ContractedChain | None = None

    @property
    def chain(self) -> Chain:
        """What the user asked about."""
        return self.contracted.source if self.contracted else self.state.costs.chain

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The best plan's stages in layers of `chain`."""
        best = self.state.best
        assert best is not None
        away = {
            each.stage: Remat(offload=each.runs, offload_input=each.input)
            for each in best.offloads
        }
        if self.contracted:
            return tuple(self.contracted.original(each, away.get(each.id)) for each in best.stages)
        return tuple(
            each.model_copy(update={"remat": away[each.id]}) if each.id in away else each
            for each in best.stages
        )

    @property
    def cost(self) -> tuple[Fraction, Fraction]:
        """What the semantics minimize; infinite without a plan."""
        return self.state.cost
