"""The runtime: what one rank executes, from a lowered plan to trained weights.

`build.build` makes a worker out of plan, pattern, split model and task; `Executor.run` trains.
Nothing here plans, lowers or captures: `launch` composes. Nothing is imported here, so that a
check that needs no torch does not wait for it.
"""
