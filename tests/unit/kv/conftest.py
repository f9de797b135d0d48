"""The leak check of tests that start real ranks."""

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from pdserve.kv.loop_thread import LoopThread


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="session")
def loops_have_run() -> None:
    """The first event loop of a process opens descriptors that stay."""
    thread = LoopThread("first")
    thread.start()
    thread.submit(lambda: None).result()
    thread.close()


@pytest.fixture
def no_leaks(loops_have_run: None) -> Iterator[None]:
    """No thread and no descriptor outlives a test."""
    threads, descriptors = threading.active_count(), open_descriptors()
    yield
    if open_descriptors() != descriptors:
        gc.collect()
    assert threading.active_count() == threads
    assert open_descriptors() == descriptors
