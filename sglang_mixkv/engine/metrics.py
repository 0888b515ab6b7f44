"""The plugin's series at SGLang's own /metrics, made only with SGLang's --enable-metrics.

As SGLang's SchedulerMetricsCollector does it (sglang: observability/metrics_collector.py):
the API process sets PROMETHEUS_MULTIPROC_DIR before it starts the schedulers, and
prometheus_client looks at it when it is imported, so it is imported here as late as there.
Each scheduler process writes its values to files of that folder; /metrics reads them all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from sglang_mixkv.series import Family, of_side

logger = logging.getLogger(__name__)


class Metrics:
    """Series by the name of the count that they show. `add` and `set` never raise: after a
    first failure, which is logged, the series stand still."""

    def __init__(self, side: str, labels: Mapping[str, str]) -> None:
        self._series: dict[str, Any] = {}
        for family in of_side(side):
            self._make(family, labels)

    def _make(self, family: Family, labels: Mapping[str, str]) -> None:
        import prometheus_client

        kind = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}
        mode = {"multiprocess_mode": "mostrecent"} if family.kind == "gauge" else {}
        names = [*labels, *([family.label] if family.label else [])]
        metric = kind[family.kind](family.name, family.help, names, **mode)
        for value, count in family.counts.items():
            own = {family.label: value} if family.label else {}
            self._series[count] = metric.labels(**labels, **own)

    def add(self, amounts: Mapping[str, float]) -> None:
        """Count on; what no series shows is left out."""
        try:
            for name, amount in amounts.items():
                if amount and name in self._series:
                    self._series[name].inc(amount)
        except Exception:
            self._stop()

    def set(self, values: Mapping[str, float]) -> None:
        """The present values of gauges."""
        try:
            for name, value in values.items():
                if name in self._series:
                    self._series[name].set(value)
        except Exception:
            self._stop()

    def _stop(self) -> None:
        self._series = {}
        logger.exception(
            "[MIXKV-SELF-01] sglang-mixkv: its series at /metrics stand still from now on"
        )


def metrics_for(side: str) -> Metrics | None:
    """This rank's series; None where SGLang's metrics are off, or (with a log line) fail."""
    try:
        return Metrics(side, labels(side)) if get_observability().enable_metrics else None
    except Exception:
        logger.exception(
            "[MIXKV-SELF-01] sglang-mixkv could not make its series; /metrics lacks them"
        )
        return None


def labels(side: str) -> dict[str, str]:
    """The labels of SGLang's own scheduler series on this rank (SchedulerMetricsCollector.
    init_new), so that both join; without `priority`, which is a request's."""
    parallel = get_parallel()
    found = {
        "model_name": get_serving().served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(side),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        found["dp_rank"] = parallel.dp_rank
    found.update(get_observability().extra_metric_labels or {})
    return {name: str(value) for name, value in found.items()}
