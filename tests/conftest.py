"""What holds for every test."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked_commands

HERE = Path(__file__).parent
FIRST = (
    "distributed/test_faults.py",
    "unit/test_compile.py",
    "distributed/test_torchrun.py",
    "unit/capture/test_fake.py",
    "unit/runtime/test_layer_programs.py",
    "unit/rematerialized/test_rematerialize.py",
    "distributed/test_large.py",
    "unit/operators/test_bits_and_bytes.py",
    "unit/capture/test_graph.py",
    "unit/test_hosting.py",
    "unit/docs/test_run.py",
    "unit/runtime/test_offload_runs.py",
    "unit/runtime/test_sampled_memory.py",
    "unit/runtime/test_split_backward.py",
    "distributed/test_joining.py",
    "unit/capture/test_odd_models.py",
    "unit/runtime/test_wide.py",
    "unit/offmate/test_training.py",
    "unit/capture/test_profile.py",
    "unit/runtime/test_optimizers.py",
    "unit/test_pipeline.py",
    "unit/runtime/test_autocast.py",
    "unit/remat/graph/test_solve.py",
    "unit/runtime/test_offload_inputs.py",
    "distributed/test_replicas.py",
)
"""Files that take longest: workers that begin with them end together. Those up to the one of the
documentation plan nothing: what numba compiles is being compiled meanwhile (Makefile)."""
_SET_FOR_GOOD = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "KMP_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""How variables begin that pytest, torch's compiler and a started run set for the process."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)


gc.set_threshold(20_000, 20, 50)  # torch makes thousands of objects that live: 3 % of the time


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes run tests, one more forks commands for all of them."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        server = forked_commands.Server()
        config.add_cleanup(server.close)
        os.environ[forked_commands.FOLDER] = str(server.folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first where several processes run tests (`--no-loadscope-reorder`)."""
    if hasattr(config, "workerinput"):
        places = {HERE / name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(item.path, len(FIRST)))


@pytest.fixture(scope="module", autouse=True)
def small_searched_heap() -> None:
    """What older tests and imports left is searched no more when garbage is collected.

    Torch and its compilers keep millions of objects, which cost half a second at each collection.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def warm_caches() -> Iterator[None]:
    """Steps of optimizers are timed without emptying the processor's caches before each.

    No test asks how long they take, and to empty caches takes longer than small layers.
    """
    from pipeplan.capture.layer_costs import optimizer_cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_cost, "COLD_BYTES", 1)
        yield


@pytest.fixture(autouse=True)
def process_as_found() -> Iterator[None]:
    """A test leaves what later tests of its process read as it found it, whatever they are.

    But for `sys.path`, where a task's folder stays by design.
    """
    variables, before = _variables(), _process()
    yield
    assert _variables() == variables
    after = _process()
    assert {name: after[name] for name in before} == before


def _variables() -> dict[str, str]:
    """Of the environment."""
    kept = (name for name in os.environ if not name.startswith(_SET_FOR_GOOD))
    return {name: os.environ[name] for name in kept}


def _process() -> dict[str, object]:
    """What all tests of a process share; of torch once it is there."""
    found: dict[str, object] = {
        "folder": os.getcwd(),
        "signals": [signal.getsignal(each) for each in _SIGNALS],
        "logging": (logging.root.level, [*logging.root.handlers], logging.root.manager.disable),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found |= {
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads": torch.get_num_threads(),
            "deterministic": torch.get_deterministic_debug_mode(),
            "gradients": torch.is_grad_enabled(),
            "anomalies": torch.is_anomaly_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "group": torch.distributed.is_initialized(),
        }
    return found
