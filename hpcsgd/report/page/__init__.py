"""A report of runs as one page of HTML, which needs neither server nor network."""

from hpcsgd.report.page.writing import follow, write

__all__ = ["follow", "write"]
