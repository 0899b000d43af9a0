"""Random valid plans with split backwards, by the means of `handmade_greedy`."""

from __future__ import annotations

from random import Random

from pipeplan.chain import Chain
from pipeplan.plan import Plan
from tests import greedy_offload, handmade
from tests.handmade_greedy import Shop, random_chain, random_cluster, random_stages, resource


def random_plan(seed: int) -> Plan:
    """A valid flush plan of up to 4 stages, most of which have I and W; some offload."""
    random = Random(f"{seed} split")
    gpus = random.randint(1, 2)
    of, cluster = weighed(random, random_chain(random)), random_cluster(random, gpus)
    stages = random_stages(random, len(of.layers), gpus)
    split = [s for s in range(1, len(stages)) if random.random() < 0.8]
    order = handmade.order(stages, split)
    shop = Shop(
        random=random,
        period=random.randint(1, 20),
        k=random.randint(1, 3),
        lengths={op: handmade.length(of, cluster, stages, *op, split) for op in order},
        resources={op: resource(cluster, stages, *op) for op in order},
    )
    while (times := shop.place()) is None:
        shop.period += random.randint(1, 8)
    plan = handmade.plan(
        of,
        stages,
        shop.period,
        times,
        cluster=cluster,
        k=shop.k,
        split=split,
        semantics="flush",
        microbatches=random.randint(40, 50),
    )
    return greedy_offload.offloading(random, plan) if random.random() < 0.3 else plan


def weighed(random: Random, of: Chain) -> Chain:
    """`of` whose layers tell all that the gradients of their weights take."""
    layers = []
    for index, layer in enumerate(of.layers):
        gradients = of.gradient_of_input(index) + layer.gradient_of_output_bytes
        weight = random.randint(0, layer.backward_ns)
        inputs = layer.backward_ns - weight + random.randint(0, 3)
        fields = {
            "backward_weight_ns": weight,
            "backward_input_ns": random.choice((None, inputs)),
            "forward_split_ns": random.choice((None, layer.forward_ns + random.randint(0, 3))),
            "saved_for_weight_bytes": (kept := random.randint(0, 9)),
            "saved_input_for_weight_bytes": random.randint(0, min(kept, of.input_of(index))),
            "input_backward_workspace_bytes": random.randint(-gradients, 9),
            "weight_backward_workspace_bytes": random.choice((0, random.randint(0, 9))),
        }
        layers.append(layer.model_copy(update=fields))
    return of.model_copy(update={"layers": tuple(layers)})
