"""A report of runs: one page with their curves, events, configurations and nodes, which needs no network."""

from __future__ import annotations

from speedtronic.report.page import report_page

__all__ = ["report_page"]
