"""The report: one self-contained HTML page, the same in Markdown, and a Chrome trace; from a result file only."""

from shardwise.bench.report.markdown import render_markdown
from shardwise.bench.report.page import render_html
from shardwise.bench.report.trace import chrome_trace

__all__ = ["chrome_trace", "render_html", "render_markdown"]
