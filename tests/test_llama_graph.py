"""How far a graph is, by how often llama.cpp has asked whether to break off, and that it does break off."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

import llama_cpp.llama_cpp as lib
import pytest

from harness import PATIENCE_SEC
from uma.llama.graph import NODES_PER_LAYER, RunningGraph

ROUNDS = 300


def question(graph: RunningGraph) -> Callable[[], bool]:
    """What llama.cpp calls after a node, as it calls it: whether to break off."""
    callback = ctypes.cast(graph.callback, lib.ggml_abort_callback)
    return lambda: bool(callback(graph.address))


def shares(graph: RunningGraph, tokens: int, nodes: int, code: int = 0) -> list[float]:
    """What is told after each node of a batch."""
    told: list[float] = []
    stops = question(graph)

    def compute() -> int:
        for _ in range(nodes):
            assert not stops()
            told.append(graph.progress)
        return code

    graph.start()
    assert graph.compute(tokens, compute) == code
    assert graph.progress == 0
    return told


@pytest.mark.skipif(sys.platform == "darwin", reason="it has no unnamed semaphores")
def test_a_batch_s_share_is_that_of_the_nodes_that_such_batches_have() -> None:
    graph = RunningGraph(1, is_counted=True)
    assert shares(graph, 64, 4) == [each / NODES_PER_LAYER for each in (1, 2, 3, 4)]
    assert shares(graph, 2, 4) == [0.25, 0.5, 0.75, 1]
    assert max(shares(graph, 65, 4)) == 0.5, "so many may have twice the nodes"
    assert shares(graph, 1, 2) == [0.25, 0.5]
    assert shares(graph, 1, 2) == [0.5, 1]
    assert shares(graph, 40, 8) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert shares(graph, 64, 4) == [0.125, 0.25, 0.375, 0.5]
    assert shares(graph, 200, 2, code=2) == shares(graph, 200, 2) != [0.5, 1], "one that failed says nothing of others"
    assert shares(graph, 200, 2) == [0.5, 1]


def test_what_is_not_counted_has_no_share() -> None:
    graph = RunningGraph(1, is_counted=False)
    assert shares(graph, 64, 4) == shares(graph, 64, 4) == [0, 0, 0, 0]


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_stop_is_never_lost_and_lasts_until_the_next_start(is_counted: bool) -> None:
    graph = RunningGraph(1, is_counted=is_counted)
    stops = question(graph)
    for _ in range(ROUNDS):
        graph.start()
        assert not stops()
        begun = threading.Event()

        def compute(begun: threading.Event = begun) -> None:
            while not stops():
                begun.set()

        thread = threading.Thread(target=compute)
        thread.start()
        assert begun.wait(PATIENCE_SEC)
        graph.stop()
        thread.join(PATIENCE_SEC)
        assert not thread.is_alive()
        assert stops()
        assert graph.progress == 0
