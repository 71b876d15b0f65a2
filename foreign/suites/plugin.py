"""The pytest plugin that puts each test of another project into a region."""

import contextlib
import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from . import records
from .records import FLOAT16, KEPT, PASSED, PLAIN, Outcome

VARIABLE = "JAMP_FOREIGN"  # the runner writes what it wants into this one
# Exceptions that report a failed comparison, and not that something could not run.
COMPARISONS = (AssertionError, pytest.fail.Exception)


@contextlib.contextmanager
def region(way: str):
    import jax
    import jax.numpy as jnp

    import jamp
    from jamp._autocast.decision import Settings
    from jamp._autocast.region import enter

    if way == KEPT:
        with enter(Settings(jnp.dtype("float16"), is_policy=True)):
            yield
    else:
        with jax.numpy_dtype_promotion("standard"), jamp.autocast(jnp.float16):
            yield


def allow_set_mesh() -> None:
    """Lets a test set its mesh inside the region, though it belongs outside.

    JAX asks whether it is tracing, and cannot tell a region from a jitted function.
    """
    import jax
    from jax.extend.core import set_current_trace

    from jamp._autocast.trace import AutocastTrace
    from jamp._compat import current_trace

    wrapped = jax.set_mesh.__init__  # pyright: ignore

    def init(self, mesh):
        trace = current_trace()
        if isinstance(trace, AutocastTrace):
            trace = trace.parent
        with set_current_trace(trace):
            wrapped(self, mesh)

    jax.set_mesh.__init__ = init  # pyright: ignore


class Recorder:
    """Selects the tests, runs each in its region and records its outcome.

    Args:
      way: one of `records.WAYS`.
      output: the file to write to.
      pattern: what the names of the tests must contain.
      size: of the sample, or None.
      plain: the file of the plain outcomes, whose failures are left out, or None.
      seconds: the limit of a test, which ends the process if it takes longer.
    """

    def __init__(
        self,
        way: str,
        output: str,
        pattern: str,
        size: int | None,
        plain: str | None,
        seconds: float,
    ):
        self.way, self.output = way, Path(output)
        self.pattern, self.size, self.plain = pattern, size, plain
        self.seconds = seconds
        self.failure: dict | None = None
        self.skipped, self.began = False, 0.0

    def pytest_collection_modifyitems(self, config, items):
        every = {name_in_file(item.nodeid): item for item in items}
        self.output.with_name("total").write_text(str(len(every)))
        named = [name for name in every if self.pattern in name]
        chosen = records.sample(named, self.size) - records.read(self.output).keys()
        if self.plain is not None:
            passed = records.read(Path(self.plain)).values()
            chosen &= {x.test for x in passed if x.outcome == PASSED}
        left = [name for name in every if name in chosen]
        config.hook.pytest_deselected(
            items=[item for name, item in every.items() if name not in left]
        )
        items[:] = [every[name] for name in left]

    def pytest_runtest_logstart(self, nodeid):
        self.failure, self.skipped, self.began = None, False, time.perf_counter()
        records.append(self.output, Outcome(name_in_file(nodeid), records.BEGUN))
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        item.obj = within(self.way, item.obj)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed and self.failure is None and call.excinfo is not None:
            error = call.excinfo.value
            self.failure = {
                "error": type(error).__name__,
                "message": str(error)[:2000],
                "compared": isinstance(error, COMPARISONS),
                "trace": str(report.longrepr)[-3000:],
            }
        return report

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failure is None:  # a subtest
            said = getattr(report.longrepr, "reprcrash", None)
            error, _, message = (said.message if said else "").partition(": ")
            self.failure = {
                "error": error,
                "message": message,
                "compared": error == "AssertionError",
                "trace": str(report.longrepr)[-3000:],
            }
        self.skipped |= report.skipped

    def pytest_runtest_logfinish(self, nodeid):
        signal.setitimer(signal.ITIMER_REAL, 0)
        outcome = records.SKIPPED if self.skipped else PASSED
        if self.failure is not None:
            outcome = records.FAILED
        seconds = round(time.perf_counter() - self.began, 2)
        records.append(
            self.output,
            Outcome(
                name_in_file(nodeid), outcome, seconds=seconds, **(self.failure or {})
            ),
        )


def name_in_file(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def within(way: str, test):
    """The test in a region. What its class does before and after it stays outside."""
    if way == PLAIN:
        return test

    @functools.wraps(test)
    def wrapped(*args, **kwargs):
        with region(way):
            return test(*args, **kwargs)

    return wrapped


def pytest_configure(config):
    wanted = json.loads(os.environ[VARIABLE])
    config.pluginmanager.register(Recorder(**wanted), "foreign")
    if wanted["way"] in (KEPT, FLOAT16):
        allow_set_mesh()
