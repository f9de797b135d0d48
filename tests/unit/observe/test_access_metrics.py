"""The series about clients at the door."""

from prometheus_client import CollectorRegistry

from pdserve.observe.access import AccessMetrics


def test_every_series_has_its_name_type_and_labels() -> None:
    """Alerts depend on these; nothing else is exported, and counts are what was recorded."""
    registry = CollectorRegistry()
    metrics = AccessMetrics(registry)
    metrics.record_refused("unknown")
    metrics.record_refused("unknown")
    metrics.record_keys(5)
    metrics.record_keys(3)
    metrics.record_refused_file()
    metrics.record_slow_client()
    samples = {
        (family.type, sample.name, tuple(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples == {
        ("counter", "pdserve_keys_refused_total", (("reason", "unknown"),)): 2,
        ("counter", "pdserve_keys_loads_total", (("outcome", "loaded"),)): 2,
        ("counter", "pdserve_keys_loads_total", (("outcome", "refused"),)): 1,
        ("gauge", "pdserve_keys", ()): 3,
        ("counter", "pdserve_slow_clients_total", ()): 1,
    }
