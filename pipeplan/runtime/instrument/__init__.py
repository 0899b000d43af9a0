"""What a rank really holds: live bytes of a whole run, and of sampled steps term by term."""

from pipeplan.runtime.instrument.counted import CountedFeed, CountedTransport
from pipeplan.runtime.instrument.states import states

__all__ = ["CountedFeed", "CountedTransport", "states"]
