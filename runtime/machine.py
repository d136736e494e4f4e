"""Names of the hardware that a command runs on."""

import platform
import re
from pathlib import Path


def processor() -> str:
    """Return the name of the CPU, or the name of the architecture if the system does not name the CPU."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # only Linux has this file
        names = []
    return names[0] if names else platform.machine()
