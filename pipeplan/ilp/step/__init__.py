"""Planning a whole synchronous step (model.md, T6): fill, steady state and drain.

A `DispatchingRule` says which op an idle GPU takes; list scheduling executes it under the
memories; local search improves rules and cuts for several placements of stages.
"""
