"""How many files this process may open, and what that leaves for clients, engines and the rest. Past the limit a reset would be all a client sees.

A disaggregated request holds three sockets: its client's and one to each engine. One that waits holds its client's only. So half of what is there is
for clients, two fifths for the legs of those that run, a tenth for connections to engines that are kept for the next ones.
"""

import resource
from dataclasses import dataclass

SPARE_FILES = 256
"""for agents, the admin port, logs, and what libraries open; a quarter of a limit that is small"""
LEAST_SPARE_FILES = 48
NO_LIMIT = 1 << 20
"""used where the system names no limit"""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What fits under one limit on open files."""

    connections: int
    """of clients"""
    leases: int
    """requests that run"""
    kept: int
    """idle connections to engines"""
    agents: int
    """connections to workers' agents"""

    @property
    def waiting(self) -> int:
        """Requests that may wait: an eighth of the connections stays free to tell others that there is no room."""
        return max(1, self.connections - self.leases - self.connections // 8)


def raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit on open files to the hard one; returns both soft limits, before and after."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def allowance(file_limit: int, max_connections: int | None) -> Allowance:
    """Divide a limit on open files.

    Args:
        file_limit: the soft limit; `resource.RLIM_INFINITY` is taken for `NO_LIMIT`.
        max_connections: lowers the number of client connections, None leaves it.
    """
    if file_limit in (resource.RLIM_INFINITY, -1):
        file_limit = NO_LIMIT
    spare = min(SPARE_FILES, max(LEAST_SPARE_FILES, file_limit // 4))
    usable = max(20, file_limit - spare)
    leases = usable // 5
    kept = leases // 2
    connections = usable - 2 * leases - kept
    if max_connections is not None:
        connections = min(connections, max_connections)
    return Allowance(connections, min(leases, connections // 2), kept, spare // 4)
