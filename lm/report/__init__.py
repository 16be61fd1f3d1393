"""Reports on run folders: one run, or arms compared on the same tokens. Imports neither torch nor lightning."""

from lm.evaluation.statistics import Interval, paired_difference
from lm.report.comparison import Comparison, compare
from lm.report.html import ReportFiles, write_report
from lm.report.runs import RunRecord, read_run
from lm.report.tables import print_table

__all__ = ["Comparison", "Interval", "ReportFiles", "RunRecord", "compare", "paired_difference", "print_table", "read_run", "write_report"]
