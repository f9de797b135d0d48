"""The tree of errors that pdserve raises, and nothing else.

    PdserveError
    ├── ConfigError            a field, its value and the fix; the command line exits 2
    ├── RequestError           the client's fault: one HTTP status, passed on once
    ├── RateLimited            a key's own limit: refused with Retry-After
    ├── PoolSaturated          overload: shed with Retry-After
    ├── NoReadyWorker          a role has no ready worker
    ├── WorkerLost             transport failure towards an engine, with the phase it hit
    ├── UpstreamError          an engine answered with an error status of its own
    ├── LoadFailed             decode did not get the prompt's KV, and the router may not let it recompute
    ├── TransferError          KV bytes that could not be proven
    ├── ProtocolMismatch       two peers whose plans differ; names both values
    └── FleetError             a worker that could not be placed, started or stopped

Every class passes all its arguments to `Exception.__init__`, so attributes survive pickling across processes.
`server/errors.py` holds the one table from these to HTTP.
"""


class PdserveError(Exception):
    """Base of all errors that pdserve raises on purpose."""

    def __repr__(self) -> str:
        # Event loops log the representation of errors that nobody awaited; arguments hold what engines and clients said.
        return f"{type(self).__name__}({str(self)!r})"


class ConfigError(PdserveError):
    """Bad input from the operator.

    Args:
        field: dotted name of the setting, e.g. ``workers.prefill``.
        value: what was given.
        fix: what to give instead, as a sentence without a full stop.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(field, value, fix)
        self.field = field
        self.value = value
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.field}: {self.value!r}: {self.fix}"


class RequestError(PdserveError):
    """A request that can never succeed as it stands.

    Args:
        status: HTTP status, 4xx.
        message: for the client; holds no path, address or secret.
        param: the offending field of the body, if there is one.
        code: machine-readable reason, e.g. ``context_length_exceeded``.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message


class RateLimited(PdserveError):
    """A key has used up one of its limits.

    Args:
        kind: ``requests`` or ``tokens``.
        per_minute: the limit.
        retry_after_s: when there is room again, in (0, 120].
    """

    def __init__(self, kind: str, per_minute: int, retry_after_s: float) -> None:
        super().__init__(kind, per_minute, retry_after_s)
        self.kind = kind
        self.per_minute = per_minute
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"the limit of {self.per_minute} {self.kind} per minute is reached"


class PoolSaturated(PdserveError):
    """There is no room for a request now.

    Args:
        reason: which bound was hit: ``requests`` or ``tokens`` of the queue, ``deadline`` if waiting would take longer than the request has,
            ``connections`` of the process.
        retry_after_s: when to come back, in (0, 120].
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"no room ({self.reason}); retry after {self.retry_after_s:.0f} s"


class NoReadyWorker(PdserveError):
    """No worker of a role is ready, and the request cannot be served without one."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.role = role

    def __str__(self) -> str:
        return f"no ready {self.role} worker"


class WorkerLost(PdserveError):
    """An engine could not be reached or broke its connection.

    Args:
        worker_id: which engine.
        phase: ``connect``, ``head``, ``body``, ``first_byte`` or ``idle``; the last two are limits on an engine's silence.
        detail: the library's message, for the log only.
    """

    def __init__(self, worker_id: str, phase: str, detail: str = "") -> None:
        super().__init__(worker_id, phase, detail)
        self.worker_id = worker_id
        self.phase = phase
        self.detail = detail

    def __str__(self) -> str:
        return f"worker {self.worker_id} lost in phase {self.phase}: {self.detail}"


class UpstreamError(PdserveError):
    """An engine answered with an error of its own; status and body are kept for the client.

    Args:
        worker_id: which engine.
        status: its HTTP status.
        body: its body, at most 64 KiB of it.
    """

    def __init__(self, worker_id: str, status: int, body: bytes) -> None:
        super().__init__(worker_id, status, body)
        self.worker_id = worker_id
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"worker {self.worker_id} answered {self.status}"


class LoadFailed(PdserveError):
    """The KV of a request's prompt did not reach decode, in a deployment whose ``router.load_failure`` is ``fail``.

    Args:
        worker_id: the decode worker.
        outcome: how its transfer ended, a value of `pdserve.types.CloseReason`.
    """

    def __init__(self, worker_id: str, outcome: str) -> None:
        super().__init__(worker_id, outcome)
        self.worker_id = worker_id
        self.outcome = outcome

    def __str__(self) -> str:
        return f"worker {self.worker_id} did not get the prompt's KV: {self.outcome}"


class TransferError(PdserveError):
    """KV bytes that did not arrive whole, or arrived for something else.

    Args:
        reason: the closed vocabulary of `pdserve.types.CloseReason`.
        detail: for the log.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"KV transfer failed: {self.reason} {self.detail}".rstrip()


class ProtocolMismatch(PdserveError):
    """Two peers that must not exchange KV.

    Args:
        field: what differs.
        ours: our value.
        theirs: the peer's value.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(field, ours, theirs)
        self.field = field
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return f"{self.field} differs: ours {self.ours!r}, peer's {self.theirs!r}"


class FleetError(PdserveError):
    """A worker or the cluster under it did not do what was asked.

    Args:
        subject: worker id, ``ray`` or ``router``.
        reason: what happened, as a sentence without a full stop.
    """

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(subject, reason)
        self.subject = subject
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}"
