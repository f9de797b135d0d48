"""What one tick of the control loop saw. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.control.actions import Action
from pdserve.ports import AgentStatus
from pdserve.types import FleetSnapshot


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """The router process as its supervisor sees it."""

    starts: int = 0
    """how often it was started; each start has an empty view of the fleet"""
    running: bool = False
    pid: int | None = None
    url: str | None = None
    """public URL, once both ports accept connections"""
    detail: str = ""
    """last line it wrote before it ended"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An action that ended since the last tick."""

    action: Action
    error: str | None = None
    """None if it did what was asked"""


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything a plan is made from, besides the state it carries."""

    now_s: float
    fleet: FleetSnapshot | None = None
    """None: the fleet could not be asked, so nothing is known about placements"""
    agents: Mapping[str, AgentStatus] = field(default_factory=dict)
    """worker id → answer; a worker that did not answer is absent"""
    router: RouterSeen = field(default_factory=RouterSeen)
    outcomes: tuple[Outcome, ...] = ()
