"""What a run leaves behind for a person: its directory, its progress line, its report."""

from agentenv.report.page import write_report
from agentenv.report.progress import Progress, format_seconds
from agentenv.report.run_directory import RunDirectory

__all__ = ["Progress", "RunDirectory", "format_seconds", "write_report"]
