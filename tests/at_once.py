"""A pytest plugin: failures are printed when they come, since a run may be cut off.

pytest prints them at the end. With `-v` it says at once which tests fail, but not why.
"""

import pytest


class AtOnce:
    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self.show(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report):
        self.show(report)

    def show(self, report):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:  # a worker of xdist has none
            terminal.ensure_newline()
            terminal.write_sep("_", report.nodeid)
            terminal.write_line(report.longreprtext)
            terminal.flush()

    def pytest_sessionfinish(self):
        self.config.option.tbstyle = "no"  # or pytest prints them all again
