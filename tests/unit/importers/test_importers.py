"""Importers: profiles of other tools become the chain that pipelining can cut."""

from __future__ import annotations

import os
import random
from pathlib import Path

import networkx as nx
import pytest

from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.importers import csv_layers, pipedream


def node(name: str, text: str, ms: float = 0.0, size: float = 8, weight: int = 0) -> str:
    """A node of a profile whose backward takes twice its forward."""
    return (
        f"{name} -- {text} -- forward_compute_time={ms:.3f}, backward_compute_time={2 * ms:.3f},"
        f" activation_size={size:.3f}, parameter_size={weight}.000"
    )


def graph(nodes: list[str], *edges: str) -> str:
    """A profile; an edge is written `1>2` for node1 -- node2."""
    lines = [f"\tnode{a} -- node{b}" for a, _, b in (edge.partition(">") for edge in edges)]
    return "\n".join([*nodes, *lines])


INPUT = node("node1", "Input", 9.0, 100)


def read(nodes: list[str], *edges: str) -> Chain:
    """The chain of a small profile."""
    return pipedream(graph(nodes, *edges), name="small", microbatch_size=4)


def test_chain_of_operations() -> None:
    """On a path each operation is a layer that keeps its input; the input node costs nothing."""
    chain = read(
        [
            INPUT,
            node("node2", "Conv2d(3, 8)", 1.5, 40, 7),
            node("node3", "Linear(8, 2)", 0.001, 2),
        ],
        "1>2",
        "2>3",
    )
    assert (chain.input_bytes, chain.microbatch_size, chain.mode) == (100, 4, "imported")
    conv, linear = chain.layers
    assert (conv.name, linear.name) == ("0:node2 Conv2d(3, 8)", "1:node3 Linear(8, 2)")
    assert (conv.forward_ns, conv.backward_ns) == (1_500_000, 3_000_000)
    assert (conv.weight_bytes, conv.gradient_bytes) == (7, 7)
    assert (conv.output_bytes, conv.saved_input_bytes, conv.saved_bytes) == (40, 100, 0)
    assert (linear.forward_ns, linear.output_bytes, linear.saved_input_bytes) == (1000, 2, 40)
    assert (linear.saved_bytes, linear.saved_output_bytes) == (0, 0)


def test_in_place_operation_joins_its_producer() -> None:
    """ReLU in place overwrites the convolution's output: one layer, nothing more is kept."""
    nodes = [INPUT, node("node2", "Conv2d(3, 8)", 1, 40), node("node3", "ReLU(inplace)", 1, 40)]
    (layer,) = read(nodes, "1>2", "2>3").layers
    assert layer.name == "0:node2..node3 Conv2d(3, 8)"
    assert (layer.forward_ns, layer.saved_bytes, layer.output_bytes) == (2_000_000, 0, 40)
    outplace = [*nodes[:2], node("node3", "ReLU(inplace=False)", 1, 40)]
    assert len(read(outplace, "1>2", "2>3").layers) == 2


def test_free_operation_joins_the_layer_before() -> None:
    """Dropout of no measured time is no layer; the tensor it reads stays inside and is kept."""
    chain = read(
        [INPUT, node("node2", "Linear(8, 8)", 1, 40), node("node3", "Dropout(p=0.5)", 0, 40)],
        "1>2",
        "2>3",
    )
    assert [layer.saved_bytes for layer in chain.layers] == [40]


def test_free_operation_that_enlarges_is_a_layer() -> None:
    """Cutting before an operation that enlarges the boundary may pay, even if it is free."""
    chain = read(
        [INPUT, node("node2", "Linear(8, 8)", 1, 40), node("node3", "Expand(9)", 0, 360)],
        "1>2",
        "2>3",
    )
    assert [layer.output_bytes for layer in chain.layers] == [40, 360]


def test_leading_free_operations_join_the_first_layer() -> None:
    """What only prepares the input belongs to the first layer that does something."""
    chain = read(
        [INPUT, node("node2", "Cast", 0, 50), node("node3", "Linear(8, 8)", 1, 40)], "1>2", "2>3"
    )
    assert [(layer.saved_input_bytes, layer.saved_bytes) for layer in chain.layers] == [(100, 50)]


