"""Launch configurations: which block sizes, warps and stages a kernel runs with on this device.

choice.py    `choose`, which launchers ask; `tuned`, which wraps them; views of a search and of tests
rows.py      keys as text, what a row was measured with, which configurations an op can have
table.py     one JSON file: read, check, merge, write
lookup.py    the order in which tables are asked
measure.py   a launch on copies of its arguments: verified, then timed
model.py     microseconds predicted from a roofline;  devices.py  the constants of devices
compiled.py  registers and shared memory, by compiling for a GPU that need not be there
search.py    the search over everything that `collect` noted
"""

from trinfer.autotune.choice import (
    choose,
    collect,
    forget,
    is_watched,
    on_forget,
    pin,
    suspended,
    tuned,
)
from trinfer.autotune.records import Call, Config, Tunable

__all__ = [
    "Call",
    "Config",
    "Tunable",
    "choose",
    "collect",
    "forget",
    "is_watched",
    "on_forget",
    "pin",
    "suspended",
    "tuned",
]
