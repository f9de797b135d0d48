"""The Prometheus series about clients at the door: keys, and those who do not read what they are sent. Labels are closed vocabularies."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class AccessMetrics:
    """The series in one registry; one per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "pdserve_keys_refused", "Requests turned away for want of a key that opens them.", ("reason",), registry=registry
        )
        self._loads = Counter("pdserve_keys_loads", "Changes of the keys file, taken over or not.", ("outcome",), registry=registry)
        self._keys = Gauge("pdserve_keys", "API keys in force; 0 without a keys file.", registry=registry)
        self._slow_clients = Counter("pdserve_slow_clients", "Connections dropped because their client did not read.", registry=registry)

    def record_refused(self, reason: str) -> None:
        """A request was turned away; `reason` is a `Refusal`."""
        self._refused.labels(reason).inc()

    def record_keys(self, count: int) -> None:
        """So many keys are in force from now on."""
        self._loads.labels("loaded").inc()
        self._keys.set(count)

    def record_refused_file(self) -> None:
        """The keys file changed and cannot be used."""
        self._loads.labels("refused").inc()

    def record_slow_client(self) -> None:
        """A connection was dropped because its client left too much unread for too long."""
        self._slow_clients.inc()
