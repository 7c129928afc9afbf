"""Load the plugins of `tests/plugins` for every test of the session."""

import os
import signal

# Scripts start processes in the background with SIGINT ignored; tests of Ctrl-C need it, here and in children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Some virtual machines announce AMX but do not allow it: torch's bfloat16 products then end the process with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

pytest_plugins = [
    "user_files",
    "kinds",
    "police",
    "guardian",
    "warm_start",
    "orders",
    "waiting",
    "addresses",
]