def test_views_share_storage() -> None:
    """View and Size own no storage: a layer that ends in them keeps nothing for them."""
    chain = read(
        [
            INPUT,
            node("node2", "MaxPool2d(2)", 1, 40),
            node("node3", "Size(0)", 0, 4),
            node("node4", "View(-1)", 0, 40),
            node("node5", "Linear(8, 2)", 1, 2),
        ],
        *("1>2", "2>3", "2>4", "3>4", "4>5"),
    )
    assert [layer.name for layer in chain.layers] == [
        "0:node2 MaxPool2d(2)",
        "1:node5 Linear(8, 2)",
    ]
    assert [layer.saved_bytes for layer in chain.layers] == [0, 0]
    assert chain.layers[1].saved_input_bytes == 40


RESIDUAL = [
    INPUT,
    node("node2", "Conv2d(a)", 1, 40, 1),
    node("node3", "Conv2d(b)", 1, 20, 2),
    node("node4", "BatchNorm2d(c)", 1, 40, 4),
    node("node5", "Add(inplace)", 0, 40),
    node("node6", "ReLU(inplace)", 1, 40),
    node("node7", "Linear(d)", 1, 2, 8),
]


def test_residual_block_is_one_layer() -> None:
    """No cut inside a skip connection; what the block produces inside is kept once each.

    The addition overwrites the batch norm's output (nobody else reads it), so inside the block
    only node3's 20 bytes are a storage of their own.
    """
    chain = read(RESIDUAL, "1>2", "2>3", "3>4", "4>5", "2>5", "5>6", "6>7")
    assert [layer.name.split()[0] for layer in chain.layers] == [
        "0:node2",
        "1:node3..node6",
        "2:node7",
    ]
    block = chain.layers[1]
    assert (block.saved_input_bytes, block.saved_bytes, block.output_bytes) == (40, 20, 40)
    assert (block.weight_bytes, block.forward_ns) == (6, 3_000_000)


def test_order_of_lines_does_not_matter() -> None:
    """Nodes and edges may come in any order."""
    edges = ["1>2", "2>3", "3>4", "4>5", "2>5", "5>6", "6>7"]
    expected = read(RESIDUAL, *edges)
    for seed in range(20):
        lines = graph(RESIDUAL, *edges).split("\n")
        random.Random(seed).shuffle(lines)
        assert pipedream("\n".join(lines), name="small", microbatch_size=4) == expected


def test_several_inputs() -> None:
    """Inputs that enter at the start add up; one that enters later forbids the cuts before it."""
    second = node("node8", "Input1", 1, 11)
    three = [*(node(f"node{i}", f"Linear({i})", 1, i) for i in (2, 3, 4))]
    early = read([INPUT, second, *three], "1>2", "8>2", "2>3", "3>4")
    assert (early.input_bytes, len(early.layers)) == (111, 3)
    late = read([INPUT, second, *three], "1>2", "2>3", "8>3", "3>4")
    assert [layer.name.split()[0] for layer in late.layers] == ["0:node2..node3", "1:node4"]


def test_several_outputs() -> None:
    """An early output has to travel to the end: no cut behind it, both leave the last layer."""
    three = [*(node(f"node{i}", f"Linear({i})", 1, 10 * i) for i in (2, 3, 4, 5))]
    chain = read([INPUT, *three], "1>2", "2>3", "2>4", "4>5")
    assert [layer.output_bytes for layer in chain.layers] == [20, 30 + 50]
    assert chain.layers[1].saved_bytes == 40


def test_unread_views_and_inputs_are_no_outputs() -> None:
    """An element of a tuple, or an input, that nobody reads does not travel to the end."""
    nodes = [INPUT, *(node(f"node{i}", f"Linear({i})", 1, 10) for i in (2, 3))]
    nodes += [node("node4", "__getitem__(1)", 0, 5), node("node5", "Size(0)", 0, 4)]
    nodes += [node("node6", "Input1", 0, 5)]
    chain = read(nodes, "1>2", "2>3", "2>4", "4>5")
    assert (chain.input_bytes, len(chain.layers)) == (100, 2)
    assert [layer.saved_bytes for layer in chain.layers] == [0, 0]


def test_numbers() -> None:
    """Lists of sizes add up; times become ns exactly, and never less than measured."""
    text = graph([INPUT], "1>2") + (
        "\nnode2 -- LSTM(4, 4) -- forward_compute_time=22.307, backward_compute_time=0.0000001,"
        " activation_size=[64.0; 8.0; 8.5], parameter_size=1e3 -- stage_id=3\n"
    )
    (layer,) = pipedream(text, name="lstm").layers
    assert (layer.forward_ns, layer.backward_ns) == (22_307_000, 1)
    assert (layer.output_bytes, layer.weight_bytes) == (64 + 8 + 9, 1000)


