"""Counters, gauges and histograms as plain data, and the flat snapshot made of them.

Each number has one writer; readers take a snapshot. Nothing here blocks, locks or knows of threads.
"""

from uma.metrics.histogram import Histogram
from uma.metrics.live import LiveFigures, LiveSeries
from uma.metrics.metrics import CacheMetrics, EngineMetrics, help_of, is_of_server, kind_of, summed

__all__ = [
    "CacheMetrics",
    "EngineMetrics",
    "Histogram",
    "LiveFigures",
    "LiveSeries",
    "help_of",
    "is_of_server",
    "kind_of",
    "summed",
]
