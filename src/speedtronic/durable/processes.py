"""What can be known of other processes on this machine."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    import ctypes

    _QUERY_LIMITED_INFORMATION = 0x1000

    def process_is_alive(pid: int) -> bool:
        """Whether a process of this id runs on this machine. (`os.kill` would end it here.)"""
        handle = ctypes.windll.kernel32.OpenProcess(_QUERY_LIMITED_INFORMATION, False, pid)
        if handle:
            ctypes.windll.kernel32.CloseHandle(handle)
        return bool(handle)

else:

    def process_is_alive(pid: int) -> bool:
        """Whether a process of this id runs on this machine."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
