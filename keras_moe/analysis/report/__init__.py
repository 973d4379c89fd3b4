"""The routing report: one page on what the experts of a model do with data."""

from keras_moe.analysis.report.report import Report, report
from keras_moe.analysis.report.section import (
    Batch,
    Block,
    Content,
    Figure,
    Html,
    Options,
    Section,
    Subject,
    Table,
    Verdict,
)

__all__ = [
    "Batch",
    "Block",
    "Content",
    "Figure",
    "Html",
    "Options",
    "Report",
    "Section",
    "Subject",
    "Table",
    "Verdict",
    "report",
]
