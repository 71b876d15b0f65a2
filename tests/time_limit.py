"""A pytest plugin of `make test`: a test that is not marked slow may take a second.

These are CPU seconds of the test and of the processes that it waits for, without its
fixtures, so that other programs on the machine do not fail a test. The limit is longer
on a slower processor, where a short calculation at the start takes longer.
"""

import os
import time

import pytest

LIMIT = 1.0
CALIBRATION = 0.015  # seconds that the calculation takes on a fast processor
SAID = (
    "{test} took {seconds:.1f} s of CPU time; the limit is {limit:.1f} s. "
    "Make it quicker (shapes instead of arrays, jit, a fixture for the module), or "
    "mark it slow."
)
limit_key = pytest.StashKey[float]()
spent_key = pytest.StashKey[float]()


def seconds() -> float:
    """CPU seconds of this process and of its finished children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def slowdown() -> float:
    """How many times longer than usual a calculation takes here; at least 1."""
    taken = []
    for _ in range(5):
        start = time.process_time()
        sum(i * i % 7 for i in range(400_000))
        taken.append(time.process_time() - start)
    return max(1.0, min(taken) / CALIBRATION)


def pytest_configure(config):
    config.stash[limit_key] = LIMIT * slowdown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    start = seconds()
    try:
        return (yield)
    finally:
        item.stash[spent_key] = seconds() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    spent, limit = item.stash.get(spent_key, 0.0), item.config.stash[limit_key]
    is_slow = item.get_closest_marker("slow")
    if report.when == "call" and report.passed and spent > limit and not is_slow:
        report.outcome = "failed"
        report.longrepr = SAID.format(test=item.nodeid, seconds=spent, limit=limit)
    return report
