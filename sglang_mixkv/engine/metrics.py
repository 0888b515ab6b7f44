"""The plugin's series at SGLang's own /metrics, made only with SGLang's --enable-metrics.

prometheus_client looks at PROMETHEUS_MULTIPROC_DIR when it is imported, which SGLang sets before it
starts the schedulers: it is imported as late as SGLang does (observability/metrics_collector.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from sglang_mixkv.series import Family, Values, of_side

logger = logging.getLogger(f"sglang.{__name__}")


class Metrics:
    """Called from several threads. `add` and `set` never raise: after a first failure, which is
    logged, the series stand still."""

    def __init__(self, side: str, common: Mapping[str, str]) -> None:
        self._common = dict(common)
        self._families = {family: self._make(family) for family in of_side(side)}
        self._series: dict[tuple[Family, Values], Any] = {}
        for family in self._families:
            for values in family.values:
                self._get(family, values)

    def _make(self, family: Family) -> Any:
        import prometheus_client

        names = [*self._common, *family.labels]
        if family.kind == "counter":
            return prometheus_client.Counter(family.name, family.help, names)
        mode: Any = "mostrecent"
        return prometheus_client.Gauge(family.name, family.help, names, multiprocess_mode=mode)

    def _get(self, family: Family, values: Values) -> Any:
        key = family, values
        if key not in self._series:
            own = dict(zip(family.labels, values, strict=True))
            self._series[key] = self._families[family].labels(**self._common, **own)
        return self._series[key]

    def add(self, family: Family, values: Values = (), amount: float = 1) -> None:
        """A family of the other side is left out."""
        try:
            if family in self._families:
                self._get(family, values).inc(amount)
        except Exception:
            self._stop()

    def set(self, family: Family, values: Values, value: float) -> None:
        try:
            if family in self._families:
                self._get(family, values).set(value)
        except Exception:
            self._stop()

    def _stop(self) -> None:
        self._families = {}
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
