"""Plan a chain of six layers on two GPUs, look at the plan, check it twice. Needs no torch.

Run it with `python examples/quickstart.py`.
"""

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.lowering import lower
from pipeplan.planner import Config, solve
from pipeplan.report.grid import grid
from pipeplan.simulator import simulate
from pipeplan.units import format_bytes, format_ns, parse_bandwidth, parse_bytes
from pipeplan.verifier import verify

MB = 10**6
layers = tuple(
    Layer(
        name=f"layer{index}",
        forward_ns=milliseconds * 10**6,
        backward_ns=2 * milliseconds * 10**6,
        weight_bytes=40 * MB,
        gradient_bytes=40 * MB,
        output_bytes=8 * MB,
        saved_input_bytes=8 * MB,
        saved_bytes=50 * MB,
    )
    for index, milliseconds in enumerate((1, 2, 1, 3, 1, 2))
)
chain = Chain(name="six layers", input_bytes=8 * MB, layers=layers)
cluster = uniform(2, parse_bytes("2GiB"), bandwidth_bytes_per_s=parse_bandwidth("12GB/s"))

plan = solve(chain, cluster, Config(time_limit_s=10))
print(grid(plan))
print("period per micro-batch:", format_ns(plan.period_per_microbatch), "gap:", plan.solver.gap)
print("peaks:", [format_bytes(row.peak_bytes) for row in plan.memory])
print("broken rules:", list(verify(plan)))
print("replayed:", simulate(plan, lower(plan)).period_ns == plan.period_ns)
