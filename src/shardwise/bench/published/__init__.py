"""Published measurements of others, predicted by our cost model: `shardwise bench published FILE`."""

from shardwise.bench.published.report import predict_file
from shardwise.bench.published.rows import Row, load_rows
from shardwise.bench.published.show import report_lines

__all__ = ["Row", "load_rows", "predict_file", "report_lines"]
