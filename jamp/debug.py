"""See what mixed precision does: which dtypes, what overflowed, what was flushed."""

# ruff: isort: off
from . import _stable
from ._checks import stand_ins as _stand_ins

try:
    # What runs in which dtype, and why
    from ._debug.explain import explain as explain
    from ._debug.explanation import Explanation as Explanation

    # Which products tolerate float8: what `jamp.calibrate` returns
    from ._debug.calibration import Calibration as Calibration

    # The op that made an inf or nan
    from ._debug.nonfinite import NonfiniteReport as NonfiniteReport
    from ._debug.nonfinite import find_nonfinite as find_nonfinite
except Exception as _error:  # JAX's internals have moved
    _names = (
        "explain",
        "Explanation",
        "Calibration",
        "NonfiniteReport",
        "find_nonfinite",
    )
    globals().update(_stand_ins(__name__, _error, *_names))

# What overflowed, what was flushed to zero
from ._debug.grad_reports import OverflowReport as OverflowReport
from ._debug.grad_reports import overflow_report as overflow_report
from ._debug.grad_reports import UnderflowReport as UnderflowReport
from ._debug.grad_reports import underflow_report as underflow_report
from ._debug.grad_histogram import GradHistogram as GradHistogram
from ._debug.grad_histogram import grad_histogram as grad_histogram

# Whether a training step uses its loss scale rightly
from ._debug.check_step import StepReport as StepReport
from ._debug.check_step import check_step as check_step

# How a run goes
from ._debug.health import check as check
from ._debug.history import History as History
from ._debug.plots import plot_scale as plot_scale

_stable.publish(__name__)