@pytest.mark.parametrize("seed", range(150))
def test_cuts_are_where_every_path_passes(seed: int) -> None:
    """On random graphs the layers end exactly where all simple paths meet; nothing gets lost."""
    rng = random.Random(seed)
    size = rng.randint(2, 9)
    pairs = [(a, b) for b in range(2, size + 1) for a in range(1, b) if rng.random() < 0.35]
    pairs += [(b - 1, b) for b in range(2, size + 1) if rng.random() < 0.75]
    edges = {f"{a}>{b}" for a, b in pairs if b > 1}
    edges |= {"1>2"}
    nodes = [INPUT, *(node(f"node{i}", f"Op({i})", i, 2**i) for i in range(2, size + 1))]
    chain = read(nodes, *sorted(edges))

    whole = nx.DiGraph(tuple(map(int, edge.split(">"))) for edge in edges)
    whole.add_nodes_from(range(2, size + 1))
    starts = [n for n in whole if not whole.in_degree(n)]
    ends = [n for n in whole if not whole.out_degree(n)]
    whole.add_edges_from([(0, n) for n in starts] + [(n, 99) for n in ends])
    meeting = set.intersection(*map(set, nx.all_simple_paths(whole, 0, 99))) - {0, 1, 99}
    expected = [2**n for n in sorted(meeting)]
    if not meeting.issuperset(ends):
        expected.append(sum(2**n for n in ends))
    assert [layer.output_bytes for layer in chain.layers] == expected
    assert sum(layer.forward_ns for layer in chain.layers) == sum(range(2, size + 1)) * 10**6


