"""The experiments, one a file. `ALL` holds them in the order they run and are reported."""

from __future__ import annotations

from benchmarks.scenario import Scenario
from benchmarks.scenarios import (
    ablation,
    cancel,
    chain,
    embed,
    first_token,
    forms,
    frontends,
    http,
    kinds,
    kv_events,
    live_view,
    long_context,
    many_machines,
    memory,
    mixed,
    neighbours,
    overhead,
    overload,
    prefix,
    rows,
    sharing,
    speculation,
    startup,
    storm,
    throughput,
    tradeoff,
    transport,
    weights,
)

ALL: tuple[Scenario, ...] = tuple(
    module.SCENARIO
    for module in (
        sharing,
        throughput,
        overhead,
        first_token,
        cancel,
        memory,
        startup,
        storm,
        prefix,
        chain,
        kinds,
        mixed,
        long_context,
        transport,
        http,
        live_view,
        overload,
        tradeoff,
        weights,
        rows,
        neighbours,
        forms,
        speculation,
        embed,
        kv_events,
        frontends,
        many_machines,
        ablation,
    )
)
