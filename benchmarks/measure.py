"""Figures from samples and processes: percentiles, rates, CPU time and memory, each under the one name reports use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import attrs
import psutil

from benchmarks.experience import Experience
from benchmarks.samples import Sample

Measures = dict[str, float]

READER_TTFT_MS, READER_PACE_MS = 1_000.0, 80.0
"""What a reader wants, for QoE: the first token after a second, then one every 80 ms."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of all are at most (nearest rank); NaN where there is none."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, round(share * len(ranked) + 0.5) - 1))]


def latency(samples: Iterable[Sample]) -> Measures:
    """TTFT and inter-token percentiles over all requests that produced anything."""
    alive = [sample for sample in samples if sample.token_s]
    ttft = [sample.ttft_ms for sample in alive]
    gaps = [gap for sample in alive for gap in sample.gaps_ms]
    measures = {f"ttft_p{round(share * 100)}_ms": percentile(ttft, share) for share in (0.5, 0.95, 0.99)}
    measures |= {f"inter_token_p{round(share * 100)}_ms": percentile(gaps, share) for share in (0.5, 0.95, 0.99)}
    measures["inter_token_worst_ms"] = max(gaps, default=float("nan"))
    return measures


def qoe(samples: Iterable[Sample]) -> list[float]:
    """Quality of experience of each request as Andes (arXiv 2404.16283) defines it, by when its client had the tokens;
    0 where none came.
    """
    return [_qoe(sample) if sample.token_s else 0.0 for sample in samples]


def _qoe(sample: Sample) -> float:
    reader = Experience(sample.sent_s * 1000 + READER_TTFT_MS, READER_PACE_MS)
    for moment_s in sample.token_s:
        reader.had_token(moment_s * 1000)
    return reader.qoe


def throughput(samples: Sequence[Sample]) -> Measures:
    """Generated tokens a second, from the first request's sending to the last token in hand."""
    tokens = sum(len(sample.token_s) for sample in samples)
    began = min(sample.sent_s for sample in samples)
    ended = max((sample.token_s[-1] for sample in samples if sample.token_s), default=began)
    wall_s = ended - began
    return {"tokens_per_s": tokens / wall_s if wall_s else float("nan"), "tokens": tokens, "wall_s": wall_s}


def median_of(rows: Sequence[Measures]) -> Measures:
    """Medians by name over rounds; a measure some rounds lack counts where it is there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row[name] for row in rows if name in row) for name in names}


def thread_cpu_s(pid: int) -> dict[int, float]:
    """CPU seconds used so far by each thread of a process: nanosecond clocks where Linux has them, else 10 ms ticks."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.exists():
        return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    used: dict[int, float] = {}
    for task in tasks.iterdir():
        try:
            used[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread ended while we read.
    return used


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in MiB."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def pss_mb(pid: int) -> float:
    """Memory of a process in MiB, what it shares with others divided among them: several processes that map one file
    count it once together.
    """
    return float(psutil.Process(pid).memory_full_info().pss) / 2**20


@attrs.define
class CpuMeter:
    """CPU time and memory of a server and of this client between `start` and `stop`."""

    pid: int
    _server_s: float = 0.0
    _client_s: float = 0.0
    _wall_s: float = 0.0

    def start(self) -> None:
        """Remember where the counters stand."""
        self._server_s, self._client_s = sum(thread_cpu_s(self.pid).values()), time.process_time()
        self._wall_s = time.perf_counter()

    def stop(self, tokens: int) -> Measures:
        """CPU use since `start`, memory now; per token where there were any."""
        server_s = sum(thread_cpu_s(self.pid).values()) - self._server_s
        client_s = time.process_time() - self._client_s
        wall_s = time.perf_counter() - self._wall_s
        measures = {"cpu_cores": (server_s + client_s) / wall_s, "rss_mb": rss_mb(self.pid)}
        if tokens:
            measures |= {"server_cpu_us": server_s / tokens * 1e6, "client_cpu_us": client_s / tokens * 1e6}
        return measures
