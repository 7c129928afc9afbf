"""Load the plugins of `tests/plugins` for every test of the session."""

import os

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
