"""What fits under a limit on open files."""

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.server.descriptors import LEAST_SPARE_FILES, allowance, raise_file_limit


@given(st.integers(80, 1 << 20))
def test_all_that_may_be_open_at_once_stays_below_the_limit(limit: int) -> None:
    """Clients, both legs of each running request, kept connections, and something to spare; room is left to tell others that there is none."""
    allowed = allowance(limit, None)
    assert allowed.connections + 2 * allowed.leases + allowed.kept + allowed.agents <= limit - LEAST_SPARE_FILES // 2
    assert min(allowed.connections, allowed.leases, allowed.kept, allowed.agents, allowed.waiting) >= 1
    assert allowed.leases + allowed.waiting <= allowed.connections - allowed.connections // 8


def test_a_usual_limit_holds_thousands_and_a_small_one_a_few() -> None:
    """The figures that an operator plans with."""
    assert allowance(20_000, None).leases == 3948
    small = allowance(128, None)
    assert (small.connections, small.leases, small.kept) == (40, 16, 8)


@pytest.mark.parametrize("unlimited", [resource.RLIM_INFINITY, -1])
def test_no_limit_is_a_large_one(unlimited: int) -> None:
    """Not a negative one."""
    assert allowance(unlimited, None).connections > 100_000


def test_a_setting_lowers_the_connections_and_never_raises_them() -> None:
    """No more requests run than clients are connected."""
    assert allowance(20_000, 10**9) == allowance(20_000, None)
    few = allowance(20_000, 16)
    assert (few.connections, few.leases) == (16, 8)


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """And said, before and after."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] // 2, before[1]))
        assert raise_file_limit() == (before[0] // 2, before[1])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
