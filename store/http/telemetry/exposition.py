"""Exposition: what all processes of a server counted, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from precompute.store.http.telemetry.instruments import (
    BUCKETS,
    INSTRUMENTS,
    SIZES,
    Instrument,
    Kind,
    Meter,
    read_slots,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_EDGES = [*map(str, BUCKETS), "+Inf"]

Series = dict[tuple[str, ...], list[float]]
Totals = dict[str, Series]
"""Instrument → labels → numbers."""


def exposition(
    meter: Meter, now: Mapping[Instrument, Mapping[tuple[str, ...], float]] | None = None
) -> bytes:
    """The text that ``/metrics`` answers with: of all processes that count into the meter's folder,
    or of its own where it has none.

    Args:
        meter: of the process that was requested.
        now: gauges that are looked up when requested, and counted by nobody.

    Raises:
        OSError: the folder cannot be read.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(meter, now or {}))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(
        self, meter: Meter, now: Mapping[Instrument, Mapping[tuple[str, ...], float]]
    ) -> None:
        self._meter, self._now = meter, now

    def collect(self) -> Iterator[Metric]:
        counted = totals(self._meter)
        for instrument in INSTRUMENTS:
            looked_up = {labels: [value] for labels, value in self._now.get(instrument, {}).items()}
            yield _family(instrument, looked_up or counted[instrument.name])

    def describe(self) -> list[Metric]:
        # without it the registry collects once to learn the names
        return []


def totals(meter: Meter) -> Totals:
    """Instrument → series → numbers over all processes; of a histogram its buckets' counts, one by
    one, and the sum of seconds.

    Raises:
        OSError: the meter's folder cannot be read.
    """
    kinds = {instrument.name: instrument.kind for instrument in INSTRUMENTS}
    added: Totals = {name: {} for name in kinds}
    if meter.folder is None:
        values = meter.slots.values
        found = [
            (key, [float(n) for n in values[at : at + SIZES[kinds[key[0]]]]])
            for key, at in meter.slots.series()
        ]
    else:
        found = [(key, numbers) for _, key, numbers in read_slots(meter.folder) if key[0] in kinds]
    for (name, labels), numbers in found:
        series = added[name]
        before = series.get(labels)
        if before is None:
            series[labels] = numbers
        elif kinds[name] is Kind.HIGHEST:
            series[labels] = [max(before[0], numbers[0])]
        else:
            series[labels] = [one + other for one, other in zip(before, numbers, strict=True)]
    return added


def _family(instrument: Instrument, series: Series) -> Metric:
    name, text, labels = instrument.name, instrument.help, instrument.labels
    if instrument.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for values, numbers in sorted(series.items()):
            counts = accumulate(numbers[:-1])
            histogram.add_metric(values, list(zip(_EDGES, counts, strict=True)), numbers[-1])
        return histogram
    if instrument.kind is Kind.COUNTER:
        counter = CounterMetricFamily(name, text, labels=labels)
        for values, numbers in sorted(series.items()):
            counter.add_metric(values, numbers[0])
        return counter
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for values, numbers in sorted(series.items()):
        gauge.add_metric(values, numbers[0])
    return gauge
