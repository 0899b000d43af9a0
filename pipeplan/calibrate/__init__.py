"""What links and actions really cost on these machines, as a cluster file for the planner.

A plan that assumes free communication has no slack: every microsecond of latency lengthens its
period. So the planner gets what a real group of processes measured, doing what a run does.

`torchrun --nproc-per-node P -m pipeplan.calibrate --memory 16GiB -o cluster.json` measures on the
machines that torchrun spans; `here.measure_here` does so with processes of this machine.
Nothing is imported here, so that `python -m` hears Ctrl-C from the beginning on.
"""
