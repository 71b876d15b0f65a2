"""See what mixed precision does: which dtypes, what overflowed, what was flushed."""

# What runs in which dtype, and why
from ._check import check as check
from ._explain import explain as explain
from ._explanation import Explanation as Explanation

# What overflowed, what was flushed to zero
from ._grad_reports import OverflowReport as OverflowReport
from ._grad_reports import UnderflowReport as UnderflowReport
from ._grad_reports import overflow_report as overflow_report
from ._grad_reports import underflow_report as underflow_report

# How a run goes
from ._history import History as History
from ._nonfinite import NonfiniteReport as NonfiniteReport
from ._nonfinite import find_nonfinite as find_nonfinite
from ._plots import GradHistogram as GradHistogram
from ._plots import grad_histogram as grad_histogram
from ._plots import plot_scale as plot_scale