GOOD = graph(RESIDUAL[:2], "1>2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no node called Input"),
        (INPUT, "got no operation but inputs, need at least one"),
        (node("node1", "Conv2d", 1), "got no node called Input"),
        (GOOD + "\n\tnode2 -- node3", "line 4: got an edge of 'node3', need a node"),
        (GOOD + "\n" + RESIDUAL[1], "line 4: got node 'node2' again, need it once"),
        (GOOD + "\n\tnode2 -- node2", "got the cycle node2 -> node2, need a graph without"),
        (
            graph(RESIDUAL[:4], "1>2", "2>3", "3>4", "4>2"),
            "got the cycle node2 -> node3 -> node4 -> node2",
        ),
        (GOOD + "\ngarbage", "line 4: got 'garbage', need a node"),
        (GOOD + "\nnode1 -- node2", "line 4: got 'node1 -- node2', need a node"),
        (GOOD.replace("1.000", "-1.000"), "line 2: got 'node2 -- Conv2d(a) -- forward"),
        (GOOD.replace("1.000", "nan"), "line 2: got "),
        (GOOD.replace("1.000", "inf"), "line 2: got "),
        (GOOD.replace("1.000", "1e90"), "line 2: got 1e90, need at most"),
        (GOOD.replace("40.000", "[40.0; ]"), "line 2: got "),
        (GOOD.replace("parameter_size", "size"), "line 1: got 'node1 -- Input"),
        (GOOD.replace("\n", "\r"), "line 1: got "),
        ('{"format": "pipeplan-chain/1"}', 'line 1: got \'{"format"'),
    ],
)
def test_bad_profile(text: str, message: str) -> None:
    """What is no profile, or no DAG, is refused with its line."""
    with pytest.raises(InputError) as caught:
        pipedream(text, name="bad", where="graph.txt")
    assert str(caught.value).startswith("graph.txt: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_long_profile() -> None:
    """A path of 20 000 operations needs no recursion and no quadratic time."""
    nodes = [INPUT, *(node(f"node{i}", "Linear(1)", 1) for i in range(2, 20_002))]
    chain = read(nodes, *(f"{i}>{i + 1}" for i in range(1, 20_001)))
    assert len(chain.layers) == 20_000


@pytest.mark.skipif("PIPEPLAN_PROFILES" not in os.environ, reason="needs published profiles")
def test_published_profiles() -> None:
    """VGG16 gives the same layers as its linearization by hand; ResNet50 its 21 steps."""
    folder = Path(os.environ["PIPEPLAN_PROFILES"])
    vgg = (folder / "pipedream-vgg16-b128.graph.txt").read_text()
    expected = Chain.read(folder / "vgg16-b128.chain.json")
    chain = pipedream(vgg, name=expected.name, microbatch_size=128)
    assert chain.layers == expected.layers
    assert chain.input_bytes == expected.input_bytes
    resnet = (folder / "pipedream-resnet50-b128.graph.txt").read_text()
    layers = pipedream(resnet, name="resnet50").layers
    assert len(layers) == 21
    assert sum(layer.weight_bytes for layer in layers) == 102_228_128


TABLE = """\
name,forward_ms,backward_us,output_bytes,saved_input_bytes,parameters,optimizer_ns

embed, 1.5,0.0001,64,8,embed.weight embed.bias,
"head, last",2,2500,4,,,7
"""


def test_table() -> None:
    """Columns may come in any unit of time; an empty cell is the default."""
    chain = csv_layers(TABLE, "table", 8, microbatch_size=2)
    embed, head = chain.layers
    assert (chain.input_bytes, chain.microbatch_size, chain.mode) == (8, 2, "imported")
    assert (embed.forward_ns, embed.backward_ns, embed.optimizer_ns) == (1_500_000, 1, 0)
    assert embed.parameters == ("embed.weight", "embed.bias")
    assert (head.name, head.saved_input_bytes, head.optimizer_ns) == ("head, last", 0, 7)
    assert (
        csv_layers("\ufeff" + TABLE.replace("\n", "\r\n"), "table", 8, microbatch_size=2) == chain
    )


def test_a_table_has_what_a_cell_can_fill() -> None:
    """Workspaces may be below zero, as in a chain; lists of records are no columns."""
    text = "name,forward_ns,backward_ns,output_bytes,forward_workspace_bytes\na,1,2,8,-4\n"
    assert csv_layers(text, "table").layers[0].forward_workspace_bytes == -4
    for field in ("modules", "riding", "options"):
        with pytest.raises(InputError, match=f"got the column '{field}', need") as caught:
            csv_layers(text.replace("forward_workspace_bytes", field), "table")
        offered = str(caught.value).split("fields of a layer: ")[1].split(", ")
        assert field not in offered
        assert {"parameters", "saved_bytes", "forward_light_ns"} <= set(offered)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: got no column name, need name, forward_ns"),
        ("name,forward_ns,output_bytes\n", "line 1: got no column backward_ns"),
        (
            "name,forward_ms\n",
            "need name, forward_ns, backward_ns, output_bytes; times with any of",
        ),
        (TABLE.replace("2500", "-1"), "line 4: backward_us: got '-1 us', which is below 0"),
        ("name,forward_ns,backward_ns,output_bytes\n", "layers: got an empty list, need 1 items"),
        (TABLE.replace("output_bytes", "output_ms"), "line 1: got the column 'output_ms'"),
        (TABLE.replace("output_bytes", "forward_ns"), "line 1: got forward_ns in two columns"),
        (TABLE.replace(",64,", ","), "line 3: got 6 cells, need 7"),
        (TABLE.replace(",64,", ",64.5,"), "line 3: output_bytes: got '64.5', need whole bytes"),
        (TABLE.replace(",64,", ",-64,"), "line 3: output_bytes: got '-64', need whole bytes"),
        (TABLE.replace(",64,", f",{10**19},"), "layers[0].output_bytes: got 10000000000000000000"),
        (TABLE.replace(",64,", ",,"), "layers[0].output_bytes: got nothing, need this field"),
        (TABLE.replace("2500", "fast"), "line 4: backward_us: got 'fast us', need a number"),
        (TABLE.replace("2500", "nan"), "line 4: backward_us: got 'nan us', need a number"),
        (TABLE.replace('"head, last"', "embed"), "layers[1].name: got 'embed', which layers[0]"),
        (TABLE.replace('last"', "last"), "is not CSV: unexpected end of data"),
        (TABLE.replace(",8,", ",9,"), "layers[0].saved_input_bytes: got 9, need at most 8"),
        (TABLE + '"' + "x" * 200_000, "is not CSV"),
    ],
)
def test_bad_table(text: str, message: str) -> None:
    """What is no table of layers is refused with its line and column."""
    with pytest.raises(InputError) as caught:
        csv_layers(text, "table", 8, where="layers.csv")
    assert str(caught.value).startswith("layers.csv: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
