# SPDX-License-Identifier: Apache-2.0
"""Registers, stack and shared memory of the ahead-of-time builds, printed at the end of a run.

pytest swallows what passing tests print. A test notes its rows with `record_property`, which
pytest-xdist hands on to the process that reports; this plugin prints them from there.
"""

from __future__ import annotations

from collections.abc import Callable

PROPERTY = "build"


def note(record_property: Callable[[str, object], None], row: dict) -> None:
    """Remember a row of `aot_builds` for the end of the run."""
    record_property(PROPERTY, row)


def table(rows: list[dict]) -> list[str]:
    """One line a build: registers/stack/shared memory of each kernel that it launches."""
    kernels: dict[str, list[str]] = {}
    for row in rows:
        cell = f"{row['kernel'].removesuffix('_kernel')} {row['registers']}/{row['stack']}/{row['shared']}"
        kernels.setdefault(row["build"], []).append(cell)
    width = max((len(name) for name in kernels), default=0)
    return [f"{name:{width}}  {'  '.join(cells)}" for name, cells in sorted(kernels.items())]


def pytest_terminal_summary(terminalreporter) -> None:  # noqa: ANN001
    """The table of every build of this run, of failed tests, too."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    noted = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for key, value in report.user_properties
        if key == PROPERTY
    ]
    if noted:
        terminalreporter.section("builds: registers / bytes of stack / bytes of shared memory")
        for line in table(noted):
            terminalreporter.write_line(line)
