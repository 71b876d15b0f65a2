"""A pytest plugin: a test that is not marked slow may take five seconds.

Seconds are those of the processor, of the test and of the processes it waits for, so
that another program on the machine fails no test. On a slower processor the limit is
longer: a short calculation is timed at the start.
"""

import os
import time

import pytest

LIMIT = 5.0
CALIBRATION = 0.015  # seconds that it takes on the machine on which the limit was set
SAID = (
    "{test} took {seconds:.1f} s of the processor's time; the limit is {limit:.1f} s. "
    "Make it quicker (shapes instead of arrays, jit, a fixture for the module), or "
    "mark it slow."
)


def seconds() -> float:
    """Those that this process and its finished children had of the processor."""
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


limit_key = pytest.StashKey[float]()
spent_key = pytest.StashKey[float]()


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
    marked = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
    if report.when == "call" and report.passed and spent > limit and not marked:
        report.outcome = "failed"
        report.longrepr = SAID.format(test=item.nodeid, seconds=spent, limit=limit)
    return report
